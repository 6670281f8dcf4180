"""`GlobalBatchLoader`: source → tokenise → shuffle → global batch, read by all ranks together, exactly resumable.

A global batch is fixed here, before anything is planned: by number of documents or by tokens, in the seeded order of
the streams (`streams.py`). Planning and packing only rearrange inside it. Every rank reads its share of the streams;
all know every document's length, and the exchange (`exchange.py`) brings the tokens to the ranks that train them.

    loader = GlobalBatchLoader(config)
    while (batch := loader.next_batch()) is not None:
        plan = ...                       # of batch.documents (and batch.carried)
        ...                              # exchange, train
        loader.note_step(batch, plan)    # ledger, and documents that the plan deferred
        saved = loader.state()           # after this step

`next_batch` is collective; everything else is not. Price: a few microseconds a document beyond reading it; in memory
are the open block of every stream that this rank reads, and the next one.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from evenload.data.batch.global_batch import Deferral, GlobalBatch, SampledDocuments, join_sampled, own_tokens
from evenload.data.batch.peers import Alone, Peers
from evenload.data.batch.state import (
    DeferredDocument,
    DocumentPlace,
    LoaderState,
    check_fingerprint,
    config_fingerprint,
)
from evenload.data.batch.streams import StreamSampler
from evenload.data.config import DataConfig, mixture_configs
from evenload.data.encoding.open_encoder import open_encoder
from evenload.data.encoding.token_table import Span
from evenload.data.encoding.tokenize import DocumentTokenizer, open_tokenizer
from evenload.data.ledger import Ledger, Tally, tally_of
from evenload.data.reading.block import BlockRequest, DocumentBlock, StreamKey
from evenload.data.reading.block_reader import BlockReader
from evenload.data.reading.block_service import BlockService
from evenload.data.reading.part_files import open_part
from evenload.data.reading.workers import ReadingJob
from evenload.data.source.files import files_digest
from evenload.errors import ConfigError, DataError, EvenloadError, InvalidPlanError
from evenload.types.document import Document
from evenload.types.plan import DEFERRED, StepPlan


class GlobalBatchLoader:
    """Global batches of `config`.

    Args:
        config: data settings.
        tokenizer: instead of the one that `config.tokenizer` names.
        peers: the ranks that read together; each makes its own loader of equal settings.
        datasets: Hugging Face data sets by source name, read instead of files (see `open_part`).
        vocab_size: of the model that is trained; token ids beyond it are corrupt records. None = not known.

    Raises:
        ConfigError: sources without files, a tokeniser or template that cannot be used.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: DocumentTokenizer | None = None,
        *,
        peers: Peers | None = None,
        datasets: dict[str, Any] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer or open_tokenizer(config.tokenizer, config.eos_token)
        self.peers: Peers = peers or Alone()
        configs = mixture_configs(config)
        self.parts = tuple(open_part(part, _dataset_of(part, datasets or {})) for part in configs)
        encoders = tuple(open_encoder(part, self.tokenizer, vocab_size) for part in configs)
        self._job: ReadingJob = tuple(zip(configs, self.parts, encoders, strict=True))
        self._fingerprint = config_fingerprint(
            config, [files_digest(part.files) for part in self.parts], [encoder.name for encoder in encoders]
        )
        self.ledger = Ledger()
        self.background = BlockService(self._job, config.workers, config.stall_timeout_s)
        # Neither threads nor workers may outlive a loader that is simply dropped.
        weakref.finalize(self, self.background.close)
        self._streams = StreamSampler(config, self.background, self.peers, self.ledger)
        self._members: list[SampledDocuments] = []
        self._deferred: dict[int, Deferral] = {}
        self._lost: tuple[DeferredDocument, ...] = ()
        self._before: LoaderState | None = None
        self._step = 0
        self._epoch = 0
        self._next_doc_id = 0

    def next_batch(self) -> GlobalBatch | None:
        """The next global batch; None after the last epoch. Collective.

        Documents that plans deferred come along as `carried`, at the end in a batch of their own.

        Raises:
            DataError: a record that is an error by the settings, an epoch without any document, or a
                ledger that does not balance at the end of an epoch; on every rank. The loader stays where it was.
        """
        if self._lost:
            self._reload_deferred()
        if not self._members:
            self._before = self._current_state()
        self._collect()
        while not self._members and not self._is_finished():
            self._end_epoch()
            self._collect()
        if not self._members and not self._deferred:
            self.close()
            return None
        members, self._members = self._members, []
        return self._hand_out(members)

    def note_step(self, batch: GlobalBatch, plan: StepPlan) -> None:
        """Account for a trained step, and keep the documents that its plan deferred for the next batch.

        Raises:
            InvalidPlanError: the plan does not cover exactly the batch's documents, or defers from the last batch.
        """
        known = {document.doc_id: document for document in batch.documents + batch.carried}
        planned = [document.doc_id for document in plan.documents] + [left.doc_id for left in plan.left_out]
        if len(planned) != len(set(planned)) or set(planned) != set(known):
            lost, strange = sorted(set(known) - set(planned)), sorted(set(planned) - set(known))
            raise InvalidPlanError(
                f"plan of step {plan.step} does not cover batch {batch.step}: {len(planned)} documents for "
                f"{len(known)}, missing {lost[:5]}, unknown {strange[:5]}; "
                "every document must be trained or left out once"
            )
        for part in (*plan.documents, *plan.left_out):
            if part.num_tokens != known[part.doc_id].num_tokens:
                raise InvalidPlanError(
                    f"plan of step {plan.step} gives document {part.doc_id} {part.num_tokens} tokens, "
                    f"the batch {known[part.doc_id].num_tokens}; plan the batch's own documents"
                )
        deferred = [left.doc_id for left in plan.left_out if left.reason == DEFERRED]
        if deferred and batch.is_last:
            raise InvalidPlanError(
                f"plan of step {plan.step} defers documents {deferred[:5]} of the last batch; train them or drop them "
                "with a reason"
            )
        self.ledger.note_step(plan)
        for doc_id in deferred:
            span: Span | None = None
            if doc_id in batch.tokens:
                # Copies: a view would keep the whole batch in memory for as long as the document waits.
                labels = batch.tokens.labels_of(doc_id).copy() if batch.has_labels else None
                span = (batch.tokens[doc_id].copy(), labels, 0, known[doc_id].num_tokens)
            saved = DeferredDocument(document=known[doc_id], place=batch.place(doc_id), has_labels=batch.has_labels)
            self._deferred[doc_id] = Deferral(saved, int(batch.owners([doc_id])[0]), span)

    def origin(self, place_of: Callable[[int], DocumentPlace], doc_id: int) -> str:
        """Where a document of a batch was read: the run of documents that are shuffled together, by its first file."""
        place = place_of(doc_id)
        reader = BlockReader(*self._job[place.part], part=place.part)
        file = reader.first_file(place.stream, place.epoch, place.cursor)
        return f"number {place.index + 1} of the block that begins in {file}"

    def held(self) -> Tally:
        """Documents and tokens that were read and are in no batch yet."""
        return sum((run.tally() for run in self._members), self._streams.held())

    def check_ledger(self) -> None:
        """Every token that was read is trained, dropped, deferred or waiting; a `DataError` where it is not."""
        self.ledger.check(self.held())

    def summary(self) -> list[str]:
        """The ledger's lines for the end of a run."""
        return self.ledger.state.lines(self.held())

    def state(self) -> LoaderState:
        """Where the loader stands: restored, it goes on with the batch after the last one handed out.

        The same on all ranks. A batch that was handed out and not noted stays in flight in the ledger.
        """
        # A record that failed in the middle of a batch leaves its first documents waiting here.
        return self._before if self._members and self._before is not None else self._current_state()

    def load_state(self, state: LoaderState) -> None:
        """Go on where a state was made, also by a loader of another process or parallel layout.

        Reads nothing: open blocks and deferred documents are read again by the next `next_batch`.

        Raises:
            ConfigError: the state was made with other data settings or files; names them.
        """
        check_fingerprint(state, self._fingerprint)
        self.background.close()
        self.ledger = Ledger(state.ledger)
        self._streams = StreamSampler(self.config, self.background, self.peers, self.ledger)
        self._streams.load_state(state.parts)
        self._step, self._epoch, self._next_doc_id = state.step, state.epoch, state.next_doc_id
        self._members, self._before, self._deferred, self._lost = [], None, {}, state.deferred

    def close(self) -> None:
        """End the background readers. State and account remain; asked for another batch, it starts them again."""
        self.background.close()
        self._streams.forget_requests()

    def _current_state(self) -> LoaderState:
        return LoaderState(
            step=self._step,
            epoch=self._epoch,
            next_doc_id=self._next_doc_id,
            parts=self._streams.state(),
            deferred=self._lost or tuple(entry.saved for entry in self._deferred.values()),
            ledger=self.ledger.state,
            fingerprint=self._fingerprint,
        )

    def _collect(self) -> None:
        """Draw the members of the next batch; none at the end of an epoch."""
        if self._is_finished():
            return
        documents, tokens, members = self.config.batch_documents, self.config.batch_tokens, self._members
        taken = sum((run.tally() for run in members), Tally())
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
        if not self._streams.num_sampled:
            files = sum(len(part.files) for part in self.parts)
            named = list(self.config.sources) or [part.name for part in self.config.mixture]
            raise DataError(
                f"epoch {self._epoch} of {files} files in {named} has no document "
                f"to train ({'; '.join(self.summary())}); check data.sources, data.overlong and data.on_corrupt"
            )
        self.check_ledger()
        self._epoch += 1
        self._streams.restart(self._epoch)

    def _is_finished(self) -> bool:
        return self.config.epochs is not None and self._epoch >= self.config.epochs

    def _hand_out(self, members: Sequence[SampledDocuments]) -> GlobalBatch:
        first, sampled = self._next_doc_id, join_sampled(members)
        columns = zip(sampled.lengths.tolist(), sampled.num_labels.tolist(), strict=True)
        documents = tuple(
            Document(doc_id=doc_id, num_tokens=num_tokens, num_label_tokens=num_labels)
            for doc_id, (num_tokens, num_labels) in enumerate(columns, start=first)
        )
        carried = {doc_id: self._deferred[doc_id] for doc_id in sorted(self._deferred)}
        batch = GlobalBatch(
            step=self._step,
            epoch=self._epoch,
            documents=documents,
            tokens=own_tokens(sampled, first, carried),
            sampled=sampled,
            has_labels=any(block.header.has_labels for block in sampled.blocks)
            or any(entry.saved.has_labels for entry in carried.values()),
            deferrals=carried,
            is_last=not documents,
        )
        self.ledger.note_handed_out(sampled.tally(), tally_of(batch.carried))
        self._deferred = {}
        self._step += 1
        self._next_doc_id += len(documents)
        return batch

    def _reload_deferred(self) -> None:
        """Read the documents of a state's deferred ones again, each on the rank that owns its stream. Collective."""
        entries: dict[int, Deferral] = {}
        problem = b""
        blocks: dict[BlockRequest, DocumentBlock] = {}
        try:
            for lost in self._lost:
                place = lost.place
                owner = self._streams.owner(place.part, place.stream)
                span: Span | None = None
                if owner == self.peers.rank:
                    request = BlockRequest(StreamKey(place.part, place.stream), place.epoch, place.cursor)
                    if request not in blocks:
                        self.background.request(request)
                        blocks[request] = self.background.take(request)
                    if blocks[request].header.checksum != place.checksum:
                        raise DataError(
                            f"deferred document {lost.document.doc_id} of {lost.document.num_tokens} tokens stands in "
                            f"block {place.cursor.block} of stream {place.stream}, which holds other documents than "
                            "when the loader's state was saved; the sources must not change between save and resume"
                        )
                    span = blocks[request].span(place.index)
                entries[lost.document.doc_id] = Deferral(lost, owner, span)
        except EvenloadError as error:
            problem = str(error).encode()
        problems = [answer for answer in self.peers.gather(problem) if answer]
        if problems:
            raise DataError(problems[0].decode())
        self._deferred, self._lost = entries, ()


def _dataset_of(config: DataConfig, datasets: dict[str, Any]) -> Any:
    """The data set object that a part's only source names, if there is one."""
    named = [source for source in config.sources if source in datasets]
    if named and len(config.sources) > 1:
        raise ConfigError(
            f"data source '{named[0]}' is a data set object, and stands beside {len(config.sources) - 1} others; give "
            "every object a part of data.mixture of its own"
        )
    return datasets[named[0]] if named else None
