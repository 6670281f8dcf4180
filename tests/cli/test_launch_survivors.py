"""What the launcher makes of lists of survivors and of processes that end, one look after the other."""

from dataclasses import dataclass, field
from multiprocessing import Pipe
from types import SimpleNamespace

import msgspec

from evenload.cli.launch_survivors import _Ranks
from evenload.runtime.comm.agreement import Decision, decision_key, gone_key, waiting_key


@dataclass
class Store:
    values: dict[str, bytes] = field(default_factory=dict)

    def set(self, key, value):
        self.values[key] = value.encode()

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]

    def decide(self, number, *ranks):
        self.set(decision_key(number), msgspec.json.encode(Decision(round=number, ranks=ranks)).decode())


class Process:
    """Of a rank; `ends` is called where the launcher asks whether it lives, and says so."""

    pid, exitcode = 4711, 0

    def __init__(self, ends=lambda: False):
        self.sentinel, other = Pipe()
        other.close()  # a look waits for nothing
        self._ends, self.is_killed = ends, False

    def is_alive(self):
        return not self._ends()

    def join(self):
        pass

    def kill(self):
        self.is_killed = True


def launched(store: Store, processes: dict[int, Process], size: int) -> tuple[_Ranks, dict]:
    """A launcher that has started these, and what each may still say."""
    line = SimpleNamespace(has_failed=SimpleNamespace(value=False))
    ranks = _Ranks(store, line, (size,), 0)  # type: ignore[bad-argument-type]
    said = {}
    for rank, process in processes.items():
        ours, said[rank] = Pipe(duplex=False)
        ranks._running[rank] = process, ours  # type: ignore[unsupported-operation]
    return ranks, said


def test_who_was_let_in_and_never_came_is_ended():
    """Process 2 was stopped before it saw that it is on the list: it does not wait, and survivors wait for its end."""
    store, processes = Store(), {0: Process(), 2: Process()}
    store.set(waiting_key(2), "0")
    ranks, _ = launched(store, processes, 2)
    store.decide(1, 0, 2)
    ranks.look()
    assert not processes[2].is_killed, "it is a member"
    store.decide(2, 0)
    ranks.look()
    assert processes[2].is_killed
    assert not processes[0].is_killed
    assert store.check([gone_key(2)])


def test_who_has_no_place_and_waits_is_not_ended():
    store, processes = Store(), {0: Process(), 1: Process()}
    ranks, _ = launched(store, processes, 2)
    store.decide(1, 0, 1)
    store.set(waiting_key(1), "1")  # the layout of round 1 has one rank
    store.decide(2, 0)
    ranks.look()
    assert not processes[1].is_killed


def test_the_error_of_a_rank_that_was_just_left_out_is_not_the_runs():
    """It may end between two looks of the launcher, before this one has seen why."""
    store = Store()

    def ends() -> bool:
        store.decide(1, 0)
        return True

    ranks, said = launched(store, {0: Process(), 1: Process(ends)}, 2)
    said[1].send((1, "RankLostError", "rank 1 gave no sign of life for so long that ranks 0 went on without it"))
    ranks.look()
    assert ranks.failure is None
    assert ranks.are_running
