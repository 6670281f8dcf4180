"""Say from how many tokens on it pays to share a prefix (`min_shared_tokens`)."""

import numpy as np

from evenload.cost.pack_cost import PackCosts, pairs_column, prefix_column
from evenload.types.columns import causal_pairs, keys_before


def min_shared_tokens(costs: PackCosts, longest_path: int) -> int:
    """Return the fewest tokens of a segment that are computed faster once, before two segments, than in each of them.

    Sharing n tokens behind d others saves n tokens and their pairs. It costs a piece: its constant, half a tile of rows
    that see d + n keys, and the keys before three pieces, 3·d + 2·n, instead of two, 2·d. It has to pay for every d of
    paths of `longest_path` tokens, also where windows let rows see few of them; `longest_path` where it never does.
    """
    depths = np.array([0, *2 ** np.arange(longest_path.bit_length())], np.int64)

    def pays(size: int) -> bool:
        gained = np.zeros((len(depths), pairs_column(len(costs.windows))))
        gained[:, 0], gained[:, 1] = size, -1.0
        for index, window in enumerate(costs.windows):
            before, behind = keys_before(depths, window), keys_before(depths + size, window)
            incomplete = (costs.features.tile - 1) / 2 * behind
            gained[:, pairs_column(index)] = causal_pairs(depths, depths + size, window) - incomplete
            gained[:, prefix_column(index)] = before - 2 * behind
        return bool((gained @ sum(matrix.sum(axis=1) for matrix in costs.stage_seconds.values()) >= 0).all())

    # Sharing nothing only costs, and what more tokens save grows faster than what they cost.
    low, high = 0, longest_path
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
