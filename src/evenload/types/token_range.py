"""`Range`: tokens of one document, the unit in which rows of a pack are named."""

from collections.abc import Iterable
from typing import NamedTuple


class Range(NamedTuple):
    """Tokens `[start, stop)` of a document; a `Slice` without what a plan says about it."""

    doc_id: int
    start: int
    stop: int


def divide_ranges(ranges: Iterable[Range], first_rows: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Ranges of the first rows, and of the others; a range that lies in both is cut."""
    first: list[Range] = []
    second: list[Range] = []
    left = first_rows
    for r in ranges:
        edge = min(r.stop, r.start + max(0, left))
        left -= r.stop - r.start
        if edge > r.start:
            first.append(Range(r.doc_id, r.start, edge))
        if edge < r.stop:
            second.append(Range(r.doc_id, edge, r.stop))
    return tuple(first), tuple(second)
