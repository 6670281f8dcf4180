"""`SliceFeatures`: what the cost of a slice, or of a pack, is linear in.

Columns: tokens, slices, 1, then pairs and prefix of each distinct window of the model.

- Sliding windows: layers with equal windows share one pair count.
- Tiles: flash attention computes whole blocks of `tile` query rows. The rows a slice lacks to full blocks cost like its
  last row, which sees `min(stop, window)` keys (WLB §5.2).
- Slices that ranks share: one of at least two tiles a rank is cut into 2·ranks chunks, of which each rank computes one
  near the start and one near the end; a shorter one stays whole on some rank where the sharding leaves it whole
  (`mixed`). Features are those of one rank, on average over the ranks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import POLICIES
from evenload.cost.flops import slice_pairs
from evenload.types.columns import SliceColumns


@dataclass(frozen=True, kw_only=True)
class SliceFeatures:
    """Of slices of one model.

    Args:
        windows: the distinct ones of its layers, 0 = full.
        tile: query rows of one attention block; an incomplete block costs a whole one.
        causal: every token sees those before it; else the whole document.
        keeps_short_whole: short slices of a shared pack stay whole on one rank.
    """

    windows: tuple[int, ...]
    tile: int
    causal: bool
    keeps_short_whole: bool

    def of_packs(self, columns: SliceColumns, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """float64[num_packs, num_columns], of one of the ranks that share each pack.

        Args:
            chosen: bool[num_slices] that count; None = all.
        """
        pack = columns.pack_of_slice()
        stop = columns.start + columns.slice_tokens()
        slices = self.of_slices(columns.start, stop, columns.cp)
        if chosen is not None:
            slices = slices * chosen[:, None]
        packs = columns.num_packs
        out = np.empty((packs, slices.shape[1]))
        for column in (0, 1, *range(3, slices.shape[1])):
            out[:, column] = np.bincount(pack, weights=slices[:, column], minlength=packs)
        out[:, 2] = 1.0
        return out

    def of_slices(
        self, start: NDArray, stop: NDArray, ranks: NDArray[np.int64] | None = None, tile: int | None = None
    ) -> NDArray[np.float64]:
        """float64[num_slices, num_columns]; column 2 is left 1 for the pack constant.

        Args:
            ranks: int64[num_slices] that share each slice; None = 1.
            tile: other than this model's attention has.
        """
        if ranks is not None and (ranks > 1).any():
            return self._of_shared_slices(start, stop, ranks)
        tile = self.tile if tile is None else tile
        rows = stop - start
        out = np.ones((len(rows), num_columns(len(self.windows))))
        out[:, 0] = rows
        missing_rows = -rows % tile
        for index, window in enumerate(self.windows):
            last_row_keys = np.minimum(stop, window) if window else stop
            pairs = slice_pairs(start, stop, window, causal=self.causal)
            out[:, pairs_column(index)] = pairs + missing_rows * last_row_keys
            out[:, prefix_column(index)] = np.minimum(start, window) if window else start
        return out

    def is_sharded(self, rows: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Slices that are cut over their ranks; the others stay whole on one of them."""
        shortest = 2 * ranks * self.tile if self.keeps_short_whole else 0
        return (ranks > 1) & (rows >= shortest)

    def _of_shared_slices(self, start: NDArray, stop: NDArray, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        """As `of_slices` of one of the ranks that share each slice, on average over them."""
        rows = stop - start
        sharded = self.is_sharded(rows, ranks)
        share = 1.0 / ranks
        out = np.ones((len(rows), num_columns(len(self.windows))))
        out[:, 0] = rows * share
        out[:, 1] = np.where(sharded, 2.0, share)
        chunk = -(-rows // (2 * ranks))
        # Chunks i and 2·ranks - 1 - i of a rank begin and end, on average, here: the rows they lack to tiles see so
        # many keys.
        chunk_start = start + rows * (2 * ranks - 1) / (4.0 * ranks)
        chunk_end = start + rows * (2 * ranks + 1) / (4.0 * ranks)
        for index, window in enumerate(self.windows):
            last_row_keys = np.minimum(stop, window) if window else stop
            chunk_keys = np.minimum(chunk_end, window) if window else chunk_end
            missing_if_cut = 2 * (-chunk % self.tile) * chunk_keys
            missing_if_whole = (-rows % self.tile) * last_row_keys * share
            missing = np.where(sharded, missing_if_cut, missing_if_whole)
            out[:, pairs_column(index)] = slice_pairs(start, stop, window) * share + missing
            prefix, chunk_prefix = (np.minimum(keys, window) if window else keys for keys in (start, chunk_start))
            out[:, prefix_column(index)] = np.where(sharded, 2 * chunk_prefix, prefix * share)
        return out


def policy_tokens(columns: SliceColumns, policy: NDArray[np.int8]) -> NDArray[np.float64]:
    """Tokens of every pack on one rank by activation policy; float64[num_packs, number of policies]."""
    pack = columns.pack_of_slice()
    tokens = columns.slice_tokens() / columns.cp
    sums = np.bincount(
        pack * len(POLICIES) + policy[columns.doc], weights=tokens, minlength=columns.num_packs * len(POLICIES)
    )
    return sums.astype(np.float64, copy=False).reshape(columns.num_packs, len(POLICIES))


def weighted(features: NDArray[np.float64], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """`features @ matrix`, summed in the order of the features: every machine gives the same bits, as the core does."""
    total = features[:, :1] * matrix[0]
    for feature in range(1, len(matrix)):
        total += features[:, feature, None] * matrix[feature]
    return total


def num_columns(num_windows: int) -> int:
    return pairs_column(num_windows)


def pairs_column(window_index: int) -> int:
    """Of a window's pairs."""
    return 3 + 2 * window_index


def prefix_column(window_index: int) -> int:
    """Of a window's prefix tokens."""
    return 4 + 2 * window_index
