"""Symmetric, chain-free slices: backward packs are the forward packs, slices reversed inside documents.

With the target τ = total work / m a document of work w gives floor(w/τ) *slim* packs of exactly τ, one slice each, and
a rest below τ; rests and whole short documents go by LPT into the remaining packs. Forward runs a pack of rests after
all slim packs of its documents; backward runs it before them:

    forward   A0 A1 [A2 c d] B0 [B1 e] [f g] [h i]
    backward  [A2 c d] A1 A0 [B1 e] B0 [f g] [h i]

So no document waits for the middle of another (a *chain*). Work is forward + backward time: the same slices serve both
directions. O(n log n).
"""

import numpy as np
from numpy.typing import NDArray

from evenload.types.columns import SliceColumns, WorkCurve, causal_pairs
from evenload.types.tree_columns import NO_TREES, TreeColumns
from reference.bin_packing import longest_first
from reference.slice_work import pieces_of, prefix_pairs


def chain_free_columns(
    num_tokens: NDArray[np.int64],
    curves: tuple[WorkCurve, ...],
    num_packs: int,
    *,
    align: int = 1,
    min_slice_tokens: int = 1,
    max_pack_tokens: int | None = None,
    trees: TreeColumns = NO_TREES,
) -> tuple[SliceColumns, SliceColumns] | None:
    """Forward and backward packs of about `num_packs`; None where the token limit cannot be met with that many."""
    everyone = np.arange(len(num_tokens))
    work = work_below(curves, num_tokens, trees, everyone)
    target = sum_in_order(work) / num_packs
    order = np.argsort(-work, kind="stable")
    # The slack keeps rounding from turning a document of exactly k targets into k - 1 packs and a sliver.
    slim_count = np.floor(work / target * (1 + 1e-9)).astype(np.int64)
    cuts = _cuts(num_tokens, order, slim_count, target, curves, align, min_slice_tokens, trees)

    items_start = np.array([cuts[d][-1] if d in cuts else 0 for d in range(len(num_tokens))], dtype=np.int64)
    rest_tokens = num_tokens - items_start
    rests = np.flatnonzero(rest_tokens)
    rest_work = work - work_below(curves, items_start, trees, everyone)
    slim_packs = sum(len(edges) - 1 for edges in cuts.values())
    groups: list[list[int]] = []
    if len(rests):
        sizes = rest_tokens[rests]
        if max_pack_tokens is not None and sizes.max() > max_pack_tokens:
            return None
        room = max(1, num_packs - slim_packs)
        groups = longest_first(
            rest_work[rests], room, num_tokens=None if max_pack_tokens is None else sizes, capacity=max_pack_tokens
        )
        groups = [rests[group].tolist() for group in groups if group]
    if max_pack_tokens is not None and any(np.diff(edges).max() > max_pack_tokens for edges in cuts.values()):
        return None
    return _columns(num_tokens, cuts, groups, work)


def work_below(
    curves: tuple[WorkCurve, ...], tokens: NDArray, trees: TreeColumns = NO_TREES, document: NDArray | None = None
) -> NDArray[np.float64]:
    """Work of the tokens `[0, tokens)` of documents summed over curves; non-decreasing in tokens."""
    rows = np.asarray(tokens)
    tokens = np.asarray(tokens, np.float64)
    zero = np.zeros_like(tokens)
    total = zero.copy()
    of_tree = (
        [pieces_of(trees, doc, 0, stop) for doc, stop in zip(document, rows, strict=True)] if trees.has_any else []
    )
    for curve in curves:
        pieces = np.array([len(one) for one in of_tree]) if trees.has_any else tokens > 0
        total += curve.linear_s * tokens + curve.slice_s * pieces
        for coefficient, window in curve.attention_s:
            pairs = causal_pairs(zero, tokens, window)
            if trees.has_any:
                counts = [sum(prefix_pairs(b, window) - prefix_pairs(a, window) for a, b in one) for one in of_tree]
                pairs = np.array(counts, np.float64)
            total += coefficient * pairs
    return total


def sum_in_order(values: NDArray[np.float64]) -> float:
    """One addition after the other, as the core adds (numpy's own sum adds in pairs)."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


def _cuts(
    num_tokens: NDArray[np.int64],
    order: NDArray[np.int64],
    slim_count: NDArray[np.int64],
    target: float,
    curves: tuple[WorkCurve, ...],
    align: int,
    min_slice_tokens: int,
    trees: TreeColumns,
) -> dict[int, NDArray[np.int64]]:
    """Per cut document its slim edges `0 = e0 < e1 < …`, longest work first; the rest starts at the last edge."""
    documents = order[slim_count[order] > 0]
    if not len(documents):
        return {}
    counts = slim_count[documents]
    owner = np.repeat(documents, counts)
    position = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    wanted = (position + 1).astype(np.float64) * target
    reached = np.minimum(_tokens_of_work(curves, wanted, int(num_tokens.max())), num_tokens[owner])
    for at in np.flatnonzero(trees.count[owner] > 1) if trees.has_any else ():
        reached[at] = _rows_of_work(curves, trees, owner[at : at + 1], int(num_tokens[owner[at]]), float(wanted[at]))
    edges = np.minimum((reached + align // 2) // align * align, num_tokens[owner])
    cuts: dict[int, NDArray[np.int64]] = {}
    for document, inner in zip(documents.tolist(), np.split(edges, np.cumsum(counts)[:-1]), strict=True):
        kept = [0]
        length = int(num_tokens[document])
        for edge in inner.tolist():
            # Rounding may make neighbours meet, and a piece must not be shorter than allowed.
            if edge - kept[-1] >= min_slice_tokens and (edge == length or length - edge >= min_slice_tokens):
                kept.append(edge)
        if len(kept) > 1:
            cuts[document] = np.array(kept, dtype=np.int64)
    return cuts


def _tokens_of_work(curves: tuple[WorkCurve, ...], wanted: NDArray[np.float64], longest: int) -> NDArray[np.int64]:
    """Fewest tokens `[0, n)` whose work is at least wanted (to rounding), at most `longest`; int64."""
    terms = [term for curve in curves for term in curve.attention_s]
    if any(window for _, window in terms):
        low, high = np.zeros(len(wanted), np.int64), np.full(len(wanted), longest, np.int64)
        for _ in range(longest.bit_length() + 1):
            middle = (low + high) // 2
            below = work_below(curves, middle) < wanted
            low, high = np.where(below, np.minimum(middle + 1, high), low), np.where(below, high, middle)
        return high
    # Without windows the work is a·n² + b·n + c; the root in the form that stays exact for a = 0.
    a = sum_in_order(np.array([coefficient for coefficient, _ in terms])) / 2
    b = sum_in_order(np.array([curve.linear_s for curve in curves])) + a
    above = np.maximum(wanted - sum_in_order(np.array([curve.slice_s for curve in curves])), 0.0)
    return np.minimum(np.ceil(2 * above / (b + np.sqrt(b * b + 4 * a * above))), longest).astype(np.int64)


def _rows_of_work(
    curves: tuple[WorkCurve, ...], trees: TreeColumns, document: NDArray[np.int64], num_tokens: int, wanted: float
) -> int:
    """Fewest rows of a tree whose work is at least wanted, else all."""
    low, high = 0, num_tokens
    while low < high:
        middle = (low + high) // 2
        if work_below(curves, np.array([middle]), trees, document)[0] < wanted:
            low = middle + 1
        else:
            high = middle
    return high


def _columns(
    num_tokens: NDArray[np.int64],
    cuts: dict[int, NDArray[np.int64]],
    groups: list[list[int]],
    work: NDArray[np.float64],
) -> tuple[SliceColumns, SliceColumns]:
    """Lay slim packs and groups out in both directions; groups with rests follow their documents' order."""
    rank = {document: position for position, document in enumerate(cuts)}
    whole = len(rank)
    groups = [sorted(group, key=lambda d: (rank.get(d, whole), -work[d], d)) for group in groups]
    groups.sort(key=lambda group: (rank.get(group[0], whole), -sum_in_order(work[group]), group[0]))
    forward: list[list[tuple[int, int, int]]] = []
    backward: list[list[tuple[int, int, int]]] = []
    done: set[int] = set()
    for document, edges in cuts.items():
        if edges[-1] == num_tokens[document]:  # no rest, so no group runs it
            slim = _slim_packs(document, edges)
            forward += slim
            backward += slim[::-1]
            done.add(document)
    for group in groups:
        slims = [_slim_packs(d, cuts[d]) for d in group if d in cuts and d not in done]
        pack = [(d, int(cuts[d][-1]) if d in cuts else 0, int(num_tokens[d])) for d in group]
        for slim in slims:
            forward += slim
        forward.append(pack)
        backward.append(pack)
        for slim in slims:
            backward += slim[::-1]
    return SliceColumns.from_ranges(forward), SliceColumns.from_ranges(backward)


def _slim_packs(document: int, edges: NDArray[np.int64]) -> list[list[tuple[int, int, int]]]:
    pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return [[(document, start, stop)] for start, stop in pairs]
