"""`DrawnBatches`: global batches sampled in order, before they are handed out.

A planner may want to know the lengths of the batches that follow (`FlexPlanner`: a switch of layout pays over several
steps). So batches are drawn ahead, and wait here; a loader's state is that after the batch handed out last, as if none
had been drawn since: every drawn batch brings what reading it added to the account, and where the streams stood after
it. Drawing is collective; its price is that of sampling, only earlier, and the open blocks of what waits.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenload.data.batch.global_batch import SampledDocuments, join_sampled
from evenload.data.batch.peers import Peers
from evenload.data.batch.state import PartState
from evenload.data.batch.streams import StreamSampler
from evenload.data.config import DataConfig
from evenload.data.ledger import Ledger, LedgerState, Tally
from evenload.data.reading.workers import BlockService
from evenload.errors import DataError
from evenload.types.document import Document


@dataclass(frozen=True, eq=False, slots=True)
class DrawPosition:
    """Between two batches: the epoch, the id of the next document, and where the streams stand."""

    epoch: int
    next_doc_id: int
    parts: tuple[PartState, ...]

    def held(self) -> Tally:
        """Documents of open blocks: they count as read and are in no batch."""
        return sum((stream.left for part in self.parts for stream in part.streams), Tally())


@dataclass(frozen=True, eq=False, slots=True)
class DrawnBatch:
    """One batch; without documents where the data has ended.

    Args:
        epoch: of the documents.
        documents: new ones, with the ids that they keep.
        noted: what reading it added to the account.
        after: where the next batch begins.
    """

    epoch: int
    documents: tuple[Document, ...]
    sampled: SampledDocuments
    noted: LedgerState
    after: DrawPosition


class DrawnBatches:
    """Draws batches.

    Args:
        config: makes the batches: how many documents or tokens, how many epochs.
        service: reads the blocks of the streams that this rank owns.
        at_epoch_end: told of the epoch that ends and of the documents drawn from it; raises a `DataError` where
            something is wrong with it.
    """

    def __init__(
        self, config: DataConfig, service: BlockService, peers: Peers, at_epoch_end: Callable[[int, int], None]
    ) -> None:
        self._config, self._at_epoch_end = config, at_epoch_end
        self._noted = Ledger()
        self._streams = StreamSampler(config, service, peers, self._noted)
        self._epoch = self._next_doc_id = 0
        self._members: list[SampledDocuments] = []
        self._waiting: deque[DrawnBatch] = deque()
        self._has_failed = False
        """The batch behind those that wait could not be read; not tried again before it is asked for."""

    def go_on(self, position: DrawPosition) -> None:
        """Draw from there, before anything was drawn."""
        self._streams.load_state(position.parts)
        self._epoch, self._next_doc_id = position.epoch, position.next_doc_id

    def position(self) -> DrawPosition:
        """After all that was drawn."""
        return DrawPosition(self._epoch, self._next_doc_id, self._streams.state())

    def account(self, handed_out: LedgerState) -> tuple[LedgerState, Tally]:
        """The account with all that was drawn, and what of it is in no batch that was handed out."""
        state, held = handed_out, self._streams.held() + _tally(self._members)
        for batch in self._waiting:
            state, held = state.with_read(batch.noted), held + batch.sampled.tally()
        return state.with_read(self._noted.state), held

    def owner(self, part: int, stream: int) -> int:
        """The rank that reads a stream."""
        return self._streams.owner(part, stream)

    def forget_requests(self) -> None:
        """Blocks that were asked for will not come."""
        self._streams.forget_requests()

    def ahead(self, count: int) -> list[DrawnBatch]:
        """The next batches, which stay here: `count` of them, fewer before the end of the data or before one that
        cannot be read, whose error `take` raises when its turn comes. Collective."""
        try:
            while len(self._waiting) < count and not self._has_failed and not self._has_ended():
                self._waiting.append(self._draw())
        except DataError:
            self._has_failed = True  # on every rank; drawn again and raised where the batch is asked for
        return [batch for batch in list(self._waiting)[:count] if batch.documents]

    def take(self) -> DrawnBatch:
        """The next batch. Collective.

        Raises:
            DataError: a record that is an error by the settings, an epoch without any document, or an account of an
                epoch that does not balance; on every rank, and again when it is asked again.
        """
        if self._waiting:
            return self._waiting.popleft()
        self._has_failed = False
        return self._draw()

    def _has_ended(self) -> bool:
        return bool(self._waiting) and not self._waiting[-1].documents

    def _draw(self) -> DrawnBatch:
        self._collect()
        while not self._members and not self._is_finished():
            self._end_epoch()
            self._collect()
        sampled, self._members = join_sampled(self._members), []
        columns = zip(sampled.lengths.tolist(), sampled.num_labels.tolist(), strict=True)
        documents = tuple(
            Document(doc_id=doc_id, num_tokens=num_tokens, num_label_tokens=num_labels)
            for doc_id, (num_tokens, num_labels) in enumerate(columns, start=self._next_doc_id)
        )
        self._next_doc_id += len(documents)
        noted, self._noted.state = self._noted.state, LedgerState()
        return DrawnBatch(self._epoch, documents, sampled, noted, self.position())

    def _collect(self) -> None:
        """Draw the members of the next batch; none at the end of an epoch. What a failure leaves is gone on with."""
        if self._is_finished():
            return
        documents, tokens, members = self._config.batch_documents, self._config.batch_tokens, self._members
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

    def _end_epoch(self) -> None:
        self._at_epoch_end(self._epoch, self._streams.num_sampled)
        self._epoch += 1
        self._streams.restart(self._epoch)

    def _is_finished(self) -> bool:
        return self._config.epochs is not None and self._epoch >= self._config.epochs


def _tally(members: Sequence[SampledDocuments]) -> Tally:
    return sum((run.tally() for run in members), Tally())
