"""Account for every document and token that was read (`Ledger`).

    read = trained + dropped (by reason) + deferred + waiting

where waiting = held by the loader (shuffle window, pending document) + in flight (in a global batch without
`record_step` yet). The loader counts what it holds itself, so `check` compares two independent counts. A record that
could not be read counts as a document of 0 tokens.
"""

from collections.abc import Callable, Collection, Mapping
from operator import add
from operator import sub as subtract

import msgspec

from evenload.errors import DataError, InvalidPlanError
from evenload.types.base import Frozen
from evenload.types.document import Document
from evenload.types.plan import DEFERRED, StepPlan
from evenload.types.text import counted


class Tally(Frozen, array_like=True):
    """A number of documents and their tokens.

    Args:
        shared_tokens: tokens of sequences that share prefixes beyond their unique `tokens`; both are path tokens.
        recomputed_tokens: of `tokens`, those that trees have twice because they were cut.
    """

    documents: int = 0
    tokens: int = 0
    shared_tokens: int = 0
    recomputed_tokens: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return self._combined(other, add)

    def __sub__(self, other: "Tally") -> "Tally":
        return self._combined(other, subtract)

    def _combined(self, other: "Tally", combine: Callable[[int, int], int]) -> "Tally":
        return Tally(**{name: combine(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__})


def tally_of(documents: Collection[Document]) -> Tally:
    trees = [one for one in documents if one.segments]
    return Tally(
        documents=len(documents),
        tokens=sum([one.num_tokens for one in documents]),
        shared_tokens=sum(one.num_shared_tokens for one in trees),
        recomputed_tokens=sum(one.num_recomputed_tokens for one in trees),
    )


class LedgerState(Frozen):
    """The ledger's counters; `masked` are tokens of trained sequences without a loss of their own (a sequence's first,
    prompts), `untaught` trained documents that have no other tokens."""

    read: Tally = Tally()
    trained: Tally = Tally()
    masked: int = 0
    untaught: int = 0
    in_flight: Tally = Tally()
    deferred: Tally = Tally()
    dropped: dict[str, Tally] = msgspec.field(default_factory=dict)

    def with_dropped(self, reason: str, dropped: Tally) -> "LedgerState":
        total = self.dropped.get(reason, Tally()) + dropped
        return msgspec.structs.replace(self, dropped=dict(sorted((self.dropped | {reason: total}).items())))

    def with_read(self, other: "LedgerState") -> "LedgerState":
        state = msgspec.structs.replace(self, read=self.read + other.read)
        for reason, dropped in other.dropped.items():
            state = state.with_dropped(reason, dropped)
        return state

    def accounted(self) -> Tally:
        return sum(self.dropped.values(), self.trained + self.deferred + self.in_flight)

    def lines(self, held: Tally | None = None) -> list[str]:
        """Format the account for the end of a run; what the loader holds is by default the difference."""
        held = self.read - self.accounted() if held is None else held
        rows = [("read", self.read), ("trained", self.trained)]
        rows += [(f"dropped ({reason})", self.dropped[reason]) for reason in sorted(self.dropped)]
        rows += [("deferred", self.deferred), ("waiting", self.in_flight + held)]
        width = max(len(name) for name, _ in rows)
        lines = []
        for name, tally in rows:
            number, noun = counted(tally.documents, "document").split()
            lines.append(f"{name:<{width}}  {number:>12} {noun:<9}  {tally.tokens:>16,} tokens")
        masked = f"  ({self.masked:,} of them masked: no loss of their own)"
        if self.untaught:
            lines.insert(2, f"{'':<{width}}  {self.untaught:>12,} of these documents taught nothing: no loss at all")
        if self.trained.shared_tokens or self.trained.recomputed_tokens:
            paths, again = self.trained.tokens + self.trained.shared_tokens, self.trained.recomputed_tokens
            twice = f", {again:,} of which are computed again, where a tree was too large" if again else ""
            lines[1] += twice
            lines.insert(2, f"{'':<{width}}  for {paths:,} tokens of sequences that share prefixes{masked}")
        else:
            lines[1] += masked
        return lines


def count_without_loss(documents: Collection[Document]) -> tuple[int, int]:
    """Count tokens of sequences without a loss of their own, and documents without any loss."""
    masked = sum(one.num_tokens + one.num_shared_tokens - one.num_label_tokens for one in documents)
    return masked, sum(not document.num_label_tokens for document in documents)


def warn_without_loss(documents: Collection[Document], origin: Callable[[int], str]) -> str:
    """Warn where documents of a first batch have no loss although they have tokens for one; else return ""."""
    untaught = [document for document in documents if not document.num_label_tokens and document.num_tokens > 1]
    if not untaught:
        return ""
    return (
        f"{len(untaught):,} of the first {counted(len(documents), 'document')} have no token with a loss and teach "
        f"nothing, such as {origin(untaught[0].doc_id)}: nobody answers in them, or beyond data.max_document_tokens; "
        "see data.record, data.loss_on and data.overlong. The ledger counts all such documents"
    )


def account_skipped(state: LedgerState, reason: str, skipped: Tally, masked: int, untaught: int) -> LedgerState:
    """Return the account after steps whose update was not applied: their documents were dropped, not trained."""
    return msgspec.structs.replace(
        state.with_dropped(reason, skipped),
        trained=state.trained - skipped,
        masked=state.masked - masked,
        untaught=state.untaught - untaught,
    )


class Ledger:
    """Running account of documents and tokens."""

    def __init__(self, state: LedgerState | None = None) -> None:
        self.state = state or LedgerState()

    def add_handed_out(self, new: Tally, carried: Tally) -> None:
        in_flight, deferred = self.state.in_flight + new + carried, self.state.deferred - carried
        self.state = msgspec.structs.replace(self.state, in_flight=in_flight, deferred=deferred)

    def record_step(self, plan: StepPlan, documents: Mapping[int, Document]) -> None:
        """Count a batch of these documents, by id, as trained by its plan; `InvalidPlanError` where that has more than
        is in flight."""
        state, trained = self.state, tally_of([documents[one.doc_id] for one in plan.documents])
        planned = trained + tally_of([documents[one.doc_id] for one in plan.left_out])
        masked, untaught = count_without_loss(plan.documents)
        rest = state.in_flight - planned
        if rest.documents < 0 or rest.tokens < 0:
            raise InvalidPlanError(
                f"plan of step {plan.step} has {planned.documents} documents of {planned.tokens} tokens, but only "
                f"{state.in_flight.documents} of {state.in_flight.tokens} are in flight; record every step once"
            )
        self.state = msgspec.structs.replace(
            state,
            in_flight=rest,
            trained=state.trained + trained,
            masked=state.masked + masked,
            untaught=state.untaught + untaught,
            deferred=state.deferred
            + tally_of([documents[one.doc_id] for one in plan.left_out if one.reason == DEFERRED]),
        )
        for doc in plan.left_out:
            if doc.reason != DEFERRED:
                self.state = self.state.with_dropped(doc.reason, tally_of([documents[doc.doc_id]]))

    def check(self, held: Tally) -> None:
        """Raise a `DataError` where tokens were lost or counted twice, given what is held."""
        read, total = self.state.read, self.state.accounted() + held
        if total != read:
            raise DataError(
                f"the ledger does not balance: read {read.documents} documents of {read.tokens} tokens, "
                f"accounted for {total.documents} of {total.tokens} ({msgspec.json.encode(self.state).decode()}, "
                f"held {held.documents} of {held.tokens}); please report this as a bug"
            )
