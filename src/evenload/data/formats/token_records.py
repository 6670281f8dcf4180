"""Documents that lie one after the other in an array of token ids, as records."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.data.formats.columns import beyond_int32, narrow_ids
from evenload.data.formats.record import Record

CHUNK_BYTES = 1 << 22
"""Documents are read and converted in runs of about so many bytes, or one by one where they are longer."""

CHUNK_DOCUMENTS = 4096

_new_record = Record._make


def token_records(ids: NDArray[Any], edges: Sequence[int], offsets: Sequence[int]) -> Iterator[Record]:
    """One record per document, its ids a slice of `ids` as int32 (not copied where they are).

    Args:
        ids: numbers of any type.
        edges: document i has ids `[edges[i], edges[i + 1])`.
        offsets: of every document, and behind the last.
    """
    tokens, fits = narrow_ids(ids)
    if fits is None:
        values = [(tokens[start:stop],) for start, stop in pairwise(edges)]
        yield from map(_new_record, zip(offsets, offsets[1:], values, repeat("", len(values)), strict=False))
        return
    for index, (start, stop) in enumerate(pairwise(edges)):
        problem = "" if fits[start:stop].all() else beyond_int32(ids[start:stop])
        yield Record(offsets[index], offsets[index + 1], None if problem else (tokens[start:stop],), problem)


def documents_at_once(edges: NDArray[np.int64], item_bytes: int) -> int:
    """How many of the documents with these edges to read together: as many as `CHUNK_BYTES` hold, at least one."""
    return max(1, int(np.searchsorted(edges, edges[0] + CHUNK_BYTES // item_bytes, side="right")) - 1)
