"""`PlannerState`: all that planning carries from step to step: documents that wait, and the layout that runs."""

from evenload.plan.deferral.delay import DelayState
from evenload.plan.reconfiguration.fmop import FlexState
from evenload.types.base import Frozen


class PlannerState(Frozen):
    """Between two steps; small and serialisable.

    Args:
        delay: what a strategy that moves documents between steps remembers.
        flex: what a planner that changes the layout remembers; None = the run starts, or keeps its layout.
    """

    delay: DelayState = DelayState()
    flex: FlexState | None = None
