"""`--strategy`: names are checked before anything is read, and 'all' says what it leaves out."""

from evenload.errors import ConfigError
from evenload.plan.options import PlanOptions
from evenload.plan.strategies import FLAT_STRATEGIES, SOLVER_STRATEGIES, STRATEGIES, strategy_named
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout

STRATEGY_HELP = (
    "'all', or names with commas: " + ", ".join(STRATEGIES) + ". 'all' leaves out "
    f"{', '.join(SOLVER_STRATEGIES)}, which takes its solver's time limit, and {', '.join(FLAT_STRATEGIES)} where the "
    "layout has a pipeline."
)


class LeftOutStrategy(Frozen):
    """A strategy that 'all' does not try, and why."""

    name: str
    why: str


def asked_strategies(text: str) -> tuple[str, ...] | None:
    """The names of `--strategy`, each once; None = all that can run.

    Raises:
        ConfigError: no name, or an unknown one (with the nearest).
    """
    if text == "all":
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"--strategy '{text}' names no strategy; use 'all' or some of {', '.join(STRATEGIES)}")
    for name in names:
        strategy_named(name)
    return names


def chosen_strategies(
    asked: tuple[str, ...] | None, layout: ParallelLayout, options: PlanOptions
) -> tuple[tuple[str, ...], tuple[LeftOutStrategy, ...]]:
    """What is planned in a layout, and what is left out where all were asked for."""
    if asked is not None:
        return asked, ()
    left_out = []
    if layout.num_stages > 1:
        left_out += [
            LeftOutStrategy(
                name=name,
                why=f"it knows no pipeline, and layout {layout.describe()} has {layout.num_stages} stages; a layout "
                "with pp=1 includes it",
            )
            for name in FLAT_STRATEGIES
        ]
    left_out += [
        LeftOutStrategy(
            name=name,
            why=f"its solver takes up to {options.solver_time_limit_s:g} s for every step; --strategy {name} runs it",
        )
        for name in SOLVER_STRATEGIES
    ]
    names = {one.name for one in left_out}
    return tuple(name for name in STRATEGIES if name not in names), tuple(left_out)
