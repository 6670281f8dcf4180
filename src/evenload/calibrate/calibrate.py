"""Quick calibration: seconds spent at the start of training, so that predicted step times mean something.

Every rank times its own stage's layers on a handful of packs (whole documents, many short ones, slices
with a prefix), *all ranks at once*, because ranks of one machine share its memory bandwidth and their step
will too. Rank 0 fits the cost model's coefficients by non-negative least squares on relative errors and
broadcasts them: one cost file for all ranks. The full profiler of a device is another command.

A machine that is busy with something else while it is timed is noticed (`disturbance.py`) and timed once more; the
quieter of the two measurements is taken, and the caller is told.

Price: at most 16 packs of up to 4,096 tokens forward and backward, once to warm up and then repeated while the
time budget lasts; the longer ones are left out where the budget is gone before them.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.optimize import nnls

from evenload.calibrate.disturbance import CoreWaits, Disturbance, spread_of_repeats
from evenload.calibrate.link_timings import (
    LinkTiming,
    fastest,
    time_context,
    time_host_link,
    time_link,
    time_reduction,
    time_tensor,
)
from evenload.cost.coefficients import CostCoefficients, MeasuredOn, PassCoefficients
from evenload.cost.flops import slice_pairs
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.device import seconds_now
from evenload.runtime.replay.stage import PackTokens, PipelineStage
from evenload.runtime.replay.store import ActivationStore
from evenload.types.cluster import LinkSpec
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.token_range import Range

_TIME_BUDGET_S = 4.0
_MIN_REPEATS = 2
_MAX_REPEATS = 30
_MAX_ATTEMPTS = 2

# Documents as lists of forward cuts; each list is one round of packs through the layers, cheapest first. Between
# them they vary tokens, slices, pairs and prefix independently, which the fit needs.
_ROUNDS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((0, 128),),
    ((0, 512),),
    ((0, 64),) * 16,
    ((0, 256),) * 4,
    ((0, 896, 1024),),
    ((0, 1024),),
    ((0, 2048),),
    ((0, 1536, 2048),),
    ((0, 1920, 2048),),
    ((0, 4096),),
    ((0, 3584, 4096),),
    ((0, 3968, 4096),),
)
# Fewer rounds than this leave coefficients undetermined, so they run even when they exceed the time budget.
_MIN_ROUNDS = 5


class _Sample(NamedTuple):
    """One timed pack on one layer: features [tokens, slices, 1, pairs, prefix] and seconds."""

    direction: str
    features: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class Calibration:
    """What was measured.

    Args:
        disturbance: of the rank that was disturbed most; a noisy measurement is good for this run at best.
    """

    coefficients: CostCoefficients
    disturbance: Disturbance


def calibrate(
    stages: Mapping[int, PipelineStage],
    model: ModelSpec,
    mesh: Mesh,
    max_document_tokens: int,
    device_name: str,
    demand: float = 1.0,
) -> Calibration:
    """Measure and fit. Collective over all ranks; every rank returns the same.

    Leaves garbage in the gradients: zero them before training.

    Args:
        stages: of this rank; layers of the first are timed, for layers of a model are alike.
        max_document_tokens: no longer documents are tried.
        demand: threads that ranks compute with for each core of the machine, see `CoreWaits`.
    """
    attempts: list[tuple[Disturbance, list[dict]]] = []
    while not attempts or (attempts[-1][0].is_noisy and len(attempts) < _MAX_ATTEMPTS):
        everyone = _measured(stages, model, mesh, max_document_tokens, demand)
        attempts.append((max((rank["disturbance"] for rank in everyone), key=lambda found: found.size), everyone))
    disturbance, everyone = min(attempts, key=lambda attempt: attempt[0].size)
    fitted = _fit(everyone, model, device_name, mesh.layout)
    if mesh.device.type == "cpu":
        # Packs of DP-Merge hold nothing local to compute meanwhile. In others gloo's threads share the cores that
        # compute, so that what hides varies with the load (benchmarks/overlap.py). None is counted.
        fitted = msgspec.structs.replace(fitted, context_hidden_share=0.0)
    return Calibration(fitted, disturbance)


def _measured(
    stages: Mapping[int, PipelineStage], model: ModelSpec, mesh: Mesh, max_document_tokens: int, demand: float
) -> list[dict]:
    dist.barrier(group=mesh.control)
    waits = CoreWaits(demand)
    layers, spread = _time_layers(stages[min(stages)], model, max_document_tokens, mesh)
    waited_share = waits.share()
    last = stages[max(stages)]
    head = _time_head(last, model.vocab_size) if last.model.is_last else []
    mine = {
        "disturbance": Disturbance(waited_share, spread),
        "layers": layers,
        "head": head,
        "peak": _matmul_flops_per_s(last.device, last.dtype),
        "optimizer": _optimizer_s_per_parameter(mesh),
        "link": time_link(mesh),
        "reduce": time_reduction(mesh),
        "context": time_context(mesh),
        "host": time_host_link(mesh.device),
        "tensor": time_tensor(mesh),
    }
    everyone: list[dict] = [{} for _ in range(mesh.layout.world_size)]
    dist.all_gather_object(everyone, mine, group=mesh.control)
    return everyone


def _fit(everyone: list[dict], model: ModelSpec, device_name: str, layout: ParallelLayout) -> CostCoefficients:
    tp = layout.tp
    samples = [s for rank in everyone for s in rank["layers"]]
    passes = {}
    for direction in ("forward", "backward"):
        chosen = [s for s in samples if s.direction == direction]
        tokens, slices, packs, pairs, prefix = _fit_relative([s.features for s in chosen], [s.seconds for s in chosen])
        passes[direction] = PassCoefficients(
            # Measured on a part of every matrix; coefficients are of whole ones.
            linear_s_per_token=tokens * tp,
            attention_s_per_pair=pairs * tp,
            prefix_s_per_token=prefix * tp,
            slice_s=slices,
            pack_s=packs,
        )
    head = [point for rank in everyone for point in rank["head"]]
    head_s_per_token, head_pack_s = _fit_relative([(n, 1.0) for n, _ in head], [s for _, s in head])
    # What nobody sent over is not known, which is not the same as free.
    p2p, reduction, host_link = (_median_link([rank[key] for rank in everyone]) for key in ("link", "reduce", "host"))
    return CostCoefficients(
        source="calibrated",
        device=device_name,
        peak_flops_per_s=float(np.median([rank["peak"] for rank in everyone])),
        forward=passes["forward"],
        backward=passes["backward"],
        attention_tile=1,
        head_s_per_token=head_s_per_token * tp,
        head_pack_s=head_pack_s,
        optimizer_s_per_parameter=float(np.median([rank["optimizer"] for rank in everyone])),
        p2p_bandwidth_bytes_per_s=p2p.bandwidth_bytes_per_s if p2p else None,
        p2p_latency_s=p2p.latency_s if p2p else 0.0,
        reduce_bandwidth_bytes_per_s=reduction.bandwidth_bytes_per_s if reduction else None,
        reduce_latency_s=reduction.latency_s if reduction else 0.0,
        # Measured over the largest group that shares documents, wherever its ranks lie, else over one that shares
        # matrices; that one's transfers are in the layers' seconds already.
        intra_node=_median_link([rank["context"] or rank["tensor"] for rank in everyone]),
        host_link=host_link,
        # A group over more devices than took part may cross other links, which are not known.
        devices_per_node=len(everyone),
        tensor_exposed_share=0.0 if tp > 1 else 0.5,
        # Whole backwards are timed; what W makes again comes on top, and is waited for where it starts.
        weight_gather_exposed_share=1.0 if tp > 1 else 0.5,
        measured_on=MeasuredOn(model=model, dp=layout.dp, cp=layout.cp, pp=layout.pp, tp=layout.tp),
    )


def _median_link(measured: list[LinkTiming | None]) -> LinkSpec | None:
    """Of the ranks that use such a link; None = nobody does."""
    known = [link for link in measured if link is not None]
    if not known:
        return None
    bandwidth, latency_s = np.median(known, axis=0).tolist()
    return LinkSpec(bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)


def _fit_relative(features: list[tuple[float, ...]], seconds: list[float]) -> tuple[float, ...]:
    """Non-negative coefficients that minimise squared *relative* errors: a small pack counts like a large one."""
    y = np.array(seconds)
    scaled: NDArray[np.float64] = np.array(features) / y[:, None]
    # Columns differ by ten orders of magnitude (pairs against packs); unit columns keep the solver exact.
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1.0
    solution, _ = nnls(scaled / norms, np.ones(len(y)))
    return tuple((solution / norms).tolist())


def _time_layers(
    stage: PipelineStage, model: ModelSpec, max_document_tokens: int, mesh: Mesh
) -> tuple[list[_Sample], float]:
    """Fastest of each pack, and the spread of the repeats."""
    deadline_s = time.perf_counter() + _TIME_BUDGET_S
    rounds = []
    # The first pass warms caches and allocators up, and tells which rounds the budget allows.
    for documents in _ROUNDS:
        if documents[0][-1] <= max(max_document_tokens, _ROUNDS[0][0][-1]):
            if len(rounds) >= _MIN_ROUNDS and _is_over(deadline_s, mesh):
                break
            rounds.append(documents)
            for _ in _time_round(stage, model, documents):
                pass
    timings: dict[tuple[str, tuple[float, ...]], list[float]] = {}  # packs differ in their features
    deadline_s = time.perf_counter() + _TIME_BUDGET_S
    repeats = 0
    while repeats < _MIN_REPEATS or (repeats < _MAX_REPEATS and not _is_over(deadline_s, mesh)):
        for documents in rounds:
            for direction, features, seconds in _time_round(stage, model, documents):
                timings.setdefault((direction, features), []).append(seconds)
        repeats += 1
    layers = len(stage.model.layers)
    samples = [_Sample(*pack, min(seconds) / layers) for pack, seconds in timings.items()]
    return samples, spread_of_repeats(list(timings.values()))


def _is_over(deadline_s: float, mesh: Mesh) -> bool:
    """Time is up on one of the ranks that have to time the same packs together."""
    is_over = torch.tensor([float(time.perf_counter() > deadline_s)], device=mesh.device)
    if mesh.tensor is not None:
        mesh.tensor.all_reduce(is_over, "calibration", dist.ReduceOp.MAX)
    return bool(is_over)


def _time_round(stage: PipelineStage, model: ModelSpec, documents: tuple[tuple[int, ...], ...]) -> Iterator[_Sample]:
    """Forward cut by cut, backward in reverse; seconds of all layers."""
    cuts = list(zip(documents[0][:-1], documents[0][1:], strict=True))
    packs = [tuple(Range(doc, a, b) for doc in range(len(documents))) for a, b in cuts]
    num_tokens = dict.fromkeys(range(len(documents)), documents[0][-1])
    stage.begin_step(num_tokens)
    store = ActivationStore(num_tokens, packs, shard=stage.row_shard)
    for ranges in packs:
        pack = _pack(ranges, stage)
        hidden = torch.randn(stage.num_rows(ranges), stage.hidden_size, dtype=stage.dtype, device=stage.device)
        start_s = seconds_now(stage.device)
        stage.forward_layers(pack, hidden, store)
        yield _Sample("forward", _features(ranges, stage, model), seconds_now(stage.device) - start_s)
    for ranges in reversed(packs):
        pack = _pack(ranges, stage)
        grad = torch.randn(stage.num_rows(ranges), stage.hidden_size, dtype=stage.dtype, device=stage.device)
        start_s = seconds_now(stage.device)
        stage.backward_layers(pack, grad, store)
        yield _Sample("backward", _features(ranges, stage, model), seconds_now(stage.device) - start_s)


def _pack(ranges: tuple[Range, ...], stage: PipelineStage) -> PackTokens:
    positions = torch.cat([torch.arange(a, b, device=stage.device) for _, a, b in ranges])
    return PackTokens(ranges, torch.zeros_like(positions), torch.zeros_like(positions), positions)


def _features(ranges: tuple[Range, ...], stage: PipelineStage, model: ModelSpec) -> tuple[float, ...]:
    start, stop = (np.array([r[i] for r in ranges], dtype=np.int64) for i in (1, 2))
    windows = [model.windows[index] for index in stage.model.layers]
    pairs = np.mean([slice_pairs(start, stop, window).sum() for window in windows])
    prefix = np.mean([(np.minimum(start, window) if window else start).sum() for window in windows])
    return float((stop - start).sum()), float(len(ranges)), 1.0, float(pairs), float(prefix)


def _time_head(stage: PipelineStage, vocab_size: int) -> list[tuple[float, float]]:
    points = []
    for rows in (64, 512, 2048):
        ranges = (Range(0, 0, rows),)
        hidden = torch.randn(stage.num_rows(ranges), stage.hidden_size, dtype=stage.dtype, device=stage.device)
        targets = torch.randint(0, vocab_size, (rows,), device=stage.device)
        points.append(
            (float(rows), fastest(lambda h=hidden, t=targets, r=ranges: stage.head(h, t, 1, r), stage.device))
        )
    return points


def _matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    # A GPU is judged by the precision it computes in, and is busy only with large matrices.
    n, dtype = (8192, dtype) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * n**3 / fastest(lambda: a @ b, device)


def _optimizer_s_per_parameter(mesh: Mesh) -> float:
    """Seconds of a parameter of this rank's shard for all that a step does to gradients and weights between transfers:
    zeroes the gradients of all ranks' shards, sums squares, clips, updates, copies what it sends."""
    count = 1 << 22  # more than caches hold, as in a step
    gradients = torch.zeros(mesh.data_size * count, device=mesh.device)
    parameter, shard = torch.zeros(count, device=mesh.device), gradients[:count]
    parameter.grad = shard
    adamw = torch.optim.AdamW([parameter], fused=True)

    def update() -> None:
        gradients.zero_()
        torch.linalg.vector_norm(shard, dtype=torch.float64)
        shard.mul_(0.5)
        adamw.step()
        parameter.clone()

    return fastest(update, mesh.device) / count
