"""The least time of a step: of any machine with these devices, and of any plan in one layout.

    physical      model FLOPs of all tokens / (devices · peak FLOP/s): every product at the peak, nothing else, no
                  waiting. MFU is the share of it that a step reaches.
    of the layout the busiest pipeline rank computes its stages of all documents, its share of them, at the cost model's
                  rates, with the tensor-parallel transfers that nothing hides; or sums its gradients, if that takes
                  longer; then the update. No plan in the layout is faster under the cost model: it may cut, share and
                  order documents as it likes, but not move layers.

Between both lies `PackCosts.lower_bound_seconds`: all useful work at the cost model's rates on all devices evenly, in
any layout. O(documents + units).
"""

import numpy as np
from numpy.typing import ArrayLike

from evenload.cost.flops import training_flops
from evenload.cost.pack_cost import PackCosts
from evenload.cost.tensor_halves import least_share
from evenload.cost.unit_transfers import unit_transfers


def physical_bound_seconds(costs: PackCosts, num_tokens: ArrayLike) -> float:
    """Of a step with documents of these lengths (int64[n])."""
    flops = float(training_flops(costs.model, np.asarray(num_tokens, np.int64)).sum())
    return flops / (costs.layout.world_size * costs.coefficients.peak_flops_per_s)


def layout_bound_seconds(costs: PackCosts, num_tokens: ArrayLike) -> float:
    """Of a step with documents of these lengths (int64[n]) in the layout of `costs`."""
    layout = costs.layout
    stage_s = costs.useful_stage_seconds(num_tokens) * least_share(costs)
    rank_s = np.zeros(layout.pipeline_ranks)
    for stage, seconds in enumerate(stage_s.tolist()):
        ranks = layout.ranks_of_stage(stage)
        rank_s[ranks.start : ranks.stop] += seconds / len(ranks)
    computed_s = float(rank_s.max()) / (layout.dp * layout.cp)
    summed_s = max(
        float(unit_transfers(costs.model, costs.coefficients, layout, rank).sum_s.sum())
        for rank in sorted(set(layout.leading_ranks))
    )
    bound_s = max(computed_s, costs.lower_bound_seconds(num_tokens), summed_s)
    return bound_s + costs.optimizer_seconds()
