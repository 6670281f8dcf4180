"""Whatever dies, sleeps or comes late: ranks that go on from a round all have the same list, and are on it."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.errors import RankLostError
from evenload.runtime.comm.agreement import (
    PROCESSES_KEY,
    Agreement,
    Decision,
    agree,
    ended_key,
    gone_key,
    waiting_key,
    waiting_ranks,
)

PATIENCE_S = 3.0


class Crash(Exception):
    """A rank dies in the middle of an operation."""


@dataclass
class Store:
    """One moment after the other, as torch's store; `before` runs ahead of every operation."""

    values: dict[str, bytes] = field(default_factory=dict)
    before: object = None

    def _begin(self):
        if self.before is not None:
            self.before()

    def set(self, key, value):
        self._begin()
        self.values[key] = value.encode()

    def check(self, keys):
        self._begin()
        return all(key in self.values for key in keys)

    def get(self, key):
        self._begin()
        return self.values[key]

    def compare_set(self, key, expected, desired):
        self._begin()
        assert expected == ""
        return self.values.setdefault(key, desired.encode())


class World:
    """Ranks that poll in any order, each operation of one possibly in the middle of another's; and processes that begin
    to wait at any time."""

    def __init__(self, size, draw, num_new=0):
        self.store, self._draw = Store(), draw
        self.store.values[PROCESSES_KEY] = str(size + num_new).encode()
        self.new = tuple(range(size, size + num_new))
        self.store.before = self._interrupt
        members = tuple(range(size))
        self.parts = {rank: Agreement(self.store, 1, members, rank, PATIENCE_S) for rank in members}
        self.clocks = dict.fromkeys(members, 0.0)
        self.outcomes: dict[int, object] = {}
        self._running: list[int] = []
        self._left = 60  # interruptions; a test must end

    def turn(self, rank, seconds):
        """One poll of a rank, some time after its last one by its own clock."""
        if rank in self.outcomes or rank in self._running or rank in self.new:
            return
        self.clocks[rank] += seconds
        self._running.append(rank)
        try:
            decision = self.parts[rank].poll(self.clocks[rank])
            if decision is not None:
                self.outcomes[rank] = decision
        except RankLostError:
            self.outcomes[rank] = "left out"
        except Crash:
            self.outcomes[rank] = "dead"
        finally:
            self._running.pop()

    def _interrupt(self):
        if not self._left:
            return
        self._left -= 1
        kind, rank, seconds = self._draw(
            st.tuples(
                st.sampled_from(["go", "go", "other", "die", "gone", "wait"]),
                st.sampled_from([*self.parts, *self.new]),
                st.floats(0, 4),
            )
        )
        if kind == "wait":
            self.store.values[waiting_key(rank)] = b"0"  # also of members, who are none that wait
        elif kind == "other":
            self.turn(rank, seconds)
        elif kind == "gone":
            self.store.values[gone_key(rank)] = b"1"  # also of ranks that live: no list may differ for it
        elif kind == "die" and len(self._dead()) + 1 < len(self.parts):
            raise Crash

    def _dead(self):
        return [rank for rank, outcome in self.outcomes.items() if outcome == "dead"]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), size=st.integers(1, 5), num_new=st.integers(0, 2))
def test_all_that_go_on_have_one_list_and_are_on_it(data, size, num_new):
    world = World(size, data.draw, num_new)
    for rank, seconds in data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.floats(0, 4)), max_size=20)):
        world.turn(rank, seconds)
    for _ in range(3):  # whoever still lives looks again, late enough to decide
        for rank in range(size):
            world.turn(rank, PATIENCE_S)
    assert set(world.outcomes) == set(range(size)), "nobody waits for ever"
    decisions = {rank: found for rank, found in world.outcomes.items() if isinstance(found, Decision)}
    assert len({decision.ranks for decision in decisions.values()}) <= 1
    for rank, decision in decisions.items():
        assert rank in decision.ranks
        assert list(decision.ranks) == sorted(set(decision.ranks))
        for new in set(decision.ranks) & set(world.new):
            assert waiting_key(new) in world.store.values, "only who waits is let in"
    for rank, outcome in world.outcomes.items():
        if outcome == "left out":
            kept = next(iter(decisions.values()), None)
            assert kept is None or rank not in kept.ranks


def part(store, rank, members, number=1):
    return Agreement(store, number, members, rank, PATIENCE_S)


def test_when_all_have_reported_nobody_waits():
    """A broken connection with everybody alive: the round ends with all of them, at once."""
    store = Store()
    first, second = part(store, 0, (0, 1)), part(store, 1, (0, 1))
    assert first.poll(0.0) is None
    decision = second.poll(100.0)
    assert decision is not None
    assert decision.ranks == (0, 1)
    assert first.poll(0.1) == decision


def test_nobody_waits_for_a_process_that_has_ended():
    store = Store()
    survivor = part(store, 0, (0, 1))
    assert survivor.poll(0.0) is None
    store.set(gone_key(1), "SIGKILL")
    decision = survivor.poll(0.1)
    assert decision is not None
    assert decision.ranks == (0,)


def test_a_rank_that_slept_through_a_round_is_stopped_by_name():
    store = Store()
    early = part(store, 2, (0, 2))
    assert early.poll(0.0) is None
    assert early.poll(PATIENCE_S) == Decision(round=1, ranks=(2,))
    with pytest.raises(RankLostError, match="rank 0 gave no sign of life for so long that ranks 2 went on without it"):
        part(store, 0, (0, 2)).poll(0.0)


def test_a_later_loss_is_a_round_of_its_own():
    store = Store()
    assert agree(part(store, 0, (0,)), poll_s=0.0).ranks == (0,)
    later = part(store, 0, (0, 3), number=2)
    assert later.poll(0.0) is None, "what was decided before does not count"


def test_who_waits_is_on_the_list_of_the_next_round():
    """Process 2 has come in the place of 1; 3 has ended meanwhile, 4 has not begun to wait."""
    store = Store()
    store.set(PROCESSES_KEY, "5")
    store.set(gone_key(1), "SIGKILL")
    store.set(waiting_key(2), "0")
    store.set(waiting_key(3), "0")
    store.set(gone_key(3), "SIGKILL")
    assert waiting_ranks(store, (0, 1)) == (2,)
    decision = part(store, 0, (0, 1)).poll(0.0)
    assert decision is not None
    assert decision.ranks == (0, 2)
    assert waiting_ranks(store, (0, 1)) == (), "it is a member"
    store.set(waiting_key(2), "1")
    assert waiting_ranks(store, (0,)) == (2,), "that round had no use for it, so it waits for the next"


def test_who_was_let_in_and_never_came_does_not_wait_again():
    """Process 2 was stopped before it saw that it is on the list: it would be let in, and waited for, for ever."""
    store = Store()
    store.set(PROCESSES_KEY, "3")
    store.set(waiting_key(2), "0")
    decision = part(store, 0, (0,)).poll(0.0)
    assert decision is not None
    assert decision.ranks == (0, 2)
    survivor = part(store, 0, (0, 2), number=2)
    assert survivor.poll(0.0) is None, "it is a member that could still report"
    decision = survivor.poll(PATIENCE_S)
    assert decision is not None
    assert decision.ranks == (0,)
    assert waiting_ranks(store, (0,)) == ()


def test_nobody_waits_for_a_process_that_has_finished():
    """It was done when another was lost, and will report nothing."""
    store = Store()
    store.set(ended_key(1), "ended")
    decision = part(store, 0, (0, 1)).poll(0.0)
    assert decision is not None
    assert decision.ranks == (0,)


def test_without_a_store_a_rank_stops():
    def gone():
        raise RuntimeError("Connection reset by peer")

    store = Store(before=gone)
    with pytest.raises(RankLostError, match=r"does not answer, so this rank stops \(Connection reset by peer\); start"):
        agree(part(store, 0, (0, 1)))
