"""Quick calibration: seconds spent at the start of training, so that predicted step times mean something.

Every rank times its own stage's layers on a handful of packs (whole documents, many short ones, slices
with a prefix), *all ranks at once*, because ranks of one machine share its memory bandwidth and their step
will too. Rank 0 fits the cost model's coefficients by non-negative least squares on relative errors and
broadcasts them: one cost file for all ranks. `calibrate.profile` measures the same and more, longer.

A machine that is busy with something else while it is timed is noticed (`disturbance.py`) and timed once more; the
quieter of the two measurements is taken, and the caller is told.

On a GPU packs of more tokens follow, up to the largest of the run: those of 4,096 tokens do not fill it. They go
through one layer of every window, so that a fifth of the device's memory holds what layers keep of them; as far as it
does, the caller is told. The host that queues packs is timed apart from the device that computes them (`pack_clock`).

Price: at most 20 packs of up to 4,096 tokens forward and backward, on a GPU larger ones too, repeated for some seconds
to warm up and then while the time budget lasts; the longer ones are left out where the budget is gone before them.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from evenload.calibrate.assemble import RankMeasurement, coefficients_of, most_disturbed
from evenload.calibrate.disturbance import CoreWaits, spread_of_repeats
from evenload.calibrate.grid_choice import kept_bytes
from evenload.calibrate.kernel_timings import copy_work, head_work, matmul_flops_per_s, optimizer_work
from evenload.calibrate.link_timings import quick_links
from evenload.calibrate.overlap import overlap_cost
from evenload.calibrate.pack_clock import PackClock, pack_clock
from evenload.calibrate.repeats import median_seconds
from evenload.calibrate.rounds import (
    NEEDED_ROUNDS,
    QUICK_ROUNDS,
    Packs,
    Sample,
    Timed,
    longest_of,
    median_sample,
    part_of,
    rounds_up_to,
    time_round,
    timed_part,
    whole,
)
from evenload.calibrate.weight_timings import weight_seconds
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.measured_on import Disturbance
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.model import ModelSpec

_TIME_BUDGET_S = 4.0
# A process asks its system for memory in the first seconds, and packs are up to 10 % slower by that; later it has some.
_WARM_UP_S = 4.0
_MIN_REPEATS = 2
_MAX_REPEATS = 30
_MAX_ATTEMPTS = 2
# Of a GPU's memory, which holds weights, gradients and optimizer state already.
_MEMORY_SHARE = 0.2


class TimedRound(NamedTuple):
    """Packs, and the layers that they are timed on with their windows."""

    packs: Packs
    stage: PipelineStage
    windows: tuple[int, ...]

    @staticmethod
    def of(packs: Packs, stage: PipelineStage, model: ModelSpec) -> "TimedRound":
        return TimedRound(packs, stage, tuple(model.windows[index] for index in stage.model.layers))


@dataclass(frozen=True, eq=False)
class Calibration:
    """What was measured.

    Args:
        largest_pack_tokens: that every rank timed.
    """

    coefficients: CostCoefficients
    largest_pack_tokens: int


def calibrate(
    stages: Mapping[int, PipelineStage],
    model: ModelSpec,
    mesh: Mesh,
    max_document_tokens: int,
    device_name: str,
    demand: float = 1.0,
    max_pack_tokens: int = 0,
) -> Calibration:
    """Measure and fit. Collective over all ranks; every rank returns the same.

    Leaves garbage in the gradients: zero them before training.

    Args:
        stages: of this rank; layers of the first are timed, for layers of a model are alike; on a GPU a few of them.
        max_document_tokens: no longer documents are tried.
        demand: threads that ranks compute with for each core of the machine, see `CoreWaits`.
        max_pack_tokens: of the run; GPUs, which small packs do not keep busy, are timed with packs of up to so many.
    """
    rounds = _rounds(stages[min(stages)], model, mesh, max_document_tokens, max_pack_tokens)
    attempts: list[list[RankMeasurement]] = []
    while not attempts or (most_disturbed(attempts[-1]).is_noisy and len(attempts) < _MAX_ATTEMPTS):
        attempts.append(_measured(stages, model, mesh, rounds, demand))
    everyone = min(attempts, key=lambda ranks: most_disturbed(ranks).size)
    fitted = coefficients_of(everyone, model, device_name, mesh.layout)
    if mesh.device.type == "cpu":
        # Packs of DP-Merge hold nothing local to compute meanwhile. In others gloo's threads share the cores that
        # compute, so that what hides varies with the load. None is counted.
        fitted = msgspec.structs.replace(fitted, context_hidden_share=0.0)
    largest = min(max(sum(stop - start for _, start, stop in pack.ranges) for pack in rank.packs) for rank in everyone)
    return Calibration(fitted, largest)


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
        disturbance=Disturbance(waited_share=waited_share, spread=spread),
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
    """What is timed, if there is time for it; the same on ranks of one group, whose devices are alike."""
    shortest = max(max_document_tokens, longest_of(whole(128)))
    part = timed_part(stage, model.windows)
    rounds = [TimedRound.of(packs, part, model) for packs in QUICK_ROUNDS if longest_of(packs) <= shortest]
    if stage.device.type == "cuda":
        room_bytes = _MEMORY_SHARE * torch.cuda.get_device_properties(stage.device).total_memory
        least = part_of(stage, model.windows, 1)
        larger = rounds_up_to(max_pack_tokens, shortest)
        fitting = [packs for packs in larger if kept_bytes(packs, least, model, mesh) <= room_bytes]
        rounds += [TimedRound.of(packs, least, model) for packs in fitting]
    return rounds


def _time_layers(wanted: Sequence[TimedRound], clock: PackClock, mesh: Mesh) -> tuple[tuple[Sample, ...], float]:
    """Median of each pack on one layer, and the spread of its repeats."""
    deadline_s = time.perf_counter() + _TIME_BUDGET_S
    rounds: list[TimedRound] = []
    # The first pass tells which rounds the budget allows.
    for one in wanted:
        if len(rounds) >= len(NEEDED_ROUNDS) and _is_over(deadline_s, mesh):
            break
        rounds.append(one)
        for _ in time_round(one.stage, one.packs, clock):
            pass
    _repeated(rounds, clock, 0, _WARM_UP_S, mesh)
    timings = _repeated(rounds, clock, _MIN_REPEATS, _TIME_BUDGET_S, mesh)
    samples = [median_sample(repeats) for repeats in timings.values()]
    spread = spread_of_repeats([[one.seconds for one in repeats] for repeats in timings.values()])
    return tuple(samples), spread


def _repeated(
    rounds: Sequence[TimedRound], clock: PackClock, least: int, budget_s: float, mesh: Mesh
) -> dict[Timed, list[Sample]]:
    """All repeats of each pack on one layer; at least so many, then while the budget lasts."""
    timings: dict[Timed, list[Sample]] = {}
    deadline_s = time.perf_counter() + budget_s
    repeats = 0
    while repeats < least or (repeats < _MAX_REPEATS and not _is_over(deadline_s, mesh)):
        for one in rounds:
            layers = len(one.windows)
            for took in time_round(one.stage, one.packs, clock):
                of_layer = Sample(took.direction, took.ranges, took.seconds / layers, took.host_s / layers, one.windows)
                timings.setdefault((took.direction, took.ranges), []).append(of_layer)
        repeats += 1
    return timings


def _is_over(deadline_s: float, mesh: Mesh) -> bool:
    """Time is up on one of the ranks that have to time the same packs together."""
    is_over = torch.tensor([float(time.perf_counter() > deadline_s)], device=mesh.device)
    if mesh.tensor is not None:
        mesh.tensor.all_reduce(is_over, "calibration", dist.ReduceOp.MAX)
    return bool(is_over)
