"""Pack plan + tokens → the arrays that a stage runs: ids, targets, positions and cumulative lengths.

Slices of a pack stand one after the other. Queries of slice i are `[cu_seqlens_q[i], cu_seqlens_q[i+1])`; its keys are
tokens `[0, stop)` of its document, so `cu_seqlens_k` adds up the stops. The target of a token is the next token of its
document, also where a cut lies between them; -100 at a document's last token and at padding.

Example, document 7 = [5 6 7 8 9] cut at 3, and document 8 = [1 2] in the second pack:

    pack 0: ids 5 6 7        targets 6 7 8            positions 0 1 2        q 0 3      k 0 3
    pack 1: ids 8 9 1 2      targets 9 -100 2 -100    positions 3 4 0 1      q 0 2 4    k 0 5 7

A tree of sequences that share prefixes has positions along its paths, and of its rows none, one or several predict a
token: `LabelEdges`. Its keys lie as `types.tree` says, so `cu_seqlens_k` does not describe them.

Price: one indexed copy of every token and target (about 10 ns a token), and about 1 µs a slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.data.blocks import TokenTable, as_token_table
from evenload.data.encoders import IGNORE_INDEX
from evenload.errors import InvalidPlanError
from evenload.types.columns import offsets_of
from evenload.types.document import MicroPack
from evenload.types.tree import Segment, TreeShape

PADDING_TOKEN = 0


class LabelEdges(NamedTuple):
    """Holds what a pack with trees is trained to predict: E pairs of a row and a token.

    Args:
        rows: int64[E], ascending; a row before a branch comes once for every child with a label.
        targets: int64[E], token ids.
        counts: int64[E], how often the loss of each counts.
    """

    rows: NDArray[np.int64]
    targets: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class PackBatch:
    """Holds one pack, ready to run. S slices, T tokens with padding.

    Args:
        doc_ids, starts, stops: int64[S]; token range of each slice, its padding included.
        token_ids, targets: int64[T]; padding is 0, no loss -100.
        positions: int64[T] within the document, of a tree along its path; padding continues them.
        edges: of a pack with trees, or with labels that count several times, in place of the targets.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32[S + 1], from 0.
        max_seqlen_q, max_seqlen_k: host integers, so that no kernel has to wait for the device.
    """

    doc_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64]
    num_padding_tokens: int
    edges: LabelEdges | None = None

    def __post_init__(self) -> None:
        if (keys := int(self.stops.sum())) > np.iinfo(np.int32).max:
            raise InvalidPlanError(f"a pack has {keys} keys, more than cu_seqlens (int32) can hold; use smaller packs")

    @cached_property
    def cu_seqlens_q(self) -> NDArray[np.int32]:
        return offsets_of(self.stops - self.starts).astype(np.int32)

    @cached_property
    def cu_seqlens_k(self) -> NDArray[np.int32]:
        return offsets_of(self.stops).astype(np.int32)

    @property
    def max_seqlen_q(self) -> int:
        return int((self.stops - self.starts).max())

    @property
    def max_seqlen_k(self) -> int:
        return int(self.stops.max())

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def collate_pack(
    pack: MicroPack, documents: Mapping[int, NDArray[np.int32]], trees: Mapping[int, TreeShape] = MappingProxyType({})
) -> PackBatch:
    """Return the arrays of one pack, of either direction; an `InvalidPlanError` where it does not fit the documents.

    Args:
        documents: of every document in the pack the tokens, int32[num_tokens]; as a `TokenTable`, the labels too.
        trees: the shapes of those documents that are trees.
    """
    table = as_token_table(documents)
    num_slices = len(pack.slices)
    if not num_slices:
        raise InvalidPlanError(f"{pack.direction} pack {pack.index} has no slices")
    doc_ids = [piece.doc_id for piece in pack.slices]
    starts = np.fromiter((piece.start for piece in pack.slices), np.int64, num_slices)
    real_stops = np.fromiter((piece.stop for piece in pack.slices), np.int64, num_slices)
    stops = starts + pack.pad_to if pack.pad_to else real_stops
    rows = table.rows(doc_ids)
    sizes = np.where(rows < 0, 0, table.edges[rows + 1] - table.edges[rows])
    wrong = np.flatnonzero(~((starts >= 0) & (starts < real_stops) & (real_stops <= sizes) & (real_stops <= stops)))
    if len(wrong):
        piece, have = pack.slices[wrong[0]], "no tokens" if rows[wrong[0]] < 0 else f"{sizes[wrong[0]]} tokens"
        raise InvalidPlanError(
            f"{pack.direction} pack {pack.index} holds tokens [{piece.start}, {piece.stop}) of document "
            f"{piece.doc_id} padded to {pack.pad_to}, but the document has {have}; the plan was made for another batch"
        )
    token_ids, targets, positions = collate_ranges(doc_ids, starts, stops, table, real_stops)
    edges = None
    # Of sequences that are equal, a document without branches has labels that count several times, too.
    counts_again = table.label_counts is not None and any((table.label_counts_of(one) != 1).any() for one in doc_ids)
    if counts_again or not trees.keys().isdisjoint(doc_ids):
        edges = _of_trees(pack, table, trees, targets, positions)
    rows = {"token_ids": token_ids, "targets": targets, "positions": positions, "edges": edges}
    slices = {"doc_ids": np.array(doc_ids, np.int64), "starts": starts, "stops": stops}
    return PackBatch(**slices, **rows, num_padding_tokens=int((stops - real_stops).sum()))


def _of_trees(
    pack: MicroPack,
    table: TokenTable,
    trees: Mapping[int, TreeShape],
    targets: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> LabelEdges:
    """Set the positions of rows, and no targets; return what the rows predict, each as often as it counts."""
    found = []
    row = 0
    for doc_id, start, stop in ((piece.doc_id, piece.start, piece.stop) for piece in pack.slices):
        labels, counts = table.labels_of(doc_id), table.label_counts_of(doc_id)
        shape = trees.get(doc_id) or TreeShape((Segment(len(labels), -1),))
        mine = slice(row, row + stop - start)
        positions[mine], targets[mine] = shape.positions(start, stop), IGNORE_INDEX
        before, tokens = shape.edges(start, stop)
        has_label = (labels[tokens] >= 0) & (counts[tokens] != 0)
        before, tokens = before[has_label], tokens[has_label]
        found.append((before - start + row, labels[tokens], counts[tokens]))
        row += pack.pad_to or stop - start
    rows, tokens, counts = (np.concatenate(column).astype(np.int64) for column in zip(*found, strict=True))
    return LabelEdges(rows, tokens, counts)


def collate_ranges(
    doc_ids: Sequence[int],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    documents: Mapping[int, NDArray[np.int32]],
    real_stops: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return token ids, targets and positions of token ranges, one after the other; int64[rows] each. The padding of
    each begins at `real_stops`, int64[n], by default at the end of its document; raises as `collate_pack`."""
    table = as_token_table(documents)
    rows = table.rows(doc_ids)
    if len(rows) and rows.min() < 0:
        missing = doc_ids[int(np.argmin(rows))]
        raise InvalidPlanError(f"document {missing} has no tokens here; the plan was made for another batch")
    lengths = stops - starts
    edges, sizes = offsets_of(lengths), table.edges[rows + 1] - table.edges[rows]
    positions = np.arange(edges[-1]) + np.repeat(starts - edges[:-1], lengths)
    source = positions + np.repeat(table.edges[rows], lengths)
    # Rows without a token are padding; a document's last token has no next one.
    real = np.minimum(stops, sizes if real_stops is None else real_stops)
    begins = edges[:-1] + np.maximum(real - starts, 0)
    padded = np.flatnonzero(begins < edges[1:]).tolist()
    padding = np.concatenate([np.zeros(0, np.int64), *(np.arange(begins[at], edges[at + 1]) for at in padded)])
    is_last = (starts < sizes) & (real == sizes)
    unlabelled = np.concatenate([padding, (edges[:-1] + sizes - starts - 1)[is_last]])
    source[padding] = 0
    token_ids = table.tokens[source].astype(np.int64)
    # The target of a token is the next token's label.
    source += 1
    source[unlabelled] = 0
    targets = (table.tokens if table.labels is None else table.labels)[source].astype(np.int64)
    token_ids[padding] = PADDING_TOKEN
    targets[unlabelled] = IGNORE_INDEX
    return token_ids, targets, positions
