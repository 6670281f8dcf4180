"""Choose a layout and plan for every step of a run: `FlexPlanner` (FlexPipe §5).

    lengths of the known steps ─► candidates ─► a few layouts ─► planned and simulated ─┐
    measured steps and switches ────────────────────────────────────────────────────────┼─► FMOP ─► StepPlan, next state
                               current layout ─► planned and simulated ─────────────────┘

The search only estimates; decisions are taken on complete plans, made inside a layout by any strategy. A layout of
another generation in the next StepPlan is the order to switch, whose seconds are part of that step. Plans of steps
known ahead are kept, so a step costs a plan of the current layout and of `finalists` others, and HBSA (milliseconds).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.errors import InfeasiblePlanError
from evenload.planning.deferral import DelayState
from evenload.planning.layouts.layout_candidates import CoefficientsOf, LayoutCandidates
from evenload.planning.layouts.layout_decision import Decision, FlexState, Outlook, decide, layout_decision, state_after
from evenload.planning.layouts.layout_plans import LayoutOutcome, LayoutPlans, OptionsOf
from evenload.planning.layouts.mapping_search import MappingSearch
from evenload.planning.layouts.measured_layouts import MeasuredLayouts
from evenload.planning.layouts.moves import SwitchPieces
from evenload.planning.layouts.switch_prices import SwitchPrices
from evenload.planning.planner import Proposal, RunPlanner, StepPlanner, StepRequest
from evenload.planning.strategies.flexpipe import FLEXPIPE, FlexOptions
from evenload.planning.strategies.registry import strategy_named
from evenload.types.base import Frozen
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout
from evenload.types.plan import LeftOut, StepPlan, seal
from evenload.types.run import LayoutDecision, switch_kind
from evenload.types.text import format_bytes


@dataclass(frozen=True, eq=False)
class FlexProposal:
    """Hold a step's plan, the state for the next step, the decision, and its record."""

    proposal: Proposal
    state: FlexState
    decision: Decision
    told: LayoutDecision


class FlexPlanner:
    """Plan steps of one run whose layout may change between them.

    Args:
        planner: in the layout in which the run starts; its devices, cp and tp stay.
        coefficients_of: costs of a layout, for example `analytic_coefficients`.
        options, options_of: of decisions, and of planning in a layout; None = the planner's.
        strategy: plans every step inside its layout.
        layouts: that the run may take; None = any.
        moved: pieces that switches of a run move and share; None = the model's units, as costs say.

    Raises:
        ConfigError: a layout that the run cannot change to, or a strategy that knows no pipeline where one has one.
    """

    def __init__(
        self,
        planner: StepPlanner,
        coefficients_of: CoefficientsOf,
        options: FlexOptions | None = None,
        *,
        strategy: str = FLEXPIPE.name,
        layouts: Sequence[ParallelLayout] | None = None,
        options_of: OptionsOf | None = None,
        moved: SwitchPieces | None = None,
    ) -> None:
        self.options = options or planner.options.own(FlexOptions)
        self.start, self.strategy = planner, strategy
        self.candidates = LayoutCandidates(
            planner,
            coefficients_of,
            self.options,
            layouts,
            runs_replicated_stages=strategy_named(strategy).runs_replicated_stages,
        )
        for layout in layouts or ():
            strategy_named(strategy).require_layout(layout)
        self._switches = SwitchPrices(planner.costs.model, planner.layout, planner.costs.coefficients, moved)
        self._plans = LayoutPlans(planner, strategy, self.options, self.candidates.coefficients, options_of)
        self._delays = strategy_named(strategy).delays(planner.options)
        self._found: dict[tuple[tuple[Document, ...], ParallelLayout], MappingSearch] = {}

    @property
    def layout(self) -> ParallelLayout:
        return self.start.layout

    @property
    def known_steps(self) -> int:
        return self.options.known_steps

    def changes_layout_of(self, strategy: str) -> bool:
        chosen = strategy_named(strategy)
        return chosen.changes_layout or (chosen.follows_layouts and self.candidates.given is not None)

    def with_strategy(self, strategy: str) -> "FlexPlanner":
        if strategy == self.strategy:
            return self
        kept: dict[str, Any] = {"layouts": self.candidates.given, "moved": self._switches.given}
        kept |= {"options": self.options, "options_of": self._plans.options_of}
        return FlexPlanner(self.start, self.candidates.coefficients_of, strategy=strategy, **kept)

    def initial_state(self) -> FlexState:
        return FlexState(layout=self.start.layout)

    def propose(
        self,
        step: int,
        documents: tuple[Document, ...],
        left_out: tuple[LeftOut, ...] = (),
        *,
        state: FlexState | None = None,
        coming: Sequence[tuple[Document, ...]] = (),
        delay: DelayState | None = None,
        is_last: bool = False,
        measured: MeasuredLayouts | None = None,
    ) -> FlexProposal:
        """Decide on a layout for a step and plan it; beyond memory where no layout holds the batch.

        Args:
            state: of the step before; None = the run starts.
            coming: documents of the steps that follow, as far as known; `known_steps - 1` of them count.
            delay, is_last: as of `StepPlanner.propose`, which raises the same; measured: what trained steps say of
                layouts.
        """
        state, measured = state or self.initial_state(), measured or MeasuredLayouts()
        known = [documents, *coming[: self.options.known_steps - 1]]
        request = StepRequest(step, documents, self.strategy, left_out, delay if self._delays else None, is_last)
        ahead = [StepRequest(step + 1 + at, batch, self.strategy) for at, batch in enumerate(known[1:])]
        self._plans.forget_before(step)
        searches, keep = self._searched(known, state.layout), self._outcome(state.layout, request, ahead, measured)
        others, without_memory = self._others(searches, state.layout, request, ahead, measured)
        best = min((one for one in others if one.holds), key=lambda one: one.order(keep), default=None)
        target = best or _fitting_by_prediction(keep, others)
        outlook = _outlook(keep, best, target.switch_s if target else 0.0)
        decision = decide(outlook, state, self.options)
        switched_to = target if decision.action == "switch" else None
        if switched_to is not None:
            proposal = _with_switch(switched_to.proposal, switched_to.switch_s)
        else:
            proposal = keep.proposal if keep.proposal.feasible else self._beyond_memory([keep, *others], without_memory)
        record = layout_decision(
            step,
            decision,
            outlook,
            keep,
            target,
            patience=(state.paying_steps + 1, self.options.patience_steps),
            fits_by_prediction=proposal.feasible,
        )
        after = state_after(decision, step, state, None if switched_to is None else switched_to.layout)
        return FlexProposal(proposal, after, decision, record)

    def _outcome(
        self, layout: ParallelLayout, request: StepRequest, ahead: Sequence[StepRequest], measured: MeasuredLayouts
    ) -> LayoutOutcome:
        """Plan the known steps in a layout, with times and memory corrected by measured steps."""
        plans, cap_bytes = self._plans.of_step(layout, request), self.start.memory_cap_bytes
        proposals = [plans.chosen, *(self._plans.of_step(layout, later).chosen for later in ahead)]
        factor, memory_factor = measured.factor(layout, request.step), measured.memory_factor()
        fits = [
            one.feasible and (cap_bytes is None or memory_factor * one.plan.predicted.peak_memory_bytes <= cap_bytes)
            for one in proposals
        ]
        return LayoutOutcome(
            layout=layout,
            proposal=_in_generation(plans.chosen, layout),
            plans=plans,
            step_s=tuple(factor * one.plan.predicted.step_time_s for one in proposals),
            holds=[*fits, False].index(False),
        )

    def _others(
        self,
        searches: Sequence[MappingSearch],
        current: ParallelLayout,
        request: StepRequest,
        ahead: Sequence[StepRequest],
        measured: MeasuredLayouts,
    ) -> tuple[list[LayoutOutcome], list[str]]:
        """Plan promising layouts up to the last finalist; return those whose switch fits memory, with its seconds, and
        the names of those that hold the step, but not the switch."""
        others: list[LayoutOutcome] = []
        without_memory: list[str] = []
        for layout in self.candidates.promising_layouts(searches, current):
            planned = self._outcome(layout, request, ahead, measured)
            there: LayoutOutcome | None = planned
            if planned.proposal.feasible and not self._fits_switch(current, planned.proposal.plan):
                there = self._within_what_is_left(current, planned, request, measured)
            if there is None:
                without_memory.append(layout.describe())
                continue
            factor = measured.switch_factor(switch_kind(current, layout))
            others.append(replace(there, switch_s=factor * self.switch_seconds(current, there.proposal.plan)))
            if sum(one.is_finalist for one in others) == self.options.finalists:
                break
        return others, without_memory

    def _within_what_is_left(
        self, current: ParallelLayout, there: LayoutOutcome, request: StepRequest, measured: MeasuredLayouts
    ) -> LayoutOutcome | None:
        """Plan a layout's first step within what a switch leaves of memory; None where it does not fit."""
        takes, cap_bytes = self._switches.memory(current, there.layout), self.start.memory_cap_bytes
        if cap_bytes is None or takes.switch_bytes > cap_bytes or takes.left_bytes >= cap_bytes:
            return None
        plans = self._plans.within(cap_bytes - takes.left_bytes).of_step(there.layout, request)
        if not plans.chosen.feasible:
            return None
        first_s = measured.factor(there.layout, request.step) * plans.chosen.plan.predicted.step_time_s
        proposal = _in_generation(plans.chosen, there.layout)
        return replace(there, proposal=proposal, plans=plans, step_s=(first_s, *there.step_s[1:]))

    def _searched(self, known: Sequence[tuple[Document, ...]], current: ParallelLayout) -> list[MappingSearch]:
        """Search mappings for every known batch; results are kept to the next step while the layout stays."""
        before, self._found = self._found, {}
        for batch in known:
            key = batch, current
            if key not in self._found:
                num_tokens = np.array([document.num_tokens for document in batch], np.int64)
                self._found[key] = before[key] if key in before else self.search(num_tokens, current)
        return [self._found[batch, current] for batch in known]

    def search(self, num_tokens: NDArray[np.int64], current: ParallelLayout) -> MappingSearch:
        return self.candidates.search(num_tokens, current)

    def switch_seconds(self, old: ParallelLayout, plan: StepPlan) -> float:
        """Predict the seconds of a switch from a layout to that of a step, which hides what it can, uncorrected."""
        new, hidden_s = plan.layout, max(plan.predicted.per_replica_s, default=0.0)
        return self.options.overhead_s + self._switches.seconds(self.candidates.coefficients(new), old, new, hidden_s)

    def _fits_switch(self, old: ParallelLayout, plan: StepPlan) -> bool:
        cap_bytes = self.start.memory_cap_bytes
        return cap_bytes is None or self._switch_peak_bytes(old, plan) <= cap_bytes

    def _switch_peak_bytes(self, old: ParallelLayout, plan: StepPlan) -> int:
        takes = self._switches.memory(old, plan.layout)
        return max(takes.switch_bytes, plan.predicted.peak_memory_bytes + takes.left_bytes)

    def require_headroom(self, old: ParallelLayout, plan: StepPlan) -> None:
        """Raise `InfeasiblePlanError` where a switch does not fit memory by prediction: from the layout in which
        processes start to that of the first step of a resumed run."""
        if not self._fits_switch(old, plan):
            start, there = old.describe(), plan.layout.describe()
            raise InfeasiblePlanError(
                f"processes start in {start} and step {plan.step} is planned for {there}; the change holds up to "
                f"{format_bytes(self._switch_peak_bytes(old, plan))} of a process's memory at once by prediction, the "
                f"limit is {format_bytes(self.start.memory_cap_bytes or 0)}; start in {there} ([parallel]), without "
                f"{there} in plan.layouts, or with a larger plan.memory_bytes"
            )

    def planner_of(self, layout: ParallelLayout) -> StepPlanner:
        return self._plans.planner_of(layout)

    def _beyond_memory(self, outcomes: Sequence[LayoutOutcome], without_memory: Sequence[str]) -> Proposal:
        closest = min(outcomes, key=lambda one: one.excess_bytes).proposal
        layout = closest.plan.layout
        depths = sorted({one.layout.pp for one in outcomes})
        but = f"; {', '.join(without_memory)} would, but not what a change to it holds at once"
        return replace(
            closest,
            why=f"no layout of {self.start.layout.world_size} devices holds the batch (pp {depths[0]} to {depths[-1]} "
            f"tried); the closest, {layout.describe()}: {closest.why}{but if without_memory else ''}",
        )


def _outlook(keep: LayoutOutcome, best: LayoutOutcome | None, switch_s: float) -> Outlook:
    steps = len(keep.step_s) if best is None else best.compared_steps(keep)
    later = 0 if best is None else best.later_steps(keep)
    keep_s = sum(keep.step_s[:steps])
    return Outlook(
        keep_s=keep_s if keep.holds and keep.plans.is_stored else float("inf"),
        save_s=keep_s if keep.holds else float("inf"),
        new_s=sum((*keep.step_s[:later], *best.step_s[later:steps])) if best else float("inf"),
        switch_s=switch_s,
        later_steps=later,
        known_steps=steps,
    )


def _fitting_by_prediction(keep: LayoutOutcome, others: Sequence[LayoutOutcome]) -> LayoutOutcome | None:
    """Return, where no layout holds the coming batch as measured, the fastest that does by prediction, if any."""
    if keep.proposal.feasible:
        return None
    fitting = [one for one in others if one.proposal.feasible]
    return min(fitting, key=lambda one: one.step_s[0] + one.switch_s, default=None)


def _in_generation(proposal: Proposal, layout: ParallelLayout) -> Proposal:
    if proposal.plan.layout.generation == layout.generation:
        return proposal
    planned = msgspec.structs.replace(proposal.plan.layout, generation=layout.generation)
    return replace(proposal, plan=seal(msgspec.structs.replace(proposal.plan, layout=planned)))


def _with_switch(proposal: Proposal, switch_s: float) -> Proposal:
    predicted = proposal.plan.predicted
    step_s = predicted.step_time_s + switch_s
    plan = msgspec.structs.replace(proposal.plan, predicted=msgspec.structs.replace(predicted, step_time_s=step_s))
    busy_share = (1.0 - proposal.bubble_fraction) * predicted.step_time_s / step_s
    return replace(proposal, plan=seal(plan), bubble_fraction=1.0 - busy_share, switch_s=switch_s)


class PlannerState(Frozen):
    """Hold between two steps the state of a strategy that moves documents, and of a planner that changes the layout;
    None = the run starts, or keeps its layout."""

    delay: DelayState = DelayState()
    flex: FlexState | None = None


@dataclass(frozen=True, eq=False)
class FlexRunPlanner:
    """Plan the steps of a run (`feed.step_maker.Planner`) whose layout may change, or stays; `measured_of` gives what
    trained steps say of layouts when a step is planned, and is called once a step."""

    planner: RunPlanner | FlexPlanner
    measured_of: Callable[[int], MeasuredLayouts] = lambda step: MeasuredLayouts()
    state_type = PlannerState

    @property
    def known_steps(self) -> int:
        return self.planner.known_steps

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
        if isinstance(self.planner, RunPlanner):
            plan, delay, decision = self.planner.plan_step(step, documents, state.delay, is_last=is_last)
            return plan, PlannerState(delay=delay, flex=state.flex), decision
        result = self.planner.propose(
            step,
            documents,
            state=state.flex,
            coming=tuple(coming),
            delay=state.delay,
            is_last=is_last,
            measured=self.measured_of(step),
        )
        after = PlannerState(delay=result.proposal.state or DelayState(), flex=result.state)
        return result.proposal.require_feasible(), after, result.told


def resumed_flex(saved: FlexState | None, layouts: Sequence[ParallelLayout]) -> FlexState | None:
    """Return a checkpoint's state for a run that starts in the first of these layouts and may take the others; None, a
    fresh start, where it may no longer take the saved one. The layout gets a generation of its own where processes
    start in another, so that the first plan is the order to go there."""
    if saved is None:
        return None
    start, shape = layouts[0], msgspec.structs.replace(saved.layout, generation=0)
    if shape not in layouts:
        return None
    if shape == start or saved.layout.generation:
        return saved
    return msgspec.structs.replace(saved, layout=msgspec.structs.replace(shape, generation=1))
