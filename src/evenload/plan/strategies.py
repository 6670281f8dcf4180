"""All strategies by name (DESIGN §5): one visible table."""

import difflib
from collections.abc import Callable

from evenload.errors import ConfigError
from evenload.plan.balanced import plan_balanced
from evenload.plan.best_fit import plan_best_fit
from evenload.plan.padded import plan_padded
from evenload.plan.problem import ReplicaChoice, StepProblem
from evenload.plan.slimpack import plan_slimpack

STRATEGIES: dict[str, Callable[[StepProblem], tuple[ReplicaChoice, ...]]] = {
    "padded": plan_padded,
    "best_fit": plan_best_fit,
    "balanced": plan_balanced,
    "slimpack": plan_slimpack,
}
"""Available strategies, naive first."""

PLANNED_STRATEGIES = ("sequential", "fixed_greedy", "fixed_exact", "wlb", "skrull", "flexpipe", "auto", "exact")
"""Names that a later version fills; known, so that they are refused with the right reason."""


def strategy_named(name: str) -> Callable[[StepProblem], tuple[ReplicaChoice, ...]]:
    """The planner of a name.

    Raises:
        ConfigError: planned for a later version, or unknown (the message offers the nearest name).
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    if name in PLANNED_STRATEGIES:
        raise ConfigError(
            f"strategy '{name}' is not available in this version, planned; available: {', '.join(STRATEGIES)}"
        )
    near = difflib.get_close_matches(name, [*STRATEGIES, *PLANNED_STRATEGIES], n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ConfigError(f"unknown strategy '{name}'; {hint}available: {', '.join(STRATEGIES)}")
