"""`FlexPlanner`: FlexPipe as a planner: a layout and a plan for every step of a run (§5).

    lengths of the coming batch ─► HBSA ─► a few mappings ─► planned and simulated ─┐
                                   current layout ─► planned and simulated ─────────┴─► FMOP ─► StepPlan, next state

The search estimates, simulation decides: time and memory of the conditions are those of complete plans, so nothing is
emitted that its own prediction calls impossible. The seconds of a switch are part of the step that follows it. A layout
of another generation in the next StepPlan is the order to switch.

Live execution is not part of this version: `evenload train` refuses `flexpipe`. Price: HBSA (milliseconds) and a plan
of the current layout and of `finalists` others per known step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import REPLAY
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.switch import ReceiveSeconds, switch_seconds
from evenload.plan.packing.pack_counts import pack_counts
from evenload.plan.planner import Proposal, StepPlanner
from evenload.plan.reconfiguration.fmop import Decision, FlexOptions, FlexState, Outlook, decide, state_after
from evenload.plan.reconfiguration.hbsa import MappingSearch, search_mappings
from evenload.plan.reconfiguration.mapping_cost import BatchCosts, Mapping, MappingCosts
from evenload.plan.search.policy_order import policies_in_order
from evenload.plan.strategies.flexpipe import FLEXPIPE
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.plan import LeftOut, seal

CoefficientsOf = Callable[[ParallelLayout], CostCoefficients]
ESTIMATE_TOLERANCE = 0.1
"""Of a device's memory: mappings whose estimate is beyond it by less may fit when simulated."""


@dataclass(frozen=True, eq=False)
class FlexProposal:
    """A step's plan and how its layout was decided.

    Args:
        state: for the next step.
        search: of the coming batch.
    """

    proposal: Proposal
    state: FlexState
    decision: Decision
    search: MappingSearch


class FlexPlanner:
    """Plans steps of one run whose layout may change between them.

    Args:
        planner: in the layout in which the run starts; its devices, cp and tp stay.
        coefficients_of: costs of a layout, for example `analytic_coefficients`.
    """

    def __init__(
        self, planner: StepPlanner, coefficients_of: CoefficientsOf, options: FlexOptions | None = None
    ) -> None:
        self.options = options or FlexOptions()
        self.start = planner
        self._model = planner.costs.model
        self._coefficients_of = coefficients_of
        self._planners = {planner.layout: planner}
        self._coefficients: dict[int, CostCoefficients] = {}

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
    ) -> FlexProposal:
        """Decide on a layout for a step and plan it; beyond memory where no layout holds the batch.

        Args:
            documents: of the step, in arrival order.
            state: what the step before handed out; None = the run starts.
            coming: documents of the steps that follow, as far as known; `known_steps - 1` of them count.

        Raises:
            ConfigError: links that a switch needs are not known.
            DataError: as `StepPlanner.propose`.
        """
        state = state or self.initial_state()
        known = [documents, *coming[: self.options.known_steps - 1]]
        found = [self.search(np.array([d.num_tokens for d in batch], np.int64), state.layout) for batch in known]
        keep = self._outcome(state.layout, step, known, left_out)
        others: list[_Outcome] = []
        for layout in self._worth_planning(found, state.layout):
            other = self._outcome(layout, step, known, left_out)
            moving_s = switch_seconds(self._model, self._links(layout.pp), state.layout, layout)
            others.append(replace(other, switch_s=self.options.overhead_s + moving_s))
            if sum(bool(one.holds) for one in others) == self.options.finalists:
                break
        best = min(others, key=lambda one: one.order(keep), default=None)
        steps = len(known) if best is None else best.compared_steps(keep)
        keep_s = sum(keep.step_s[:steps])
        fits_as_it_is = bool(keep.holds) and not self._saves_memory(keep.proposal)
        outlook = Outlook(
            keep_s=keep_s if fits_as_it_is else math.inf,
            save_s=keep_s if keep.holds else math.inf,
            new_s=sum(best.step_s[:steps]) if best and best.holds else math.inf,
            switch_s=best.switch_s if best else 0.0,
        )
        decision = decide(outlook, state, self.options)
        if decision.action == "switch" and best is not None and best.holds:
            after = state_after(decision, step, state, best.proposal.plan.layout)
            return FlexProposal(_with_switch(best.proposal, best.switch_s), after, decision, found[0])
        proposal = keep.proposal if keep.holds else self._beyond_memory([keep, *others])
        return FlexProposal(proposal, state_after(decision, step, state, None), decision, found[0])

    def search(self, num_tokens: NDArray[np.int64], current: ParallelLayout) -> MappingSearch:
        """HBSA for one batch; `current` is the layout to switch from."""
        if not len(num_tokens):
            return MappingSearch((), 0)
        start = self.start
        can_offload = start.costs.coefficients.host_link is not None
        policies = policies_in_order(num_tokens, start.options.policy, can_offload=can_offload)
        batches = [cache(partial(self.batch_costs, num_tokens, policy)) for policy in policies]
        return search_mappings(
            self._model.num_layers,
            start.layout.dp * start.layout.pp,
            len(policies),
            lambda depth, policy: self.prices(batches[policy](), depth),
            lambda depth: self.receive_seconds(depth, current),
            switch_weight=1.0 / self.options.known_steps,
            least_depth_only=self.options.least_depth_only,
        )

    def batch_costs(self, num_tokens: NDArray[np.int64], policy: NDArray[np.int8] | None = None) -> BatchCosts:
        """A batch under one policy, as HBSA prices it."""
        layout = self.start.layout
        return BatchCosts(self._model, self.start.costs.coefficients, num_tokens, policy, cp=layout.cp, tp=layout.tp)

    def prices(self, batch: BatchCosts, depth: int) -> list[MappingCosts]:
        """Of mappings of one depth over all devices, one for every number of micro-batches that HBSA tries."""
        start, options = self.start.layout, self.start.options
        dp = start.dp * start.pp // depth
        counts = pack_counts(-(-batch.whole_tokens // dp), depth, options.candidates, options.max_pack_tokens)
        most = -(-batch.num_documents // dp)
        return [
            MappingCosts(
                self._model,
                self._links(depth),
                batch,
                depth=depth,
                dp=dp,
                micro_batches=count,
                cap_bytes=self.start.memory_cap_bytes,
                cp=start.cp,
                tp=start.tp,
            )
            for count in sorted({min(count, most) for count in counts})
        ]

    def receive_seconds(self, depth: int, current: ParallelLayout) -> ReceiveSeconds:
        """What devices receive in a switch to that depth."""
        return ReceiveSeconds(self._model, self._links(depth), current, self._even_layout(depth))

    def _worth_planning(self, found: Sequence[MappingSearch], current: ParallelLayout) -> list[ParallelLayout]:
        """Layouts in the order in which they promise most: the best of every known batch, then the second, …; all that
        may fit, or else the closest few."""
        cap = self.start.memory_cap_bytes
        ordered = []
        for rank in range(max(len(search.mappings) for search in found)):
            ordered += [search.mappings[rank] for search in found if rank < len(search.mappings)]
        near = [one for one in ordered if cap is None or one.excess_bytes <= ESTIMATE_TOLERANCE * cap]
        layouts = [self._layout(one, current.generation + 1) for one in near or ordered[: self.options.finalists]]
        return [
            layout
            for layout in dict.fromkeys(layouts)
            if (layout.dp, layout.stage_layers) != (current.dp, current.stage_layers)
        ]

    def _outcome(
        self,
        layout: ParallelLayout,
        step: int,
        known: Sequence[tuple[Document, ...]],
        left_out: tuple[LeftOut, ...],
    ) -> "_Outcome":
        planner = self._planner_of(layout)
        proposals = [
            planner.propose(step + ahead, batch, FLEXPIPE.name, () if ahead else left_out)
            for ahead, batch in enumerate(known)
        ]
        plan = seal(msgspec.structs.replace(proposals[0].plan, layout=layout))
        return _Outcome(
            proposal=replace(proposals[0], plan=plan),
            step_s=tuple(one.plan.predicted.step_time_s for one in proposals),
            holds=next((ahead for ahead, one in enumerate(proposals) if not one.feasible), len(proposals)),
        )

    def _saves_memory(self, proposal: Proposal) -> bool:
        """Some document is not replayed because the layout does not hold the batch otherwise."""
        if self.start.options.policy != "choose":
            return False
        policies = (choice.candidate.policy for choice in proposal.choices)
        return any(policy is not None and bool((policy != REPLAY).any()) for policy in policies)

    def _planner_of(self, layout: ParallelLayout) -> StepPlanner:
        key = msgspec.structs.replace(layout, generation=0)
        if key not in self._planners:
            self._planners[key] = StepPlanner(
                self._model,
                self._links(layout.pp),
                key,
                self.start.memory_cap_bytes,
                self.start.options,
                self.start.host,
            )
        return self._planners[key]

    def _layout(self, mapping: Mapping, generation: int) -> ParallelLayout:
        even = self._even_layout(mapping.depth)
        return msgspec.structs.replace(even, stage_layers=tuple(pairwise(mapping.edges)), generation=generation)

    def _even_layout(self, depth: int) -> ParallelLayout:
        start = self.start.layout
        dp = start.dp * start.pp // depth
        return even_layout(self._model.num_layers, dp=dp, pp=depth, cp=start.cp, tp=start.tp)

    def _links(self, depth: int) -> CostCoefficients:
        if depth not in self._coefficients:
            self._coefficients[depth] = self._coefficients_of(self._even_layout(depth))
        return self._coefficients[depth]

    def _beyond_memory(self, outcomes: Sequence["_Outcome"]) -> Proposal:
        """The closest of plans that all exceed memory, with a reason that says so."""
        closest = min(outcomes, key=lambda one: one.excess_bytes).proposal
        layout = closest.plan.layout
        depths = sorted({one.proposal.plan.layout.pp for one in outcomes})
        return replace(
            closest,
            why=f"no layout of {self.start.layout.world_size} devices holds the batch (pp {depths[0]} to {depths[-1]} "
            f"tried); the closest, {layout.describe()}: {closest.why}",
        )


@dataclass(frozen=True, eq=False)
class _Outcome:
    """One layout over the known steps.

    Args:
        proposal: of the coming step.
        step_s: of every known step.
        holds: known steps that fit, up to the first that does not.
    """

    proposal: Proposal
    step_s: tuple[float, ...]
    holds: int
    switch_s: float = 0.0

    @property
    def excess_bytes(self) -> int:
        return max(choice.candidate.excess_bytes for choice in self.proposal.choices)

    def compared_steps(self, keep: "_Outcome") -> int:
        """Steps over which it stands against the current layout: those that both hold."""
        return min(self.holds, keep.holds) if keep.holds else self.holds

    def order(self, keep: "_Outcome") -> tuple[int, int, float]:
        """The coming step must fit; what gains most over the current layout, or where that cannot run, what holds the
        most steps and is fastest over them."""
        steps = self.compared_steps(keep)
        seconds = sum(self.step_s[:steps]) + self.switch_s
        if keep.holds:
            return self.excess_bytes, 0, seconds - sum(keep.step_s[:steps])
        return self.excess_bytes, -steps, seconds


def _with_switch(proposal: Proposal, switch_s: float) -> Proposal:
    """The same plan, its step time with the switch before it."""
    predicted = proposal.plan.predicted
    step_s = predicted.step_time_s + switch_s
    plan = msgspec.structs.replace(proposal.plan, predicted=msgspec.structs.replace(predicted, step_time_s=step_s))
    busy_share = (1.0 - proposal.bubble_fraction) * predicted.step_time_s / step_s
    return replace(proposal, plan=seal(plan), bubble_fraction=1.0 - busy_share, switch_s=switch_s)
