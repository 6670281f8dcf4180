"""`EnginePlanner`: plans of a run that an engine trains.

The strategies are Evenload's own, under what the engine can run: whole documents, nothing shared among replicas, one
layout, all activations stored. Its `auto` is not the strategy of that name, which searches for Evenload's runtime: it
lets every strategy that the engine can run plan the step, `balanced` also with more micro-batches than it would take,
and keeps the fastest by the engine's own price.

Memory is not among the limits: what an engine holds depends on its settings (sharding, checkpointing of activations),
which nobody tells here, and all activations are stored, none in host memory. `max_pack_tokens` bounds what a
micro-batch holds.
"""

import copy
import math
from collections.abc import Hashable

import msgspec

from evenload.cost.coefficients import CostCoefficients
from evenload.engines.price import EnginePrice, engine_price
from evenload.engines.profile import EngineProfile
from evenload.engines.projection import StepShape
from evenload.engines.refusals import BEST, require_auto, require_strategy, runnable
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.plan.planner import AskedStep, Proposal, StepPlanner
from evenload.plan.problem.options import CHOOSE, PlanOptions
from evenload.plan.strategies.balanced import BALANCED
from evenload.plan.strategies.registry import strategy_named
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

ENGINES_AUTO = "every global batch by the strategy that is fastest by this engine's price, of those that it can run"
"""Description of `auto` under an engine; that of Evenload's own runtime searches for something else."""
MORE_MICRO_BATCHES = (1.25, 1.5, 2, 3)
"""Times the micro-batches of a rank that `balanced` takes; what `auto` tries beside them."""


class EnginePlanner(StepPlanner):
    """Plans steps that an engine trains.

    Args:
        profile: of the engine.
        model, coefficients, layout, options: as `StepPlanner`.
        shape: what the run fixes of micro-batches; None = nothing.

    Raises:
        ConfigError: the engine does not have the layout. Whether it shares this model's heads (`require_heads`) is
            asked by who knows that it is this model.
    """

    def __init__(
        self,
        profile: EngineProfile,
        model: ModelSpec,
        coefficients: CostCoefficients,
        layout: ParallelLayout,
        options: PlanOptions | None = None,
        shape: StepShape | None = None,
    ) -> None:
        require_strategy(profile, BEST, options or PlanOptions(), layout)
        super().__init__(
            model, coefficients, layout, None, options_under(profile, options or PlanOptions()), host="unlimited"
        )
        self.profile, self.shape = profile, shape
        self.schedule = CHOOSE if options is None else options.schedule
        self._made: dict[Hashable, Proposal] | None = None

    def remembering(self) -> "EnginePlanner":
        """The same, which plans nothing twice and holds all that it has planned: for evaluations of some steps, where
        `auto` asks for the plans of strategies that have rows of their own. Copies of it remember together."""
        other = copy.copy(self)
        other._made = {}
        return other

    def price(self, proposal: Proposal, shape: StepShape | None = None) -> EnginePrice:
        """What the plan takes on the engine; `shape` instead of the planner's own, where given."""
        return engine_price(proposal.plan, self.profile, self.costs, shape or self.shape, self.schedule)

    def _propose(self, asked: AskedStep) -> Proposal:
        """As `StepPlanner.propose`; the plan's own prediction stays that of Evenload's runtime.

        Raises:
            ConfigError: also for a strategy that the engine cannot run.
        """
        require_strategy(self.profile, asked.strategy, self.options, self.layout)
        if asked.strategy == BEST:
            require_auto(self.profile, self.options)
            return self._fastest(asked)
        return self._proposed(self, asked)

    def _proposed(self, planner: StepPlanner, asked: AskedStep) -> Proposal:
        """By `planner`, this one or one of other options; as it was made before, where it was."""

        def make() -> Proposal:
            return StepPlanner._propose(planner, asked)

        if self._made is None:
            return make()
        # A strategy that puts nothing off asks neither what waits nor what comes, so whoever asks gets the same.
        delays = strategy_named(asked.strategy).delays(planner.options)
        of_state = (asked.state, asked.is_last) if delays else asked.state is None
        key = planner.options.micro_batches, asked.strategy, asked.step, asked.documents, asked.left_out, of_state
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _fastest(self, asked: AskedStep) -> Proposal:
        """The fastest by the engine's price, the first of equals; nothing is put off to later steps."""
        found: list[tuple[float, Proposal]] = []
        failed: list[ConfigError | DataError | InfeasiblePlanError] = []
        count = 0

        def try_one(planner: StepPlanner, name: str) -> Proposal | None:
            try:
                proposal = self._proposed(planner, asked._replace(strategy=name, is_last=True))
                found.append((self.price(proposal).step_time_s, proposal))
            except (ConfigError, DataError, InfeasiblePlanError) as error:
                failed.append(error)  # of one strategy: no limit where it needs one, too many micro-batches, no room
                return None
            return proposal

        for name in runnable(self.profile, self.options, self.layout)[0]:
            proposal = try_one(self, name)
            if name == BALANCED.name and proposal is not None:
                count = max(len(packs.forward) for packs in proposal.plan.pack_plans)
        for planner in self._with_more_micro_batches(count, len(asked.documents)):
            try_one(planner, BALANCED.name)
        if not found:
            raise failed[0]
        return min(found, key=lambda one: one[0])[1]

    def _with_more_micro_batches(self, count: int, num_documents: int) -> list[StepPlanner]:
        """Planners with fixed numbers of micro-batches above one; none where the user fixed it, documents lack, or one
        number holds for all steps, which a single step cannot choose."""
        if self.options.micro_batches is not None or not count or self.profile.is_constant_in(self.layout):
            return []
        counts = {math.ceil(factor * count) for factor in MORE_MICRO_BATCHES}
        options = [
            msgspec.structs.replace(self.options, micro_batches=more)
            for more in sorted(counts - {count})
            if more * self.layout.dp <= num_documents
        ]
        return [
            StepPlanner(self.costs.model, self.costs.coefficients, self.layout, None, own, host=self.host)
            for own in options
        ]


def options_under(profile: EngineProfile, options: PlanOptions) -> PlanOptions:
    """The options with what the engine decides: no sharing among replicas, everything stored, its own order, and where
    one context group shares everything, every document in equal chunks."""
    changes: dict[str, object] = {"dp_merge": False, "policy": "replay", "schedule": CHOOSE}
    if profile.context_parallel != "none":
        changes["cp_sharding"] = "per_document"
    return msgspec.structs.replace(options, **changes)
