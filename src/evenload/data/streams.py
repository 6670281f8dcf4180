"""Sample the documents of all streams one after the other, the same on every rank (`StreamSampler`), and draw them in
batches (`DrawnBatches`).

Which document comes next follows from block headers, which every rank knows. Parts of the mixture take turns so that
their *tokens* keep to the weights: next is the part that is furthest behind its share. Inside a part the streams take
turns. A rank that owns a stream also has its blocks' tokens, and requests the next block when it starts to take from
one. One gather brings the next header of every stream that has none. Price: about 0.2 µs a document (some 20 µs where
parts take turns document by document).

A planner may want the lengths of coming batches (`feed.step_maker.Planner.known_steps`): `peek` draws them before their
turn. Every batch carries the position after it and its part of the account, and both count only when the batch is
handed out, so a state is the same however many batches were drawn.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.data.batches import OpenBlock, PartState, Peers, SampledDocuments, StreamState, join_sampled
from evenload.data.blocks import BlockHeader, BlockRequest, DocumentBlock, StreamKey
from evenload.data.config import DataConfig
from evenload.data.ledger import Ledger, LedgerState, Tally
from evenload.data.workers import BlockService
from evenload.errors import DataError, EvenloadError
from evenload.types.document import Document


@dataclass(slots=True)
class _Stream:
    key: StreamKey
    owner: int
    at: StreamState = field(default_factory=StreamState)
    opened: OpenBlock | None = None

    def move(self, at: StreamState) -> None:
        """Go to another block, or to another place in one that is opened again."""
        self.at, self.opened = at, None


@dataclass(slots=True)
class _Part:
    name: str
    weight: float
    streams: list[_Stream]
    at: PartState = field(default_factory=PartState)
    """Of which `streams` is not used."""

    @property
    def has_ended(self) -> bool:
        return all(stream.at.cursor is None for stream in self.streams)

    def restart(self, at: PartState) -> None:
        self.at = at
        for stream in self.streams:
            stream.move(StreamState())


def owner_of(key: StreamKey, num_ranks: int) -> int:
    return (key.part + key.stream) % num_ranks


class StreamSampler:
    """Sample documents.

    Args:
        config: names the parts of the mixture, their weights and streams, and whether an ended part starts again.
        service: reads the blocks of the streams that this rank owns.
        ledger: counts every block that is opened.
    """

    def __init__(self, config: DataConfig, service: BlockService, peers: Peers, ledger: Ledger) -> None:
        self._repeats = config.mixture_end == "repeat"
        self._service, self._peers, self._ledger = service, peers, ledger
        named = [(part.name, part.weight) for part in config.mixture] or [("sources", 1.0)]
        total = sum(weight for _, weight in named)
        self._parts: list[_Part] = []
        for part, (name, weight) in enumerate(named):
            keys = [StreamKey(part, stream) for stream in range(config.num_streams)]
            self._parts.append(_Part(name, weight / total, [_Stream(key, owner_of(key, peers.size)) for key in keys]))

    @property
    def num_sampled(self) -> int:
        return sum(part.at.documents for part in self._parts)

    def sample(
        self, num_documents: int | None, num_tokens: int | None, *, at_least_one: bool
    ) -> SampledDocuments | None:
        """Sample at most `num_documents` of at most `num_tokens`, as far as the open blocks go; the next call goes on.
        Collective.

        Returns:
            No documents where the next one alone has more than `num_tokens`, unless `at_least_one`; None at the end of
            the epoch.

        Raises:
            DataError: what reading raised, on every rank; the next call raises the same again.
        """
        while (found := self._next_part()) is not None:
            part, is_only = found
            streams = self._ready_streams(part)
            if not streams:
                continue
            # Parts take turns by document; a part that is alone gives whole rounds of its streams.
            rounds, most = 1, 1
            if is_only:
                rounds = min(len(stream.opened.lengths) - stream.at.taken for stream in streams if stream.opened)
                most = rounds * len(streams)
            if num_documents is not None:
                most = min(most, num_documents)
            sampled = _rounds(streams, rounds, most)
            if num_tokens is not None:
                fitting = int(np.searchsorted(np.cumsum(sampled.lengths), num_tokens, side="right"))
                fitting = max(fitting, 1) if at_least_one else fitting
                if fitting < most:
                    sampled = _rounds(streams, rounds, fitting)
            self._commit(part, streams, sampled.tally())
            return sampled
        return None

    def restart(self, epoch: int) -> None:
        for part in self._parts:
            part.restart(PartState(epoch=epoch))

    def state(self) -> tuple[PartState, ...]:
        """Return where every stream stands; the same on all ranks."""
        return tuple(
            msgspec.structs.replace(part.at, streams=tuple(stream.at for stream in part.streams))
            for part in self._parts
        )

    def load_state(self, states: Sequence[PartState]) -> None:
        """Go on from a state, before anything was sampled. Open blocks are read again when needed."""
        for part, state in zip(self._parts, states, strict=True):
            part.at = state
            for stream, at in zip(part.streams, state.streams, strict=True):
                stream.move(at)

    def _next_part(self) -> tuple[_Part, bool] | None:
        """Return the part that is furthest behind its share of the tokens, and whether it is the only one left."""
        for part in self._parts if self._repeats else ():
            if part.has_ended:
                if not part.at.documents:
                    raise DataError(
                        f"part '{part.name}' of data.mixture has no document to train; remove it, or check its "
                        "sources, data.overlong and data.on_corrupt"
                    )
                part.restart(PartState(epoch=part.at.epoch + 1, tokens=part.at.tokens))
        left = [part for part in self._parts if not part.has_ended]
        if len(left) < 2:
            return (left[0], True) if left else None
        total = sum(part.at.tokens for part in self._parts)
        # The share of one more token breaks the tie at the beginning by weight.
        return max(left, key=lambda part: part.weight * (total + 1) - part.at.tokens), False

    def _ready_streams(self, part: _Part) -> list[_Stream]:
        """Return the streams that have not ended, from the one whose turn it is, each with documents left to take."""
        ready: list[_Stream] = []
        for stream in part.streams[part.at.turn :] + part.streams[: part.at.turn]:
            while stream.at.cursor is not None:
                if stream.opened is None:
                    self._open_blocks()
                assert stream.opened is not None
                if len(stream.opened.lengths):
                    ready.append(stream)
                    break
                self._count(stream.opened)
                stream.move(StreamState(cursor=stream.opened.header.next_cursor))
        return ready

    def _commit(self, part: _Part, streams: Sequence[_Stream], taken: Tally) -> None:
        count, turn = taken.documents, part.at.turn
        if count:
            turn = (streams[(count - 1) % len(streams)].key.stream + 1) % len(part.streams)
        part.at = msgspec.structs.replace(
            part.at, turn=turn, documents=part.at.documents + count, tokens=part.at.tokens + taken.tokens
        )
        for index, stream in enumerate(streams):
            own = count // len(streams) + (index < count % len(streams))
            opened, at = stream.opened, stream.at
            if not own or opened is None:
                continue
            left, stop = at.left if at.taken else self._count(opened), at.taken + own
            if stop == len(opened.lengths):
                stream.move(StreamState(cursor=opened.header.next_cursor))
                continue
            left -= Tally(documents=own, tokens=int(opened.lengths[at.taken : stop].sum()))
            stream.at = StreamState(cursor=at.cursor, taken=stop, left=left, checksum=opened.header.checksum)

    def _count(self, opened: OpenBlock) -> Tally:
        """Count a block as read, and what it dropped as dropped; return its documents."""
        documents = Tally(documents=len(opened.lengths), tokens=int(opened.lengths.sum()))
        self._ledger.note_read(sum(opened.header.dropped.values(), documents))
        for reason, dropped in opened.header.dropped.items():
            self._ledger.note_dropped(reason, dropped)
        return documents

    def _open_blocks(self) -> None:
        """Open the next block of every stream that has none open, read by its owner. Collective."""
        waiting = [
            (part, stream, BlockRequest(stream.key, part.at.epoch, stream.at.cursor))
            for part in self._parts
            for stream in part.streams
            if stream.at.cursor is not None and stream.opened is None
        ]
        requests = [request for _, stream, request in waiting if stream.owner == self._peers.rank]
        for request in requests:
            self._service.request(request)
        own: dict[StreamKey, DocumentBlock] = {}
        answer: list[tuple[StreamKey, BlockHeader]] | str
        try:
            for request in requests:
                own[request.key] = self._service.take(request)
            answer = [(key, block.header) for key, block in own.items()]
        except EvenloadError as error:
            # Names of files may hold bytes that are no UTF-8.
            answer = str(error).encode(errors="backslashreplace").decode()
        headers: dict[StreamKey, BlockHeader] = {}
        for data in self._peers.gather(msgspec.msgpack.encode(answer)):
            answer = msgspec.msgpack.decode(data, type=list[tuple[StreamKey, BlockHeader]] | str)
            if isinstance(answer, str):
                raise DataError(answer)
            headers |= answer
        for part, stream, request in waiting:
            header, block = headers[stream.key], own.get(stream.key)
            if stream.at.taken and stream.at.checksum != header.checksum:
                raise DataError(
                    f"block {header.cursor.block} of stream {stream.key.stream} of data.{part.name} holds other "
                    f"documents than when the loader's state was saved ({stream.at.taken} of them were trained "
                    "already); the sources must not change between save and resume"
                )
            lengths, num_labels = (np.frombuffer(column, np.int32) for column in (header.lengths, header.num_labels))
            stream.opened = OpenBlock(request, stream.owner, header, lengths, num_labels, block)
            if block is not None and header.next_cursor is not None:
                # The next one is read while documents of this one are taken.
                self._service.request(request._replace(cursor=header.next_cursor))


def _rounds(streams: Sequence[_Stream], rounds: int, most: int) -> SampledDocuments:
    """Return the first `most` documents when the streams take turns so many times."""
    blocks = [stream.opened for stream in streams if stream.opened is not None]
    starts = np.array([stream.at.taken for stream in streams])

    def columns(values: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
        spans = [column[start : start + rounds] for column, start in zip(values, starts.tolist(), strict=True)]
        return np.stack(spans, axis=1).ravel()[:most]

    order = np.arange(most)
    block_of = order % len(blocks)
    return SampledDocuments(
        tuple(blocks),
        block_of,
        starts[block_of] + order // len(blocks),
        columns([block.lengths for block in blocks]),
        columns([block.num_labels for block in blocks]),
    )


@dataclass(frozen=True, eq=False, slots=True)
class DrawPosition:
    """Between two batches: the epoch, the id of the next document, and where the streams stand."""

    epoch: int
    next_doc_id: int
    parts: tuple[PartState, ...]

    def held(self) -> Tally:
        """Sum up the documents of open blocks, which count as read and are in no batch."""
        return sum((stream.left for part in self.parts for stream in part.streams), Tally())


@dataclass(frozen=True, eq=False, slots=True)
class DrawnBatch:
    """One batch of new documents of an epoch; without documents where the data has ended. `read` is what reading it
    added to the account, `after` where the next batch begins."""

    epoch: int
    documents: tuple[Document, ...]
    sampled: SampledDocuments
    read: LedgerState
    after: DrawPosition


EpochEnd = Callable[[int, int], None]
"""Called with the epoch that ends and how many documents it gave; raises a `DataError` where something is wrong."""


@dataclass(eq=False)
class DrawnBatches:
    """Draw batches of the size that `config` sets; `service` reads the streams that this rank owns."""

    config: DataConfig
    service: BlockService
    peers: Peers
    _read: Ledger = field(default_factory=Ledger)
    _members: list[SampledDocuments] = field(default_factory=list)
    _waiting: deque[DrawnBatch] = field(default_factory=deque)
    _has_failed: bool = False
    """The batch after those that wait could not be read; not tried again before its turn comes."""

    def __post_init__(self) -> None:
        self._streams = StreamSampler(self.config, self.service, self.peers, self._read)
        self._epoch = self._next_doc_id = 0

    def load(self, position: DrawPosition) -> None:
        self._streams.load_state(position.parts)
        self._epoch, self._next_doc_id = position.epoch, position.next_doc_id

    def position(self) -> DrawPosition:
        return DrawPosition(self._epoch, self._next_doc_id, self._streams.state())

    def account(self, handed_out: LedgerState) -> tuple[LedgerState, Tally]:
        """Return the account with all that was drawn, and what of it is in no batch that was handed out."""
        state, held = handed_out, self.position().held() + _tally(self._members)
        for batch in self._waiting:
            state, held = state.with_read(batch.read), held + batch.sampled.tally()
        return state.with_read(self._read.state), held

    def peek(self, count: int, at_epoch_end: EpochEnd) -> list[DrawnBatch]:
        """Return the next `count` batches, which stay here; fewer before the end of the data or before a batch that
        cannot be read, whose error `take` raises when its turn comes. Collective."""
        try:
            while len(self._waiting) < count and not self._has_failed:
                if self._waiting and not self._waiting[-1].documents:
                    break
                self._waiting.append(self._draw(at_epoch_end))
        except DataError:
            self._has_failed = True  # on every rank
        return [batch for batch in list(self._waiting)[:count] if batch.documents]

    def take(self, at_epoch_end: EpochEnd) -> DrawnBatch:
        """Return the next batch. Collective.

        Raises:
            DataError: a record that is an error by the settings, an epoch without any document, or an account of an
                epoch that does not balance; on every rank, and again by the next call.
        """
        if self._waiting:
            return self._waiting.popleft()
        self._has_failed = False
        return self._draw(at_epoch_end)

    def _draw(self, at_epoch_end: EpochEnd) -> DrawnBatch:
        self._collect()
        while not self._members and not self._is_finished():
            at_epoch_end(self._epoch, self._streams.num_sampled)
            self._epoch += 1
            self._streams.restart(self._epoch)
            self._collect()
        sampled, self._members = join_sampled(self._members), []
        columns = zip(sampled.lengths.tolist(), sampled.num_labels.tolist(), strict=True)
        documents = tuple(
            Document(doc_id=doc_id, num_tokens=num_tokens, num_label_tokens=num_labels)
            for doc_id, (num_tokens, num_labels) in enumerate(columns, start=self._next_doc_id)
        )
        self._next_doc_id += len(documents)
        read, self._read.state = self._read.state, LedgerState()
        return DrawnBatch(self._epoch, documents, sampled, read, self.position())

    def _collect(self) -> None:
        """Draw the members of the next batch, after a failure its other ones; none at the end of an epoch."""
        if self._is_finished():
            return
        documents, tokens, members = self.config.batch_documents, self.config.batch_tokens, self._members
        taken = _tally(members)
        while taken.documents != documents:
            run = self._streams.sample(
                None if documents is None else documents - taken.documents,
                None if tokens is None else tokens - taken.tokens,
                at_least_one=not members,
            )
            if run is None or not len(run.lengths):
                break
            members.append(run)
            taken += run.tally()

    def _is_finished(self) -> bool:
        return self.config.epochs is not None and self._epoch >= self.config.epochs


def _tally(members: Sequence[SampledDocuments]) -> Tally:
    return sum((run.tally() for run in members), Tally())
