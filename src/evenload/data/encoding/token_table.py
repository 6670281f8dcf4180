"""`TokenTable`: tokens and labels of many documents in two flat arrays.

Blocks, batches and what ranks send each other are all runs of such arrays, so documents are cut out of them only where
a pack needs them. As a mapping it gives each document's tokens by its id.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenload.data.encoding.document_encoder import IGNORE_INDEX


@dataclass(frozen=True, eq=False)
class TokenTable(Mapping[int, NDArray[np.int32]]):
    """D documents of N tokens in all.

    Args:
        doc_ids: int64[D], each once, in any order.
        edges: int64[D + 1]; document i has tokens `[edges[i], edges[i + 1])`.
        tokens: int32[N].
        labels: int32[N], the id to be predicted at each token (not shifted), -100 = no loss, always so at the first
            token of a document; None = every token but the first is its own label.
    """

    doc_ids: NDArray[np.int64]
    edges: NDArray[np.int64]
    tokens: NDArray[np.int32]
    labels: NDArray[np.int32] | None = None
    _rows: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rows", {doc_id: row for row, doc_id in enumerate(self.doc_ids.tolist())})

    def __len__(self) -> int:
        return len(self.doc_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __contains__(self, doc_id: object) -> bool:
        # `Mapping`'s own cuts the tokens out, or raises and catches: a microsecond a question.
        return doc_id in self._rows

    def __getitem__(self, doc_id: int) -> NDArray[np.int32]:
        row = self._rows[doc_id]
        return self.tokens[self.edges[row] : self.edges[row + 1]]

    def labels_of(self, doc_id: int) -> NDArray[np.int32]:
        """int32[num_tokens]: a document's labels, -100 at its first token."""
        row = self._rows[doc_id]
        start, stop = self.edges[row], self.edges[row + 1]
        return span_labels(self.tokens, self.labels, int(start), int(stop))

    def rows(self, doc_ids: Sequence[int]) -> NDArray[np.int64]:
        """int64[n]: where the documents stand; -1 for one that is not here."""
        find = self._rows.get
        return np.fromiter((find(doc_id, -1) for doc_id in doc_ids), np.int64, len(doc_ids))

    def select(self, doc_ids: Sequence[int]) -> "TokenTable":
        """These documents in this order; a `KeyError` where one is not here."""
        rows = self.rows(doc_ids)
        if len(rows) and rows.min() < 0:
            raise KeyError(int(np.asarray(doc_ids)[rows < 0][0]))
        spans = list(zip(self.edges[rows].tolist(), self.edges[rows + 1].tolist(), strict=True))
        own = [(self.tokens, self.labels, *span) for span in spans]
        return TokenTable(np.asarray(doc_ids, dtype=np.int64), *flat_spans(own))


Span = tuple[NDArray[np.int32], NDArray[np.int32] | None, int, int]
"""Tokens `[start, stop)` of a flat array, and its labels."""


def flat_spans(spans: Sequence[Span]) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32] | None]:
    """Edges, tokens and labels, as of `TokenTable`, of documents that each stand in one span, copied once."""
    lengths = np.fromiter((stop - start for _, _, start, stop in spans), np.int64, len(spans))
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    labels = None
    if any(span[1] is not None for span in spans):
        labels = _join([span_labels(*span) for span in spans])
    return edges, _join([tokens[start:stop] for tokens, _, start, stop in spans]), labels


def join_tables(tables: Sequence[TokenTable]) -> TokenTable:
    """All documents of the tables, which have none in common, copied once."""
    if len(tables) == 1:
        return tables[0]
    starts = np.cumsum([0, *(len(table.tokens) for table in tables)])
    edges = [table.edges[1:] + start for table, start in zip(tables, starts[:-1], strict=True)]
    labels = None
    if any(table.labels is not None for table in tables):
        labels = _join([all_labels(table) for table in tables])
    return TokenTable(
        np.concatenate([np.zeros(0, np.int64), *(table.doc_ids for table in tables)]),
        np.concatenate([np.zeros(1, np.int64), *edges]),
        _join([table.tokens for table in tables]),
        labels,
    )


def table_of(documents: Mapping[int, NDArray[np.int32]]) -> TokenTable:
    """A table of documents given one by one, every token but the first a label."""
    if isinstance(documents, TokenTable):
        return documents
    doc_ids = np.fromiter(documents, np.int64, len(documents))
    spans = [(content, None, 0, len(content)) for content in documents.values()]
    return TokenTable(doc_ids, *flat_spans(spans))


def span_labels(
    tokens: NDArray[np.int32], labels: NDArray[np.int32] | None, start: int, stop: int
) -> NDArray[np.int32]:
    """int32[stop - start]: labels of one document in a span, also where they are its tokens."""
    if labels is not None:
        return labels[start:stop]
    written = tokens[start:stop].copy()
    written[:1] = IGNORE_INDEX
    return written


def all_labels(table: TokenTable) -> NDArray[np.int32]:
    """int32[N]: labels of all documents, also where they are the tokens."""
    if table.labels is not None:
        return table.labels
    labels = table.tokens.copy()
    labels[table.edges[:-1][np.diff(table.edges) > 0]] = IGNORE_INDEX
    return labels


def _join(parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts).astype(np.int32, copy=False) if parts else np.zeros(0, np.int32)
