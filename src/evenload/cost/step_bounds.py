"""The least time of a step: of any machine with these devices, and of any plan in one layout.

    physical      model FLOPs of all tokens / (devices · peak FLOP/s): every product at the peak, nothing else, no
                  waiting. MFU is the share of it that a step reaches.
    of the layout the busiest pipeline rank computes its stages of all documents, its share of them, at the cost model's
                  rates, with the tensor-parallel transfers that nothing hides; or sums its gradients, if that takes
                  longer; then the update. No plan in the layout is faster under the cost model: it may cut, share and
                  order documents as it likes, but not move layers.
    of the sizes  the same for every split of the model's layers over the pipeline's ranks, with any number of stages a
                  rank: some rank has the dearest layer, as the last one is with the head; at least the mean of all
                  ranks; and as many layers as an even split's fullest. What a search over layouts may leave out by,
                  which splits layers later.

Between both lies `PackCosts.lower_bound_seconds`: all useful work at the cost model's rates on all devices evenly, in
any layout. O(documents + units).
"""

import numpy as np
from numpy.typing import ArrayLike

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.flops import training_flops
from evenload.cost.memory import trained_parameters_per_rank
from evenload.cost.pack_cost import PackCosts
from evenload.cost.unit_transfers import unit_transfers
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import ModelSpec


def physical_bound_seconds(costs: PackCosts, num_tokens: ArrayLike) -> float:
    """Of a step with documents of these lengths (int64[n])."""
    flops = float(training_flops(costs.model, np.asarray(num_tokens, np.int64)).sum())
    return flops / (costs.layout.world_size * costs.coefficients.peak_flops_per_s)


def layout_bound_seconds(costs: PackCosts, num_tokens: ArrayLike) -> float:
    """Of a step with documents of these lengths (int64[n]) in the layout of `costs`."""
    layout = costs.layout
    stage_s = costs.useful_stage_seconds(num_tokens)
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


def sizes_bound_seconds(
    model: ModelSpec, coefficients: CostCoefficients, layout: ParallelLayout, num_tokens: ArrayLike
) -> float:
    """Of a step with documents of these lengths (int64[n]) in any layout of the same dp, cp, pp and tp.

    Args:
        coefficients: of layouts of these sizes.
    """
    ranks, layers = layout.pp, model.num_layers
    if ranks == 1:
        return layout_bound_seconds(PackCosts(model, coefficients, layout), num_tokens)
    # Every layer as a stage, embedding and head with the first and the last: a rank has the sum of its layers.
    alone = even_layout(layers, dp=layout.dp, cp=layout.cp, pp=layers, tp=layout.tp)
    costs = PackCosts(model, coefficients, alone)
    layer_s = costs.useful_stage_seconds(num_tokens)
    sum_s = np.array([unit_transfers(model, coefficients, alone, rank).sum_s.sum() for rank in range(layers)])
    computed_s = _fullest_at_least(layer_s, ranks) / (layout.dp * layout.cp)
    evenly_s = costs.lower_bound_seconds(num_tokens) * layers / ranks
    trained = _fullest_at_least(trained_parameters_per_rank(model, alone), ranks)
    updated_s = coefficients.optimizer_s_per_parameter * trained / (layout.dp * layout.cp)
    return max(computed_s, evenly_s, _fullest_at_least(sum_s, ranks)) + updated_s


def _fullest_at_least(of_layers: np.ndarray, ranks: int) -> float:
    """The least that the fullest rank has of something, however layers are split."""
    most = -(-len(of_layers) // ranks)
    return max(float(of_layers.sum()) / ranks, float(np.sort(of_layers)[:most].sum()), float(of_layers.max()))
