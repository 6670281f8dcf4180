"""Seconds of one slice in plain Python, the same bits as of the native core."""

from evenload.types.columns import SliceColumns, WorkCurve


def prefix_pairs(num_tokens: int, window: int) -> int:
    """(query, key) pairs of the first `num_tokens` tokens under causal attention; window 0 = full."""
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


def slice_works_s(work: WorkCurve, columns: SliceColumns) -> list[float]:
    return [slice_work_s(work, *edges) for edges in zip(columns.start.tolist(), columns.stop.tolist(), strict=True)]
