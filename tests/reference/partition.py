"""Packs of nearly equal work: documents in a given order, cut exactly where the work is spent (SlimPack §4.1).

All work lies on one line, document after document; a pack ends at the boundary nearest to its target: before the
document that crosses it, after it, or at a cut, found by binary search because work is monotone. The next target is
`position + remaining work / packs left`, so rounding never drifts and the error of an indivisible document is spread
over all later packs. When the token cap closes a pack early, the packs left are recounted so that none is asked for
more than the first share. A slice's constant is on the line once per document. O(n + packs log(longest document)).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.types.columns import SliceColumns, WorkCurve
from evenload.types.tree_columns import NO_TREES, TreeColumns
from reference.slice_work import rows_work_s


def partition_by_work(
    num_tokens: NDArray[np.int64],
    order: NDArray[np.int32],
    work: WorkCurve,
    num_packs: int,
    *,
    align: int = 1,
    min_slice_tokens: int = 1,
    max_pack_tokens: int | None = None,
    last_first: bool = False,
    trees: TreeColumns = NO_TREES,
) -> SliceColumns:
    """Fill packs of equal work in document order (int32 indices); at most `num_packs` unless the token cap forces more.

    Cuts lie on multiples of `align`; both pieces of one have `min_slice_tokens`. `last_first` takes a document's slices
    from its end (FILO, backward packs). Raises `ConfigError` for a cap so small that no legal cut makes such packs."""
    lengths = np.ascontiguousarray(num_tokens, dtype=np.int64)
    sequence = np.ascontiguousarray(order, dtype=np.int32)
    cap = np.iinfo(np.int64).max if max_pack_tokens is None else max_pack_tokens
    if lengths[sequence].max(initial=0) > cap and cap < 2 * min_slice_tokens + align - 2:
        raise ConfigError(f"partition: no legal cut makes packs of {cap} tokens")
    rule = _CutRule(work, trees, align, min_slice_tokens, last_first)
    return SliceColumns.from_ranges(_fill(lengths.tolist(), sequence.tolist(), rule, num_packs, int(cap)))


@dataclass(frozen=True)
class _CutRule:
    work: WorkCurve
    trees: TreeColumns
    align: int
    min_slice_tokens: int
    last_first: bool

    def dealt_s(self, document: int, num_tokens: int, taken: int) -> float:
        """Work of the first `taken` tokens in dealing order; monotone in `taken`."""
        start, stop = (num_tokens - taken, num_tokens) if self.last_first else (0, taken)
        return rows_work_s(self.work, self.trees, document, start, stop)

    def nearest(
        self, document: int, num_tokens: int, taken: int, room: int, base_s: float, target_s: float, forced: bool
    ) -> int:
        """Tokens dealt out after this pack: no more, all, or a legal cut, whichever lies nearest the target.

        On a tie the one named first, so a document is never cut for nothing; of two cuts the smaller.
        `forced`: "no more" is not allowed, because an empty pack could never take the document whole.
        """
        best, distance = taken, math.inf
        if not forced:
            distance = abs(base_s + self.dealt_s(document, num_tokens, taken) - target_s)
        candidates = [num_tokens] if num_tokens - taken <= room else []
        first = taken + self.min_slice_tokens
        first += ((num_tokens if self.last_first else 0) - first) % self.align
        last = min(num_tokens - self.min_slice_tokens, taken + room)
        if first <= last:
            low, high = 0, (last - first) // self.align  # first step at or beyond the target, else the last step
            while low < high:
                middle = (low + high) // 2
                if base_s + self.dealt_s(document, num_tokens, first + middle * self.align) >= target_s:
                    high = middle
                else:
                    low = middle + 1
            candidates += [first + step * self.align for step in (low - 1, low) if step >= 0]
        for candidate in candidates:
            away = abs(base_s + self.dealt_s(document, num_tokens, candidate) - target_s)
            if away < distance:
                best, distance = candidate, away
        return best


def _fill(
    num_tokens: list[int], order: list[int], rule: _CutRule, num_packs: int, cap: int
) -> list[list[tuple[int, int, int]]]:
    packs: list[list[tuple[int, int, int]]] = [[]]
    total_s = 0.0
    for index in order:
        total_s += rows_work_s(rule.work, rule.trees, index, 0, num_tokens[index])
    share_s = total_s / num_packs
    packs_left = num_packs
    target_s = total_s if packs_left == 1 else share_s
    room, base_s = cap, 0.0
    for index in order:
        n = num_tokens[index]
        end_s = base_s + rows_work_s(rule.work, rule.trees, index, 0, n)
        taken = 0
        while taken < n:
            fits = n - taken <= room
            if fits and end_s <= target_s:
                upto = n
            else:
                upto = rule.nearest(index, n, taken, room, base_s, target_s, forced=not fits and room == cap)
            # The cap, not the target, closes the pack when even a full pack ends before the target.
            capped = not fits and base_s + rule.dealt_s(index, n, taken + room) < target_s
            if upto > taken:
                packs[-1].append((index, *((n - upto, n - taken) if rule.last_first else (taken, upto))))
                room -= upto - taken
            taken = upto
            at_s = base_s + rule.dealt_s(index, n, taken)
            # The last pack takes everything that the cap lets it take.
            if taken < n or (at_s >= target_s and packs_left > 1):
                if packs[-1]:
                    packs.append([])
                room = cap
                packs_left = max(packs_left - 1, 1)
                if capped:
                    # 1e-9: rounding in the division must not ask for one pack more.
                    packs_left = max(packs_left, math.ceil((total_s - at_s) / share_s - 1e-9))
                target_s = total_s if packs_left == 1 else at_s + (total_s - at_s) / packs_left
        base_s = end_s
    return packs if packs[-1] else packs[:-1]
