"""`Yardstick`: how fast the machine is now against its costs: packs of the calibration, timed again later.

A machine changes its speed by some percent within minutes (its clock, its neighbours), and costs are of the minutes in
which they were measured. A comparison of measured with predicted seconds therefore times some of the packs that the
costs come from once more, beside what it measures: by how much *those* differ from what they took then (the cost file
keeps it) is the machine's change, and what is left is the model's error.

Price: at most five packs of up to 1,024 tokens forward and backward each time.
"""

import statistics

import torch.distributed as dist

from evenload.calibrate.pack_clock import pack_clock
from evenload.calibrate.rounds import YARDSTICK_ROUNDS, time_round, timed_part
from evenload.cost.coefficients import CostCoefficients
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.layout import ParallelLayout
from evenload.types.micropack import Direction
from evenload.types.token_range import Range

Timed = tuple[Direction, tuple[Range, ...]]


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
        dist.barrier(group=self._mesh.control)
        layers = len(self._stage.model.layers)
        for packs in self._rounds:
            for direction, ranges, seconds, *_ in time_round(self._stage, packs, self._clock):
                self._seconds_now.setdefault((direction, ranges), []).append(seconds / layers)

    def drift(self) -> float:
        """Seconds of all packs now over those of the calibration, minus 1: -0.05 is a machine that became 5 % faster.
        Medians of the repeats, the mean of all ranks. Collective; the same on every rank."""
        now_s = sum(statistics.median(seconds) for seconds in self._seconds_now.values())
        mine = now_s / sum(self._seconds_then[pack] for pack in self._seconds_now) - 1
        everyone = [mine] * self._mesh.layout.world_size
        dist.all_gather_object(everyone, mine, group=self._mesh.control)
        return statistics.mean(everyone)
