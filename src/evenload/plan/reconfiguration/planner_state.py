"""`PlannerState`: all that planning carries from step to step: documents that wait, and the layout that runs."""

from collections.abc import Sequence

import msgspec

from evenload.plan.deferral.delay import DelayState
from evenload.plan.reconfiguration.fmop import FlexState
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout


class PlannerState(Frozen):
    """Between two steps; small and serialisable.

    Args:
        delay: what a strategy that moves documents between steps remembers.
        flex: what a planner that changes the layout remembers; None = the run starts, or keeps its layout.
    """

    delay: DelayState = DelayState()
    flex: FlexState | None = None


def resumed_flex(saved: FlexState | None, layouts: Sequence[ParallelLayout]) -> FlexState | None:
    """A checkpoint's state for a run that starts in the first of these layouts and may take the others.

    None, a fresh start, where it may no longer take the saved one. Else the layout has a generation of its own where it
    is not the one in which processes start, so that the first plan is the order to go there.
    """
    if saved is None:
        return None
    start, shape = layouts[0], msgspec.structs.replace(saved.layout, generation=0)
    if shape not in layouts:
        return None
    if shape == start or saved.layout.generation:
        return saved
    return msgspec.structs.replace(saved, layout=msgspec.structs.replace(shape, generation=1))
