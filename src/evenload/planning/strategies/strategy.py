"""Describe one way to plan a step in one frozen record, `Strategy`.

`plan` maps a step under given activation policies to one choice a replica; it is called under every policy in order
until the step fits memory. `delay` does the same and may move documents to later steps. `search`, in the place of
`plan`, chooses the policies, too. The rest of the program reads the traits below, never the name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenload.cost.layer_counts import OR_NO_TREES
from evenload.errors import ConfigError
from evenload.planning.activation_policy import plan_under_policies
from evenload.planning.deferral import Arrivals, DelayedChoice
from evenload.planning.problem import CHOOSE, Planner, PlanOptions, ReplicaChoice, StepProblem, StrategyOptions
from evenload.schedule.registry import SCHEDULES
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout

Planned = tuple[StepProblem, tuple[ReplicaChoice, ...]]  # A step under the chosen policies, one choice a replica
DelayingPlanner = Callable[[StepProblem, Arrivals], DelayedChoice]


class LeftOutStrategy(Frozen):
    """Name a strategy that a comparison leaves out, and why."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Describe one way to plan a step.

    Args:
        name: `--strategy NAME`, `plan.strategy`.
        description: what it does, in one line for a log.
        plan: one step under given activation policies; None only where `search` is given.
        delay: as `plan`, and documents in none of its choices wait for a later step.
        search: the step under every activation policy that may be used, all stored first, and the other registered
            strategies, to the best plan.
        options: what it alone reads, a struct tagged with its name.
        require_options: refuses, by a `ConfigError`, options that do not go together; called before a run, too.
        moves_documents: with which options documents really wait, where there is `delay`.
        can_fit: False where it is known without planning that a problem exceeds memory: such a problem is planned only
            where no activation policy fits.
        cuts_documents: into slices, so the model has to be causal (unless `tries_others`: then it may); where
            the model mixes tokens in a way of its own, they stay whole.
        shares_documents: among replicas; reads `dp_merge`, and the options of cuts and schedules.
        assigns_ranks: decides by itself which context-parallel ranks compute a document; reads no `cp_sharding`.
        needs_one_stage: refused where the layout has a pipeline.
        solver_limit_s: what its exact solver takes for every step at most. It needs `evenload[exact]`, runs only where
            it is named, and ranks that do not talk may plan differently.
        changes_layout: between steps: `plan.layouts` plans with it; by itself it packs inside one layout.
        follows_layouts: it may change the layout between steps where a run declares layouts (`plan.layouts`).
        ignores_memory: its packs do not depend on the memory limit, or are chosen among by time: never faster with a
            limit than without.
        tries_others: plans with the other strategies, too, and is as fast as the fastest.
        plans_trees: of shared prefixes, by what their rows cost.
        runs_replicated_stages: plans layouts whose stages have different numbers of devices, round which the packs go.
    """

    name: str
    description: str
    plan: Planner | None = None
    delay: DelayingPlanner | None = None
    search: Callable[[Sequence[StepProblem], Sequence["Strategy"]], Planned] | None = None
    options: type[StrategyOptions] | None = None
    require_options: Callable[[PlanOptions], None] = lambda options: None
    moves_documents: Callable[[PlanOptions], bool] = lambda options: True
    can_fit: Callable[[StepProblem], bool] | None = None
    cuts_documents: bool = False
    shares_documents: bool = False
    assigns_ranks: bool = False
    needs_one_stage: bool = False
    solver_limit_s: Callable[[PlanOptions], float] | None = None
    changes_layout: bool = False
    follows_layouts: bool = False
    ignores_memory: bool = False
    tries_others: bool = False
    plans_trees: bool = False
    runs_replicated_stages: bool = False

    def __post_init__(self) -> None:
        if (self.plan is None) == (self.search is None):
            raise ConfigError(f"strategy {self.name}: give it one of plan and search, not both or none")
        if self.options is not None and self.options.__struct_config__.tag != self.name:
            raise ConfigError(
                f"strategy {self.name}: its options {self.options.__name__} are tagged "
                f"'{self.options.__struct_config__.tag}'; write class {self.options.__name__}(StrategyOptions, "
                f'tag="{self.name}")'
            )

    @property
    def keeps_whole(self) -> bool:
        """Check whether every document is computed in one piece by the ranks of one replica."""
        return not (self.cuts_documents or self.shares_documents or self.assigns_ranks)

    @property
    def needs_solver(self) -> bool:
        """Check whether an exact solver plans, up to a time limit."""
        return self.solver_limit_s is not None

    def delays(self, options: PlanOptions) -> bool:
        """Check whether documents may be trained in a later step than their batch's."""
        return self.delay is not None and self.moves_documents(options)

    def plan_step(
        self,
        problems: Sequence[StepProblem],
        arrivals: Arrivals | None = None,
        others: Sequence["Strategy"] = (),
        enough_s: float = 0.0,
    ) -> tuple[StepProblem, DelayedChoice]:
        """Plan the step under the activation policies that suit it best.

        Args:
            problems: the step under every activation policy that may be used, all stored first.
            arrivals: when the documents came; None = the step stands alone, and nothing waits.
            others: all registered strategies, for one that tries others.
            enough_s: of a strategy without `search`, a plan within memory that takes no longer ends the choice.

        Raises:
            ConfigError: the layout or the model does not suit the strategy.
            DataError: a document longer than `max_pack_tokens`, which the strategy does not cut.
            InfeasiblePlanError: no plan meets the token limit.
        """
        first = problems[0]
        self.require_layout(first.layout)
        self.require_schedule(first.options, first.layout)
        self.require_options(first.options)
        if first.trees.has_any:
            self.require_trees()
        if self.cuts_documents and not self.tries_others:
            first.require_causal(self.name)
        if not self.cuts_documents or (first.costs.model.mixers and not self.tries_others):
            first.require_whole_documents_fit(self.name)
        if self.search is not None:
            problem, choices = self.search(problems, [other for other in others if other is not self])
            return problem, DelayedChoice(choices)
        return plan_under_policies(problems, lambda problem: self._answer(problem, arrivals), self.can_fit, enough_s)

    def require_layout(self, layout: ParallelLayout) -> None:
        """Refuse a layout with a pipeline, also of virtual stages on one rank, where there may be none, and stages with
        different numbers of devices where packs are not dealt."""
        if self.needs_one_stage and layout.num_stages > 1:
            raise ConfigError(
                f"strategy {self.name}: layout {layout.describe()} has a pipeline and {self.name} has none; "
                "use pp=1 (with cp for long documents), or slimpack"
            )
        if layout.has_replicated_stages and not self.runs_replicated_stages:
            raise ConfigError(
                f"strategy {self.name}: the stages of layout {layout.describe()} have different numbers of devices, to "
                f"which only balanced and flexpipe deal packs; use one of these, or as many devices for every stage"
            )

    def require_trees(self) -> None:
        """Refuse trees of shared prefixes, by a `ConfigError`, where the strategy does not plan them."""
        if not self.plans_trees:
            raise ConfigError(
                f"strategy {self.name} does not plan trees of shared prefixes; use slimpack, auto or balanced, "
                f"{OR_NO_TREES}"
            )

    def require_schedule(self, options: PlanOptions, layout: ParallelLayout) -> None:
        """Refuse, by a `ConfigError`, a schedule that the strategy's packs or the layout cannot run."""
        if options.schedule == CHOOSE:
            return
        rule = SCHEDULES.named(options.schedule)
        if self.needs_one_stage:
            why = f"strategy {self.name} has no pipeline, so there is nothing to order; leave it out"
        elif rule.needs_equal_packs and self.cuts_documents:
            why = (
                f"strategy {self.name} cuts documents, so its backward packs are not its forward packs, which this "
                "schedule needs; use list, or a strategy of whole documents"
            )
        elif layout.has_replicated_stages and not rule.runs_replicated_stages:
            why = f"it is of one rank a stage, layout {layout.describe()} has several; use 1f1b"
        elif rule.one_stage_per_rank and layout.num_stages > layout.pp:
            why = f"it is of one stage a rank, layout {layout.describe()} has several; use list_split, or virtual=1"
        else:
            return
        raise ConfigError(f"plan.options.schedule is '{rule.name}': {why}")

    def _answer(self, problem: StepProblem, arrivals: Arrivals | None) -> DelayedChoice:
        if self.delay is not None and arrivals is not None:
            return self.delay(problem, arrivals)
        assert self.plan is not None, "a strategy without `search` has `plan`"
        return DelayedChoice(self.plan(problem))
