"""List all strategies by name, naive first; packages add theirs by entry points, a program by `register`.

Adding one: CONTRIBUTING.md. Decided here, too: whether a run may use a strategy, and whether its replicas share
documents by default, on for the strategies that can, because their plans share only where that is faster by
prediction; off with one replica, costs that know no link between replicas, or a model whose layers carry states,
as what sharing these takes is not priced.
"""

import msgspec

from evenload.cost.coefficients import CostCoefficients
from evenload.errors import ConfigError
from evenload.planning.problem import PlanOptions, StrategyOptions
from evenload.planning.strategies.auto import AUTO
from evenload.planning.strategies.baselines import BALANCED, BEST_FIT, PADDED, SEQUENTIAL
from evenload.planning.strategies.fixed import FIXED_EXACT, FIXED_GREEDY
from evenload.planning.strategies.flexpipe import FLEXPIPE
from evenload.planning.strategies.skrull import SKRULL
from evenload.planning.strategies.slimpack import SLIMPACK
from evenload.planning.strategies.strategy import Strategy
from evenload.planning.strategies.wlb import WLB
from evenload.types.base import Registry
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    Strategy,
    "evenload.strategies",
    (*(PADDED, SEQUENTIAL, BEST_FIT, FIXED_GREEDY, FIXED_EXACT, BALANCED), *(WLB, SKRULL, SLIMPACK, FLEXPIPE, AUTO)),
)
strategy_named, register = STRATEGIES.named, STRATEGIES.register


def option_tables() -> dict[str, type[StrategyOptions]]:
    """Return the options of the strategies that have some: tables of `plan.options`."""
    return {name: one.options for name, one in STRATEGIES.items() if one.options is not None}


def require_trainable(
    name: str, layout: ParallelLayout, options: PlanOptions, longest: int | None = None, *, has_trees: bool = False
) -> None:
    """Refuse what `evenload plan` predicts and a run cannot follow, and settings that would do nothing.

    Args:
        longest: most unique tokens of a document, `data.max_tree_tokens` or `max_document_tokens`; None = not known.
        has_trees: sequences of the data share prefixes.

    Raises:
        ConfigError: unknown strategy; a pipeline or trees that it does not know; options that it does not read, or that
            do not go together; or documents that fit no pack and are not cut.
    """
    strategy = strategy_named(name)
    if has_trees:
        strategy.require_trees()
        if options.dp_merge:
            raise ConfigError("plan.options.dp_merge is True, and replicas share no trees of prefixes; leave it out")
    strategy.require_layout(layout)
    strategy.require_schedule(options, layout)
    strategy.require_options(options)
    if not strategy.cuts_documents and options.max_pack_tokens and (longest or 0) > options.max_pack_tokens:
        raise ConfigError(
            f"plan.options.max_pack_tokens is {options.max_pack_tokens}, documents may have {longest} "
            f"(data.max_document_tokens, of trees data.max_tree_tokens), and strategy {name} never cuts a document; "
            "raise the former, lower the latter (and say data.overlong), or train with slimpack or auto"
        )
    if options.dp_merge and not strategy.shares_documents:
        sharing = [other.name for other in STRATEGIES.values() if other.shares_documents]
        raise ConfigError(
            f"plan.options.dp_merge is True, which strategy {name} does not read; leave it out, or train with "
            f"{' or '.join(sharing)}"
        )
    for own in options.strategies:
        if not (strategy.tries_others or own == type(own)() or isinstance(own, strategy.options or ())):
            other = own.__struct_config__.tag
            raise ConfigError(
                f"plan.options.{other} is set, which strategy {name} does not read; leave it out, or train with {other}"
            )
    if strategy.assigns_ranks and options.cp_sharding != PlanOptions().cp_sharding:
        raise ConfigError(
            f"plan.options.cp_sharding is '{options.cp_sharding}', but strategy {name} decides by itself which ranks "
            "compute a document; leave cp_sharding out, or train with another strategy"
        )


def require_layouts(name: str, layout: ParallelLayout, num_layouts: int) -> None:
    """Refuse, by a `ConfigError`, a strategy that changes the layout where a run, which starts in `layout`, may take
    one only, and several layouts under one that stays."""
    strategy = strategy_named(name)
    if strategy.changes_layout and num_layouts == 1:
        groups = layout.dp * layout.pp
        others = [f'"pp={pp}"' for pp in range(1, groups + 1) if groups % pp == 0 and pp != layout.pp]
        such = f", such as plan.layouts = [{', '.join(others[:3])}]" if others else ""
        staying = ", ".join(other.name for other in STRATEGIES.values() if not other.changes_layout)
        there = "one process" if layout.world_size == 1 else layout.describe()
        raise ConfigError(
            f"strategy '{name}' changes the layout between steps, and there is {there} alone; name the "
            f"others in plan.layouts{such}, or choose from {staying}"
        )
    if num_layouts > 1 and not (strategy.changes_layout or strategy.follows_layouts):
        following = [other.name for other in STRATEGIES.values() if other.changes_layout or other.follows_layouts]
        raise ConfigError(
            f"plan.layouts is set, and strategy '{name}' stays in its layout; leave it out, or train with "
            f"{' or '.join(following)}"
        )


def decide_dp_merge(
    options: PlanOptions, strategy: str, model: ModelSpec, layout: ParallelLayout, coefficients: CostCoefficients
) -> tuple[PlanOptions, str]:
    """Set `dp_merge` where the strategy reads it, and say what was decided ("" = nothing to say)."""
    merge, why = options.dp_merge, "plan.options.dp_merge"
    is_unpriced = merge is None and bool(model.state_functions)
    if not strategy_named(strategy).shares_documents or layout.dp == 1 or is_unpriced:
        return options, ""
    if merge is None:
        merge = coefficients.group_link_or_none(layout.dp * layout.cp, stride=layout.tp) is not None
        off, unknown = "plan.options.dp_merge = false turns it off", "the costs know no link between replicas"
        why = off if merge else unknown
    shared = "replicas share documents too long for one of them where that is faster"
    message = shared if merge else "every document stays on one replica"
    return msgspec.structs.replace(options, dp_merge=merge), f"{message} ({why})"
