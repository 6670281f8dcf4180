"""Seconds of one slice in plain Python, the same bits as of the native core."""

from evenload.types.columns import SliceColumns, WorkCurve
from evenload.types.tree_columns import TreeColumns


def prefix_pairs(num_tokens: int, window: int) -> int:
    """(query, key) pairs of the first `num_tokens` tokens under causal attention; window 0 = full."""
    if window < 0:
        whole, rest = divmod(num_tokens, -window)
        return whole * (-window * (1 - window) // 2) + rest * (rest + 1) // 2
    if window == 0 or num_tokens <= window:
        return num_tokens * (num_tokens + 1) // 2
    return window * (window + 1) // 2 + (num_tokens - window) * window


def slice_work_s(work: WorkCurve, start: int, stop: int) -> float:
    """Seconds of the slice `[start, stop)`; 0 for an empty one."""
    if stop == start:
        return 0.0
    seconds = work.linear_s * (stop - start)
    for coef, window in work.attention_s:
        seconds = seconds + coef * (prefix_pairs(stop, window) - prefix_pairs(start, window))
    return seconds + work.slice_s


def pieces_of(trees: TreeColumns, document: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Pieces of the rows `[start, stop)` as positions; of a plain document the rows themselves."""
    if not trees.has_any:
        return [(start, stop)] if start < stop else []
    lo, count = int(trees.first[document]), int(trees.count[document])
    edges = (trees.start[lo : lo + count + 1] - trees.start[lo]).tolist()
    found = []
    for at in range(count):
        first, last = max(start, edges[at]), min(stop, edges[at + 1])
        if first < last:
            shift = int(trees.depth[lo + at]) - edges[at]
            found.append((first + shift, last + shift))
    return found


def rows_work_s(work: WorkCurve, trees: TreeColumns, document: int, start: int, stop: int) -> float:
    """Seconds of rows of a document that may be a tree; a piece costs what a slice does."""
    if stop == start:
        return 0.0
    pieces = pieces_of(trees, document, start, stop)
    seconds = work.linear_s * (stop - start)
    for coef, window in work.attention_s:
        seconds = seconds + coef * sum(
            prefix_pairs(last, window) - prefix_pairs(first, window) for first, last in pieces
        )
    return seconds + work.slice_s * len(pieces)


def slice_works_s(work: WorkCurve, columns: SliceColumns) -> list[float]:
    return [slice_work_s(work, *edges) for edges in zip(columns.start.tolist(), columns.stop.tolist(), strict=True)]
