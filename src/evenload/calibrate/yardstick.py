"""`Yardstick`: how fast the machine is now against its costs: packs of the calibration, timed again later.

A machine changes its speed by some percent within minutes (its clock, its neighbours), and costs are of the minutes in
which they were measured. A comparison of measured with predicted seconds therefore times the packs that the costs come
from once more, beside what it measures: by how much *those* differ from what the costs say is the machine's change, and
what is left is the model's error.

Price: at most five packs of up to 1,024 tokens forward and backward each time.
"""

import statistics

import torch.distributed as dist

from evenload.calibrate.rounds import QUICK_ROUNDS, longest_of, pack_features, time_round
from evenload.cost.coefficients import CostCoefficients
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.layout import ParallelLayout
from evenload.types.micropack import Direction
from evenload.types.model import ModelSpec
from evenload.types.token_range import Range

_NUM_ROUNDS = 5


def can_tell_drift(costs: CostCoefficients, layout: ParallelLayout) -> bool:
    """Whether packs that are timed in a layout are those that the costs speak of. Not where nothing was measured; and
    not under another tp: packs of a tensor-parallel group contain its transfers, which costs of whole matrices price
    apart from them."""
    measured = costs.measured_on
    return costs.source != "analytic" and measured is not None and measured.tp == layout.tp


class Yardstick:
    """Of one rank.

    Args:
        stage: whose layers are timed.
        costs: measured ones, of this model; `can_tell_drift` in this layout.
        max_document_tokens: no longer documents are timed, but for the shortest of the calibration.
    """

    def __init__(
        self, stage: PipelineStage, model: ModelSpec, costs: CostCoefficients, max_document_tokens: int, mesh: Mesh
    ) -> None:
        self._stage, self._costs, self._mesh = stage, costs, mesh
        self._windows = [model.windows[index] for index in stage.model.layers]
        longest = max(max_document_tokens, longest_of(QUICK_ROUNDS[0]))
        self._rounds = [packs for packs in QUICK_ROUNDS if longest_of(packs) <= longest][:_NUM_ROUNDS]
        self._seconds: dict[tuple[Direction, tuple[Range, ...]], list[float]] = {}

    def measure(self) -> None:
        """Time every pack once, on all ranks at once as the calibration does. Collective; adds to gradients."""
        dist.barrier(group=self._mesh.control)
        for packs in self._rounds:
            for direction, ranges, seconds in time_round(self._stage, packs):
                self._seconds.setdefault((direction, ranges), []).append(seconds)

    def drift(self) -> float:
        """Seconds of all packs now over what the costs say of them, minus 1: -0.05 is a machine that became 5 % faster.
        Medians of the repeats, the mean of all ranks. Collective; the same on every rank."""
        now_s = sum(statistics.median(seconds) for seconds in self._seconds.values())
        mine = now_s / sum(self._costed_s(direction, ranges) for direction, ranges in self._seconds) - 1
        everyone = [mine] * self._mesh.layout.world_size
        dist.all_gather_object(everyone, mine, group=self._mesh.control)
        return statistics.mean(everyone)

    def _costed_s(self, direction: Direction, ranges: tuple[Range, ...]) -> float:
        costs = self._costs.forward if direction == "forward" else self._costs.backward
        tokens, slices, packs, pairs, prefix = pack_features(ranges, self._windows, self._costs.attention_tile)
        whole_s = tokens * costs.linear_s_per_token + pairs * costs.attention_s_per_pair
        whole_s += prefix * costs.prefix_s_per_token
        # Only what matrices and heads cost is shared by a tensor-parallel group.
        shared_s = whole_s / self._mesh.layout.tp
        return len(self._windows) * (shared_s + slices * costs.slice_s + packs * costs.pack_s)
