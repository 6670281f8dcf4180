"""`GlobalBatchLoader`: source → tokenise → shuffle window → global batch, exactly resumable.

A global batch is fixed here, before anything is planned: by number of documents or by tokens, in the
order of the seeded window. Planning and packing only rearrange inside it. Today every rank runs this
loader and reads all of the batch; the exchange (`exchange.py`) then picks what a rank trains.

    loader = GlobalBatchLoader(config)
    while (batch := loader.next_batch()) is not None:
        plan = ...                       # of batch.documents (and batch.carried)
        ...                              # train
        loader.note_step(batch, plan)    # ledger, and documents that the plan deferred
        saved = loader.state()           # after this step

Price: the window's documents in memory; restoring costs reading the window again, whatever the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenload.data.config import DataConfig
from evenload.data.ledger import Ledger, Tally
from evenload.data.sources import DocumentSource
from evenload.data.state import DeferredDocument, LoaderState, check_fingerprint, config_fingerprint
from evenload.data.stream import DocumentPosition, DocumentStream, LoadedDocument
from evenload.data.tokenize import DocumentTokenizer, open_tokenizer
from evenload.data.window import ShuffleWindow
from evenload.errors import DataError, InvalidPlanError
from evenload.types.document import Document
from evenload.types.plan import DEFERRED, StepPlan


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalBatch:
    """The documents of one optimizer step.

    Args:
        step: 0-based number of the batch.
        epoch: of the new documents.
        documents: new in this batch, in stream order.
        tokens: int32[num_tokens] by doc_id, of `documents` and `carried`.
        positions: where each document was read, by doc_id.
        carried: documents that the plans of earlier steps deferred, oldest first; to be planned with the new ones.
        is_last: the data has ended and only carried documents are left: the plan must not defer again.
    """

    step: int
    epoch: int
    documents: tuple[Document, ...]
    tokens: dict[int, NDArray[np.int32]]
    positions: dict[int, DocumentPosition] = field(default_factory=dict)
    carried: tuple[Document, ...] = ()
    is_last: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the new documents."""
        return sum(document.num_tokens for document in self.documents)

    @property
    def num_label_tokens(self) -> int:
        """Label tokens of the new documents."""
        return sum(document.num_label_tokens for document in self.documents)


class GlobalBatchLoader:
    """Global batches of `config`.

    Args:
        config: data settings.
        tokenizer: instead of the one that `config.tokenizer` names.

    Raises:
        ConfigError: sources without files, a tokeniser that cannot be used.
    """

    def __init__(self, config: DataConfig, tokenizer: DocumentTokenizer | None = None) -> None:
        self.config = config
        self.tokenizer = tokenizer or open_tokenizer(config.tokenizer, config.eos_token)
        self.source = DocumentSource(config)
        self.ledger = Ledger()
        self._stream = DocumentStream(config, self.source, self.tokenizer, self.ledger)
        self._window: ShuffleWindow[LoadedDocument] = ShuffleWindow(config.shuffle_window, config.seed)
        self._pending: list[LoadedDocument] = []
        self._deferred: dict[int, tuple[Document, LoadedDocument]] = {}
        self._step = 0
        self._epoch = 0
        self._next_doc_id = 0

    def next_batch(self) -> GlobalBatch | None:
        """The next global batch; None after the last epoch.

        Documents that plans deferred come along as `carried`, at the end in a batch of their own.

        Raises:
            DataError: a record that is an error by the settings, an epoch without any document, or a
                ledger that does not balance at the end of an epoch. The loader stays where it was.
        """
        members = self._collect()
        while not members and not self._is_finished():
            self._end_epoch()
            members = self._collect()
        if not members and not self._deferred:
            return None
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
            self._deferred[doc_id] = (known[doc_id], LoadedDocument(batch.positions[doc_id], batch.tokens[doc_id]))

    def held(self) -> Tally:
        """Documents and tokens that were read and are in no batch yet."""
        waiting = (*self._window.items, *self._pending)
        return Tally(documents=len(waiting), tokens=sum(len(document.tokens) for document in waiting))

    def check_ledger(self) -> None:
        """Every token that was read is trained, dropped, deferred or waiting.

        Raises:
            DataError: it is not.
        """
        self.ledger.check(self.held())

    def summary(self) -> list[str]:
        """The ledger's lines for the end of a run."""
        return self.ledger.summary(self.held())

    def state(self) -> LoaderState:
        """Where the loader stands: restored, it goes on with the batch after the last one handed out.

        A batch that was handed out and not noted stays in flight in the ledger.
        """
        return LoaderState(
            step=self._step,
            epoch=self._epoch,
            next_doc_id=self._next_doc_id,
            cursor=self._stream.cursor,
            num_draws=self._window.num_draws,
            window=tuple(document.position for document in self._window.items),
            pending=tuple(document.position for document in self._pending),
            deferred=tuple(
                DeferredDocument(document=document, position=loaded.position)
                for document, loaded in self._deferred.values()
            ),
            ledger=self.ledger.state(),
            fingerprint=self._fingerprint(),
        )

    def load_state(self, state: LoaderState) -> None:
        """Go on where a state was made, also by a loader of another process or parallel layout.

        Raises:
            ConfigError: the state was made with other data settings or files; names them.
            DataError: the sources changed.
        """
        check_fingerprint(state, self._fingerprint())
        positions = [*state.window, *state.pending, *(entry.position for entry in state.deferred)]
        # One pass over the sources for all of them, so that each file is opened once.
        loaded = self._stream.reload(positions)
        num_window, num_drawn = len(state.window), len(state.window) + len(state.pending)
        deferred = {
            entry.document.doc_id: (entry.document, document)
            for entry, document in zip(state.deferred, loaded[num_drawn:], strict=True)
        }
        for document, content in deferred.values():
            if document.num_tokens != len(content.tokens):
                raise DataError(
                    f"deferred document {document.doc_id} had {document.num_tokens} tokens and has "
                    f"{len(content.tokens)} now; the sources must not change between save and resume"
                )
        self._step, self._epoch, self._next_doc_id = state.step, state.epoch, state.next_doc_id
        self._stream.restart(state.epoch, state.cursor)
        self._window.restart(state.epoch, state.num_draws, loaded[:num_window])
        self._pending = loaded[num_window:num_drawn]
        self._deferred = deferred
        self.ledger = Ledger(state.ledger)
        self._stream.ledger = self.ledger

    def _collect(self) -> list[LoadedDocument]:
        """The next batch's new documents, all of one epoch; empty at its end."""
        config = self.config
        members: list[LoadedDocument] = []
        num_tokens = 0
        try:
            while config.batch_documents is None or len(members) < config.batch_documents:
                document = self._draw()
                if document is None:
                    break
                num_tokens += len(document.tokens)
                if config.batch_tokens is not None and members and num_tokens > config.batch_tokens:
                    self._pending.insert(0, document)
                    break
                members.append(document)
        except Exception:
            # Nothing is lost when a record fails in the middle of a batch.
            self._pending[:0] = members
            raise
        return members

    def _draw(self) -> LoadedDocument | None:
        """The next document of the epoch in shuffled order."""
        if self._pending:
            return self._pending.pop(0)
        while not self._window.is_full and not self._is_finished():
            document = self._stream.next_document()
            if document is None:
                break
            self._window.add(document)
        return self._window.draw() if len(self._window) else None

    def _end_epoch(self) -> None:
        if not self._window.num_draws:
            raise DataError(
                f"epoch {self._epoch} of {len(self.source.files)} files in {list(self.config.sources)} has no document "
                f"to train ({'; '.join(self.summary())}); check data.sources, data.overlong and data.on_corrupt"
            )
        self.check_ledger()
        self._epoch += 1
        self._stream.restart(self._epoch)
        self._window.restart(self._epoch)

    def _is_finished(self) -> bool:
        return self.config.epochs is not None and self._epoch >= self.config.epochs

    def _hand_out(self, members: Sequence[LoadedDocument]) -> GlobalBatch:
        first = self._next_doc_id
        documents = tuple(
            Document(doc_id=first + index, num_tokens=len(member.tokens), num_label_tokens=len(member.tokens) - 1)
            for index, member in enumerate(members)
        )
        contents = {document.doc_id: member for document, member in zip(documents, members, strict=True)}
        carried = [self._deferred[doc_id] for doc_id in sorted(self._deferred)]
        contents |= {document.doc_id: loaded for document, loaded in carried}
        batch = GlobalBatch(
            step=self._step,
            epoch=self._epoch,
            documents=documents,
            tokens={doc_id: loaded.tokens for doc_id, loaded in contents.items()},
            positions={doc_id: loaded.position for doc_id, loaded in contents.items()},
            carried=tuple(document for document, _ in carried),
            is_last=not members,
        )
        carried_tokens = sum(document.num_tokens for document in batch.carried)
        self.ledger.note_handed_out(
            Tally(documents=len(documents), tokens=batch.num_tokens),
            Tally(documents=len(batch.carried), tokens=carried_tokens),
        )
        self._deferred = {}
        self._step += 1
        self._next_doc_id += len(documents)
        return batch

    def _fingerprint(self) -> dict[str, str]:
        return config_fingerprint(self.config, self.source.digest, self.tokenizer.name)
