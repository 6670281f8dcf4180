"""`decide_dp_merge`: whether a run's replicas share documents where nobody said so.

On for the strategies that can, because a document that is too long for one replica makes all others wait, and because
their plans share one only where that is faster by prediction. Off where nothing can be shared: one replica, or costs
that know no link between replicas (a cost file by hand, or one measured on a single replica), so that sharing cannot
be priced.
"""

import msgspec

from evenload.cost.coefficients import CostCoefficients
from evenload.errors import ConfigError
from evenload.plan.problem.options import PlanOptions
from evenload.plan.strategies.registry import strategy_named
from evenload.types.layout import ParallelLayout


def decide_dp_merge(
    options: PlanOptions, strategy: str, layout: ParallelLayout, coefficients: CostCoefficients
) -> tuple[PlanOptions, str]:
    """Options with `dp_merge` set where the strategy reads it, and what was decided, in words for a log ("" = nothing
    to say: one replica, or a strategy that never shares)."""
    if not strategy_named(strategy).shares_documents or layout.dp == 1:
        return options, ""
    merge, why = options.dp_merge, "plan.options.dp_merge"
    if merge is None:
        merge, why = _can_share(layout, coefficients)
    shared = "replicas share documents too long for one of them where that is faster"
    said = shared if merge else "every document stays on one replica"
    return msgspec.structs.replace(options, dp_merge=merge), f"{said} ({why})"


def _can_share(layout: ParallelLayout, coefficients: CostCoefficients) -> tuple[bool, str]:
    try:
        coefficients.group_link(layout.dp * layout.cp, stride=layout.tp)
    except ConfigError:
        return False, "the costs know no link between replicas"
    return True, "plan.options.dp_merge = false turns it off"
