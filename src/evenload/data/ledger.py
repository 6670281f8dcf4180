"""`Ledger`: what became of every document and token that was read.

    read = trained + dropped (by reason) + deferred + waiting
    trained = with a loss + masked

where waiting = held by the loader (shuffle window, pending document) + in flight (in a global batch
whose plan was not noted yet). The loader counts what it holds for itself, so `check` compares two
independent counts. A record that could not be read counts as a document of 0 tokens.
"""

import msgspec

from evenload.errors import DataError, InvalidPlanError
from evenload.types.base import Frozen
from evenload.types.plan import DEFERRED, StepPlan


class Tally(Frozen, array_like=True):
    """A number of documents and their tokens."""

    documents: int = 0
    tokens: int = 0

    def plus(self, documents: int, tokens: int) -> "Tally":
        """The sum; negative numbers subtract."""
        return Tally(documents=self.documents + documents, tokens=self.tokens + tokens)


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
        trained=state.trained.plus(-skipped.documents, -skipped.tokens),
        masked=state.masked - masked,
        dropped=state.dropped | {reason: state.dropped.get(reason, Tally()).plus(skipped.documents, skipped.tokens)},
    )


def account_lines(state: LedgerState) -> list[str]:
    """The lines of a state that balances: what is read and nowhere else waits in the loader."""
    kept = (state.trained, state.deferred, state.in_flight, *state.dropped.values())
    documents, tokens = sum(part.documents for part in kept), sum(part.tokens for part in kept)
    return Ledger(state).summary(state.read.plus(-documents, -tokens))


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
        """The counters as data."""
        return LedgerState(
            read=self.read,
            trained=self.trained,
            masked=self.masked,
            in_flight=self.in_flight,
            deferred=self.deferred,
            dropped=dict(sorted(self.dropped.items())),
        )

    def note_read(self, num_tokens: int, documents: int = 1) -> None:
        """A document came out of the source; 0 documents for the tail of one that is cut off."""
        self.read = self.read.plus(documents, num_tokens)

    def note_dropped(self, reason: str, documents: int, num_tokens: int) -> None:
        """Documents or tokens will never be trained, and why; 0 documents where only tokens are cut off."""
        self.dropped[reason] = self.dropped.get(reason, Tally()).plus(documents, num_tokens)

    def note_handed_out(self, new: Tally, carried: Tally) -> None:
        """A global batch left the loader: new documents, and deferred ones that come again."""
        self.in_flight = self.in_flight.plus(new.documents + carried.documents, new.tokens + carried.tokens)
        self.deferred = self.deferred.plus(-carried.documents, -carried.tokens)

    def note_step(self, plan: StepPlan) -> None:
        """A handed-out batch was trained as planned: its documents, and those the plan left out.

        Raises:
            InvalidPlanError: the plan has more documents or tokens than are in flight.
        """
        trained = Tally(documents=len(plan.documents), tokens=sum(doc.num_tokens for doc in plan.documents))
        left = Tally(documents=len(plan.left_out), tokens=sum(doc.num_tokens for doc in plan.left_out))
        rest = self.in_flight.plus(-trained.documents - left.documents, -trained.tokens - left.tokens)
        if rest.documents < 0 or rest.tokens < 0:
            raise InvalidPlanError(
                f"plan of step {plan.step} accounts for {trained.documents + left.documents} documents of "
                f"{trained.tokens + left.tokens} tokens, but only {self.in_flight.documents} of "
                f"{self.in_flight.tokens} are in flight; note every step once, with the plan of its batch"
            )
        self.in_flight = rest
        self.trained = self.trained.plus(trained.documents, trained.tokens)
        self.masked += trained.tokens - sum(doc.num_label_tokens for doc in plan.documents)
        for doc in plan.left_out:
            if doc.reason == DEFERRED:
                self.deferred = self.deferred.plus(1, doc.num_tokens)
            else:
                self.note_dropped(doc.reason, 1, doc.num_tokens)

    def check(self, held: Tally) -> None:
        """Compare what was read with what became of it.

        Args:
            held: documents and tokens that the loader holds now.

        Raises:
            DataError: they differ: tokens were lost or counted twice.
        """
        kept = (self.trained, self.deferred, self.in_flight, held, *self.dropped.values())
        documents, tokens = sum(part.documents for part in kept), sum(part.tokens for part in kept)
        if (documents, tokens) != (self.read.documents, self.read.tokens):
            raise DataError(
                f"the ledger does not balance: read {self.read.documents} documents of {self.read.tokens} tokens, "
                f"accounted for {documents} of {tokens} ({msgspec.json.encode(self.state()).decode()}, held "
                f"{held.documents} of {held.tokens}); please report this as a bug"
            )

    def summary(self, held: Tally | None = None) -> list[str]:
        """Lines for the end of a run.

        Args:
            held: what the loader still holds, shown as waiting with what is in flight.
        """
        waiting = self.in_flight.plus(held.documents, held.tokens) if held else self.in_flight
        rows = [("read", self.read), ("trained", self.trained)]
        rows += [(f"dropped ({reason})", self.dropped[reason]) for reason in sorted(self.dropped)]
        rows += [("deferred", self.deferred), ("waiting", waiting)]
        width = max(len(name) for name, _ in rows)
        lines = [
            f"{name:<{width}}  {tally.documents:>12,} documents  {tally.tokens:>16,} tokens" for name, tally in rows
        ]
        lines[1] += f"  ({self.masked:,} of them masked: no loss of their own)"
        return lines
