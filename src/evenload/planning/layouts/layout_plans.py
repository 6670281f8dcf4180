"""Plan steps in any layout of a run, and keep plans until they come; `LayoutOutcome` is a layout over the known steps.

Where a layout does not hold a step as it is, the faster of two memory plans that fits is taken: documents that
recompute or offload in all stages, which every `StepPlanner` chooses by itself, and layers that recompute for all
documents, as few in every stage as memory asks for (FlexPipe's O_plan, §5.1; also Sun et al., AdaPipe). A stage's peak
falls nearly linearly with its recomputed layers: a first guess, then the slope that a plan shows, gives the next
number. Price: at most `MOST_PLANS` plans.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.layer_counts import (
    REPLAY,
    activation_bytes_per_token,
    kv_bytes_per_token,
    mean_of_layers,
    recomputed_width,
)
from evenload.planning.layouts.layout_candidates import CoefficientsOf
from evenload.planning.planner import Proposal, StepPlanner, StepRequest
from evenload.planning.problem import PlanOptions, PolicyOption
from evenload.planning.strategies.flexpipe import FlexOptions
from evenload.planning.strategies.registry import strategy_named
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

MOST_PLANS = 6
PlanWith = Callable[[ParallelLayout], Proposal]  # A step in a layout that recomputes some of its layers
_KEPT_PLANNERS = 64  # Of layouts whose stages have, or recompute, ever other layers


def plan_recomputing_layers(
    model: ModelSpec, layout: ParallelLayout, cap_bytes: int, plan_with: PlanWith
) -> Proposal | None:
    """Return the fastest plan that fits among those with few recomputed layers; None where not even all layers of the
    stages that lack memory do, and of layouts with several stages a rank or ranks a stage."""
    most = np.array(layout.stage_counts, np.int64)
    stored_bytes = _peak_bytes(plan_with(layout))
    if len(stored_bytes) != len(most):
        return None
    lacking = np.maximum(0, stored_bytes - cap_bytes)
    # What one recomputed layer saves of what packs hold on a stage. The peak holds more: a low first guess.
    of_kinds = activation_bytes_per_token(model, "replay", layout.tp) + kv_bytes_per_token(model, layout.tp)
    width, kept = (mean_of_layers(model, values) for values in (recomputed_width(model, layout.tp), of_kinds))
    share_of_layer = model.bytes_per_element * width / (kept * most)
    saved = np.maximum(1.0, share_of_layer * stored_bytes)
    counts, best, tried = _needed(lacking, saved, most), None, set[tuple[int, ...]]()
    for _ in range(MOST_PLANS - 1):
        tried.add(tuple(counts.tolist()))
        result = plan_with(layout.recomputing(counts.tolist()))
        peak_bytes = _peak_bytes(result)
        step_s = result.plan.predicted.step_time_s
        if result.feasible and (best is None or step_s < best.plan.predicted.step_time_s):
            best = result
        saved = np.where(counts > 0, np.maximum(1.0, (stored_bytes - peak_bytes) / np.maximum(counts, 1)), saved)
        still_lacking = peak_bytes > cap_bytes
        if (still_lacking & (counts == most)).any():
            break
        # More where it was too little, whatever the slope says.
        counts = np.maximum(_needed(lacking, saved, most), np.where(still_lacking, counts + 1, 0))
        if tuple(counts.tolist()) in tried:
            break
    return best


def _needed(lacking: NDArray[np.int64], saved: NDArray[np.float64], most: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.minimum(most, np.ceil(lacking / saved).astype(np.int64))


def _peak_bytes(proposal: Proposal) -> NDArray[np.int64]:
    return np.max([choice.candidate.simulation.peak_bytes for choice in proposal.choices], axis=0)


OptionsOf = Callable[[ParallelLayout, CostCoefficients], PlanOptions]


@dataclass(frozen=True, eq=False)
class MemoryPlans:
    """Hold a step in one layout: the proposal that is run, beyond memory where nothing fits; whether it stores all
    activations; and predicted seconds with documents, and with layers that save memory, where such a plan fits, is
    among `FlexOptions.memory_plans`, and is needed."""

    chosen: Proposal
    is_stored: bool
    documents_s: float | None = None
    layers_s: float | None = None


class LayoutPlans:
    """Plan the steps of a run that starts in the layout of `start`; `options_of` None = its options in all layouts."""

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
        self._stored, self._recomputing = (lru_cache(_KEPT_PLANNERS)(self._new_planner) for _ in range(2))
        self._kept: dict[tuple[int, ParallelLayout, tuple[Document, ...]], MemoryPlans] = {}

    def forget_before(self, step: int) -> None:
        self._kept = {key: plans for key, plans in self._kept.items() if key[0] >= step}

    def within(self, cap_bytes: int) -> "LayoutPlans":
        start = self._start
        costs, options = start.costs, start.options
        planner = StepPlanner(costs.model, costs.coefficients, start.layout, cap_bytes, options, host=start.host)
        return LayoutPlans(planner, self._strategy, self._options, self._coefficients_of, self.options_of)

    def planner_of(self, layout: ParallelLayout) -> StepPlanner:
        return self._planner(layout, self._start.options.policy)

    def of_step(self, layout: ParallelLayout, step: StepRequest) -> MemoryPlans:
        """Plan a step in a layout; where it depends on its documents alone, the plans are kept."""
        if step.state is not None or step.left_out:
            return self._planned(layout, step)
        key = step.step, layout.arrangement, step.documents
        if key not in self._kept:
            self._kept[key] = self._planned(layout, step)
        return self._kept[key]

    def _planned(self, layout: ParallelLayout, step: StepRequest) -> MemoryPlans:
        usual, cap_bytes = self.planner_of(layout).answer(step), self._start.memory_cap_bytes
        may_choose = self._start.options.policy == "choose"
        policies = [choice.candidate.packs.policy for choice in usual.choices if may_choose]
        is_stored = not any(policy is not None and (policy != REPLAY).any() for policy in policies)
        if (usual.feasible and is_stored) or not may_choose or cap_bytes is None:
            return MemoryPlans(usual, is_stored)
        wanted, by_layers = self._options.memory_plans, None
        # A strategy that searches chooses policies itself, and a search for every number of layers takes too long.
        if "layers" in wanted and strategy_named(self._strategy).search is None:
            by_layers = plan_recomputing_layers(
                self._start.costs.model,
                layout.arrangement,
                cap_bytes,
                lambda one: self._planner(one, "replay").answer(step),
            )
        by_documents = usual if usual.feasible and "documents" in wanted else None
        fitting = [one for one in (by_documents, by_layers) if one is not None]
        fastest = min(fitting, key=lambda one: one.plan.predicted.step_time_s, default=None)
        if fastest is None:
            # Beyond memory either way: by how much where activations are stored.
            fastest = usual if not usual.feasible else self._planner(layout, "replay").answer(step)
        return MemoryPlans(
            chosen=fastest,
            is_stored=False,
            documents_s=None if by_documents is None else by_documents.plan.predicted.step_time_s,
            layers_s=None if by_layers is None else by_layers.plan.predicted.step_time_s,
        )

    def _planner(self, layout: ParallelLayout, policy: PolicyOption) -> StepPlanner:
        layout = msgspec.structs.replace(layout, generation=0)
        if (layout, policy) == (self._start.layout.arrangement, self._start.options.policy):
            return self._start
        make = self._recomputing if any(layout.recomputed_counts) else self._stored
        return make(layout, policy)  # type: ignore[bad-argument-type]  # frozen structs hash

    def _new_planner(self, layout: ParallelLayout, policy: PolicyOption) -> StepPlanner:
        coefficients, start = self._coefficients_of(layout.arrangement), self._start
        options = msgspec.structs.replace(self.options_of(layout.arrangement, coefficients), policy=policy)
        return StepPlanner(start.costs.model, coefficients, layout, start.memory_cap_bytes, options, host=start.host)


@dataclass(frozen=True, eq=False)
class LayoutOutcome:
    """Hold what the known steps take in a layout, with the generation that it has or would have.

    Args:
        proposal: of the coming step, chosen from `plans`; its layout may recompute some layers.
        step_s, switch_s: predicted seconds of every known step, and of a switch to it, corrected by measured ones.
        holds: known steps that fit, up to the first that does not.
    """

    layout: ParallelLayout
    proposal: Proposal
    plans: MemoryPlans
    step_s: tuple[float, ...]
    holds: int
    switch_s: float = 0.0

    @property
    def is_finalist(self) -> bool:
        """Check whether it holds the coming step and counts among `FlexOptions.finalists`, without virtual stages."""
        return self.holds > 0 and self.layout.num_stages == self.layout.pp

    @property
    def excess_bytes(self) -> int:
        return max(choice.candidate.excess_bytes for choice in self.proposal.choices)

    def compared_steps(self, keep: "LayoutOutcome") -> int:
        return min(self.holds, keep.holds) if keep.holds else self.holds

    def later_steps(self, keep: "LayoutOutcome") -> int:
        """Return after how many of the compared steps a switch gains most; 0 where the coming step does not fit."""
        steps = self.compared_steps(keep) if keep.holds else 0
        gains_s = [0.0, *accumulate(a - b for a, b in zip(keep.step_s[:steps], self.step_s[:steps], strict=True))]
        return min(range(steps), key=gains_s.__getitem__, default=0)

    def order(self, keep: "LayoutOutcome") -> tuple[int, float]:
        """Rank layouts that hold the coming step: by the gain over the current layout, now or later, or, where that
        cannot run, by the steps that they hold and their time."""
        steps, later = self.compared_steps(keep), self.later_steps(keep)
        seconds = sum(self.step_s[later:steps]) + self.switch_s
        if keep.holds:
            return 0, seconds - sum(keep.step_s[later:steps])
        return -steps, seconds
