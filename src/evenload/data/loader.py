"""Load global batches (`GlobalBatchLoader`), by all ranks together, exactly resumable.

    while (batch := loader.next_batch()) is not None:  # collective, as is `coming`
        plan = ...                                     # of batch.documents and batch.carried; exchange, train
        loader.record_step(batch, plan)                # ledger, and documents that the plan deferred

Every rank reads its share of the streams and knows every document's length from block headers; `feed.step_maker` brings
the tokens to the ranks that train them. The part of the mixture that is furthest behind its share of *tokens* is next;
inside a part the streams take turns (`StreamSampler`). Batches may be drawn before their turn (`DrawnBatches`); each
carries the position after it and its part of the account, which count only when it is handed out, so a state is the
same however many were drawn. Price: a few microseconds a document (some 10 µs in a mixture); in memory are the open
block of every stream that this rank reads, the next one, and those of drawn batches.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from evenload.data.batches import (
    Deferral,
    DeferredDocument,
    DocumentPlace,
    GlobalBatch,
    LoaderState,
    OpenBlock,
    PartState,
    Peers,
    SampledDocument,
    SingleRank,
    StreamState,
    check_fingerprint,
    config_fingerprint,
    own_tokens,
    state_at_epoch,
)
from evenload.data.blocks import BlockHeader, BlockReader, BlockRequest, DocumentBlock, StreamKey
from evenload.data.chat_encoding import open_encoder
from evenload.data.config import DataConfig, mixture_configs
from evenload.data.ledger import Ledger, LedgerState, Tally, tally_of
from evenload.data.part_files import label_warnings, open_part, source_lines, with_kinds
from evenload.data.sources import files_digest
from evenload.data.tokenize import DocumentTokenizer, open_tokenizer
from evenload.data.workers import BlockService, ReadingJob
from evenload.errors import ConfigError, DataError, EvenloadError, InvalidPlanError
from evenload.types.document import Document
from evenload.types.plan import DEFERRED, StepPlan
from evenload.types.text import counted


@dataclass(slots=True)
class _Stream:
    key: StreamKey
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

    @property
    def has_ended(self) -> bool:
        return all(stream.at.cursor is None for stream in self.streams)

    def restart(self, at: PartState) -> None:
        self.at = at
        for stream in self.streams:
            stream.move(StreamState())


Takes = Callable[[int], bool]
"""Called with the tokens of every next document: whether the batch takes it; after a refusal it takes no other one."""


class StreamSampler:
    """Sample documents; `service` reads the streams that this rank owns, `ledger` counts every opened block."""

    def __init__(self, config: DataConfig, service: BlockService, peers: Peers, ledger: Ledger) -> None:
        self._repeats = config.mixture_end == "repeat"
        self._service, self._peers, self._ledger = service, peers, ledger
        named = [(part.name, part.weight) for part in config.mixture] or [("sources", 1.0)]
        total = sum(weight for _, weight in named)
        self._parts: list[_Part] = []
        for part, (name, weight) in enumerate(named):
            streams = [_Stream(StreamKey(part, stream)) for stream in range(config.num_streams)]
            self._parts.append(_Part(name, weight / total, streams))

    @property
    def num_sampled(self) -> int:
        return sum(part.at.documents for part in self._parts)

    def sample(self, num_documents: int | None, first_id: int, takes: Takes) -> list[SampledDocument]:
        """Sample at most `num_documents`, up to the first that `takes` refuses, as far as the open blocks go; none also
        at the end of the epoch. Ids count from `first_id`. Collective; `DataError` on every rank."""
        while (next_part := self._next_part()) is not None:
            part, is_only = next_part
            streams = self._ready_streams(part)
            if not streams:
                continue
            # Parts take turns by document; a part that is alone gives whole rounds of its streams.
            most = 1
            if is_only:
                most = len(streams) * min(len(opened.lengths) - stream.at.taken for stream, opened in streams)
            if num_documents is not None:
                most = min(most, num_documents)
            sampled: list[SampledDocument] = []
            for turn in range(most):
                stream, opened = streams[turn % len(streams)]
                one = opened.sampled(stream.at.taken + turn // len(streams), first_id + turn)
                if not takes(one.document.num_tokens):
                    break
                sampled.append(one)
            self._commit(part, streams, [one.document for one in sampled])
            return sampled
        return []

    def restart(self, epoch: int) -> None:
        for part in self._parts:
            part.restart(PartState(epoch=epoch))

    def state(self) -> tuple[PartState, ...]:
        return tuple(
            msgspec.structs.replace(part.at, streams=tuple(stream.at for stream in part.streams))
            for part in self._parts
        )

    def load_state(self, states: Sequence[PartState]) -> None:
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

    def _ready_streams(self, part: _Part) -> list[tuple[_Stream, OpenBlock]]:
        """Return the streams that have not ended, each with documents left to take, from the one whose turn it is."""
        ready: list[tuple[_Stream, OpenBlock]] = []
        for stream in part.streams[part.at.turn :] + part.streams[: part.at.turn]:
            while stream.at.cursor is not None:
                if stream.opened is None:
                    self._open_blocks()
                assert stream.opened is not None
                if len(stream.opened.lengths):
                    ready.append((stream, stream.opened))
                    break
                self._count(stream.opened)
                stream.move(StreamState(cursor=stream.opened.header.next_cursor))
        return ready

    def _commit(self, part: _Part, streams: Sequence[tuple[_Stream, OpenBlock]], documents: Sequence[Document]) -> None:
        count, turn = len(documents), part.at.turn
        if count:
            turn = (streams[(count - 1) % len(streams)][0].key.stream + 1) % len(part.streams)
        tokens = part.at.tokens + sum([one.num_tokens for one in documents])
        part.at = msgspec.structs.replace(part.at, turn=turn, documents=part.at.documents + count, tokens=tokens)
        for index, (stream, opened) in enumerate(streams[:count]):
            at, taken = stream.at, documents[index :: len(streams)]
            left, stop = at.left if at.taken else self._count(opened), at.taken + len(taken)
            if stop == len(opened.lengths):
                stream.move(StreamState(cursor=opened.header.next_cursor))
                continue
            left -= tally_of(taken)
            stream.at = StreamState(cursor=at.cursor, taken=stop, left=left, checksum=opened.header.checksum)

    def _count(self, opened: OpenBlock) -> Tally:
        """Count a block as read, and what it dropped as dropped; return its documents."""
        documents, dropped = opened.tally(), opened.header.dropped
        read = LedgerState(read=sum(dropped.values(), documents), dropped=dropped)
        self._ledger.state = self._ledger.state.with_read(read)
        return documents

    def _open_blocks(self) -> None:
        """Open the next block of every stream that has none open, read by its owner. Collective."""
        waiting = [
            (part, stream, BlockRequest(stream.key, part.at.epoch, stream.at.cursor))
            for part in self._parts
            for stream in part.streams
            if stream.at.cursor is not None and stream.opened is None
        ]
        blocks = _open_together([request for *_, request in waiting], self._service, self._peers)
        for (part, stream, request), opened in zip(waiting, blocks, strict=True):
            if stream.at.taken and stream.at.checksum != opened.header.checksum:
                raise DataError(
                    f"block {request.cursor.block} of stream {stream.key.stream} of data.{part.name} has changed since "
                    "the loader's state was saved; the sources must not change between save and resume"
                )
            stream.opened = opened
            if opened.table is not None and opened.header.next_cursor is not None:
                # The next one is read while documents of this one are taken.
                self._service.request(request._replace(cursor=opened.header.next_cursor))


def _open_together(requests: Sequence[BlockRequest], service: BlockService, peers: Peers) -> list[OpenBlock]:
    """Open blocks, each read by the rank that owns its stream. Collective; `DataError` on every rank."""
    own = [request for request in requests if request.key.owner(peers.size) == peers.rank]
    for request in own:
        service.request(request)
    blocks: dict[BlockRequest, DocumentBlock] = {}
    answer: list[tuple[BlockRequest, BlockHeader]] | str
    try:
        for request in own:
            blocks[request] = service.take(request)
        answer = [(request, block.header) for request, block in blocks.items()]
    except EvenloadError as error:
        # Names of files may hold bytes that are no UTF-8.
        answer = str(error).encode(errors="backslashreplace").decode()
    headers: dict[BlockRequest, BlockHeader] = {}
    for data in peers.gather(msgspec.msgpack.encode(answer)):
        answer = msgspec.msgpack.decode(data, type=list[tuple[BlockRequest, BlockHeader]] | str)
        if isinstance(answer, str):
            raise DataError(answer)
        headers |= answer
    opened: list[OpenBlock] = []
    for request in requests:
        header, block = headers[request], blocks.get(request)
        lengths, num_labels = (np.frombuffer(column, np.int32) for column in (header.lengths, header.num_labels))
        opened.append(OpenBlock(request, header, lengths, num_labels, block.table if block else None))
    return opened


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
    """New documents of an epoch, none where the data has ended; `read` is what reading them added to the account."""

    epoch: int
    documents: tuple[Document, ...]
    sampled: tuple[SampledDocument, ...]
    read: LedgerState
    after: DrawPosition


EpochEnd = Callable[[int, int], None]
"""Called with the epoch that ends and how many documents it gave; raises a `DataError` where something is wrong."""


@dataclass(eq=False)
class DrawnBatches:
    """Draw batches of the size that `config` sets, before their turn too; with `fill` they end before the first
    document that the function it returns, made anew for every batch, refuses."""

    config: DataConfig
    service: BlockService
    peers: Peers
    fill: Callable[[], Takes] | None = None
    _read: Ledger = field(default_factory=Ledger)
    _members: list[SampledDocument] = field(default_factory=list)
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
        state, held = handed_out, self.position().held() + tally_of([one.document for one in self._members])
        for batch in self._waiting:
            state, held = state.with_read(batch.read), held + tally_of(batch.documents)
        return state.with_read(self._read.state), held

    def peek(self, count: int, at_epoch_end: EpochEnd) -> list[DrawnBatch]:
        """Return the next `count` batches, which stay here; fewer where the data ends or `take` raises. Collective."""
        try:
            while len(self._waiting) < count and not self._has_failed:
                if self._waiting and not self._waiting[-1].documents:
                    break
                self._waiting.append(self._draw(at_epoch_end))
        except DataError:
            self._has_failed = True  # on every rank
        return [batch for batch in list(self._waiting)[:count] if batch.documents]

    def take(self, at_epoch_end: EpochEnd) -> DrawnBatch:
        """Return the next batch. Collective. Raises `DataError`, on every rank and again by the next call: a record
        that is an error by the settings, an epoch without documents or with an account that does not balance."""
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
        sampled, self._members = tuple(self._members), []
        documents = tuple([one.document for one in sampled])
        self._next_doc_id += len(documents)
        read, self._read.state = self._read.state, LedgerState()
        return DrawnBatch(self._epoch, documents, sampled, read, self.position())

    def _collect(self) -> None:
        """Draw the members of the next batch, after a failure its other ones; none at the end of an epoch."""
        if self._is_finished():
            return
        documents, members = self.config.batch_documents, self._members
        takes = self.fill() if self.fill else _TokenBudget(self.config.batch_tokens or math.inf).take
        for one in members:
            takes(one.document.num_tokens)
        while len(members) != documents:
            most = None if documents is None else documents - len(members)
            sampled = self._streams.sample(most, self._next_doc_id + len(members), takes)
            if not sampled:
                break
            members += sampled

    def _is_finished(self) -> bool:
        return self.config.epochs is not None and self._epoch >= self.config.epochs


@dataclass(slots=True)
class _TokenBudget:
    limit: float
    taken: int = 0

    def take(self, num_tokens: int) -> bool:
        fits = not self.taken or self.taken + num_tokens <= self.limit  # a larger document is a batch of its own
        self.taken += num_tokens * fits
        return fits


_INSPECTED_FILES = 16


class GlobalBatchLoader:
    """Load the global batches of `config`; every rank of `peers` makes its own loader of equal settings. `datasets` are
    Hugging Face's by source name, read instead of files; token ids beyond `vocab_size` are corrupt records; `fill`, as
    in `DrawnBatches`, decides batches in the place of `config`."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: DocumentTokenizer | None = None,
        *,
        peers: Peers | None = None,
        datasets: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        fill: Callable[[], Takes] | None = None,
    ) -> None:
        self.config = config = with_kinds(config, datasets)
        self._fill = fill
        self.tokenizer = tokenizer or open_tokenizer(config.tokenizer, config.eos_token)
        self.peers: Peers = peers or SingleRank()
        configs = mixture_configs(config)
        self.parts = tuple(open_part(part, _dataset_of(part, datasets or {})) for part in configs)
        encoders = tuple(open_encoder(part, self.tokenizer, vocab_size) for part in configs)
        self._job: ReadingJob = tuple(zip(configs, self.parts, encoders, strict=True))
        self._fingerprint = config_fingerprint(
            config, [files_digest(part.files) for part in self.parts], [encoder.name for encoder in encoders]
        )
        if fill is not None:
            self._fingerprint["data.batch_tokens"] = "as packs hold"  # so many as there are ranks
        self.ledger = Ledger()
        self.background = BlockService(self._job, config.workers, config.stall_timeout_s)
        # Neither threads nor workers may outlive a loader that is never closed.
        weakref.finalize(self, self.background.close)
        self._drawn = DrawnBatches(config, self.background, self.peers, fill)
        self._at = self._drawn.position()
        """After the last batch that was handed out."""
        self._deferred: dict[int, Deferral] = {}
        self._lost: tuple[DeferredDocument, ...] = ()
        self._step = 0

    def source_lines(self) -> list[str]:
        return [line for config, part, _ in self._job for line in source_lines(config, part)]

    def label_warnings(self) -> list[str]:
        return [line for config, part, encoder in self._job for line in label_warnings(config, part, encoder)]

    def next_batch(self) -> GlobalBatch | None:
        """Return the next global batch, at the end of the data one of carried documents alone; None after that.
        Collective. Raises `DataError` as `DrawnBatches.take`; the loader stays where it was."""
        if self._lost:
            self._reload_deferred()
        drawn = self._drawn.take(self._check_epoch)
        self._at = drawn.after
        self.ledger.state = self.ledger.state.with_read(drawn.read)
        if not drawn.documents and not self._deferred:
            self.close()
            return None
        sampled, documents, carried = drawn.sampled, drawn.documents, dict(sorted(self._deferred.items()))
        batch = GlobalBatch(
            step=self._step,
            epoch=drawn.epoch,
            documents=documents,
            tokens=own_tokens(sampled, carried),
            sampled=sampled,
            has_labels=any(one.block.header.has_labels for one in sampled)
            or any(entry.saved.has_labels for entry in carried.values()),
            deferrals=carried,
            is_last=not documents,
        )
        self.ledger.add_handed_out(tally_of(documents), tally_of(batch.carried))
        self._deferred = {}
        self._step += 1
        return batch

    def coming(self, count: int) -> tuple[tuple[Document, ...], ...]:
        """Return the new documents of the next `count` batches, fewer as in `DrawnBatches.peek`. Collective."""
        return tuple(batch.documents for batch in self._drawn.peek(count, self._check_epoch))

    def cut_trees(self, batch: GlobalBatch, cuts: Mapping[int, Sequence[int]]) -> GlobalBatch:
        """Return the batch with trees in parts (`GlobalBatch.cut_trees`), which count as documents that were read."""
        cut = batch.cut_trees(cuts)
        more = tally_of(cut.documents) - tally_of(batch.documents)
        self.ledger.state = self.ledger.state.with_read(LedgerState(read=more))
        self.ledger.add_handed_out(more, Tally())
        return cut

    def record_step(self, batch: GlobalBatch, plan: StepPlan) -> None:
        """Account for a trained step, and keep the documents that its plan deferred for the next batch. Raises
        `InvalidPlanError`: the plan does not cover exactly the batch's documents, or defers from the last batch."""
        known = {document.doc_id: document for document in batch.documents + batch.carried}
        planned = [document.doc_id for document in plan.documents] + [left.doc_id for left in plan.left_out]
        if len(planned) != len(set(planned)) or set(planned) != set(known):
            lost, strange = sorted(set(known) - set(planned)), sorted(set(planned) - set(known))
            raise InvalidPlanError(
                f"plan of step {plan.step} does not cover batch {batch.step}: {counted(len(planned), 'document')} for "
                f"{len(known)}, missing {lost[:5]}, unknown {strange[:5]}; train or leave out every document once"
            )
        for part in (*plan.documents, *plan.left_out):
            if part.num_tokens != known[part.doc_id].num_tokens:
                raise InvalidPlanError(
                    f"plan of step {plan.step} gives document {part.doc_id} {part.num_tokens} tokens, "
                    f"the batch {known[part.doc_id].num_tokens}; plan the batch's own documents"
                )
        deferred = [left.doc_id for left in plan.left_out if left.reason == DEFERRED]
        if deferred and batch.is_last:
            raise InvalidPlanError(f"plan of step {plan.step} defers {deferred[:5]} of the last batch; train them")
        self.ledger.record_step(plan, known)
        for doc_id in deferred:
            # A copy: a view would keep the whole batch in memory for as long as the document waits.
            content = batch.tokens.select([doc_id]).at(0) if doc_id in batch.tokens else None
            saved = DeferredDocument(document=known[doc_id], place=batch.place(doc_id), has_labels=batch.has_labels)
            self._deferred[doc_id] = Deferral(saved, content)

    def origin(self, place_of: Callable[[int], DocumentPlace], doc_id: int) -> str:
        """Say where a document was read: its number in the shuffled block, and the file in which that begins."""
        place = place_of(doc_id)
        file = BlockReader(self._job[place.part], place.part).first_file(place.block)
        return f"number {place.index + 1} of the block that begins in {file}"

    def check_ledger(self) -> None:
        self.ledger.check(self._at.held())

    def summary(self) -> list[str]:
        return self.ledger.state.lines(self._at.held())

    def state(self) -> LoaderState:
        """Return the state after the last batch handed out, the same on all ranks; one not recorded stays in flight."""
        return LoaderState(
            step=self._step,
            epoch=self._at.epoch,
            next_doc_id=self._at.next_doc_id,
            parts=self._at.parts,
            deferred=self._lost or tuple(entry.saved for entry in self._deferred.values()),
            ledger=self.ledger.state,
            fingerprint=self._fingerprint,
        )

    def first_batches(self, epoch: int, most_tokens: int) -> tuple[list[tuple[Document, ...]], float]:
        """Return the first batches of an epoch, which this rank reads alone, until they have so many tokens, and which
        share of the epoch they are: 1.0 = all, less is estimated by the records, 0.0 = not known."""
        service, alone = BlockService(self._job, 0, self.config.stall_timeout_s), SingleRank()
        drawn = DrawnBatches(msgspec.structs.replace(self.config, epochs=epoch + 1), service, alone, self._fill)
        drawn.load(DrawPosition(epoch, 0, state_at_epoch(self.state(), epoch).parts))
        batches, taken, account = list[tuple[Document, ...]](), Tally(), LedgerState()
        try:
            while taken.tokens < most_tokens:
                batch = drawn.take(lambda *_: None)
                if not batch.documents:
                    return batches, 1.0
                batches.append(batch.documents)
                taken, account = taken + tally_of(batch.documents), account.with_read(batch.read)
        finally:
            service.close()
        readers = [reader for part in self.parts for reader in part.readers]
        chosen = readers[:: -(-len(readers) // _INSPECTED_FILES)]
        # How many records a tree has is not known.
        has_trees = any(one.segments for batch in batches for one in batch)
        counts = [None if has_trees else reader.summary().num_records for reader in chosen]
        # Pieces that a document was split into are one record.
        longest = self.config.max_document_tokens if self.config.overlong == "split" else 0
        pieces = sum(document.num_tokens == longest for batch in batches for document in batch)
        kept = 1 - sum(account.dropped.values(), Tally()).documents / account.read.documents
        total = sum(filter(None, counts)) * len(readers) / len(chosen) * kept
        return batches, 0.0 if None in counts else min(1.0, (taken.documents - pieces) / max(1.0, total))

    def load_state(self, state: LoaderState) -> None:
        """Go on from a state, also of another parallel layout; `ConfigError` names other data settings or files."""
        check_fingerprint(state, self._fingerprint)
        self.background.close()
        self.ledger = Ledger(state.ledger)
        self._drawn = DrawnBatches(self.config, self.background, self.peers, self._fill)
        self._at = DrawPosition(state.epoch, state.next_doc_id, state.parts)
        self._drawn.load(self._at)
        self._step, self._deferred, self._lost = state.step, {}, state.deferred

    def close(self) -> None:
        self.background.close()

    def _check_epoch(self, epoch: int, num_sampled: int) -> None:
        account, held = self._drawn.account(self.ledger.state)
        if not num_sampled and self.config.reads == "held_out" and not account.read.documents:
            shares = (share for part in self.parts for share in part.segments)
            number = sum(1 for reader, share in shares for _ in reader.records(share))
            raise DataError(
                f"validation.share {self.config.held_out_share:g} holds out none of {counted(number, 'document')} of "
                "data.sources; raise it, or give validation.sources"
            )
        if not num_sampled:
            files = sum(len(part.files) for part in self.parts)
            named = list(self.config.sources) or [part.name for part in self.config.mixture]
            raise DataError(
                f"epoch {epoch} of {counted(files, 'file')} in {named} has no document to train ("
                f"{'; '.join(account.lines(held))}); check data: sources, overlong, on_corrupt, and validation.share"
            )
        Ledger(account).check(held)

    def _reload_deferred(self) -> None:
        """Read the deferred documents of a state again, each on the rank that reads its stream. Collective."""
        requests = list(dict.fromkeys(lost.place.block for lost in self._lost))
        blocks = {block.request: block for block in _open_together(requests, self.background, self.peers)}
        entries: dict[int, Deferral] = {}
        for lost in self._lost:
            place, block, doc_id = lost.place, blocks[lost.place.block], lost.document.doc_id
            if block.header.checksum != place.checksum:
                raise DataError(
                    f"block {place.block.cursor.block} of stream {place.block.key.stream} with deferred document "
                    f"{doc_id} has changed; sources must not change between save and resume"
                )
            entries[doc_id] = Deferral(lost, None if block.table is None else block.table.at(place.index))
        self._deferred, self._lost = entries, ()


def _dataset_of(config: DataConfig, datasets: dict[str, Any]) -> Any:
    named = [source for source in config.sources if source in datasets]
    if named and len(config.sources) > 1:
        raise ConfigError(f"data source '{named[0]}' is a data set object, next to others; make it a part of a mixture")
    return datasets[named[0]] if named else None
