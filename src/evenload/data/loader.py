"""Load global batches (`GlobalBatchLoader`): source → tokenise → shuffle → batch, by all ranks together, exactly
resumable.

A global batch is fixed before anything is planned: by number of documents or by tokens, in the seeded order of the
streams (`streams.py`). Every rank reads its share of the streams and knows every document's length;
`feed.step_maker` brings the tokens to the ranks that train them.

    loader = GlobalBatchLoader(config)
    while (batch := loader.next_batch()) is not None:
        plan = ...                       # of batch.documents (and batch.carried)
        ...                              # exchange, train
        loader.note_step(batch, plan)    # ledger, and documents that the plan deferred
        saved = loader.state()           # after this step

`next_batch` and `coming` are collective; everything else is not. Price: a few microseconds a document besides reading
it; in memory are the open block of every stream that this rank reads, the next one, and those of batches drawn before
their turn.
"""

import weakref
from collections.abc import Callable
from typing import Any

from evenload.data.batches import (
    Alone,
    Deferral,
    DeferredDocument,
    DocumentPlace,
    GlobalBatch,
    LoaderState,
    Peers,
    check_fingerprint,
    config_fingerprint,
    own_tokens,
)
from evenload.data.blocks import BlockReader, BlockRequest, DocumentBlock
from evenload.data.config import DataConfig, mixture_configs
from evenload.data.encoders import EncodedDocument
from evenload.data.ledger import Ledger, Tally, tally_of
from evenload.data.open_encoder import open_encoder
from evenload.data.part_files import label_warnings, open_part, source_lines
from evenload.data.sources import files_digest
from evenload.data.streams import DrawnBatch, DrawnBatches, DrawPosition, owner_of
from evenload.data.tokenize import DocumentTokenizer, open_tokenizer
from evenload.data.workers import BlockService, ReadingJob
from evenload.errors import ConfigError, DataError, EvenloadError, InvalidPlanError
from evenload.types.document import Document
from evenload.types.plan import DEFERRED, StepPlan
from evenload.types.text import counted


class GlobalBatchLoader:
    """Load the global batches of `config`.

    Args:
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
        # Neither threads nor workers may outlive a loader that is never closed.
        weakref.finalize(self, self.background.close)
        self._drawn = DrawnBatches(config, self.background, self.peers)
        self._at = self._drawn.position()
        """After the last batch that was handed out."""
        self._deferred: dict[int, Deferral] = {}
        self._lost: tuple[DeferredDocument, ...] = ()
        self._step = 0

    def source_lines(self) -> list[str]:
        """Report what is read of every source and what is not, a line each; `DataError` for an unreadable file."""
        return [line for config, part, _ in self._job for line in source_lines(config, part)]

    def label_warnings(self) -> list[str]:
        """Warn of labels that are other ids than their tokens, by the first records of every source.

        Raises:
            DataError: a file that cannot be read, or a column that would change what is trained.
        """
        return [line for config, part, encoder in self._job for line in label_warnings(config, part, encoder)]

    def next_batch(self) -> GlobalBatch | None:
        """Return the next global batch; None after the last epoch. Collective.

        Documents that plans deferred are its `carried`, at the end of the data alone.

        Raises:
            DataError: as `DrawnBatches.take`, on every rank. The loader stays where it was.
        """
        if self._lost:
            self._reload_deferred()
        drawn = self._drawn.take(self._check_epoch)
        self._at = drawn.after
        self.ledger.state = self.ledger.state.with_read(drawn.read)
        if not drawn.documents and not self._deferred:
            self.close()
            return None
        return self._hand_out(drawn)

    def coming(self, count: int) -> tuple[tuple[Document, ...], ...]:
        """Return the new documents of the next `count` batches, with their final ids; fewer batches where the data ends
        or one cannot be read, which `next_batch` raises in its turn. Collective. State and account do not change."""
        return tuple(batch.documents for batch in self._drawn.peek(count, self._check_epoch))

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
        self.ledger.note_step(plan)
        for doc_id in deferred:
            content = None
            if doc_id in batch.tokens:
                # Copies: a view would keep the whole batch in memory for as long as the document waits.
                labels = batch.tokens.labels_of(doc_id).copy() if batch.has_labels else None
                content = EncodedDocument(batch.tokens[doc_id].copy(), labels)
            saved = DeferredDocument(document=known[doc_id], place=batch.place(doc_id), has_labels=batch.has_labels)
            self._deferred[doc_id] = Deferral(saved, int(batch.owners([doc_id])[0]), content)

    def origin(self, place_of: Callable[[int], DocumentPlace], doc_id: int) -> str:
        """Say where a document was read: its number in the shuffled block, and the file in which that begins."""
        place = place_of(doc_id)
        reader = BlockReader(*self._job[place.part], part=place.part)
        file = reader.first_file(place.block.key.stream, place.block.epoch, place.block.cursor)
        return f"number {place.index + 1} of the block that begins in {file}"

    def held(self) -> Tally:
        """Count what was read and is in no batch, up to the last batch handed out."""
        return self._at.held()

    def check_ledger(self) -> None:
        """Raise a `DataError` unless every token that was read is trained, dropped, deferred or waiting."""
        self.ledger.check(self.held())

    def summary(self) -> list[str]:
        return self.ledger.state.lines(self.held())

    def state(self) -> LoaderState:
        """Return the state, the same on all ranks: restored, it continues after the last batch handed out.

        A batch that was handed out and not noted stays in flight in the ledger.
        """
        return LoaderState(
            step=self._step,
            epoch=self._at.epoch,
            next_doc_id=self._at.next_doc_id,
            parts=self._at.parts,
            deferred=self._lost or tuple(entry.saved for entry in self._deferred.values()),
            ledger=self.ledger.state,
            fingerprint=self._fingerprint,
        )

    def load_state(self, state: LoaderState) -> None:
        """Go on from a state, also of another process or parallel layout; `next_batch` reads open blocks and deferred
        documents again.

        Raises:
            ConfigError: the state was made with other data settings or files; names them.
        """
        check_fingerprint(state, self._fingerprint)
        self.background.close()
        self.ledger = Ledger(state.ledger)
        self._drawn = DrawnBatches(self.config, self.background, self.peers)
        self._at = DrawPosition(state.epoch, state.next_doc_id, state.parts)
        self._drawn.load(self._at)
        self._step, self._deferred, self._lost = state.step, {}, state.deferred

    def close(self) -> None:
        """End the background readers; the next request for a batch starts them again."""
        self.background.close()

    def _check_epoch(self, epoch: int, num_sampled: int) -> None:
        """Check that an epoch gave documents, and that all that was read of it is accounted for."""
        account, held = self._drawn.account(self.ledger.state)
        if not num_sampled and self.config.reads == "held_out" and not account.read.documents:
            shares = ((part.readers[at], part.files[at], share) for part in self.parts for at, share in part.segments)
            number = sum(1 for reader, file, share in shares for _ in reader.records(file, share))
            raise DataError(
                f"validation.share {self.config.held_out_share:g} holds out none of {counted(number, 'document')} of "
                "data.sources; raise it, or give validation.sources"
            )
        if not num_sampled:
            files = sum(len(part.files) for part in self.parts)
            named = list(self.config.sources) or [part.name for part in self.config.mixture]
            raise DataError(
                f"epoch {epoch} of {counted(files, 'file')} in {named} has no document "
                f"to train ({'; '.join(account.lines(held))}); check data.sources, data.overlong, "
                "data.on_corrupt and validation.share"
            )
        Ledger(account).check(held)

    def _hand_out(self, drawn: DrawnBatch) -> GlobalBatch:
        sampled, documents = drawn.sampled, drawn.documents
        carried = {doc_id: self._deferred[doc_id] for doc_id in sorted(self._deferred)}
        batch = GlobalBatch(
            step=self._step,
            epoch=drawn.epoch,
            documents=documents,
            tokens=own_tokens(sampled, documents[0].doc_id if documents else 0, carried),
            sampled=sampled,
            has_labels=any(block.header.has_labels for block in sampled.blocks)
            or any(entry.saved.has_labels for entry in carried.values()),
            deferrals=carried,
            is_last=not documents,
        )
        self.ledger.note_handed_out(sampled.tally(), tally_of(batch.carried))
        self._deferred = {}
        self._step += 1
        return batch

    def _reload_deferred(self) -> None:
        """Read the deferred documents of a state again, each on the rank that reads its stream. Collective."""
        entries: dict[int, Deferral] = {}
        problem = b""
        blocks: dict[BlockRequest, DocumentBlock] = {}
        try:
            for lost in self._lost:
                place, request, content = lost.place, lost.place.block, None
                owner = owner_of(request.key, self.peers.size)
                if owner == self.peers.rank:
                    if request not in blocks:
                        blocks[request] = self.background.take(request)
                    if blocks[request].header.checksum != place.checksum:
                        raise DataError(
                            f"deferred document {lost.document.doc_id} of {lost.document.num_tokens} tokens stands in "
                            f"block {request.cursor.block} of stream {request.key.stream}, which holds other documents "
                            "than when the loader's state was saved; sources must not change between save and resume"
                        )
                    content = blocks[request].document(place.index)
                entries[lost.document.doc_id] = Deferral(lost, owner, content)
        except EvenloadError as error:
            problem = str(error).encode()
        problems = [answer for answer in self.peers.gather(problem) if answer]
        if problems:
            raise DataError(problems[0].decode())
        self._deferred, self._lost = entries, ()


def _dataset_of(config: DataConfig, datasets: dict[str, Any]) -> Any:
    named = [source for source in config.sources if source in datasets]
    if named and len(config.sources) > 1:
        raise ConfigError(
            f"data source '{named[0]}' is a data set object, next to {len(config.sources) - 1} others; give "
            "every object a part of data.mixture of its own"
        )
    return datasets[named[0]] if named else None
