"""All strategies by name (DESIGN §5): one visible table."""

from collections.abc import Callable, Sequence

from evenload.errors import ConfigError
from evenload.plan.auto import Rival, plan_auto
from evenload.plan.balanced import plan_balanced
from evenload.plan.best_fit import plan_best_fit
from evenload.plan.delay import Arrivals, DelayedChoice
from evenload.plan.fixed import delay_fixed_exact, delay_fixed_greedy, plan_fixed_exact, plan_fixed_greedy
from evenload.plan.flexpipe import plan_flexpipe
from evenload.plan.options import PlanOptions
from evenload.plan.padded import plan_padded
from evenload.plan.problem import Planner, ReplicaChoice, StepProblem
from evenload.plan.sequential import plan_sequential
from evenload.plan.skrull import can_fit, plan_skrull, require_flat
from evenload.plan.slimpack import plan_slimpack
from evenload.plan.wlb import delay_wlb, plan_wlb
from evenload.types.layout import ParallelLayout
from evenload.types.nearest_name import did_you_mean

STRATEGIES: dict[str, Planner] = {
    "padded": plan_padded,
    "sequential": plan_sequential,
    "best_fit": plan_best_fit,
    "fixed_greedy": plan_fixed_greedy,
    "fixed_exact": plan_fixed_exact,
    "balanced": plan_balanced,
    "wlb": plan_wlb,
    "skrull": plan_skrull,
    "slimpack": lambda problem: plan_slimpack([problem])[1],
    "flexpipe": plan_flexpipe,
    "auto": lambda problem: _plan_auto([problem])[1],
}
"""Available strategies, naive first. Each plans one global batch whole."""

STRATEGY_WORKS: dict[str, str] = {
    "padded": "pads documents to the longest of their pack: a baseline, wastes compute",
    "sequential": "cuts the stream of documents at the window: a baseline",
    "best_fit": "fills packs by tokens, whole documents: a baseline, packs of unequal work",
    "fixed_greedy": "packs of fixed length with the least attention work, greedily",
    "fixed_exact": "packs of fixed length with the least attention work, by an exact solver",
    "balanced": "whole documents, packs of equal predicted seconds",
    "wlb": "packs of equal work; puts outliers off to later steps, so the order of the data changes (ledger: deferred)",
    "skrull": "short documents whole on one rank, long ones shared by the context-parallel group",
    "slimpack": "cuts documents into slices; forward and backward packs of equal work, chosen by simulation",
    "flexpipe": "whole documents, packs of equal predicted seconds; the pipeline's depth follows the batch",
    "auto": "plans with every strategy and takes the fastest in simulation, within memory",
}
"""What each does, in words for a log."""

DELAYING_STRATEGIES: dict[str, Callable[[StepProblem, Arrivals], DelayedChoice]] = {
    "fixed_greedy": delay_fixed_greedy,
    "fixed_exact": delay_fixed_exact,
    "wlb": delay_wlb,
}
"""Those that may put documents off to later steps, where a state is carried from step to step."""

MEMORY_CHECKS: dict[str, Callable[[StepProblem], bool]] = {"skrull": can_fit}
"""Those that know at a glance that a problem cannot fit memory: it is planned only where no policy fits."""

SOLVER_STRATEGIES = ("fixed_exact",)
"""Need `evenload[exact]` and up to `solver_time_limit_s` a step, so they run only where they are named."""

WHOLE_STRATEGIES = ("padded", "best_fit", "fixed_greedy", "fixed_exact", "balanced", "wlb")
"""Never cut a document, nor share one among replicas."""

BOUNDED_STRATEGIES = ("padded", "sequential", "best_fit", "fixed_greedy", "balanced")
"""Their packs do not depend on memory, or are chosen among by time: no memory limit makes them faster."""

FLAT_STRATEGIES = ("skrull",)
"""Know no pipeline: refused where pp > 1."""

MERGING_STRATEGIES = ("slimpack", "auto")
"""Cut documents by search, order packs by search and let replicas share documents."""

SEARCH_OPTIONS = ("dp_merge", "cuts", "schedule")
"""Options that only these read."""

OWNING_STRATEGIES = ("skrull",)
"""Decide by themselves which ranks compute a document, so they read no `cp_sharding`."""

LAYOUT_STRATEGIES = ("flexpipe",)
"""Change the layout between steps: `plan.flex_planner` plans with them; here they pack inside one layout."""


def _plan_auto(problems: Sequence[StepProblem]) -> tuple[StepProblem, tuple[ReplicaChoice, ...]]:
    """Beside `slimpack`, rivals of `auto` are all but what needs a solver and what chooses a layout."""
    apart = ("auto", "slimpack", *SOLVER_STRATEGIES, *LAYOUT_STRATEGIES)
    rivals = [
        Rival(plan, name not in WHOLE_STRATEGIES, name in BOUNDED_STRATEGIES, MEMORY_CHECKS.get(name))
        for name, plan in STRATEGIES.items()
        if name not in apart
    ]
    return plan_auto(problems, rivals)


LEVEL_STRATEGIES: dict[str, Callable[[Sequence[StepProblem]], tuple[StepProblem, tuple[ReplicaChoice, ...]]]] = {
    "slimpack": plan_slimpack,
    "auto": _plan_auto,
}
"""Those that choose the activation policies themselves, from the step under every level of `plan.policies`."""


def strategy_named(name: str) -> Planner:
    """The planner of a name.

    Raises:
        ConfigError: unknown (the message offers the nearest name).
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    raise ConfigError(f"unknown strategy '{name}'; {did_you_mean(name, STRATEGIES)}available: {', '.join(STRATEGIES)}")


def require_trainable(name: str, layout: ParallelLayout, options: PlanOptions) -> None:
    """Refuse what `evenload plan` predicts and the runtime of this version cannot run, and settings that would do
    nothing (`evenload plan` compares many strategies under one set of options, a run has one strategy).

    Raises:
        ConfigError: unknown; it changes the layout during the run; it knows no pipeline and the layout has one; or an
            option is set that it does not read.
    """
    strategy_named(name)
    if name in LAYOUT_STRATEGIES:
        raise ConfigError(
            f"strategy '{name}' changes the layout between steps, and live switching is not available in this version; "
            f"'evenload plan --strategy {name}' predicts it; to train, choose from "
            f"{', '.join(other for other in STRATEGIES if other not in LAYOUT_STRATEGIES)}"
        )
    if name in FLAT_STRATEGIES:
        require_flat(layout)
    usual = PlanOptions()
    for option in SEARCH_OPTIONS:
        asked = getattr(options, option)
        # No merging is what the others do anyway.
        if name not in MERGING_STRATEGIES and asked is not False and asked != getattr(usual, option):
            raise ConfigError(
                f"plan.options.{option} is {asked!r}, which strategy {name} does not read; leave it out, or train with "
                f"{' or '.join(MERGING_STRATEGIES)}"
            )
    if name in OWNING_STRATEGIES and options.cp_sharding != usual.cp_sharding:
        raise ConfigError(
            f"plan.options.cp_sharding is '{options.cp_sharding}', but strategy {name} decides by itself which ranks "
            "compute a document; leave cp_sharding out, or train with another strategy"
        )
