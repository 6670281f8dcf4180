"""`GlobalBatch`: the documents of one optimizer step, of which this rank has read some.

They are sampled as columns that point into open blocks (`SampledDocuments`), in the order in which they come.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenload.data.batch.state import DeferredDocument, DocumentPlace
from evenload.data.encoding.token_table import Span, TokenTable, flat_spans, join_tables
from evenload.data.ledger import Tally
from evenload.data.reading.block import BlockHeader, DocumentBlock, StreamKey
from evenload.types.document import Document


@dataclass(frozen=True, eq=False, slots=True)
class OpenBlock:
    """A block that documents are sampled from.

    Args:
        owner: rank that reads the stream.
        lengths, num_labels: int32[num_documents].
        block: with tokens, on the owner; None elsewhere.
    """

    key: StreamKey
    epoch: int
    owner: int
    header: BlockHeader
    lengths: NDArray[np.int32]
    num_labels: NDArray[np.int32]
    block: DocumentBlock | None

    def place(self, row: int) -> DocumentPlace:
        return DocumentPlace(
            part=self.key.part,
            stream=self.key.stream,
            epoch=self.epoch,
            cursor=self.header.cursor,
            index=row,
            checksum=self.header.checksum,
        )


@dataclass(frozen=True, eq=False, slots=True)
class SampledDocuments:
    """Documents sampled one after the other.

    Args:
        blocks: that they come from; of each, consecutive rows.
        block_of, rows: int64[n], the block and the document in it; lengths, num_labels: int32[n].
    """

    blocks: tuple[OpenBlock, ...]
    block_of: NDArray[np.int64]
    rows: NDArray[np.int64]
    lengths: NDArray[np.int32]
    num_labels: NDArray[np.int32]

    def tally(self) -> Tally:
        return Tally(documents=len(self.lengths), tokens=int(self.lengths.sum()))


def join_sampled(runs: Sequence[SampledDocuments]) -> SampledDocuments:
    """Several runs as one; a block that comes several times stays one."""
    blocks = {id(block): block for run in runs for block in run.blocks}
    index = {key: at for at, key in enumerate(blocks)}
    block_of = [np.array([index[id(block)] for block in run.blocks], np.int64)[run.block_of] for run in runs]
    return SampledDocuments(
        tuple(blocks.values()),
        np.concatenate([np.zeros(0, np.int64), *block_of]),
        np.concatenate([np.zeros(0, np.int64), *(run.rows for run in runs)]),
        np.concatenate([np.zeros(0, np.int32), *(run.lengths for run in runs)]),
        np.concatenate([np.zeros(0, np.int32), *(run.num_labels for run in runs)]),
    )


@dataclass(frozen=True, eq=False)
class Deferral:
    """A document that a plan deferred; its tokens on the rank that owns its stream."""

    saved: DeferredDocument
    owner: int
    span: Span | None


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalBatch:
    """The documents of one optimizer step.

    Args:
        step: 0-based number of the batch.
        epoch: of the new documents.
        documents: new in this batch, in stream order.
        tokens: of those of `documents` and `carried` that this rank has read.
        sampled: where the new documents come from, in their order.
        has_labels: some document's labels differ from its tokens.
        deferrals: where the documents of `carried` come from.
        is_last: the data has ended and only carried documents are left: the plan must not defer again.
    """

    step: int
    epoch: int
    documents: tuple[Document, ...]
    tokens: TokenTable
    sampled: SampledDocuments
    has_labels: bool = False
    deferrals: Mapping[int, Deferral] = field(default_factory=dict)
    is_last: bool = False

    @property
    def carried(self) -> tuple[Document, ...]:
        """Documents that the plans of earlier steps deferred, oldest first; to be planned with the new ones."""
        return tuple(entry.saved.document for entry in self.deferrals.values())

    def place(self, doc_id: int) -> DocumentPlace:
        if doc_id in self.deferrals:
            return self.deferrals[doc_id].saved.place
        at = doc_id - self.documents[0].doc_id
        return self.sampled.blocks[self.sampled.block_of[at]].place(int(self.sampled.rows[at]))

    def owners(self, doc_ids: Sequence[int]) -> NDArray[np.int64]:
        """int64[n]: the ranks that have read the documents."""
        first = self.documents[0].doc_id if self.documents else 0
        by_block = np.array([block.owner for block in self.sampled.blocks], np.int64)
        own = by_block[self.sampled.block_of] if len(by_block) else by_block
        carried = self.deferrals
        return np.fromiter(
            (carried[d].owner if d in carried else own[d - first] for d in doc_ids), np.int64, len(doc_ids)
        )

    @property
    def num_label_tokens(self) -> int:
        return sum(document.num_label_tokens for document in self.documents)


def own_tokens(sampled: SampledDocuments, first: int, carried: Mapping[int, Deferral]) -> TokenTable:
    """Tokens of the documents that this rank has read. The rows that a batch takes of a block lie side by side."""
    by_block = np.argsort(sampled.block_of, kind="stable")
    edges = np.searchsorted(sampled.block_of[by_block], np.arange(len(sampled.blocks) + 1))
    tables: list[TokenTable] = []
    for index, opened in enumerate(sampled.blocks):
        block, members = opened.block, by_block[edges[index] : edges[index + 1]]
        if block is None or not len(members):
            continue
        start, stop = int(sampled.rows[members[0]]), int(sampled.rows[members[-1]]) + 1
        low, high = block.edges[start], block.edges[stop]
        labels = None if block.labels is None else block.labels[low:high]
        tables.append(TokenTable(first + members, block.edges[start : stop + 1] - low, block.tokens[low:high], labels))
    waiting = [(doc_id, entry.span) for doc_id, entry in carried.items() if entry.span is not None]
    if waiting:
        ids = np.array([doc_id for doc_id, _ in waiting], np.int64)
        tables.append(TokenTable(ids, *flat_spans([span for _, span in waiting])))
    return join_tables(tables)
