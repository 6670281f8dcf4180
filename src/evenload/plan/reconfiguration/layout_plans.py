"""`LayoutPlans`: steps planned in any layout of a run, and kept until they come.

Where a layout does not hold a step as it is, two memory plans stand against each other: documents that recompute or
offload in all stages, which every `StepPlanner` chooses by itself, and layers that recompute for all documents
(`layer_plan`, FlexPipe's O_plan). The faster one that fits is the layout's plan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.layer_counts import REPLAY
from evenload.plan.deferral.delay import DelayState
from evenload.plan.planner import Proposal, StepPlanner
from evenload.plan.problem.options import PlanOptions, PolicyOption
from evenload.plan.reconfiguration.layer_plan import plan_recomputing_layers
from evenload.plan.strategies.flexpipe import FlexOptions
from evenload.plan.strategies.registry import strategy_named
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout
from evenload.types.plan import LeftOut

CoefficientsOf = Callable[[ParallelLayout], CostCoefficients]
OptionsOf = Callable[[ParallelLayout, CostCoefficients], PlanOptions]
_KEPT_RECOMPUTING = 64
"""Planners of layouts with recomputed layers: steps ask for ever other numbers of these, layouts are few."""
_KEPT_LIMITS = 8
"""Other limits of memory: of the changes between two layouts that the steps at hand ask for. What one that was
forgotten had planned is planned again, alike."""
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, eq=False)
class MemoryPlans:
    """A step in one layout.

    Args:
        chosen: what is run in it; beyond memory where nothing fits.
        is_stored: it keeps all activations: no memory plan is needed.
        documents_s, layers_s: predicted seconds with documents, and with layers that save memory; None = it does not
            fit, is not among `FlexOptions.memory_plans`, or is not needed.
    """

    chosen: Proposal
    is_stored: bool
    documents_s: float | None = None
    layers_s: float | None = None


class LayoutPlans:
    """Of one run.

    Args:
        start: planner of the layout in which the run starts.
        coefficients_of: costs of a layout, kept by the caller.
        options_of: options of planning in a layout; None = those of `start` in all of them.
    """

    def __init__(
        self,
        start: StepPlanner,
        strategy: str,
        options: FlexOptions,
        coefficients_of: CoefficientsOf,
        options_of: OptionsOf | None,
    ) -> None:
        self._start, self._strategy, self._options = start, strategy, options
        self._coefficients_of = coefficients_of
        self.options_of = options_of or (lambda layout, coefficients: start.options)
        self._planners = {(start.layout.arrangement, start.options.policy): start}
        self._recomputing: dict[tuple[ParallelLayout, PolicyOption], StepPlanner] = {}
        self._ahead: dict[tuple[int, ParallelLayout, tuple[Document, ...]], MemoryPlans] = {}
        # For changes between two layouts whose first step has less room.
        self._within: dict[int | None, LayoutPlans] = {}

    def forget_before(self, step: int) -> None:
        """Steps before this one have come."""
        self._ahead = {key: plans for key, plans in self._ahead.items() if key[0] >= step}
        for tighter in self._within.values():
            tighter.forget_before(step)

    def within(self, cap_bytes: int | None) -> "LayoutPlans":
        """The same with another limit of a device's memory."""

        def made() -> LayoutPlans:
            start = self._start
            planner = StepPlanner(
                start.costs.model, start.costs.coefficients, start.layout, cap_bytes, start.options, host=start.host
            )
            return LayoutPlans(planner, self._strategy, self._options, self._coefficients_of, self.options_of)

        return _kept(self._within, cap_bytes, made, _KEPT_LIMITS)

    def planner_of(self, layout: ParallelLayout) -> StepPlanner:
        """That plans inside one layout, whatever its generation, with the run's policy of activations."""
        return self._planner(layout, self._start.options.policy)

    def ahead(self, layout: ParallelLayout, step: int, documents: tuple[Document, ...]) -> MemoryPlans:
        """A step by itself, kept until it has come."""
        key = step, layout.arrangement, documents
        if key not in self._ahead:
            self._ahead[key] = self._planned(layout, lambda planner: planner.propose(step, documents, self._strategy))
        return self._ahead[key]

    def coming(
        self,
        layout: ParallelLayout,
        step: int,
        documents: tuple[Document, ...],
        left_out: tuple[LeftOut, ...],
        delay: DelayState | None,
        *,
        is_last: bool,
    ) -> MemoryPlans:
        """The coming step, which may leave documents out; arguments as `StepPlanner.propose`."""

        def propose(planner: StepPlanner) -> Proposal:
            return planner.propose(step, documents, self._strategy, left_out, state=delay, is_last=is_last)

        return self._planned(layout, propose)

    def _planned(self, layout: ParallelLayout, propose: Callable[[StepPlanner], Proposal]) -> MemoryPlans:
        usual = propose(self.planner_of(layout))
        is_stored = not self._saves_memory(usual)
        cap_bytes = self._start.memory_cap_bytes
        if (usual.feasible and is_stored) or self._start.options.policy != "choose" or cap_bytes is None:
            return MemoryPlans(usual, is_stored)
        wanted, by_layers = self._options.memory_plans, None
        # A strategy that searches chooses policies itself, and a search for every number of layers takes too long.
        if "layers" in wanted and strategy_named(self._strategy).search is None:
            by_layers = plan_recomputing_layers(
                self._start.costs.model,
                layout.arrangement,
                cap_bytes,
                lambda one: propose(self._planner(one, "replay")),
            )
        by_documents = usual if usual.feasible and "documents" in wanted else None
        fitting = [one for one in (by_documents, by_layers) if one is not None]
        fastest = min(fitting, key=lambda one: one.plan.predicted.step_time_s, default=None)
        if fastest is None:
            # Beyond memory either way; what is told of it is how far the stored activations are.
            fastest = usual if not usual.feasible else propose(self._planner(layout, "replay"))
        return MemoryPlans(
            chosen=fastest,
            is_stored=False,
            documents_s=None if by_documents is None else by_documents.plan.predicted.step_time_s,
            layers_s=None if by_layers is None else by_layers.plan.predicted.step_time_s,
        )

    def _planner(self, layout: ParallelLayout, policy: PolicyOption) -> StepPlanner:
        key = msgspec.structs.replace(layout, generation=0), policy
        if not any(layout.recomputed_counts):
            if key not in self._planners:
                self._planners[key] = self._new_planner(*key)
            return self._planners[key]
        return _kept(self._recomputing, key, lambda: self._new_planner(*key), _KEPT_RECOMPUTING)

    def _new_planner(self, layout: ParallelLayout, policy: PolicyOption) -> StepPlanner:
        coefficients, start = self._coefficients_of(layout.arrangement), self._start
        options = msgspec.structs.replace(self.options_of(layout.arrangement, coefficients), policy=policy)
        return StepPlanner(start.costs.model, coefficients, layout, start.memory_cap_bytes, options, host=start.host)

    def _saves_memory(self, proposal: Proposal) -> bool:
        """Some document is not replayed because the layout does not hold the batch otherwise."""
        if self._start.options.policy != "choose":
            return False
        policies = (choice.candidate.policy for choice in proposal.choices)
        return any(policy is not None and bool((policy != REPLAY).any()) for policy in policies)


def _kept(found: dict[_Key, _Value], key: _Key, make: Callable[[], _Value], most: int) -> _Value:
    """What is there by this key or made now; of all, those asked for last stay."""
    value = found.pop(key) if key in found else make()
    found[key] = value  # the newest last
    if len(found) > most:
        del found[next(iter(found))]
    return value
