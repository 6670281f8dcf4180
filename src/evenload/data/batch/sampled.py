"""`SampledDocuments`: documents in the order in which they were sampled, as columns that point into open blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.data.batch.state import DocumentPlace
from evenload.data.ledger import Tally
from evenload.data.reading.block import BlockHeader, DocumentBlock, StreamKey


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
        """Where its `row`-th document can be read again."""
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

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def tally(self) -> Tally:
        return Tally(documents=len(self.lengths), tokens=self.num_tokens)


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


def first_sampled(sampled: SampledDocuments, count: int) -> SampledDocuments:
    """The first `count` of them."""
    return SampledDocuments(
        sampled.blocks,
        sampled.block_of[:count],
        sampled.rows[:count],
        sampled.lengths[:count],
        sampled.num_labels[:count],
    )
