"""Time the units of a step (embedding, layers, head), and bound a step's time from below.

A unit's gradients are reduce-scattered over the ranks that hold it, and its updated weights all-gathered, in a few
buffers of a transfer each (`runtime.optim.data_parallel`): bytes are paid once, the latency of a ring once a
buffer. A backward completes the units of its stage in the order head, layers downwards, embedding; a first forward
reads them in the order embedding, layers upwards.

Lower bounds of a step's time:

    physical      model FLOPs of all tokens / (devices · peak FLOP/s); MFU is the share of it that a step reaches
    of the layout the busiest pipeline rank computes its share of all documents, or reduces its gradients; then updates
    of the sizes  the same for every split of the layers: some rank has the most expensive layer, at least the mean of
                  all ranks, and as many layers as an even split's fullest
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.cost.coefficients import CostCoefficients, PassCoefficients
from evenload.cost.layer_counts import training_flops
from evenload.cost.memory import ReplicaPacks, trained_parameters_per_rank, trained_unit_parameters
from evenload.cost.pack_cost import PackCosts, pairs_column, prefix_column
from evenload.types.columns import SliceColumns
from evenload.types.document import Direction
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import ModelSpec
from evenload.types.tree_columns import NO_TREES, TreeColumns


class UnitTransfers(NamedTuple):
    """Hold the transfers of one pipeline rank's units (`cost.memory.trained_unit_parameters`), from start to end of the
    model: int64[n] numbers and parameters, float64[n] seconds of reduce-scatters and all-gathers alone."""

    unit: NDArray[np.int64]
    parameters: NDArray[np.int64]
    sum_s: NDArray[np.float64]
    gather_s: NDArray[np.float64]


def unit_transfers(
    model: ModelSpec, coefficients: CostCoefficients, layout: ParallelLayout, rank: int
) -> UnitTransfers:
    """Time the reduce-scatter and the all-gather of every unit of a pipeline rank; raises `ConfigError` where several
    ranks hold the units and no link between them is known."""
    parameters, buffers = trained_unit_parameters(model, layout, rank), unit_buffers(model, layout, rank)
    units, copies, element = sorted(parameters), layout.data_sizes[rank], model.bytes_per_element
    sums, gathers = (
        [coefficients.ring_seconds(size * parameters[unit], copies, buffers[unit], way) for unit in units]
        for size, way in ((max(element, 4), "sum"), (element, "gather"))
    )
    held = np.array([parameters[unit] for unit in units], np.int64)
    return UnitTransfers(np.array(units, np.int64), held, np.array(sums, np.float64), np.array(gathers, np.float64))


def unit_buffers(model: ModelSpec, layout: ParallelLayout, rank: int) -> dict[int, int]:
    """Count the buffers of a pipeline rank's units, without those of biases that the model does not count."""
    is_cut, stages, last = layout.tp > 1, layout.stages_of_rank(rank), layout.num_stages - 1
    layers = [layer for stage in stages for layer in range(*layout.stage_layers[stage])]
    # Decays and steps of scans are cut, and decay as norms do, which are whole.
    cut = [kind.biases or any(one.is_scan for one in kind.states) for kind in model.kinds]
    of_kinds = [2 + is_cut * ((kind.experts is not None) + one) for kind, one in zip(model.kinds, cut, strict=True)]
    if model.has_adapters:
        of_kinds = [2 if is_cut else 1 for _ in model.kinds]
    result = {1 + layer: of_kinds[model.layers[layer]] for layer in layers}
    if model.has_adapters:
        return result
    if 0 in stages:
        result[0] = 1 + (model.position_parameters > 0 and (model.tied_embeddings or is_cut))
    if last in stages:
        result[1 + model.num_layers] = 1 + (not (model.tied_embeddings and 0 in stages))
    return result


def pack_features(
    costs: PackCosts, packs: Iterable[tuple[ReplicaPacks, int]], direction: Direction
) -> NDArray[np.float64]:
    """Return the features (`cost.pack_cost`) of packs, each given by its replica and number; float64[n, features]."""
    parts = [one.trees.pieces(getattr(one, direction).pack_range(pack, pack + 1)) for one, pack in packs]
    return costs.features.of_packs(SliceColumns.concat(parts, [0] * len(parts)))


def stage_units(costs: PackCosts, stage: int, direction: Direction = "backward") -> list[int]:
    """List a stage's units (`cost.memory.trained_unit_parameters`) in the order in which a backward completes them, or
    a forward reads them; the head is the backward's."""
    first, last = costs.layout.stage_layers[stage]
    units = [*([0] if stage == 0 else []), *(1 + layer for layer in range(first, last))]
    if direction == "forward":
        return units
    return [*([1 + costs.model.num_layers] if stage == costs.layout.num_stages - 1 else []), *reversed(units)]


def unit_shares(
    costs: PackCosts, features: NDArray[np.float64], stage: int, direction: Direction
) -> NDArray[np.float64]:
    """Return the share of each pack's backward that is left when a unit's gradients are complete, or of its forward
    that is over when a unit's weights are read, from `pack_features`; float64[n, `stage_units`]."""
    seconds = unit_seconds(costs, features, stage_units(costs, stage, direction), direction)
    total_s, done_s = seconds.sum(axis=1, keepdims=True), np.cumsum(seconds, axis=1)
    wanted_s = np.maximum(0.0, total_s - done_s) if direction == "backward" else done_s - seconds
    return np.divide(wanted_s, total_s, out=np.zeros_like(wanted_s), where=total_s > 0)


def unit_seconds(
    costs: PackCosts, features: NDArray[np.float64], units: Sequence[int], direction: Direction
) -> NDArray[np.float64]:
    """Price every pack on every unit, without transfers; float64[n, units]. The head counts as backward."""
    coefficients, tp = costs.coefficients, costs.layout.tp
    layer: PassCoefficients = getattr(coefficients, direction)
    rates = np.zeros((features.shape[1], len(units)))
    for at, unit in enumerate(units):
        if unit == 0:
            rates[0, at] = coefficients.embedding_s_per_token / tp
        elif unit == 1 + costs.model.num_layers:
            rates[0, at], rates[2, at] = coefficients.head_s_per_token / tp, coefficients.head_pack_s
        else:
            kind, shares = costs.model.layers[unit - 1], costs.shares
            token_s, slice_s = shares.linear[kind] * layer.linear_s_per_token / tp, shares.pieces[kind] * layer.slice_s
            rates[:3, at] = token_s, slice_s, layer.pack_s
            if (reach := shares.reach[kind]) is not None:
                window = costs.windows.index(reach)
                rates[pairs_column(window), at] = shares.attention[kind] * layer.attention_s_per_pair / tp
                rates[prefix_column(window), at] = shares.keys[kind] * layer.prefix_s_per_token / tp
    return features @ rates


def physical_bound_seconds(costs: PackCosts, num_tokens: ArrayLike, trees: TreeColumns = NO_TREES) -> float:
    """Bound the time of a step with documents of these lengths (int64[n]) on any machine with these devices."""
    flops = float(training_flops(costs.model, np.asarray(num_tokens, np.int64), trees).sum())
    return flops / (costs.layout.world_size * costs.coefficients.peak_flops_per_s)


def layout_bound_seconds(costs: PackCosts, num_tokens: ArrayLike, trees: TreeColumns = NO_TREES) -> float:
    """Bound the time of a step with documents of these lengths (int64[n]) in the layout of `costs`."""
    layout = costs.layout
    computed_s = _slowest_rank_s(layout, costs.useful_stage_seconds(num_tokens, trees)) / (layout.dp * layout.cp)
    if trees.has_any:  # which replicas share none of, so that one computes the longest path
        longest = np.array([trees.depth_stop.max()])
        computed_s = max(computed_s, _slowest_rank_s(layout, costs.useful_stage_seconds(longest)))
    summed_s = max(
        float(unit_transfers(costs.model, costs.coefficients, layout, rank).sum_s.sum())
        for rank in sorted(set(layout.leading_ranks))
    )
    return max(computed_s, costs.lower_bound_seconds(num_tokens, trees), summed_s) + costs.optimizer_seconds()


def _slowest_rank_s(layout: ParallelLayout, stage_s: NDArray[np.float64]) -> float:
    rank_s = np.zeros(layout.pipeline_ranks)
    for stage, seconds in enumerate(stage_s.tolist()):
        ranks = layout.ranks_of_stage(stage)
        rank_s[ranks.start : ranks.stop] += seconds / len(ranks)
    return float(rank_s.max())


def sizes_bound_seconds(
    model: ModelSpec,
    coefficients: CostCoefficients,
    layout: ParallelLayout,
    num_tokens: ArrayLike,
    trees: TreeColumns = NO_TREES,
) -> float:
    """Bound the time of a step with documents of these lengths (int64[n]) in any layout of the same dp, cp, pp and tp,
    of which the coefficients are."""
    ranks, layers = layout.pp, model.num_layers
    if ranks == 1:
        return layout_bound_seconds(PackCosts(model, coefficients, layout), num_tokens, trees)
    # Every layer as a stage, embedding and head with the first and the last: a rank has the sum of its layers.
    alone = even_layout(layers, dp=layout.dp, cp=layout.cp, pp=layers, tp=layout.tp)
    costs = PackCosts(model, coefficients, alone)
    layer_s = costs.useful_stage_seconds(num_tokens, trees)
    sum_s = np.array([unit_transfers(model, coefficients, alone, rank).sum_s.sum() for rank in range(layers)])
    computed_s = _fullest_at_least(layer_s, ranks) / (layout.dp * layout.cp)
    evenly_s = costs.lower_bound_seconds(num_tokens, trees) * layers / ranks
    trained = _fullest_at_least(trained_parameters_per_rank(model, alone), ranks)
    updated_s = coefficients.optimizer_s_per_parameter * trained / (layout.dp * layout.cp)
    return max(computed_s, evenly_s, _fullest_at_least(sum_s, ranks)) + updated_s


def _fullest_at_least(of_layers: np.ndarray, ranks: int) -> float:
    """Return the least that the fullest rank has of something, however layers are split."""
    most = -(-len(of_layers) // ranks)
    return max(float(of_layers.sum()) / ranks, float(np.sort(of_layers)[:most].sum()), float(of_layers.max()))
