"""Read blocks of streams (`BlockReader`): records → documents within the length limit → shuffled block.

A block is a pure function of settings, epoch, stream and cursor: any process, before or after a resume, reads the same
documents in the same order. It ends after its number of documents or tokens; the first ones of a stream are small and
double in size, so that the first batch comes soon however large the window is. Price: every record is read and encoded
once; a resume reads the open block of each stream again. Memory: one block and one chunk of records a stream.

A record is held out for validation where a hash of its file's key and its offset falls below the share: by the data
alone, so a data set that moves keeps the choice, and a larger share holds out all that a smaller one does (1 µs each).
"""

import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.data.config import DataConfig
from evenload.data.encoders import IGNORE_INDEX, DocumentEncoder, EncodedDocument
from evenload.data.groups import Dropped, Outcome, SequenceOutcome, encode_groups, make_documents
from evenload.data.ledger import Tally
from evenload.data.part_files import BLOCKS, SEGMENTS, PartFiles, Segment, permutation
from evenload.data.records import Record, RecordReader, naming
from evenload.errors import DataError
from evenload.types.base import Frozen
from evenload.types.tree import Segment as TreeSegment
from evenload.types.tree import TreeShape

_Columns = tuple[NDArray[np.int32], NDArray[np.int32] | None, NDArray[np.int32] | None]
"""Tokens, labels and label counts."""


@dataclass(frozen=True, eq=False)
class TokenTable(Mapping[int, NDArray[np.int32]]):
    """D documents of N tokens in all.

    Args:
        doc_ids: int64[D], each once, in any order.
        edges: int64[D + 1]; document i has `tokens`, int32[N], `[edges[i], edges[i + 1])`.
        labels: int32[N], the id to be predicted at each token (not shifted), -100 = no loss, as at every first token;
            None = every token but the first is its own label.
        label_counts: int32[N], how many sequences train each token's label; None = once each.
    """

    doc_ids: NDArray[np.int64]
    edges: NDArray[np.int64]
    tokens: NDArray[np.int32]
    labels: NDArray[np.int32] | None = None
    label_counts: NDArray[np.int32] | None = None

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {doc_id: row for row, doc_id in enumerate(self.doc_ids.tolist())}

    def __len__(self) -> int:
        return len(self.doc_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __contains__(self, doc_id: object) -> bool:
        # `Mapping`'s own cuts the tokens out: a microsecond a call.
        return doc_id in self._rows

    def __getitem__(self, doc_id: int) -> NDArray[np.int32]:
        return self.at(self._rows[doc_id]).tokens

    def at(self, row: int) -> EncodedDocument:
        return EncodedDocument(*self._columns(self.edges[row], self.edges[row + 1]))

    def span(self, start: int, stop: int, doc_ids: NDArray[np.int64]) -> "TokenTable":
        """Return rows `[start, stop)` under other ids, as views."""
        low, high = self.edges[start], self.edges[stop]
        return TokenTable(doc_ids, self.edges[start : stop + 1] - low, *self._columns(low, high))

    def _columns(self, low: int, high: int) -> _Columns:
        labels = None if self.labels is None else self.labels[low:high]
        counts = None if self.label_counts is None else self.label_counts[low:high]
        return self.tokens[low:high], labels, counts

    def labels_of(self, doc_id: int) -> NDArray[np.int32]:
        """Return a document's labels, int32[num_tokens], -100 at its first token."""
        return all_labels(self.at(self._rows[doc_id]))

    def label_counts_of(self, doc_id: int) -> NDArray[np.int32]:
        """Return how many sequences train each of a document's labels, int32[num_tokens]."""
        return all_label_counts(self.at(self._rows[doc_id]))

    def rows(self, doc_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the rows of documents, int64[n]; -1 for one that is not in the table."""
        find = self._rows.get
        return np.fromiter((find(doc_id, -1) for doc_id in doc_ids), np.int64, len(doc_ids))

    def select(self, doc_ids: Sequence[int]) -> "TokenTable":
        """Copy these documents, in this order; a `KeyError` where one is not in the table."""
        return make_table(doc_ids, [self.at(self._rows[doc_id]) for doc_id in doc_ids])


def make_table(doc_ids: Sequence[int], documents: Sequence[EncodedDocument]) -> TokenTable:
    """Make a table of documents that are given one by one; copies once."""
    edges = np.cumsum([0, *(len(document.tokens) for document in documents)], dtype=np.int64)
    return TokenTable(np.asarray(doc_ids, dtype=np.int64), edges, *_joined_columns(documents))


def as_token_table(documents: Mapping[int, NDArray[np.int32]]) -> TokenTable:
    """Make a table of documents that are given by their tokens, every token but the first a label; a table stays."""
    if isinstance(documents, TokenTable):
        return documents
    return make_table(list(documents), [EncodedDocument(tokens) for tokens in documents.values()])


def join_tables(tables: Sequence[TokenTable]) -> TokenTable:
    """Join tables that have no document in common; copies once."""
    if len(tables) == 1:
        return tables[0]
    starts = np.cumsum([0, *(len(table.tokens) for table in tables)])
    edges = [table.edges[1:] + start for table, start in zip(tables, starts[:-1], strict=True)]
    return TokenTable(
        np.concatenate([np.zeros(0, np.int64), *(table.doc_ids for table in tables)]),
        np.concatenate([np.zeros(1, np.int64), *edges]),
        *_joined_columns(tables),
    )


def _joined_columns(parts: Sequence[EncodedDocument] | Sequence[TokenTable]) -> _Columns:
    has_labels = any(part.labels is not None for part in parts)
    has_counts = any(part.label_counts is not None for part in parts)
    return (
        _join([part.tokens for part in parts]),
        _join([all_labels(part) for part in parts]) if has_labels else None,
        _join([all_label_counts(part) for part in parts]) if has_counts else None,
    )


def all_labels(documents: EncodedDocument | TokenTable) -> NDArray[np.int32]:
    """Return the labels of all documents, int32[N], also where they are the tokens."""
    if documents.labels is not None:
        return documents.labels
    labels = documents.tokens.copy()
    is_one = isinstance(documents, EncodedDocument)
    labels[slice(1) if is_one else documents.edges[:-1][np.diff(documents.edges) > 0]] = IGNORE_INDEX
    return labels


def all_label_counts(documents: EncodedDocument | TokenTable) -> NDArray[np.int32]:
    """Return how many sequences train each label, int32[N], also where it is one each."""
    counts = documents.label_counts
    return np.ones(len(documents.tokens), np.int32) if counts is None else counts


def _join(parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts).astype(np.int32, copy=False) if parts else np.zeros(0, np.int32)


class BlockCursor(Frozen, array_like=True):
    """Where a block begins in its stream: its number in the stream and epoch, the segment, the offset of the next
    record there (None = its beginning), and documents that were taken of that record, which is split into several."""

    block: int = 0
    segment: int = 0
    offset: int | None = None
    part: int = 0


class StreamKey(NamedTuple):
    """A stream: part of the mixture, and stream in it."""

    part: int
    stream: int

    def owner(self, num_readers: int) -> int:
        """Return which of so many ranks, or of a rank's workers, reads the stream."""
        return (self.part + self.stream) % num_readers


class BlockRequest(NamedTuple):
    """Identifies a block: it begins at the cursor."""

    key: StreamKey
    epoch: int
    cursor: BlockCursor


class TreeHeader(NamedTuple):
    """What all ranks know of a tree of sequences that share prefixes: as in `Document`, and of each segment the number
    of its labels, each as often as it counts."""

    segments: tuple[TreeSegment, ...]
    num_path_tokens: int
    num_recomputed_tokens: int
    num_labels: tuple[int, ...]


class BlockHeader(Frozen, array_like=True):
    """A block without its tokens: what all ranks know of it.

    Args:
        next_cursor: of the stream's next block; None = the stream ends for this epoch.
        lengths, num_labels: int32[num_documents] as bytes, in sampling order.
        checksum: CRC-32 of tokens, labels and their counts, to notice a source that changed between save and resume.
        dropped: what was read for this block and is in no document, by reason.
        trees: of the documents that are trees or parts of them, by place in sampling order.
    """

    cursor: BlockCursor
    next_cursor: BlockCursor | None
    lengths: bytes
    num_labels: bytes
    has_labels: bool
    checksum: int
    dropped: dict[str, Tally]
    trees: dict[int, TreeHeader]


class DocumentBlock(NamedTuple):
    """A block with its tokens, by row."""

    header: BlockHeader
    table: TokenTable


HELD_OUT = "held out for validation"
_HASH_BYTES = 8


@dataclass(frozen=True)
class HoldOut:
    """Hold out a `share` of all records; a reader `takes` those, or else the rest."""

    share: float
    takes: bool

    @staticmethod
    def of(config: DataConfig) -> "HoldOut | None":
        return HoldOut(config.held_out_share, config.reads == "held_out") if config.held_out_share else None

    def is_held_out(self, key: str, offset: int) -> bool:
        hashed = blake2b(f"{key}\n{offset}".encode(errors="surrogateescape"), digest_size=_HASH_BYTES).digest()
        return int.from_bytes(hashed) < self.share * 256**_HASH_BYTES


BLOCK_TOKENS = 1 << 18
"""A block ends once it holds so many tokens, which bounds memory and the time of a resume."""

_FIRST_BLOCK_DOCUMENTS = 4
# Without shuffling the order does not depend on the size of blocks.
_UNSHUFFLED_DOCUMENTS = 256
# A source may drop everything for a long time; a block of counts alone shows other ranks that it continues.
_BLOCK_RECORDS = 1 << 16
# Records encoded at once: enough for the tokeniser's threads, few where documents are long.
_CHUNK_RECORDS, _CHUNK_TOKENS = 64, 1 << 16


class _Step(NamedTuple):
    """What one record, or one document of it, adds to a block; `segment`, `offset` and `part` as in `BlockCursor`."""

    document: EncodedDocument | None
    segment: int
    offset: int
    part: int = 0
    dropped: Dropped | None = None


ReadingSource = tuple[DataConfig, PartFiles, DocumentEncoder]
"""What a part of the mixture is read with; can be pickled."""


class BlockReader:
    """Read blocks of one part of the mixture, number `part`; `on_open` is called with the name of every opened file."""

    def __init__(self, source: ReadingSource, part: int, on_open: Callable[[str], object] = lambda name: None) -> None:
        self._config, self._files, self._encoder = source
        self._part, self._on_open, config = part, on_open, self._config
        self._shuffled = config.shuffle_window > 1
        self._most = max(1, config.shuffle_window // config.num_streams) if self._shuffled else _UNSHUFFLED_DOCUMENTS
        self._open: dict[StreamKey, tuple[BlockRequest, Generator[_Step, None, None]]] = {}
        self._hold_out = HoldOut.of(config)
        self._ordered: tuple[int, Sequence[Segment]] = (-1, ())

    def read(self, request: BlockRequest) -> DocumentBlock:
        """Read a block; `DataError` for a file that cannot be read, or a record that is an error by the settings."""
        key, epoch, cursor = request
        following, steps = self._open.pop(key, (None, None))
        if steps is None or following != request:
            steps = self._steps(request)
        documents: list[EncodedDocument] = []
        dropped: dict[str, Tally] = {}
        num_tokens = 0
        limit = min(self._most, _FIRST_BLOCK_DOCUMENTS << min(cursor.block, 40)) if self._shuffled else self._most
        next_cursor: BlockCursor | None = None
        for num_steps, step in enumerate(steps, start=1):
            if step.document is not None:
                documents.append(step.document)
                num_tokens += len(step.document.tokens)
            if step.dropped is not None:
                reason, count, size = step.dropped
                dropped[reason] = dropped.get(reason, Tally()) + Tally(documents=count, tokens=size)
            if len(documents) >= limit or num_tokens >= BLOCK_TOKENS or num_steps >= _BLOCK_RECORDS:
                block = cursor.block + 1
                next_cursor = BlockCursor(block=block, segment=step.segment, offset=step.offset, part=step.part)
                self._open[key] = (request._replace(cursor=next_cursor), steps)
                break
        if self._shuffled:
            user = (self._part << 32) | key.stream
            order = permutation(len(documents), self._config.seed, epoch, BLOCKS, user, cursor.block)
            documents = [documents[index] for index in order]
        return _make_block(documents, cursor, next_cursor, dropped)

    def close(self) -> None:
        """Close the files of unfinished blocks; left to the garbage collector, an error's traceback keeps them open."""
        for _, steps in self._open.values():
            steps.close()
        self._open.clear()

    def first_file(self, request: BlockRequest) -> str:
        return self._segments(request)[request.cursor.segment].reader.file.name

    def _segments(self, request: BlockRequest) -> Sequence[Segment]:
        epoch = request.epoch
        if self._ordered[0] != epoch:
            segments = self._files.segments
            if self._shuffled:
                order = permutation(len(segments), self._config.seed, epoch, SEGMENTS, self._part, 0)
                segments = [segments[index] for index in order]
            self._ordered = (epoch, segments)
        return self._ordered[1][request.key.stream :: self._config.num_streams]

    def _steps(self, request: BlockRequest) -> Generator[_Step, None, None]:
        segments, chosen = self._segments(request), self._hold_out
        limit = self._config.max_document_tokens
        start, skip = request.cursor.offset, request.cursor.part
        for rank in range(request.cursor.segment, len(segments)):
            reader, part = segments[rank]
            file = reader.file
            if chosen is None or not (chosen.takes and reader.holds_one) or chosen.is_held_out(file.key, 0):
                self._on_open(file.name)
                records = reader.records(part, start)
                # The first chunk is small: a request for four documents need not wait for sixty-four.
                size = _FIRST_BLOCK_DOCUMENTS
                while chunk := list(islice(records, size)):
                    with naming(file):
                        outcomes = self._outcomes(chunk, file.key)
                    num_tokens = 0
                    for record, outcome in zip(chunk, outcomes, strict=True):
                        for one in outcome if isinstance(outcome, list) else (outcome,):
                            num_tokens += len(one.tokens) if isinstance(one, EncodedDocument) else 0
                        # Nearly all records; through a second generator they would cost twice as much.
                        if isinstance(outcome, EncodedDocument) and 0 < len(outcome.tokens) <= limit:
                            yield _Step(outcome, rank, record.next_offset)
                        else:
                            yield from self._pieces(reader, rank, record, outcome, skip)
                        skip = 0
                    size = min(max(1, _CHUNK_TOKENS * len(chunk) // max(1, num_tokens)), 2 * size, _CHUNK_RECORDS)
            start, skip = None, 0

    def _outcomes(self, chunk: list[Record], key: str) -> Sequence[Outcome]:
        chosen = self._hold_out
        if chosen is None:
            return encode_groups(self._encoder, chunk)
        held_out = [chosen.is_held_out(key, record.offset) for record in chunk]
        if chosen.takes:
            taken = [record for record, is_taken in zip(chunk, held_out, strict=True) if is_taken]
            encoded = iter(encode_groups(self._encoder, taken))
            return [next(encoded) if out else None for out in held_out]
        return [
            one if not out else [_held_out(each) for each in one] if isinstance(one, list) else _held_out(one)
            for one, out in zip(encode_groups(self._encoder, chunk), held_out, strict=True)
        ]

    def _pieces(self, reader: RecordReader, rank: int, record: Record, outcome: Outcome, skip: int) -> Iterator[_Step]:
        """Yield what becomes of a record that is no document as it stands, from its `skip`-th piece on."""
        pieces = fit_record(reader, record, outcome, self._config)
        for part, (document, dropped) in enumerate(pieces[skip:], start=skip + 1):
            at, left = (record.next_offset, 0) if part == len(pieces) else (record.offset, part)
            yield _Step(document, rank, at, left, dropped)


def _held_out(outcome: SequenceOutcome) -> SequenceOutcome:
    return (HELD_OUT, 1, len(outcome.tokens)) if isinstance(outcome, EncodedDocument) else outcome


_Pieces = list[tuple[EncodedDocument | None, Dropped | None]]


def fit_record(reader: RecordReader, record: Record, outcome: Outcome, config: DataConfig) -> _Pieces:
    """Return the documents within the limits of length that a record becomes, and what is dropped of it."""
    if not isinstance(outcome, list):
        return _fit_length(reader, record.offset, outcome, config)
    pairs = zip(record.sequences, outcome, strict=True)
    pieces = [piece for one, each in pairs for piece in _fit_length(reader, one.offset, each, config)]
    sequences = [document for document, _ in pieces if document is not None]
    try:
        documents = make_documents(sequences, config)
    except DataError as problem:
        raise DataError(f"{reader.origin(record.offset)}: {problem}") from problem
    dropped: _Pieces = [(None, dropped) for _, dropped in pieces if dropped is not None]
    return dropped + [(document, None) for document in documents]


def _fit_length(reader: RecordReader, offset: int, outcome: SequenceOutcome, config: DataConfig) -> _Pieces:
    if isinstance(outcome, str):
        if config.on_corrupt == "error":
            raise corrupt_record(reader.origin(offset), outcome)
        outcome = ("corrupt", 1, 0)
    elif isinstance(outcome, EncodedDocument) and not len(outcome.tokens):
        outcome = ("empty", 1, 0)
    if not isinstance(outcome, EncodedDocument):
        return [(None, outcome)]
    size, limit = len(outcome.tokens), config.max_document_tokens
    if size <= limit:
        return [(outcome, None)]
    match config.overlong:
        case "error":
            raise DataError(
                f"{reader.origin(offset)} has {size} tokens, more than max_document_tokens ({limit}); raise "
                'it, or set data.overlong to "split", "truncate" or "drop" instead of "error"'
            )
        case "drop":
            return [(None, ("overlong", 1, size))]
        case "truncate":
            # The tail is no document of its own: only its tokens count.
            return [(_piece(outcome, 0, limit), ("truncated", 0, size - limit))]
        case "split":
            return [(_piece(outcome, start, start + limit), None) for start in range(0, size, limit)]


def corrupt_record(origin: str, problem: str) -> DataError:
    return DataError(f'{origin}: {problem}; repair it, or set data.on_corrupt = "skip"')


def _piece(document: EncodedDocument, start: int, stop: int) -> EncodedDocument:
    """Return tokens `[start, stop)` as a document, whose first token has no label."""
    labels = document.labels
    if labels is not None:
        labels = labels[start:stop].copy()
        labels[0] = IGNORE_INDEX
    return EncodedDocument(document.tokens[start:stop], labels)


def _times_trained(documents: EncodedDocument | TokenTable) -> NDArray[np.int32]:
    return (all_labels(documents) != IGNORE_INDEX) * all_label_counts(documents)


def _make_block(
    documents: list[EncodedDocument], cursor: BlockCursor, next_cursor: BlockCursor | None, dropped: dict[str, Tally]
) -> DocumentBlock:
    table = make_table(range(len(documents)), documents)
    edges, tokens, labels, counts = table.edges, table.tokens, table.labels, table.label_counts
    lengths = np.diff(edges)
    num_labels = np.maximum(lengths - 1, 0)
    if labels is not None or counts is not None:
        trained = np.concatenate([np.zeros(1, np.int64), np.cumsum(_times_trained(table), dtype=np.int64)])
        num_labels = trained[edges[1:]] - trained[edges[:-1]]
    trees: dict[int, TreeHeader] = {}
    for row, one in enumerate(documents):
        if one.segments:
            of_segments = tuple(np.add.reduceat(_times_trained(one), TreeShape(one.segments).starts).tolist())
            trees[row] = TreeHeader(one.segments, sum(one.sequence_lengths), one.num_recomputed_tokens, of_segments)
    checksum = 0
    for column in (tokens, labels, counts):
        checksum = checksum if column is None else zlib.crc32(column.data, checksum)
    header = BlockHeader(
        cursor=cursor,
        next_cursor=next_cursor,
        lengths=lengths.astype(np.int32).tobytes(),
        num_labels=num_labels.astype(np.int32).tobytes(),
        has_labels=labels is not None,
        checksum=checksum,
        dropped=dropped,
        trees=trees,
    )
    return DocumentBlock(header, table)
