"""`Turns`: two halves of a pack compute by turns, so that transfers of one run while the other computes.

Each half is the same program, in a thread of its own, because a half must stop in the middle of a layer that is not
ours, and in the middle of autograd. Only one of them runs at any time: who has the turn keeps it until it starts a
transfer, or comes to the middle of a block, and goes on when the other has done as much. So what either does, and the
order of all transfers, follows from the program alone, and is the same on every rank of the group.

The leading half is one turn ahead. With a block's three turns (input on its way, first part, second part and sums on
their way) that puts every transfer of one half beside a part of the other's products:

    leader      X Y   Z   Y'...      X  wait for sums, norm, start to gather the block's input
    follower        X   Y   Z        Y  wait for it, first part of the block;  Z  second part, start to scatter its sums

Both make the same number of turns in a layer, so the follower is behind the leader in everything, and may read what
the leader has left in it: a document whose rows are cut finds the other half's keys, or gradients of its own.

Price: two wakes of a thread a turn, some 20 µs.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from evenload.runtime.comm.transfer_queue import Pending, Transfers

LEADER, FOLLOWER = 0, 1
Half = Callable[[], Any]
"""A half's program."""


class _StoppedError(Exception):
    """The other half has failed."""


class _Later:
    """A transfer whose result is not needed soon."""

    def __init__(self, transfers: Transfers, call: Callable[[], object]) -> None:
        self._transfers = transfers
        self._call: Callable[[], object] | None = call
        self._pending: Pending | None = None

    def start(self) -> Pending:
        if self._pending is None:
            assert self._call is not None
            self._pending, self._call = self._transfers.start(self._call), None  # its tensors belong to who waits
        return self._pending


class Turns:
    """Of one pack.

    Args:
        transfers: of the group; nothing of it is under way.
        put_away: called by a half before the other runs: saves what both have one of, and returns what puts it back.
    """

    def __init__(self, transfers: Transfers, put_away: Callable[[], Callable[[], None]]) -> None:
        self._transfers, self._put_away = transfers, put_away
        self._may_run = threading.Semaphore(0), threading.Semaphore(0)
        self._has_ended = [False, False]
        self._running = LEADER
        self._head_start = 1
        self._error: BaseException | None = None
        self._follower_is_over = threading.Event()
        self._later: list[_Later] = []
        self._not_waited: tuple[set[_Later], set[_Later]] = set(), set()

    def run(self, leader: Half, follower: Half) -> tuple[Any, Any]:
        """Both results. What a half raises, this raises."""
        results: list[Any] = [None, None]
        as_here = _as_here()

        def follow() -> None:
            try:
                self._may_run[FOLLOWER].acquire()
                self._go_on()
                with as_here():
                    results[FOLLOWER] = follower()
                    self._settle(FOLLOWER)
            except BaseException as error:  # whatever it is, the leader raises it
                self._error = self._error or error
            self._end(FOLLOWER)
            self._follower_is_over.set()

        _worker().put(follow)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[LEADER] = leader()
                self._settle(LEADER)
            self._end(LEADER)
            self._follower_is_over.wait()
        except BaseException as error:
            self._error = self._error or error
            self._may_run[FOLLOWER].release()
            if self._running == LEADER:  # else an interrupt, and the follower may wait for a lost rank
                self._follower_is_over.wait()
        if self._error is not None:
            raise self._error
        return results[LEADER], results[FOLLOWER]

    def next(self) -> None:
        """Let the other half run until it does the same."""
        mine, other = self._running, 1 - self._running
        if mine == LEADER and self._head_start:
            self._head_start -= 1
            return
        if self._has_ended[other]:
            return
        put_back = self._put_away()
        self._running = other
        self._may_run[other].release()
        self._may_run[mine].acquire()
        self._go_on()
        put_back()

    def transfer(self, call: Callable[[], object]) -> None:
        """Run a blocking collective of the group while the other half has the turn."""
        pending = self._transfers.start(call)
        for later in self._later:
            later.start()
        self._later.clear()
        self.next()
        pending.wait()

    def transfer_later(self, call: Callable[[], object]) -> Callable[[], None]:
        """Run one whose result is not needed soon, behind the next `transfer` of either half. Returns what waits for
        it."""
        later, of_half = _Later(self._transfers, call), self._not_waited[self._running]
        self._later.append(later)
        of_half.add(later)

        def wait() -> None:
            of_half.discard(later)
            later.start().wait()

        return wait

    def _settle(self, half: int) -> None:
        """Nothing that a half has started is under way any more."""
        for later in self._not_waited[half]:
            later.start().wait()

    def _go_on(self) -> None:
        if self._error is not None:
            raise _StoppedError

    def _end(self, half: int) -> None:
        self._has_ended[half] = True
        self._running = 1 - half
        self._may_run[1 - half].release()


def _as_here() -> Callable[[], Any]:
    """What makes another thread compute as this one does: gradients or not, and the device's stream."""
    has_grad = torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def entered() -> Iterator[None]:
        # Backward in the thread that asks for it, also on a GPU: one thread for both halves would wait for itself.
        with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(has_grad):
            if stream is None:
                yield
                return
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                yield

    return entered


_workers: list["queue.SimpleQueue[Callable[[], None]]"] = []
"""Of the process: the thread of followers, once there is one."""


def _worker() -> "queue.SimpleQueue[Callable[[], None]]":
    """Jobs of the thread that followers run in. It stays, because threads of matrix products belong to the thread that
    asks for them. A daemon: a half that waits for a lost rank must not keep the process."""
    if not _workers:
        jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        _workers.append(jobs)
        threading.Thread(target=_run_jobs, args=(jobs,), name="evenload-second-half", daemon=True).start()
    return _workers[0]


def _run_jobs(jobs: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        jobs.get()()
