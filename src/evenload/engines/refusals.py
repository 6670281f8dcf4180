"""What an engine is not asked to do: layouts and strategies refused at start, by name, with what works instead."""

from evenload.engines.profile import EngineProfile
from evenload.errors import ConfigError
from evenload.plan.problem.options import CHOOSE, PlanOptions
from evenload.plan.strategies.registry import STRATEGIES, strategy_named
from evenload.plan.strategies.strategy import LeftOutStrategy, Strategy
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

BEST = "auto"
"""Under an engine: the fastest by its price of all strategies that it can run (`engines.engine_planner`)."""


def require_plan_layout(profile: EngineProfile, layout: ParallelLayout) -> None:
    """Refuse a layout that the engine does not have, by a `ConfigError`."""
    asked = f"layout {layout.describe()}"
    if layout.has_wide_stages:
        profile.refuse("layouts", f"{asked} has stages with different numbers of devices")
    if layout.num_stages > 1 and not profile.schedules:
        profile.refuse("pipeline", f"{asked} has a pipeline of {layout.num_stages} stages")
    if layout.num_stages > layout.pp and (layout.pp == 1 or "interleaved" not in profile.schedules):
        profile.refuse("virtual", f"{asked} has {layout.num_stages} virtual stages on {layout.pp} pipeline ranks")
    if layout.cp > 1 and profile.context_parallel == "none":
        profile.refuse("context", f"{asked} shares documents among {layout.cp} context-parallel ranks")


def require_heads(profile: EngineProfile, model: ModelSpec, layout: ParallelLayout) -> None:
    """Refuse, by a `ConfigError`, a group whose ranks would have no or unequal heads."""
    heads, kv_heads, ranks = model.num_heads, model.num_kv_heads, layout.cp * layout.tp
    if profile.context_parallel == "heads" and (heads % ranks or (kv_heads % ranks and ranks % kv_heads)):
        raise ConfigError(
            f"engine {profile.name}: layout {layout.describe()} shares heads among {ranks} ranks, and {model.name} has "
            f"{heads} query heads and {kv_heads} key/value heads. Use as many ranks as divide both, or a multiple of "
            f"{kv_heads} that divides {heads}"
        )


def require_strategy(profile: EngineProfile, name: str, options: PlanOptions, layout: ParallelLayout) -> None:
    """Refuse a strategy whose plans the engine cannot run in this layout.

    Raises:
        ConfigError: unknown strategy; layout, strategy or schedule that the engine does not have; no `micro_batches`
            where every step needs equally many.
    """
    require_plan_layout(profile, layout)
    _require_sharing(profile, options)
    if options.schedule != CHOOSE and options.schedule not in profile.schedules:
        asked = f"plan.options.schedule is '{options.schedule}'"
        if not profile.schedules:
            profile.refuse("pipeline", asked)
        raise ConfigError(
            f"engine {profile.name}: {asked}. It orders its pipeline by its own schedules. Use one of "
            f"{', '.join(profile.schedules)}, or leave it out"
        )
    if options.schedule != CHOOSE and (options.schedule == "interleaved") != (layout.num_stages > layout.pp):
        raise ConfigError(
            f"engine {profile.name}: plan.options.schedule is '{options.schedule}' on layout {layout.describe()}. "
            "Interleaved is the order of ranks with several virtual stages, and the only one of them. Leave the "
            "schedule out, or change virtual"
        )
    if options.policy not in ("choose", "replay"):
        raise ConfigError(
            f"engine {profile.name}: plan.options.policy is '{options.policy}'. What is kept between forward and "
            "backward is the engine's own setting, which plans do not change. Leave it out, and set the engine's "
            "checkpointing of activations"
        )
    if name == BEST:
        return
    _require_whole(profile, strategy_named(name), layout)
    strategy_named(name).require_layout(layout)


def require_auto(profile: EngineProfile, options: PlanOptions) -> None:
    """Refuse what `auto` of an engine does not read: it plans every global batch by itself."""
    if options.window > 1:
        raise ConfigError(
            f"engine {profile.name}: plan.options.window is {options.window} with strategy {BEST}, which plans every "
            "global batch by itself and puts nothing off. Name fixed_greedy, which packs over several, or leave it out"
        )


def _require_sharing(profile: EngineProfile, options: PlanOptions) -> None:
    """Refuse a way of sharing documents that was asked for and is not the engine's."""
    if profile.context_parallel != "none" and options.cp_sharding not in ("mixed", "per_document"):
        shared = "has some heads a rank" if profile.context_parallel == "heads" else "cuts it into equal parts"
        raise ConfigError(
            f"engine {profile.name}: plan.options.cp_sharding is '{options.cp_sharding}'. Its context-parallel group "
            f"shares every document of a micro-batch: it {shared}. Leave it out, or say 'per_document'"
        )


def _require_whole(profile: EngineProfile, strategy: Strategy, layout: ParallelLayout) -> None:
    name = f"strategy {strategy.name}"
    if strategy.changes_layout:
        profile.refuse("layouts", f"{name} changes the layout between steps")
    if strategy.cuts_documents and not profile.slices:
        profile.refuse("slices", f"{name} cuts documents into slices")
    if strategy.shares_documents:
        profile.refuse("sharing", f"{name} shares documents among replicas")
    if strategy.assigns_ranks and layout.cp > 1 and profile.context_parallel != "group":
        profile.refuse(
            "mixed_context", f"{name} keeps some documents of a micro-batch whole on one rank of {layout.cp}"
        )


def runnable(
    profile: EngineProfile, options: PlanOptions, layout: ParallelLayout
) -> tuple[tuple[str, ...], tuple[LeftOutStrategy, ...]]:
    """Of all strategies those that the engine can run in this layout, and why not the others. Exact solvers, which take
    their time limit for every step, run where they are named only.

    Raises:
        ConfigError: the layout or the schedule is none of the engine's, so nothing runs.
    """
    require_strategy(profile, BEST, options, layout)
    names: list[str] = []
    left_out: list[LeftOutStrategy] = []
    for one in STRATEGIES.values():
        if one.name == BEST:
            continue
        if one.solver_limit_s is not None:
            limit_s = one.solver_limit_s(options)
            why = f"its solver takes up to {limit_s:g} s for every step; --strategy {one.name} runs it"
            left_out.append(LeftOutStrategy(name=one.name, why=why))
            continue
        try:
            require_strategy(profile, one.name, options, layout)
        except ConfigError as error:
            why = str(error).removeprefix(f"engine {profile.name}: ").removeprefix(f"strategy {one.name}").lstrip(": ")
            left_out.append(LeftOutStrategy(name=one.name, why=why))
        else:
            names.append(one.name)
    return tuple(names), tuple(left_out)
