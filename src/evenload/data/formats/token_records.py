"""Documents that lie one after the other in an array of token ids, as records: what both kinds of token files share.

Format "memmap" is Megatron's `.bin` with its `.idx` (`megatron_tokens`), or a one-dimensional `.npy` (`npy_tokens`).
Local files are mapped into memory, remote ones read by ranges. Ids become int32 in runs of about 4 MB and documents are
slices of a run; int32 files are not copied at all. Price: one run in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.data.formats.columns import beyond_int32, narrow_ids
from evenload.data.formats.mapped import NumberArray
from evenload.data.formats.record import Record, make_records

CHUNK_BYTES = 1 << 22
"""Documents are read and converted in runs of about so many bytes, or one by one where they are longer."""

CHUNK_DOCUMENTS = 4096


def token_records(ids: NDArray[Any], edges: Sequence[int], offsets: Sequence[int]) -> Iterator[Record]:
    """One record per document, its ids a slice of `ids` as int32 (not copied where they are).

    Args:
        ids: numbers of any type.
        edges: document i has ids `[edges[i], edges[i + 1])`.
        offsets: of every document, and behind the last.
    """
    tokens, fits = narrow_ids(ids)
    spans = list(pairwise(edges))
    problems = {}
    if fits is not None:
        wrong = (index for index, (start, stop) in enumerate(spans) if not fits[start:stop].all())
        problems = {index: beyond_int32(ids[slice(*spans[index])]) for index in wrong}
    return make_records(offsets, [(tokens[start:stop],) for start, stop in spans], problems)


def records_by_edges(
    array: NumberArray, documents: range, edges_of: Callable[[int, int], NDArray[np.int64]]
) -> Iterator[Record]:
    """The documents, whose offsets are their numbers; read together as many as `CHUNK_BYTES` hold, at least one.

    Args:
        edges_of: edges int64[stop - start + 1] in ids, ascending, of documents `[start, stop)`.
    """
    document = documents.start
    while document < documents.stop:
        edges = edges_of(document, min(documents.stop, document + CHUNK_DOCUMENTS))
        most = edges[0] + CHUNK_BYTES // array.dtype.itemsize
        count = max(1, int(np.searchsorted(edges, most, side="right")) - 1)
        ids = array.read(int(edges[0]), int(edges[count]))
        relative = (edges[: count + 1] - edges[0]).tolist()
        yield from token_records(ids, relative, range(document, document + count + 1))
        document += count
        array.ranges.release(ids.nbytes)
