"""`SwitchRecord`: one change of the layout that a run made, as predicted and as it was."""

from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout


class SwitchRecord(Frozen):
    """What a switch moved and took.

    Args:
        step: before which the layout changed.
        old, new: layouts.
        moved_bytes: sent from one device to another, all devices together; 0 = everything was in place.
        predicted_s: seconds that links alone say training stands still.
        measured_s: for which it did, on the slowest rank, behind the step too.
        predicted_gain_s: that the planner expected to win over the steps it knew, the switch paid; None where memory
            forced it.
    """

    step: int
    old: ParallelLayout
    new: ParallelLayout
    moved_bytes: int
    predicted_s: float
    measured_s: float
    predicted_gain_s: float | None
