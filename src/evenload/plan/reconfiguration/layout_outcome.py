"""`LayoutOutcome`: one layout over the known steps, planned and simulated."""

from dataclasses import dataclass
from itertools import accumulate

from evenload.plan.planner import Proposal
from evenload.plan.reconfiguration.layout_plans import MemoryPlans
from evenload.types.layout import ParallelLayout


@dataclass(frozen=True, eq=False)
class LayoutOutcome:
    """What a layout would make of the known steps.

    Args:
        layout: with the generation that it has or would have.
        proposal: of the coming step; its layout may recompute some layers.
        plans: the memory plans that it was chosen from.
        step_s: predicted seconds of every known step, as far as measured steps correct them.
        holds: known steps that fit, up to the first that does not.
        switch_s: of a switch to it, corrected alike; 0 = it is the current one.
    """

    layout: ParallelLayout
    proposal: Proposal
    plans: MemoryPlans
    step_s: tuple[float, ...]
    holds: int
    switch_s: float = 0.0

    @property
    def is_finalist(self) -> bool:
        """It holds the coming step and counts as one of `FlexOptions.finalists`; layouts with virtual stages do not."""
        return self.holds > 0 and self.layout.num_stages == self.layout.pp

    @property
    def excess_bytes(self) -> int:
        """Above a device's memory, of the coming step."""
        return max(choice.candidate.excess_bytes for choice in self.proposal.choices)

    def compared_steps(self, keep: "LayoutOutcome") -> int:
        """Steps over which it stands against the current layout: those that both hold."""
        return min(self.holds, keep.holds) if keep.holds else self.holds

    def later_steps(self, keep: "LayoutOutcome") -> int:
        """After how many of the compared steps a switch to it gains most: until then the current layout, which holds
        them, is the faster one. 0 where it does not hold the coming step."""
        steps = self.compared_steps(keep) if keep.holds else 0
        gains_s = [0.0, *accumulate(a - b for a, b in zip(keep.step_s[:steps], self.step_s[:steps], strict=True))]
        return min(range(steps), key=gains_s.__getitem__, default=0)

    def order(self, keep: "LayoutOutcome") -> tuple[int, float]:
        """Of layouts that hold the coming step: what gains most over the current layout, now or later, or where that
        cannot run, what holds the most steps and is fastest over them."""
        steps, later = self.compared_steps(keep), self.later_steps(keep)
        seconds = sum(self.step_s[later:steps]) + self.switch_s
        if keep.holds:
            return 0, seconds - sum(keep.step_s[later:steps])
        return -steps, seconds
