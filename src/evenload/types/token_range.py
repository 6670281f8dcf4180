"""`Range`: tokens of one document, the unit in which rows of a pack are named."""

from typing import NamedTuple


class Range(NamedTuple):
    """Tokens `[start, stop)` of a document; a `Slice` without what a plan says about it."""

    doc_id: int
    start: int
    stop: int
