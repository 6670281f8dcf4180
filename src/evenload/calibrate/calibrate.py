"""Calibrate the cost model for some seconds at the start of training.

All ranks time their own stage's layers at once, as a step shares the machine too, on a handful of packs: whole
documents, many short ones, slices with a prefix. Coefficients are fitted by non-negative least squares on relative
errors; a cost file is cached by everything that changes the seconds, unless a measurement was noisy (`calibrate.fit`).
On a GPU larger packs follow, through one layer of every window. Slow layers are timed less often, and fewer of them, so
that all ends within `train.calibration_max_s`.
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
from evenload.calibrate.links import TransferKind, median_link, median_of, overlap_cost, quick_links
from evenload.calibrate.rounds import (
    FEW_LAYERS,
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
    num_tokens_of,
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
from evenload.runtime.comm.mesh import Mesh, gather_from_all, most_of_ranks
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
        is_cut_short: `max_s` left layers, packs or repeats out.
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
    is_cut_short: bool = False


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
    sizes = {"dp": layout.dp, "cp": layout.cp, "pp": layout.pipeline_ranks, "tp": tp}
    is_cut_short = any(rank.is_cut_short for rank in ranks)
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
        overlap=median_of([rank.overlap for rank in ranks]),
        measured_on=MeasuredOn(model=model, **sizes, noise=max_noise(ranks), is_cut_short=is_cut_short),
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
    host = [(row[1], 1.0, one.host_s) for row, one in zip(features, samples, strict=True) if one.host_s]
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
_VERSION = 20


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
_WARM_UP_S = 3.0  # while a process first takes memory of its system, packs are up to 10 % slower
_HEAD_BUDGET_S = 2.0  # beyond it the largest head is left out, and the others are timed once
_MIN_REPEATS, _MAX_REPEATS, _WEIGHT_REPEATS = 2, 30, 3
_REPEATED_ROUNDS = 2  # the cheapest, which show how far repeats spread, even after time is up
_LAYERS_SHARE = 0.7  # of all time, after which no more layers are timed
_PASS_SHARE = 0.15  # of all time, for one pass over the rounds that are needed; else fewer layers are timed
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
    max_s: float = 20.0,
) -> tuple[CostCoefficients, int]:
    """Measure and fit; return the coefficients, the same on every rank, and the tokens of the largest pack that all
    timed. Adds to gradients: zero them before training. Collective.

    Args:
        stages: of this rank; layers of the first are timed, on a GPU, and where they are slow, a few of them.
        max_document_tokens: no longer documents are timed.
        demand: threads that ranks compute with for each core of the machine (`CoreWaits`).
        max_pack_tokens: of the run; GPUs, which small packs do not keep busy, are timed with packs of up to so many.
        max_s: about the most that all of it takes, where layers are not so slow that the least takes longer.
    """
    stage, is_few = stages[min(stages)], False
    if mesh.device.type == "cpu":
        stage, is_few = _timed_part(stage, model, mesh, _PASS_SHARE * max_s)
    else:  # compiles kernels, for which a step would wait too
        list(time_round(part_of(stage, model.layers, 1), NEEDED_ROUNDS[1], PackClock(stage.device)))
    end_s = time.perf_counter() + _LAYERS_SHARE * max_s
    wanted = _rounds(stage, model, mesh, max_document_tokens, max_pack_tokens)
    dist.barrier(group=mesh.control)
    waits = CoreWaits(demand)
    first, last = stages[min(stages)], stages[max(stages)]
    clock = pack_clock(wanted[0].stage, mesh)
    packs, spread = _time_layers(wanted, clock, mesh, end_s, is_few=is_few)
    waited_share, is_late = waits.share(), _is_over(end_s, mesh)
    update, num_parameters = optimizer_work(mesh.data_size, mesh.device)
    copy, copied_bytes = copy_work(model, mesh.layout.tp, mesh.device, first.dtype)
    mine = RankMeasurement(
        noise=Noise(waited_share=waited_share, spread=spread),
        packs=packs,
        head=_time_heads(last, model, mesh) if last.model.is_last else (),
        peak_flops_per_s=matmul_flops_per_s(last.device, last.dtype),
        optimizer_s=median_seconds(update, mesh.device) / num_parameters,
        copy_s_per_byte=median_seconds(copy, mesh.device) / copied_bytes,
        weight_s=weight_seconds(wanted[0].stage, clock, 1 if is_late else _WEIGHT_REPEATS),
        links=quick_links(mesh),
        overlap=overlap_cost(mesh),
        is_cut_short=is_late or is_few,
    )
    everyone = gather_from_all(mine, mesh)
    fitted = coefficients_of(everyone, model, device_name, mesh.layout, is_cpu=mesh.device.type == "cpu")
    largest = min(max(sum(stop - start for _, start, stop in pack.ranges) for pack in rank.packs) for rank in everyone)
    return fitted, largest


def _rounds(
    stage: PipelineStage, model: ModelSpec, mesh: Mesh, max_document_tokens: int, max_pack_tokens: int
) -> list[TimedRound]:
    """Return what to time while time lasts; the same on ranks of one group, whose devices are alike."""
    longest = max(max_document_tokens, longest_of(whole(128)))
    is_gpu = stage.device.type == "cuda"
    part = part_of(stage, model.layers, FEW_LAYERS) if is_gpu else stage
    wanted = [(packs, part) for packs in QUICK_ROUNDS if longest_of(packs) <= longest and may_run(packs, model)]
    if is_gpu:
        headroom_bytes = _MEMORY_SHARE * torch.cuda.get_device_properties(stage.device).total_memory
        least = part_of(stage, model.layers, 1)
        larger = rounds_up_to(max_pack_tokens, longest)
        fitting = (packs for packs in larger if kept_bytes(packs, least, model, mesh) <= headroom_bytes)
        wanted += [(packs, least) for packs in fitting if may_run(packs, model)]
    return [TimedRound(packs, part, shares_of(part, model, model)) for packs, part in wanted]


def _timed_part(stage: PipelineStage, model: ModelSpec, mesh: Mesh, budget_s: float) -> tuple[PipelineStage, bool]:
    """Return as many of a CPU's layers as pass through the needed rounds within the budget, all or a few, else one of
    each kind, whose least repeats take less than a step of training; and whether these are too few. Collective."""
    least, few = (part_of(stage, model.layers, most) for most in (1, FEW_LAYERS))
    clock, (_, small, larger, *_) = PackClock(stage.device), NEEDED_ROUNDS
    _, took_s = (sum(one.seconds for one in time_round(least, packs, clock)) for packs in (small, larger))
    passes = sum(sum(num_tokens_of(packs).values()) for packs in NEEDED_ROUNDS) / sum(num_tokens_of(larger).values())
    layer_s = most_of_ranks(passes * took_s / len(least.model.layers), mesh)
    part = next((one for one in (stage, few) if layer_s * len(one.model.layers) <= budget_s), least)
    return part, len(part.model.layers) < len(few.model.layers)


def _time_layers(
    wanted: Sequence[TimedRound], clock: PackClock, mesh: Mesh, end_s: float, *, is_few: bool
) -> tuple[tuple[Sample, ...], float]:
    budget_end_s = min(end_s, time.perf_counter() + _TIME_BUDGET_S)
    rounds: list[TimedRound] = []
    # The first pass shows which rounds the budget allows.
    for one in wanted:
        if len(rounds) >= len(NEEDED_ROUNDS) and (is_few or _is_over(budget_end_s, mesh)):
            break
        rounds.append(one)
        if not is_few:
            list(time_round(one.stage, one.packs, clock))
    _repeated(rounds, clock, 0, 0.0 if is_few else _WARM_UP_S, end_s, mesh)
    timings = _repeated(rounds, clock, _MIN_REPEATS, _TIME_BUDGET_S, end_s, mesh)
    samples = [median_sample(repeats) for repeats in timings.values()]
    spread = spread_of_repeats([[one.seconds for one in repeats] for repeats in timings.values() if len(repeats) > 1])
    return tuple(samples), spread


def _repeated(
    rounds: Sequence[TimedRound], clock: PackClock, least: int, budget_s: float, end_s: float, mesh: Mesh
) -> dict[Timed, list[Sample]]:
    """Return all repeats of each pack on one layer: `least`, then more while the budget lasts; after `end_s` what is
    needed alone."""
    timings: dict[Timed, list[Sample]] = {}
    deadline_s = min(end_s, time.perf_counter() + budget_s)
    repeats, pass_s = 0, 0.0
    while repeats < least or (repeats < _MAX_REPEATS and not _is_over(deadline_s - pass_s, mesh)):
        from_s = time.perf_counter()
        for at, one in enumerate(rounds):
            if at >= (_REPEATED_ROUNDS if repeats else len(NEEDED_ROUNDS)) and _is_over(end_s, mesh):
                break
            layers = len(one.layers)
            for took in time_round(one.stage, one.packs, clock):
                of_layer = Sample(took.direction, took.ranges, took.seconds / layers, took.host_s / layers, one.layers)
                timings.setdefault((took.direction, took.ranges), []).append(of_layer)
        repeats, pass_s = repeats + 1, time.perf_counter() - from_s
    return timings


def _time_heads(last: PipelineStage, model: ModelSpec, mesh: Mesh) -> tuple[tuple[int, float], ...]:
    """Return (rows, seconds) of at least two heads."""
    deadline_s, timings = time.perf_counter() + _HEAD_BUDGET_S, list[tuple[int, float]]()
    for rows, work in head_work(last, model.vocab_size).items():
        is_late = _is_over(deadline_s, mesh)
        if is_late and len(timings) > 1:
            break
        timings.append((rows, median_seconds(work, last.device, repeats=1 if is_late else 5)))
    return tuple(timings)


def _is_over(deadline_s: float, mesh: Mesh) -> bool:
    """Say whether time is up on one of the ranks that time the same packs together."""
    is_over = torch.tensor([float(time.perf_counter() >= deadline_s)], device=mesh.device)
    if mesh.tensor is not None:
        mesh.tensor.all_reduce(is_over, "calibration", dist.ReduceOp.MAX)
    return bool(is_over)
