"""When, inside the last backward of a stage, the gradients of each of its units are complete.

A backward runs the head, then the layers downwards, then the embedding, and each takes what its coefficients say of the
pack. Waiting for other ranks and what is computed again are not told apart: they are spread like the rest.
"""

from collections.abc import Sequence

from evenload.cost.pack_cost import PackCosts
from evenload.cost.slice_features import pairs_column, prefix_column
from evenload.types.columns import SliceColumns


def pack_features(costs: PackCosts, backward: SliceColumns, pack: int) -> list[float]:
    """Of one backward pack, as `cost.slice_features` has them."""
    return costs.features.of_packs(backward.pack_range(pack, pack + 1))[0].tolist()


def shares_left(costs: PackCosts, features: Sequence[float], stage: int) -> dict[int, float]:
    """Of every unit of a stage, by number (`cost.memory.trained_unit_parameters`), the share of a backward's seconds
    that is left when its gradients are complete, from the head's to the embedding's.

    Args:
        features: of the pack.
    """
    coefficients, tp, windows = costs.coefficients, costs.layout.tp, costs.windows
    layer = coefficients.backward
    common_s = features[0] * layer.linear_s_per_token / tp + features[1] * layer.slice_s + features[2] * layer.pack_s
    window_s = {
        window: (
            features[pairs_column(index)] * layer.attention_s_per_pair
            + features[prefix_column(index)] * layer.prefix_s_per_token
        )
        / tp
        for index, window in enumerate(windows)
    }
    first, last = costs.layout.stage_layers[stage]
    parts: list[tuple[int, float]] = []
    if stage == costs.layout.num_stages - 1:
        head_s = features[0] * coefficients.head_s_per_token / tp + coefficients.head_pack_s
        parts.append((1 + costs.model.num_layers, head_s))
    parts += [(1 + at, common_s + window_s[costs.model.windows[at]]) for at in reversed(range(first, last))]
    if stage == 0:
        parts.append((0, features[0] * coefficients.embedding_s_per_token / tp))
    total_s = sum(seconds for _, seconds in parts)
    found, left_s = {}, total_s
    for unit, seconds in parts:
        left_s -= seconds
        found[unit] = max(0.0, left_s / total_s) if total_s else 0.0
    return found
