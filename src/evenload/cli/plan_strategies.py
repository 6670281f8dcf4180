"""`--strategy`: names are checked before anything is read, and 'all' says what it leaves out."""

from collections.abc import Callable

from evenload.errors import ConfigError
from evenload.plan.problem.options import PlanOptions
from evenload.plan.strategies.registry import STRATEGIES, strategy_named
from evenload.plan.strategies.strategy import LeftOutStrategy, Strategy
from evenload.types.layout import ParallelLayout


def _built_in(trait: Callable[[Strategy], bool]) -> str:
    return ", ".join(one.name for one in STRATEGIES.built_in.values() if trait(one))


# Without those of other packages: a help text must not fail because a package does.
STRATEGY_HELP = (
    f"'all', or names with commas: {_built_in(lambda one: True)}, and those that other packages add. 'all' leaves out "
    f"{_built_in(lambda one: one.needs_solver)}, which takes its solver's time limit, and "
    f"{_built_in(lambda one: one.needs_one_stage)} where the layout has a pipeline."
)

_WHOLE_CLUSTERS = "it changes the layout of whole clusters, and this one is judged on a part; --layout plans it"


def asked_strategies(text: str) -> tuple[str, ...] | None:
    """The names of `--strategy`, each once; None = all that can run."""
    if text == "all":
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"--strategy '{text}' names no strategy; use 'all' or some of {', '.join(STRATEGIES)}")
    for name in names:
        strategy_named(name)
    return names


def chosen_strategies(
    asked: tuple[str, ...] | None, layout: ParallelLayout | None, options: PlanOptions, *, in_part: bool = False
) -> tuple[tuple[str, ...], tuple[LeftOutStrategy, ...]]:
    """What is planned in a layout, and what is left out where all were asked for.

    Args:
        layout: None = each strategy in its own.
        in_part: a part of a large cluster stands for the whole, which changes of its layout cannot be planned in.
    """
    if asked is not None:
        if in_part and (changing := [name for name in asked if strategy_named(name).changes_layout]):
            raise ConfigError(f"--strategy {', '.join(changing)} with --search-layout: {_WHOLE_CLUSTERS}")
        return asked, ()
    left_out = []
    for one in STRATEGIES.values():
        if in_part and one.changes_layout:
            left_out.append(LeftOutStrategy(name=one.name, why=_WHOLE_CLUSTERS))
        if layout is not None and one.needs_one_stage and layout.num_stages > 1:
            why = f"it knows no pipeline, and layout {layout.describe()} has {layout.num_stages} stages; a layout "
            left_out.append(LeftOutStrategy(name=one.name, why=why + "with pp=1 includes it"))
    for one in STRATEGIES.values():
        if one.solver_limit_s is not None:
            limit_s = one.solver_limit_s(options)
            why = f"its solver takes up to {limit_s:g} s for every step; --strategy {one.name} runs it"
            left_out.append(LeftOutStrategy(name=one.name, why=why))
    names = {one.name for one in left_out}
    return tuple(name for name in STRATEGIES if name not in names), tuple(left_out)
