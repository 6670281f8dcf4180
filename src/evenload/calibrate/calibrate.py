"""Calibrate the cost model for some seconds at the start of training.

All ranks time their own stage's layers at once, as a step shares the machine too, on a handful of packs: whole
documents, many short ones, slices with a prefix. Coefficients are fitted by non-negative least squares on relative
errors; a cost file is cached by everything that changes the seconds. A noisy measurement (`calibrate.fit`) is repeated
once, and the quieter one counts. On a GPU larger packs follow, through one layer of every window.
"""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from evenload.calibrate.fit import CoreWaits, fit_relative, median_seconds, spread_of_repeats
from evenload.calibrate.kernels import TOKENS, copy_work, head_work, matmul_flops_per_s, optimizer_work, weight_seconds
from evenload.calibrate.links import TransferKind, median_link, median_overlap, overlap_cost, quick_links
from evenload.calibrate.rounds import (
    GPU_LAYERS,
    NEEDED_ROUNDS,
    QUICK_ROUNDS,
    LayerShares,
    PackClock,
    Packs,
    Sample,
    Timed,
    kept_bytes,
    longest_of,
    may_run,
    median_sample,
    pack_clock,
    pack_features,
    part_of,
    rounds_up_to,
    shares_of,
    time_round,
    whole,
)
from evenload.cost.coefficients import (
    CostCoefficients,
    MeasuredOn,
    Noise,
    OverlapCost,
    PassCoefficients,
    read_coefficients,
    write_coefficients,
)
from evenload.cost.group_transfers import weight_gather_seconds
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.cluster import LinkSpec
from evenload.types.document import Direction
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class RankMeasurement:
    """Holds the measurements of one rank.

    Args:
        packs: seconds of one layer; head: (rows, seconds), empty where the rank has no head.
        optimizer_s: of one parameter; copy_s_per_byte: of rows put in place by an index.
        weight_s: of the weight gradients of `kernels.TOKENS` tokens on one layer.
        links: of the transfers that the rank takes part in; overlap: None = not measured.
    """

    noise: Noise
    packs: tuple[Sample, ...]
    head: tuple[tuple[int, float], ...]
    peak_flops_per_s: float
    optimizer_s: float
    copy_s_per_byte: float
    weight_s: float
    links: dict[TransferKind, LinkSpec] = field(default_factory=dict)
    overlap: OverlapCost | None = None


def max_noise(ranks: Sequence[RankMeasurement]) -> Noise:
    return Noise(
        waited_share=max(rank.noise.waited_share for rank in ranks), spread=max(rank.noise.spread for rank in ranks)
    )


def coefficients_of(
    ranks: Sequence[RankMeasurement],
    model: ModelSpec,
    device_name: str,
    layout: ParallelLayout,
    tile: int = 1,
    *,
    is_cpu: bool = False,
) -> CostCoefficients:
    """Fit one set of coefficients to all ranks' timings, with attention blocks of `tile` query rows. On a CPU gloo's
    threads share the cores that compute, so no transfer of K and V counts as hidden."""
    tp = layout.tp
    head = [point for rank in ranks for point in rank.head]
    head_s_per_token, head_pack_s = fit_relative([(float(rows), 1.0) for rows, _ in head], [s for _, s in head])
    links = [rank.links for rank in ranks]
    # A link that no rank uses is unknown, not free.
    p2p, reduction = median_link(links, "pipeline"), median_link(links, "reduction")
    fitted = CostCoefficients(
        source="calibrated",
        device=device_name,
        peak_flops_per_s=float(np.median([rank.peak_flops_per_s for rank in ranks])),
        forward=_pass(ranks, "forward", tile, tp),
        backward=_pass(ranks, "backward", tile, tp),
        attention_tile=tile,
        head_s_per_token=head_s_per_token * tp,
        head_pack_s=head_pack_s,
        optimizer_s_per_parameter=float(np.median([rank.optimizer_s for rank in ranks])),
        p2p_bandwidth_bytes_per_s=p2p.bandwidth_bytes_per_s if p2p else None,
        p2p_latency_s=p2p.latency_s if p2p else 0.0,
        reduce_bandwidth_bytes_per_s=reduction.bandwidth_bytes_per_s if reduction else None,
        reduce_latency_s=reduction.latency_s if reduction else 0.0,
        gather_link=median_link(links, "gather"),
        # Measured over the largest group that shares documents, wherever its ranks lie, else over one that shares
        # matrices; that one's transfers are in the layers' seconds already.
        intra_node=median_link(links, "context", "tensor"),
        host_link=median_link(links, "host"),
        # A group over more devices than took part may cross other links, which are not known.
        devices_per_node=len(ranks),
        # The runtime waits for every one of them where it starts. Under tp they are in the layers' seconds already, but
        # for what W gathers again: whole backwards are timed.
        tensor_exposed_share=0.0 if tp > 1 else 1.0,
        weight_gather_exposed_share=1.0,
        copy_s_per_byte=float(np.median([rank.copy_s_per_byte for rank in ranks])),
        overlap=median_overlap([rank.overlap for rank in ranks]),
        measured_on=MeasuredOn(
            model=model, dp=layout.dp, cp=layout.cp, pp=layout.pipeline_ranks, tp=layout.tp, noise=max_noise(ranks)
        ),
    )
    hidden_share = 0.0 if is_cpu else fitted.context_hidden_share
    share = _weight_share(ranks, fitted, tp)
    return msgspec.structs.replace(fitted, weight_share=share, context_hidden_share=hidden_share)


def _weight_share(ranks: Sequence[RankMeasurement], fitted: CostCoefficients, tp: int) -> float | None:
    """Return the share of weight gradients in a linear backward, without tp's transfers; None if linears are free."""
    assert fitted.measured_on is not None
    model = fitted.measured_on.model
    gather_token_s, gather_pack_s = weight_gather_seconds(model, fitted, tp)
    blocks = float(np.average([kind.blocks for kind in model.kinds], weights=model.kind_counts))
    own_s = float(np.median([rank.weight_s for rank in ranks])) - blocks * (TOKENS * gather_token_s + gather_pack_s)
    linear_s = TOKENS * fitted.backward.linear_s_per_token / tp + fitted.backward.pack_s
    return min(1.0, max(0.0, own_s / linear_s)) if linear_s > 0 else None


def pass_timings(
    ranks: Sequence[RankMeasurement], direction: Direction, tile: int
) -> tuple[list[tuple[float, ...]], list[float], list[Sample]]:
    """Return features, device seconds and samples of all ranks' packs in one direction."""
    chosen = [sample for rank in ranks for sample in rank.packs if sample.direction == direction]
    features: list[tuple[float, ...]] = [pack_features(one.ranges, one.layers, tile) for one in chosen]
    return features, [sample.seconds for sample in chosen], chosen


def _pass(ranks: Sequence[RankMeasurement], direction: Direction, tile: int, tp: int) -> PassCoefficients:
    features, seconds, samples = pass_timings(ranks, direction, tile)
    tokens, slices, packs, pairs, prefix = fit_relative(features, seconds)
    # Of a host; 0 where devices are their own hosts.
    host = [(float(len(one.ranges)), 1.0, one.host_s) for one in samples if one.host_s]
    host_slice_s, host_pack_s = (
        fit_relative([row[:2] for row in host], [row[2] for row in host]) if host else (0.0, 0.0)
    )
    return PassCoefficients(
        # Measured on a part of every matrix; coefficients are of whole ones.
        linear_s_per_token=tokens * tp,
        attention_s_per_pair=pairs * tp,
        prefix_s_per_token=prefix * tp,
        slice_s=slices,
        pack_s=packs,
        host_slice_s=host_slice_s,
        host_pack_s=host_pack_s,
    )


# Raise when calibration measures or fits differently.
_VERSION = 19


def cached_path(
    directory: Path, model: ModelSpec, layout: ParallelLayout, device_name: str, threads: int, backend: str
) -> Path:
    key = (_VERSION, model, layout, device_name, threads, backend)
    return directory / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:24]}.json"


def read_cached(path: Path) -> CostCoefficients | None:
    return read_coefficients(path) if os.path.isfile(path) else None  # no directory that may not be searched


def write_cached(path: Path, coefficients: CostCoefficients) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    write_coefficients(partial, coefficients)
    partial.replace(path)


_TIME_BUDGET_S = 4.0
_WARM_UP_S = 4.0  # while a process first takes memory of its system, packs are up to 10 % slower
_MIN_REPEATS, _MAX_REPEATS = 2, 30
_MAX_ATTEMPTS = 2
_MEMORY_SHARE = 0.2  # of a GPU's memory, which holds weights, gradients and optimizer state already


class TimedRound(NamedTuple):
    """Holds packs, and the layers that they are timed on."""

    packs: Packs
    stage: PipelineStage
    layers: tuple[LayerShares, ...]


def calibrate(
    stages: Mapping[int, PipelineStage],
    model: ModelSpec,
    mesh: Mesh,
    max_document_tokens: int,
    device_name: str,
    demand: float = 1.0,
    max_pack_tokens: int = 0,
) -> tuple[CostCoefficients, int]:
    """Measure and fit; return the coefficients, the same on every rank, and the tokens of the largest pack that all
    timed. Adds to gradients: zero them before training. Collective.

    Args:
        stages: of this rank; layers of the first are timed, on a GPU a few of them.
        max_document_tokens: no longer documents are timed.
        demand: threads that ranks compute with for each core of the machine (`CoreWaits`).
        max_pack_tokens: of the run; GPUs, which small packs do not keep busy, are timed with packs of up to so many.
    """
    rounds = _rounds(stages[min(stages)], model, mesh, max_document_tokens, max_pack_tokens)
    attempts: list[list[RankMeasurement]] = []
    while not attempts or (max_noise(attempts[-1]).is_noisy and len(attempts) < _MAX_ATTEMPTS):
        attempts.append(_measured(stages, model, mesh, rounds, demand))
    everyone = min(attempts, key=lambda ranks: max_noise(ranks).size)
    fitted = coefficients_of(everyone, model, device_name, mesh.layout, is_cpu=mesh.device.type == "cpu")
    largest = min(max(sum(stop - start for _, start, stop in pack.ranges) for pack in rank.packs) for rank in everyone)
    return fitted, largest


def _measured(
    stages: Mapping[int, PipelineStage], model: ModelSpec, mesh: Mesh, wanted: Sequence[TimedRound], demand: float
) -> list[RankMeasurement]:
    dist.barrier(group=mesh.control)
    waits = CoreWaits(demand)
    first, last = stages[min(stages)], stages[max(stages)]
    clock = pack_clock(wanted[0].stage, mesh)
    packs, spread = _time_layers(wanted, clock, mesh)
    waited_share = waits.share()
    heads = head_work(last, model.vocab_size) if last.model.is_last else {}
    update, num_parameters = optimizer_work(mesh.data_size, mesh.device)
    copy, copied_bytes = copy_work(model, mesh.layout.tp, mesh.device, first.dtype)
    mine = RankMeasurement(
        noise=Noise(waited_share=waited_share, spread=spread),
        packs=packs,
        head=tuple((rows, median_seconds(work, last.device)) for rows, work in heads.items()),
        peak_flops_per_s=matmul_flops_per_s(last.device, last.dtype),
        optimizer_s=median_seconds(update, mesh.device) / num_parameters,
        copy_s_per_byte=median_seconds(copy, mesh.device) / copied_bytes,
        weight_s=weight_seconds(wanted[0].stage, clock),
        links=quick_links(mesh),
        overlap=overlap_cost(mesh),
    )
    everyone = [mine] * mesh.layout.world_size
    dist.all_gather_object(everyone, mine, group=mesh.control)
    return everyone


def _rounds(
    stage: PipelineStage, model: ModelSpec, mesh: Mesh, max_document_tokens: int, max_pack_tokens: int
) -> list[TimedRound]:
    """Return what to time while time lasts; the same on ranks of one group, whose devices are alike."""
    longest = max(max_document_tokens, longest_of(whole(128)))
    is_gpu = stage.device.type == "cuda"
    part = part_of(stage, model.layers, GPU_LAYERS) if is_gpu else stage
    wanted = [(packs, part) for packs in QUICK_ROUNDS if longest_of(packs) <= longest and may_run(packs, model)]
    if is_gpu:
        headroom_bytes = _MEMORY_SHARE * torch.cuda.get_device_properties(stage.device).total_memory
        least = part_of(stage, model.layers, 1)
        larger = rounds_up_to(max_pack_tokens, longest)
        fitting = (packs for packs in larger if kept_bytes(packs, least, model, mesh) <= headroom_bytes)
        wanted += [(packs, least) for packs in fitting if may_run(packs, model)]
    return [TimedRound(packs, part, shares_of(part, model, model)) for packs, part in wanted]


def _time_layers(wanted: Sequence[TimedRound], clock: PackClock, mesh: Mesh) -> tuple[tuple[Sample, ...], float]:
    deadline_s = time.perf_counter() + _TIME_BUDGET_S
    rounds: list[TimedRound] = []
    # The first pass shows which rounds the budget allows.
    for one in wanted:
        if len(rounds) >= len(NEEDED_ROUNDS) and _is_over(deadline_s, mesh):
            break
        rounds.append(one)
        list(time_round(one.stage, one.packs, clock))
    _repeated(rounds, clock, 0, _WARM_UP_S, mesh)
    timings = _repeated(rounds, clock, _MIN_REPEATS, _TIME_BUDGET_S, mesh)
    samples = [median_sample(repeats) for repeats in timings.values()]
    spread = spread_of_repeats([[one.seconds for one in repeats] for repeats in timings.values()])
    return tuple(samples), spread


def _repeated(
    rounds: Sequence[TimedRound], clock: PackClock, least: int, budget_s: float, mesh: Mesh
) -> dict[Timed, list[Sample]]:
    """Return all repeats of each pack on one layer: `least`, then more while the budget lasts."""
    timings: dict[Timed, list[Sample]] = {}
    deadline_s = time.perf_counter() + budget_s
    repeats = 0
    while repeats < least or (repeats < _MAX_REPEATS and not _is_over(deadline_s, mesh)):
        for one in rounds:
            layers = len(one.layers)
            for took in time_round(one.stage, one.packs, clock):
                of_layer = Sample(took.direction, took.ranges, took.seconds / layers, took.host_s / layers, one.layers)
                timings.setdefault((took.direction, took.ranges), []).append(of_layer)
        repeats += 1
    return timings


def _is_over(deadline_s: float, mesh: Mesh) -> bool:
    """Say whether time is up on one of the ranks that time the same packs together."""
    is_over = torch.tensor([float(time.perf_counter() > deadline_s)], device=mesh.device)
    if mesh.tensor is not None:
        mesh.tensor.all_reduce(is_over, "calibration", dist.ReduceOp.MAX)
    return bool(is_over)
