"""`BlockReader`: reads blocks of streams: records → documents within the length limit → shuffled block.

    segment's records ─► encode ─► over-long rule ─► block of documents ─► permuted

A block ends after its number of documents or tokens. The first blocks of a stream are small and double in size, so that
the first batch needs few documents however large the window is. What is dropped on the way is counted in the block.

Asked for the block that follows the last one it read, a reader goes on where it stands; asked for any other, it opens
the source anew at the cursor. Price: every record is read and encoded once; a resume reads the open block of each
stream again. Memory: one block and one chunk of records a stream.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from evenload.data.config import DataConfig
from evenload.data.encoding.document_encoder import IGNORE_INDEX, DocumentEncoder, EncodedDocument
from evenload.data.encoding.token_table import flat_spans
from evenload.data.formats.columns import NeighbourProblem
from evenload.data.formats.record import Record
from evenload.data.ledger import Tally
from evenload.data.reading.block import BlockCursor, BlockHeader, DocumentBlock
from evenload.data.reading.held_out import HELD_OUT, HoldOut
from evenload.data.reading.part_files import PartFiles, Segment, assign_segments
from evenload.data.reading.random_order import BLOCKS, permutation
from evenload.errors import DataError

BLOCK_TOKENS = 1 << 18
"""A block ends once it holds so many tokens: bounds memory and the time of a resume where documents are long."""

_FIRST_BLOCK_DOCUMENTS = 4
# Without shuffling the order does not depend on the size of blocks.
_UNSHUFFLED_DOCUMENTS = 256
# A source may drop everything for a long time; a block that only counts lets others see that it goes on.
_BLOCK_RECORDS = 1 << 16
# Records encoded at once: enough for the tokeniser's threads, few where documents are long.
_CHUNK_RECORDS, _CHUNK_TOKENS = 64, 1 << 16


class _Step(NamedTuple):
    """What one record, or one document of it, adds to a block.

    Args:
        document: None where nothing of the record is trained.
        segment, offset, part: where to go on after it, as in `BlockCursor`.
        read, dropped: tallies beyond the document itself, as (documents, tokens) and (reason, documents, tokens).
    """

    document: EncodedDocument | None
    segment: int
    offset: int
    part: int = 0
    read: tuple[int, int] = (0, 0)
    dropped: tuple[str, int, int] | None = None


class _LeftOut(NamedTuple):
    """A record of the other reader: held out, with its documents and tokens; or trained, and not even encoded."""

    read: tuple[int, int] = (0, 0)


class BlockReader:
    """Reads blocks of one part of the mixture.

    Args:
        part: number of the part.
        on_open: told the name of every file that is opened.
    """

    def __init__(
        self,
        config: DataConfig,
        files: PartFiles,
        encoder: DocumentEncoder,
        part: int,
        on_open: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._config, self._files, self._encoder, self._part = config, files, encoder, part
        self._on_open = on_open
        self._shuffled = config.shuffle_window > 1
        self._most = max(1, config.shuffle_window // config.num_streams) if self._shuffled else _UNSHUFFLED_DOCUMENTS
        self._open: dict[int, tuple[int, BlockCursor | None, Iterator[_Step]]] = {}
        self._hold_out = HoldOut.of(config)
        self._assigned: tuple[int, tuple[tuple[Segment, ...], ...]] | None = None

    def read(self, stream: int, epoch: int, cursor: BlockCursor) -> DocumentBlock:
        """The block that begins at the cursor.

        Raises:
            DataError: a file that cannot be read; a corrupt or over-long record where that is an error. Asked again,
                it raises the same again.
        """
        at = self._open.pop(stream, None)
        steps = at[2] if at is not None and at[:2] == (epoch, cursor) else self._steps(stream, epoch, cursor)
        documents: list[EncodedDocument] = []
        dropped: dict[str, Tally] = {}
        num_read = tokens_read = num_tokens = 0
        limit = min(self._most, _FIRST_BLOCK_DOCUMENTS << min(cursor.block, 40)) if self._shuffled else self._most
        next_cursor: BlockCursor | None = None
        for num_steps, step in enumerate(steps, start=1):
            if step.document is not None:
                documents.append(step.document)
                num_tokens += len(step.document.tokens)
            num_read += step.read[0]
            tokens_read += step.read[1]
            if step.dropped is not None:
                reason, count, size = step.dropped
                dropped[reason] = dropped.get(reason, Tally()) + Tally(documents=count, tokens=size)
            if len(documents) >= limit or num_tokens >= BLOCK_TOKENS or num_steps >= _BLOCK_RECORDS:
                next_cursor = BlockCursor(
                    block=cursor.block + 1, segment=step.segment, offset=step.offset, part=step.part
                )
                self._open[stream] = (epoch, next_cursor, steps)
                break
        read = Tally(documents=num_read + len(documents), tokens=tokens_read + num_tokens)
        order = range(len(documents))
        if self._shuffled:
            stream_id = (self._part << 32) | stream
            order = permutation(len(documents), self._config.seed, epoch, BLOCKS, stream_id, cursor.block)
        return _make_block([documents[index] for index in order], cursor, next_cursor, read, dropped)

    def first_file(self, stream: int, epoch: int, cursor: BlockCursor) -> str:
        segment = self._stream_segments(stream, epoch)[cursor.segment]
        return self._files.files[segment.file].name

    def _stream_segments(self, stream: int, epoch: int) -> tuple[Segment, ...]:
        if self._assigned is None or self._assigned[0] != epoch:
            streams, seed = self._config.num_streams, self._config.seed
            assigned = assign_segments(
                self._files.segments, streams, shuffled=self._shuffled, seed=seed, epoch=epoch, part=self._part
            )
            self._assigned = (epoch, assigned)
        return self._assigned[1][stream]

    def _steps(self, stream: int, epoch: int, cursor: BlockCursor) -> Iterator[_Step]:
        """Everything from the cursor to the end of the stream's epoch."""
        segments = self._stream_segments(stream, epoch)
        limit = self._config.max_document_tokens
        for rank in range(cursor.segment, len(segments)):
            segment = segments[rank]
            file, reader = self._files.files[segment.file], self._files.readers[segment.file]
            chosen = self._hold_out
            if chosen is not None and chosen.takes and reader.holds_one and not chosen.is_held_out(file.key, 0):
                continue
            self._on_open(file.name)
            resumed = rank == cursor.segment
            start = cursor.offset if resumed else None
            records = reader.records(file, segment.part, start)
            skip = cursor.part if resumed else 0
            # The first chunk is small: who asks for four documents need not wait for sixty-four.
            size = _FIRST_BLOCK_DOCUMENTS
            while chunk := list(islice(records, size)):
                try:
                    outcomes = self._outcomes(chunk, file.key)
                except NeighbourProblem as problem:
                    raise DataError(f"{file.name}: {problem}") from problem
                for record, outcome in zip(chunk, outcomes, strict=True):
                    # Nearly all records; through a second generator they would cost twice as much.
                    if isinstance(outcome, EncodedDocument) and 0 < len(outcome.tokens) <= limit:
                        yield _Step(outcome, rank, record.next_offset)
                    else:
                        yield from self._pieces(segment.file, rank, record, outcome, skip)
                    skip = 0
                num_tokens = sum(len(outcome.tokens) for outcome in outcomes if isinstance(outcome, EncodedDocument))
                size = min(max(1, _CHUNK_TOKENS * len(chunk) // max(1, num_tokens)), 2 * size, _CHUNK_RECORDS)

    def _outcomes(self, chunk: list[Record], key: str) -> Sequence["EncodedDocument | str | _LeftOut"]:
        """What becomes of records of the file with this key."""
        chosen = self._hold_out
        if chosen is None:
            return self._encoder.encode_records(chunk)
        held_out = [chosen.is_held_out(key, record.offset) for record in chunk]
        if chosen.takes:
            wanted = [record for record, is_held_out in zip(chunk, held_out, strict=True) if is_held_out]
            encoded = iter(self._encoder.encode_records(wanted))
            return [next(encoded) if is_held_out else _LeftOut() for is_held_out in held_out]
        outcomes = self._encoder.encode_records(chunk)
        return [
            _LeftOut((1, len(outcome.tokens))) if is_held_out and isinstance(outcome, EncodedDocument) else outcome
            for outcome, is_held_out in zip(outcomes, held_out, strict=True)
        ]

    def _pieces(
        self, file: int, rank: int, record: Record, outcome: "EncodedDocument | str | _LeftOut", skip: int
    ) -> Iterator[_Step]:
        """What comes of a record that is no document as it stands, from its `skip`-th piece on."""
        config, after = self._config, record.next_offset
        if isinstance(outcome, _LeftOut):
            read = outcome.read
            yield _Step(None, rank, after, read=read, dropped=(HELD_OUT, *read) if read[0] else None)
            return
        if isinstance(outcome, str):
            if config.on_corrupt == "error":
                origin = self._files.origin(file, record.offset)
                raise DataError(f'{origin}: {outcome}; repair it, or set data.on_corrupt = "skip"')
            yield _Step(None, rank, after, read=(1, 0), dropped=("corrupt", 1, 0))
            return
        size, limit = len(outcome.tokens), config.max_document_tokens
        if not size:
            yield _Step(None, rank, after, read=(1, 0), dropped=("empty", 1, 0))
            return
        match config.overlong:
            case "error":
                raise DataError(
                    f"{self._files.origin(file, record.offset)} has {size} tokens, more than max_document_tokens "
                    f'({limit}); raise it, or set data.overlong to "split" (consecutive documents of at most '
                    f'{limit} tokens), "truncate" (keep the first {limit}), "drop" (leave the document out) '
                    'instead of "error"'
                )
            case "drop":
                yield _Step(None, rank, after, read=(1, size), dropped=("overlong", 1, size))
            case "truncate":
                # The tail is no document of its own: only its tokens are read and dropped.
                tail = size - limit
                yield _Step(_piece(outcome, 0, limit), rank, after, read=(0, tail), dropped=("truncated", 0, tail))
            case "split":
                starts = range(0, size, limit)
                for part in range(skip, len(starts)):
                    piece = _piece(outcome, starts[part], min(size, starts[part] + limit))
                    is_last = part == len(starts) - 1
                    yield _Step(piece, rank, after) if is_last else _Step(piece, rank, record.offset, part + 1)


def _piece(document: EncodedDocument, start: int, stop: int) -> EncodedDocument:
    """Tokens `[start, stop)` as a document of its own, whose first token has no label."""
    labels = document.labels
    if labels is not None:
        labels = labels[start:stop].copy()
        labels[0] = IGNORE_INDEX
    return EncodedDocument(document.tokens[start:stop], labels)


def _make_block(
    documents: list[EncodedDocument],
    cursor: BlockCursor,
    next_cursor: BlockCursor | None,
    read: Tally,
    dropped: dict[str, Tally],
) -> DocumentBlock:
    spans = [(document.tokens, document.labels, 0, len(document.tokens)) for document in documents]
    edges, tokens, labels = flat_spans(spans)
    lengths = np.diff(edges)
    num_labels = np.maximum(lengths - 1, 0)
    if labels is not None:
        trained = np.concatenate([np.zeros(1, np.int64), np.cumsum(labels != IGNORE_INDEX)])
        num_labels = trained[edges[1:]] - trained[edges[:-1]]
    header = BlockHeader(
        cursor=cursor,
        next_cursor=next_cursor,
        lengths=lengths.astype(np.int32).tobytes(),
        num_labels=num_labels.astype(np.int32).tobytes(),
        has_labels=labels is not None,
        checksum=zlib.crc32(tokens.data) if labels is None else zlib.crc32(labels.data, zlib.crc32(tokens.data)),
        read=read,
        dropped=dropped,
    )
    return DocumentBlock(header, edges, tokens, labels)
