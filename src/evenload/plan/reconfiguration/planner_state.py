"""`FlexRunPlanner`: plans of a run whose layout may change; `PlannerState`: what it carries from step to step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from evenload.plan.deferral.delay import DelayState
from evenload.plan.feedback.measured_layouts import MeasuredLayouts
from evenload.plan.planner import RunPlanner, StepPlanner
from evenload.plan.reconfiguration.flex_planner import FlexPlanner
from evenload.plan.reconfiguration.fmop import FlexState
from evenload.types.base import Frozen
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout
from evenload.types.layout_decision import LayoutDecision
from evenload.types.plan import StepPlan


class PlannerState(Frozen):
    """Between two steps; small and serialisable.

    Args:
        delay: what a strategy that moves documents between steps remembers.
        flex: what a planner that changes the layout remembers; None = the run starts, or keeps its layout.
    """

    delay: DelayState = DelayState()
    flex: FlexState | None = None


@dataclass(frozen=True, eq=False)
class FlexRunPlanner:
    """Plans the steps of a run (`feed.step_maker.Planner`) whose layout may change, or stays.

    Args:
        strategy: of a planner that keeps its layout; one that changes it brings its own.
        measured_of: what trained steps say of layouts when a step is planned; called once a step.
    """

    planner: StepPlanner | FlexPlanner
    strategy: str
    measured_of: Callable[[int], MeasuredLayouts] = lambda step: MeasuredLayouts()

    @property
    def state_type(self) -> type[PlannerState]:
        """What it carries from step to step."""
        return PlannerState

    @property
    def known_steps(self) -> int:
        """Steps whose lengths it wants to know, the coming one included."""
        return self.planner.known_steps if isinstance(self.planner, FlexPlanner) else 1

    def plan_step(
        self,
        step: int,
        documents: tuple[Document, ...],
        state: PlannerState,
        *,
        coming: Sequence[tuple[Document, ...]],
        is_last: bool,
    ) -> tuple[StepPlan, PlannerState, LayoutDecision | None]:
        """Plan a step; the state after it, and the decision about its layout. Raises as `FlexPlanner.propose`."""
        if isinstance(self.planner, StepPlanner):
            plan, delay, _ = RunPlanner(self.planner, self.strategy).plan_step(
                step, documents, state.delay, is_last=is_last
            )
            return plan, PlannerState(delay=delay, flex=state.flex), None
        found = self.planner.propose(
            step,
            documents,
            state=state.flex,
            coming=tuple(coming),
            delay=state.delay,
            is_last=is_last,
            measured=self.measured_of(step),
        )
        after = PlannerState(delay=found.proposal.state or DelayState(), flex=found.state)
        return found.proposal.require_feasible(), after, found.told


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
