"""Choose a layout and plan for every step of a run: `FlexPlanner` (FlexPipe §5).

    lengths of the known steps ─► candidates ─► a few layouts ─► planned and simulated ─┐
    measured steps and switches ────────────────────────────────────────────────────────┼─► FMOP ─► StepPlan, next state
                               current layout ─► planned and simulated ─────────────────┘

The search only estimates; decisions are taken on complete plans, made inside a layout by any strategy. A layout of
another generation in the next StepPlan is the order to switch, whose seconds are part of that step. Plans of steps
known ahead are kept, so a step costs a plan of the current layout and of `finalists` others, and HBSA (milliseconds).

FMOP (§5; Alg. 1 lines 28-37) decides to keep the layout, save memory in it, or switch:

    A   the current layout holds the coming batch                 T(current) is infinite where it does not
    B   switching does not pay: T(new) + T(switch) >= T(current)
    C   it holds the batch when documents are recomputed or offloaded
    D   switching does not beat that: T(new) + T(switch) >= T(current) + T_rc + T_swap

    A and B             stay
    not A and C and D   stay, with the memory plan
    otherwise           switch (the printed condition E leaves out "not A, not C, D")

Ours on top is hysteresis: a switch that nothing forces must gain `margin` of the time without it, and, but for the
first one, have paid at `patience_steps` steps in a row. With margin 0 and patience 1 the decision is the published one.
T of all conditions runs over the steps whose lengths are known. Where a switch gains more some of these steps later, it
is made then; the steps it waits count for patience.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np

from evenload.errors import InfeasiblePlanError
from evenload.planning.deferral import DelayState
from evenload.planning.layouts.layout_candidates import CoefficientsOf, LayoutCandidates
from evenload.planning.layouts.layout_plans import LayoutOutcome, LayoutPlans, MemoryPlans, OptionsOf
from evenload.planning.layouts.mapping_search import MappingSearch
from evenload.planning.layouts.measured_layouts import MeasuredLayouts
from evenload.planning.layouts.moves import SwitchPieces, SwitchPrices
from evenload.planning.planner import Proposal, RunPlanner, StepPlanner, StepRequest
from evenload.planning.strategies.flexpipe import FLEXPIPE, FlexOptions
from evenload.planning.strategies.registry import strategy_named
from evenload.types.base import Frozen
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout
from evenload.types.plan import LeftOut, StepPlan, seal
from evenload.types.run import LayoutAction, LayoutDecision, switch_kind
from evenload.types.text import format_bytes

Action = Literal["stay", "save memory", "switch"]
_PREDICTED = "{} holds the batch as predicted; by measured memory no layout does"


class FlexState(Frozen):
    """Hold between two steps the layout, the step before which it last changed (None = never), and how many latest
    steps in a row a switch would have paid at, then or later, without one."""

    layout: ParallelLayout
    switched_at: int | None = None
    paying_steps: int = 0


@dataclass(frozen=True)
class Outlook:
    """Hold the seconds of the known steps, infinite where the coming batch does not fit: T(current) without and with a
    memory plan for the coming step, T(new) of the best other mapping, and T(switch), which gains most after
    `later_steps` of them."""

    keep_s: float
    save_s: float
    new_s: float
    switch_s: float
    later_steps: int = 0
    known_steps: int = 1


@dataclass(frozen=True)
class Decision:
    """Hold what to do before a step, and the conditions it follows from."""

    action: Action
    fits: bool
    switching_is_slower: bool
    fits_saving: bool
    switching_is_slower_than_saving: bool
    is_patient: bool = False
    later_steps: int = 0


def decide(outlook: Outlook, state: FlexState, options: FlexOptions) -> Decision:
    switched_s = outlook.new_s + outlook.switch_s
    fits, fits_saving = math.isfinite(outlook.keep_s), math.isfinite(outlook.save_s)
    slower = switched_s >= outlook.keep_s * (1 - options.margin)
    slower_than_saving = switched_s >= outlook.save_s * (1 - options.margin)
    action: Action = "switch"
    if fits and slower:
        action = "stay"
    elif not fits and fits_saving and slower_than_saving:
        action = "save memory"
    later_steps, patient = 0, False
    if action == "switch" and (fits or fits_saving):
        later_steps = outlook.later_steps
        patient = state.switched_at is not None and state.paying_steps + 1 < options.patience_steps
    if later_steps or patient:
        action = "stay" if fits else "save memory"
    return Decision(action, fits, slower, fits_saving, slower_than_saving, patient and not later_steps, later_steps)


def state_after(decision: Decision, step: int, state: FlexState, switched_to: ParallelLayout | None) -> FlexState:
    if switched_to is not None:
        return FlexState(layout=switched_to, switched_at=step)
    would_pay = decision.is_patient or decision.later_steps > 0
    paying_steps = state.paying_steps + 1 if would_pay else 0
    return FlexState(layout=state.layout, switched_at=state.switched_at, paying_steps=paying_steps)


def layout_decision(
    step: int,
    decision: Decision,
    outlook: Outlook,
    keep: LayoutOutcome,
    target: LayoutOutcome | None,
    *,
    patience: tuple[int, int],
    fits_by_prediction: bool,
) -> LayoutDecision:
    """Record what was decided before a step about `keep`, the current layout, and `target`, the best other one that
    holds the coming batch. `patience`: steps in a row at which a switch has paid, with this one, and how many it takes;
    `fits_by_prediction`: the plan of the step fits, whatever measured steps say of memory."""
    before = after = keep.layout
    saves = decision.action == "save memory"
    action: LayoutAction = "save memory" if saves else "stay"
    case = 2 if saves else 1
    if decision.action == "switch" and target is not None:
        after, case = target.layout, 4 if decision.fits else 3
        action = switch_kind(before, after)
    conditions: dict[str, Any] = asdict(decision) | {"action": action}
    unknown = _PREDICTED.format(after.describe()) if fits_by_prediction else "no layout holds the batch"
    return LayoutDecision(
        step=step,
        layout=after.describe(),
        before=before.describe(),
        case=case,
        **conditions,
        other="" if target is None else target.layout.describe(),
        known_steps=outlook.known_steps,
        keep_s=_known(outlook.keep_s),
        save_s=_known(outlook.save_s),
        save_documents_s=keep.plans.documents_s,
        save_layers_s=keep.plans.layers_s,
        memory_plan=_memory_plan(keep.plans),
        new_s=_known(outlook.new_s),
        switch_s=outlook.switch_s,
        why=_why(step, decision, outlook, keep, target, patience=patience, has_switched=case > 2) or unknown,
    )


def _memory_plan(plans: MemoryPlans) -> str:
    """Name how the current layout holds a batch that it cannot store; "" where it can, or nothing helps."""
    if plans.is_stored or not plans.chosen.feasible:
        return ""
    again = plans.chosen.plan.layout.recomputed_counts
    if any(again):
        return f"recomputing {'+'.join(map(str, again))} layers of its stages"
    names = sorted({policy for packs in plans.chosen.plan.pack_plans for policy in packs.policies.values()})
    verbs = {"recompute": "recomputing", "offload": "offloading"}
    return f"{' and '.join(verbs[name] for name in names)} documents"


def _known(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _why(
    step: int,
    decision: Decision,
    outlook: Outlook,
    keep: LayoutOutcome,
    target: LayoutOutcome | None,
    *,
    patience: tuple[int, int],
    has_switched: bool,
) -> str:
    """Explain the decision in one sentence; "" where no layout is known to hold the batch."""
    here = keep.layout.describe()
    staying = f"{here} holds the batch"
    if not decision.fits:
        saved_by = _memory_plan(keep.plans) or "recomputing or offloading"
        staying = f"{here} holds the batch by {saved_by}" if decision.fits_saving else ""
    if target is None:
        return f"{staying}; no other layout does" if staying else ""
    if not staying:
        return f"{here} does not hold the batch, not even by recomputing or offloading"
    staying_s = outlook.keep_s if decision.fits else outlook.save_s
    share = (outlook.new_s + outlook.switch_s) / staying_s - 1
    less = "less" if share < 0 else "more"
    faster = f"{target.layout.describe()} with the switch takes {100 * abs(share):.1f} % {less} time"
    if has_switched:
        return f"{faster} than {here}{'' if decision.fits else ' with a memory plan'}"
    if decision.later_steps:
        return f"{staying}; {faster}, gaining most from step {step + decision.later_steps} on"
    if decision.is_patient:
        return f"{staying}; {faster}, for {patience[0]} of {patience[1]} steps in a row now"
    return f"{staying}; {faster}{', within the margin' if share < 0 else ''}"


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
        layers_move: it may take those with any layers in their stages.
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
        layers_move: bool = False,
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
            layers_move=layers_move,
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
        kept: dict[str, Any] = {"layouts": self.candidates.given, "layers_move": self.candidates.layers_move}
        kept |= {"moved": self._switches.given}
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
                self._found[key] = before.get(key) or self.candidates.search(num_tokens, current)
        return [self._found[batch, current] for batch in known]

    def switch_seconds(self, old: ParallelLayout, plan: StepPlan) -> float:
        """Predict the seconds of a switch from a layout to that of a step, which hides what it can, uncorrected."""
        new, hidden_s = plan.layout, max(plan.predicted.per_replica_s, default=0.0)
        return self.options.overhead_s + self._switches.seconds(
            self.candidates.coefficients(new), old, new, hidden_s, plan.first_forward_s
        )

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

    def cuts(self, documents: Sequence[Document]) -> dict[int, list[int]]:
        """Return where trees are cut; nowhere while the layout may change, which the cuts depend on."""
        return self.planner.cuts(documents) if isinstance(self.planner, RunPlanner) else {}

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


def resumed_flex(
    saved: FlexState | None, layouts: Sequence[ParallelLayout], *, layers_move: bool = False
) -> FlexState | None:
    """Return a checkpoint's state for a run that starts in the first of these layouts and may take the others
    (`layers_move`: with any layers in their stages); None, a fresh start, where it may no longer take the saved one.
    The layout gets a generation of its own where processes start in another, so that the first plan is the order to go
    there."""
    if saved is None:
        return None
    start, there = layouts[0], msgspec.structs.replace(saved.layout, generation=0)
    if there not in layouts and not (layers_move and there.shape in [layout.shape for layout in layouts]):
        return None
    if there == start or saved.layout.generation:
        return saved
    return msgspec.structs.replace(saved, layout=msgspec.structs.replace(there, generation=1))
