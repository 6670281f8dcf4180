"""`Yardstick`: how fast the machine is now against its costs: packs of the calibration, timed again later.

A machine changes its speed by some percent within minutes (its clock, its neighbours), and costs are of the minutes in
which they were measured. A comparison of measured with predicted seconds therefore times some of the packs that the
costs come from once more, beside what it measures: by how much *those* differ from what they took then (the cost file
keeps it) is the machine's change, and what is left is the model's error.

What they took then is measured as it is later, one round after the other, and when all else of the calibration is
measured (`reference`). On a CPU the same packs take 2 to 6 % longer between its other packs, small and large ones, and
1 to 4 % longer before its transfers, head and optimizer; why was not found out.

Price: at most five packs of up to 1,024 tokens forward and backward each time; three to seven times that at first.
"""

import statistics
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from evenload.calibrate.pack_clock import PackClock, pack_clock
from evenload.calibrate.rounds import YARDSTICK_ROUNDS, Packs, Sample, Timed, median_sample, time_round, timed_part
from evenload.cost.coefficients import CostCoefficients
from evenload.runtime.comm.mesh import Mesh, most_of_ranks
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.layout import ParallelLayout
from evenload.types.token_range import Range

_LEAST_PASSES, _MOST_PASSES = 3, 7
_BUDGET_S = 4.0


def can_tell_drift(costs: CostCoefficients, layout: ParallelLayout) -> bool:
    """Whether packs that are timed in a layout are those that the costs speak of. Not where nothing was measured, or by
    an older version, which kept no pack's seconds; and not under another tp: packs of a tensor-parallel group are parts
    of matrices, and contain its transfers."""
    measured = costs.measured_on
    return measured is not None and bool(measured.packs) and measured.tp == layout.tp


class Yardstick:
    """Of one rank.

    Args:
        stage: whose layers are timed.
        costs: `can_tell_drift` in this layout.
    """

    def __init__(self, stage: PipelineStage, costs: CostCoefficients, mesh: Mesh) -> None:
        assert costs.measured_on is not None
        assert costs.measured_on.packs
        self._stage, self._mesh = timed_part(stage, costs.measured_on.model.windows), mesh
        self._clock = pack_clock(self._stage, mesh)
        self._seconds_then: dict[Timed, float] = {}
        for pack in costs.measured_on.packs:
            self._seconds_then[pack.direction, tuple(Range(*one) for one in pack.slices)] = pack.seconds
        self._rounds = [
            packs for packs in YARDSTICK_ROUNDS if all(("forward", one) in self._seconds_then for one in packs)
        ]
        self._seconds_now: dict[Timed, list[float]] = {}

    def measure(self) -> None:
        """Time every pack once, on all ranks at once as the calibration does. Collective; adds to gradients."""
        for took in _timed_once(self._stage, self._rounds, self._clock, self._mesh):
            self._seconds_now.setdefault((took.direction, took.ranges), []).append(took.seconds)

    def drift(self) -> float:
        """Seconds of all packs now over those of the calibration, minus 1: -0.05 is a machine that became 5 % faster.
        Medians of the repeats, the mean of all ranks. Collective; the same on every rank."""
        now_s = sum(statistics.median(seconds) for seconds in self._seconds_now.values())
        mine = now_s / sum(self._seconds_then[pack] for pack in self._seconds_now) - 1
        everyone = [mine] * self._mesh.layout.world_size
        dist.all_gather_object(everyone, mine, group=self._mesh.control)
        return statistics.mean(everyone)


def reference(stage: PipelineStage, timed: Sequence[Packs], clock: PackClock, mesh: Mesh) -> tuple[Sample, ...]:
    """What packs of the yardstick take on one layer after a calibration, medians. Collective; adds to gradients.

    Args:
        timed: rounds of the calibration; those of the yardstick among them are timed again.
    """
    rounds = [packs for packs in YARDSTICK_ROUNDS if packs in timed]
    found: dict[Timed, list[Sample]] = {}
    deadline_s = time.perf_counter() + _BUDGET_S
    for number in range(_MOST_PASSES):
        if number >= _LEAST_PASSES and most_of_ranks(time.perf_counter() > deadline_s, mesh):
            break
        for took in _timed_once(stage, rounds, clock, mesh):
            found.setdefault((took.direction, took.ranges), []).append(took)
    return tuple(map(median_sample, found.values()))


def _timed_once(stage: PipelineStage, rounds: Sequence[Packs], clock: PackClock, mesh: Mesh) -> Iterator[Sample]:
    """Seconds of one layer, on all ranks at once."""
    dist.barrier(group=mesh.control)
    layers = len(stage.model.layers)
    for packs in rounds:
        for took in time_round(stage, packs, clock):
            yield took._replace(seconds=took.seconds / layers)
