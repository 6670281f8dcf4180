"""All strategies by name (DESIGN §5): one visible table."""

import difflib
from collections.abc import Callable

from evenload.errors import ConfigError
from evenload.plan.auto import plan_auto
from evenload.plan.balanced import plan_balanced
from evenload.plan.best_fit import plan_best_fit
from evenload.plan.delay import Arrivals, DelayedChoice
from evenload.plan.fixed import delay_fixed_exact, delay_fixed_greedy, plan_fixed_exact, plan_fixed_greedy
from evenload.plan.flexpipe import plan_flexpipe
from evenload.plan.padded import plan_padded
from evenload.plan.problem import Planner, StepProblem
from evenload.plan.sequential import plan_sequential
from evenload.plan.skrull import can_fit, plan_skrull
from evenload.plan.slimpack import plan_slimpack
from evenload.plan.wlb import delay_wlb, plan_wlb

STRATEGIES: dict[str, Planner] = {
    "padded": plan_padded,
    "sequential": plan_sequential,
    "best_fit": plan_best_fit,
    "fixed_greedy": plan_fixed_greedy,
    "fixed_exact": plan_fixed_exact,
    "balanced": plan_balanced,
    "wlb": plan_wlb,
    "skrull": plan_skrull,
    "slimpack": plan_slimpack,
    "flexpipe": plan_flexpipe,
    "auto": lambda problem: plan_auto(problem, _within_auto(), WHOLE_STRATEGIES),
}
"""Available strategies, naive first. Each plans one global batch whole."""

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

FLAT_STRATEGIES = ("skrull",)
"""Know no pipeline: refused where pp > 1."""

LAYOUT_STRATEGIES = ("flexpipe",)
"""Change the layout between steps: `plan.flex_planner` plans with them; here they pack inside one layout."""


def _within_auto() -> dict[str, Planner]:
    """What `auto` chooses from: everything but itself, what needs a solver, and what chooses a layout."""
    apart = ("auto", *SOLVER_STRATEGIES, *LAYOUT_STRATEGIES)
    return {name: plan for name, plan in STRATEGIES.items() if name not in apart}


def strategy_named(name: str) -> Planner:
    """The planner of a name.

    Raises:
        ConfigError: unknown (the message offers the nearest name).
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    near = difflib.get_close_matches(name, STRATEGIES, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ConfigError(f"unknown strategy '{name}'; {hint}available: {', '.join(STRATEGIES)}")


def require_trainable(name: str) -> None:
    """Refuse what `evenload plan` predicts and the runtime of this version cannot run.

    Raises:
        ConfigError: unknown, or it changes the layout during the run.
    """
    strategy_named(name)
    if name in LAYOUT_STRATEGIES:
        raise ConfigError(
            f"strategy '{name}' changes the layout between steps, and live switching is not available in this version; "
            f"'evenload plan --strategy {name}' predicts it; to train, choose from "
            f"{', '.join(other for other in STRATEGIES if other not in LAYOUT_STRATEGIES)}"
        )
