"""`Ledger`: what became of every document and token that was read.

    read = trained + dropped (by reason) + deferred + waiting
    trained = with a loss + masked

where waiting = held by the loader (shuffle window, pending document) + in flight (in a global batch
whose plan was not noted yet). The loader counts what it holds for itself, so `check` compares two
independent counts. A record that could not be read counts as a document of 0 tokens.
"""

from collections.abc import Collection

import msgspec

from evenload.errors import DataError, InvalidPlanError
from evenload.types.base import Frozen
from evenload.types.document import Document
from evenload.types.plan import DEFERRED, LeftOut, StepPlan


class Tally(Frozen, array_like=True):
    """A number of documents and their tokens."""

    documents: int = 0
    tokens: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(documents=self.documents + other.documents, tokens=self.tokens + other.tokens)

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(documents=self.documents - other.documents, tokens=self.tokens - other.tokens)


def tally_of(documents: Collection[Document | LeftOut]) -> Tally:
    """How many these are, and their tokens."""
    return Tally(documents=len(documents), tokens=sum(document.num_tokens for document in documents))


class LedgerState(Frozen):
    """The ledger's counters; `dropped` is by reason, `masked` the trained tokens without a loss of their own (a
    document's first, prompts)."""

    read: Tally = Tally()
    trained: Tally = Tally()
    masked: int = 0
    in_flight: Tally = Tally()
    deferred: Tally = Tally()
    dropped: dict[str, Tally] = msgspec.field(default_factory=dict)


def with_skipped(state: LedgerState, reason: str, skipped: Tally, masked: int) -> LedgerState:
    """The account after steps whose update was not applied: their documents were dropped, not trained.

    Args:
        skipped: documents and tokens of these steps.
        masked: those of the tokens that had no loss of their own.
    """
    return msgspec.structs.replace(
        state,
        trained=state.trained - skipped,
        masked=state.masked - masked,
        dropped=state.dropped | {reason: state.dropped.get(reason, Tally()) + skipped},
    )


def account_lines(state: LedgerState) -> list[str]:
    """The lines of a state that balances: what is read and nowhere else waits in the loader."""
    ledger = Ledger(state)
    return ledger.summary(state.read - ledger.accounted())


class Ledger:
    """Running account of documents and tokens.

    Args:
        state: where to go on.
    """

    def __init__(self, state: LedgerState | None = None) -> None:
        state = state or LedgerState()
        self.read = state.read
        self.trained = state.trained
        self.masked = state.masked
        self.in_flight = state.in_flight
        self.deferred = state.deferred
        self.dropped: dict[str, Tally] = dict(state.dropped)

    def state(self) -> LedgerState:
        return LedgerState(
            read=self.read,
            trained=self.trained,
            masked=self.masked,
            in_flight=self.in_flight,
            deferred=self.deferred,
            dropped=dict(sorted(self.dropped.items())),
        )

    def note_read(self, read: Tally) -> None:
        """Documents came out of the source."""
        self.read += read

    def note_dropped(self, reason: str, dropped: Tally) -> None:
        """Documents or tokens will never be trained, and why; 0 documents where only tokens are cut off."""
        self.dropped[reason] = self.dropped.get(reason, Tally()) + dropped

    def note_handed_out(self, new: Tally, carried: Tally) -> None:
        """A global batch left the loader: new documents, and deferred ones that come again."""
        self.in_flight += new + carried
        self.deferred -= carried

    def note_step(self, plan: StepPlan) -> None:
        """A handed-out batch was trained as planned: its documents, and those the plan left out.

        Raises:
            InvalidPlanError: the plan has more documents or tokens than are in flight.
        """
        trained = tally_of(plan.documents)
        planned = trained + tally_of(plan.left_out)
        rest = self.in_flight - planned
        if rest.documents < 0 or rest.tokens < 0:
            raise InvalidPlanError(
                f"plan of step {plan.step} accounts for {planned.documents} documents of "
                f"{planned.tokens} tokens, but only {self.in_flight.documents} of "
                f"{self.in_flight.tokens} are in flight; note every step once, with the plan of its batch"
            )
        self.in_flight = rest
        self.trained += trained
        self.masked += trained.tokens - sum(doc.num_label_tokens for doc in plan.documents)
        for doc in plan.left_out:
            if doc.reason == DEFERRED:
                self.deferred += tally_of([doc])
            else:
                self.note_dropped(doc.reason, tally_of([doc]))

    def accounted(self) -> Tally:
        """All that is trained, deferred, dropped or in flight."""
        return sum(self.dropped.values(), self.trained + self.deferred + self.in_flight)

    def check(self, held: Tally) -> None:
        """Compare what was read with what became of it.

        Args:
            held: documents and tokens that the loader holds now.

        Raises:
            DataError: they differ: tokens were lost or counted twice.
        """
        found = self.accounted() + held
        if found != self.read:
            raise DataError(
                f"the ledger does not balance: read {self.read.documents} documents of {self.read.tokens} tokens, "
                f"accounted for {found.documents} of {found.tokens} ({msgspec.json.encode(self.state()).decode()}, "
                f"held {held.documents} of {held.tokens}); please report this as a bug"
            )

    def summary(self, held: Tally | None = None) -> list[str]:
        """Lines for the end of a run.

        Args:
            held: what the loader still holds, shown as waiting with what is in flight.
        """
        rows = [("read", self.read), ("trained", self.trained)]
        rows += [(f"dropped ({reason})", self.dropped[reason]) for reason in sorted(self.dropped)]
        rows += [("deferred", self.deferred), ("waiting", self.in_flight + (held or Tally()))]
        width = max(len(name) for name, _ in rows)
        lines = [
            f"{name:<{width}}  {tally.documents:>12,} documents  {tally.tokens:>16,} tokens" for name, tally in rows
        ]
        lines[1] += f"  ({self.masked:,} of them masked: no loss of their own)"
        return lines
