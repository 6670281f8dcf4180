"""`Agreement`: after a rank is lost, the ranks that go on decide who they are, once, for all of them.

They talk through a store that none of them holds (the launcher's), because the ranks they would ask may be the dead:

    gone        the launcher has seen a rank's process end, killed or done; nobody waits for its report
    waiting     a process that is no member, such as one that the launcher has started in the place of a lost one, wants
                to become one
    report      every rank that notices the loss says that it is there
    decision    when all have reported, or after a while, each writes who has, and who waits; the store keeps the first
                such list

Everyone acts upon the list that the store kept, never upon its own, so all ranks that go on from one round have the
same list, whatever died, slept or came late meanwhile. Who is not on it (it slept through the round) must not go on and
gets an error. A rank of the list that dies later is the loss of the next round, which only ranks of this list take part
in. How long the round waits decides who is on the list, and nothing else: no clocks are compared.

So growth is no mechanism of its own. Members that see somebody waiting leave their groups together, between two steps,
and begin a round; so does a loss, and whoever waits then comes in by the same list. A process never takes the number of
another, so what the store says of a number is never about two processes.

Source: consensus by one compare-and-set register (Herlihy 1991, "Wait-free synchronization", §3.2), which is safe for
any number of crashes. Its price is that the store must live: where it is gone, every rank stops.

Price: a write and a read of all reports a rank and poll.
"""

import time
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from evenload.errors import RankLostError
from evenload.types.base import Frozen


class AgreementStore(Protocol):
    """What is needed of `torch.distributed.Store`; every operation takes effect at one moment, for all ranks."""

    def set(self, key: str, value: str, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write where the key holds `expected`, "" = where there is none; what it holds then."""
        ...


def ended_key(rank: int) -> str:
    """Set by the launcher, to anything, when the process of a rank has ended, however and whenever."""
    return f"ended/{rank}"


def gone_key(rank: int) -> str:
    """Set by the launcher, to anything, when the process of a rank was killed, or is left out and will be."""
    return f"gone/{rank}"


def waiting_key(rank: int) -> str:
    """Set by a process when it begins to wait, to the number of the last round that it knows (`is_waiting`)."""
    return f"waiting/{rank}"


PROCESSES_KEY = "processes"
"""Set by the launcher before it starts one: how many it has started, numbered from 0."""

OVER_KEY = "over"
"""Set by the launcher, to anything, when the run ends: who waits now waits in vain."""


def is_waiting(store: AgreementStore, rank: int) -> bool:
    """Whether a process has begun to wait and is on no list since. Not for the process itself to take back: one that is
    stopped before it sees the list would wait for ever, and others would let it in again and again."""
    if not store.check([waiting_key(rank)]):
        return False
    number = int(store.get(waiting_key(rank))) + 1
    while store.check([decision_key(number)]):
        if rank in decision_of(store, number).ranks:
            return False
        number += 1
    return True


def waiting_ranks(store: AgreementStore, members: Collection[int]) -> tuple[int, ...]:
    """Processes that want to become members and live, as far as the store says, ascending."""
    count = int(store.get(PROCESSES_KEY)) if store.check([PROCESSES_KEY]) else 0
    return tuple(
        rank for rank in range(count) if rank not in members and not _has_ended(store, rank) and is_waiting(store, rank)
    )


def _has_ended(store: AgreementStore, rank: int) -> bool:
    """Killed, or done: one that has finished while the others still write is no loss, and reports nothing."""
    return store.check([gone_key(rank)]) or store.check([ended_key(rank)])


def decision_key(number: int) -> str:
    """Where the store keeps the list of a round."""
    return f"round/{number}/decision"


class Decision(Frozen):
    """The ranks that go on after a round, ascending, by the numbers of their processes."""

    round: int
    ranks: tuple[int, ...]


def decision_of(store: AgreementStore, number: int) -> Decision:
    """Of a round that is decided."""
    return msgspec.json.decode(store.get(decision_key(number)), type=Decision)


class Agreement:
    """One rank's part in one round.

    Args:
        number: of the round, one more than that from which this rank comes.
        members: the ranks of that one; all of the run at the start.
        rank: this one.
        patience_s: how long this rank waits for others to report before it proposes a list without them; longer than
            a living rank may take to notice the loss.
    """

    def __init__(
        self, store: AgreementStore, number: int, members: tuple[int, ...], rank: int, patience_s: float
    ) -> None:
        assert rank in members, "only members of a round take part in it"
        self._store, self._number, self._rank = store, number, rank
        self._members, self._patience_s = members, patience_s
        self._begun_s: float | None = None

    def poll(self, now_s: float) -> Decision | None:
        """Look once, and propose where it is time to; None = not decided yet.

        Args:
            now_s: of any clock of this rank that only goes forward.

        Raises:
            RankLostError: the others have decided without this rank.
        """
        store = self._store
        if self._begun_s is None:
            self._begun_s = now_s
            store.set(self._key(f"report/{self._rank}"), "here")
        if store.check([decision_key(self._number)]):
            return self._checked(store.get(decision_key(self._number)))
        left = [rank for rank in self._members if rank == self._rank or not _has_ended(store, rank)]
        here = tuple(sorted(rank for rank in left if store.check([self._key(f"report/{rank}")])))
        if len(here) < len(left) and now_s - self._begun_s < self._patience_s:
            return None
        new = waiting_ranks(store, self._members)
        proposal = Decision(round=self._number, ranks=tuple(sorted((*here, *new))))
        return self._checked(store.compare_set(decision_key(self._number), "", msgspec.json.encode(proposal).decode()))

    def _checked(self, kept: bytes) -> Decision:
        decision = msgspec.json.decode(kept, type=Decision)
        if self._rank not in decision.ranks:
            raise RankLostError(
                f"rank {self._rank} gave no sign of life for so long that ranks "
                f"{', '.join(map(str, decision.ranks))} went on without it; it must not train any further"
            )
        return decision

    def _key(self, name: str) -> str:
        return f"round/{self._number}/{name}"


def agree(agreement: Agreement, *, poll_s: float = 0.05, sleep: Callable[[float], None] = time.sleep) -> Decision:
    """Poll until it is decided: about `patience_s` at the longest.

    Raises:
        RankLostError: the others went on without this rank, or the store is gone.
    """
    while True:
        try:
            decision = agreement.poll(time.monotonic())
        except RuntimeError as error:  # of torch's store, or ours
            raise RankLostError(
                "a rank is lost, and the store in which the others would agree how to go on does not answer, so this "
                f"rank stops ({' '.join(str(error).split())}); start the run again to go on from its last checkpoint"
            ) from error
        if decision is not None:
            return decision
        sleep(poll_s)
