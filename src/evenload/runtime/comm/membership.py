"""`Membership`: the ranks that train together, and how those that are left become a new set in the same processes.

    round 0   all ranks of the start make their groups
    loss      the launcher sees a process end and marks it as gone in the store, or a rank waits in vain and gives the
              alarm there. Every rank looks for both several times a second and cuts its connections (`sever`), so that
              whatever waits in a group ends with an error
    round 1   survivors agree (`agreement`), are numbered anew in the order of their old numbers, and make new groups
              under keys of their own in the store
    growth    a process that is no member says in the store that it waits. Members see it there, leave their groups
              together, between two steps, and the next round has it on its list

Nothing of a rank but its process goes over: models, optimizers, loaders and threads are made anew from what ranks kept
(`checkpoint.kept_steps`) or from the last checkpoint, which depend on no layout. Groups of a round are never used in
another, so a rank that wakes up late can talk to nobody.

Price: two reads of the store a rank and `_LOOK_S`, and one for each process that is no member; making groups again, as
at the start.
"""

import gc
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from evenload.errors import ConfigError, RankLostError
from evenload.runtime.comm.agreement import (
    OVER_KEY,
    Agreement,
    Decision,
    agree,
    decision_key,
    decision_of,
    ended_key,
    gone_key,
    waiting_key,
    waiting_ranks,
)
from evenload.runtime.comm.sever import can_sever, open_sockets, sever_all_but
from evenload.runtime.comm.watch import comes_of_transport

_LOOK_S = 0.2
_JOIN_LOOK_S = 0.05
PATIENCE_S = 60.0
"""How long survivors wait for a rank that nobody saw die before they go on without it."""


class Membership:
    """One process's place among those that train.

    Args:
        rank: of this process at the start of the run; names it for ever. From `world_size` on: of one that was started
            later, which is no member yet.
        world_size: processes at the start, the first members.
        host, port: of the launcher's store.

    Raises:
        ConfigError: a system on which a rank cannot leave what it waits for.
    """

    def __init__(self, rank: int, world_size: int, host: str, port: int) -> None:
        if not can_sever():
            raise ConfigError(
                "train.on_lost_rank is 'shrink', which needs /proc/self/fd (Linux) to cut connections to lost ranks; "
                "leave it at 'stop'"
            )
        self.start_rank = rank
        self.round = 0
        self.ranks = tuple(range(world_size))
        """Of the members, as they were numbered at the start."""
        self._address = host, port
        self._store = self._connection()
        self._alarm: _Alarm | None = None

    @property
    def rank(self) -> int:
        """Of this process among the members."""
        return self.ranks.index(self.start_rank)

    @property
    def is_member(self) -> bool:
        return self.start_rank in self.ranks

    @property
    def num_waiting(self) -> int:
        """Inside `groups`: processes that want to become members, as this one saw a moment ago."""
        return self._alarm.num_waiting if self._alarm is not None else 0

    @contextmanager
    def groups(self, timeout_s: float) -> Iterator[None]:
        """Inside, torch's default group is that of the members; other groups may be made of it. Where one of them is
        gone or gives the alarm, all connections are cut and whatever waits in a group fails.

        Raises:
            RankLostError: instead of any error that comes after the alarm, or of a transfer that broke: that may be
                here before the launcher has seen whose process ended.
        """
        self._alarm = alarm = _Alarm(self._connection(), self.round, self.ranks)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"round/{self.round}/groups", self._connection()),
                rank=self.rank,
                world_size=len(self.ranks),
                timeout=timedelta(seconds=timeout_s),
            )
            yield
        except Exception as error:
            if not (isinstance(error, RankLostError) or comes_of_transport(error) or alarm.is_given()):
                raise
            alarm.give()
            alarm.cut()  # what threads of this rank still wait for: nobody looks for the alarm any more
            raise RankLostError(" ".join(str(error).split())) from error
        finally:
            self._alarm = None
            alarm.close()

    def keep(self, size: int) -> bool:
        """From now on the first `size` members alone; whether this process is one of them. On all members alike."""
        self.ranks = self.ranks[:size]
        return self.is_member

    def wait_to_join(self) -> bool:
        """As a process that is no member: wait until a round has it on its list; False where the run ends before.

        Raises:
            RankLostError: there is no store any more.
        """
        try:
            while self._store.check([decision_key(self.round + 1)]):  # of others, before this process came
                self._take(decision_of(self._store, self.round + 1))
            self._store.set(waiting_key(self.start_rank), str(self.round))
            while not self._store.check([OVER_KEY]):
                while self._store.check([decision_key(self.round + 1)]):
                    self._take(decision_of(self._store, self.round + 1))
                    if self.is_member:
                        return True
                time.sleep(_JOIN_LOOK_S)
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self.start_rank} waited to be taken in, and the launcher's store does not answer "
                f"({' '.join(str(error).split())})"
            ) from error
        return False

    def go_on(self) -> None:
        """After `groups` ended with `RankLostError`, or all left them to let others in, and nothing of what used them
        is held any more: leave them, agree with the other members, and be one of what they are from now on.

        Raises:
            RankLostError: the others went on without this rank, or there is no store any more.
        """
        gc.collect()  # what a loop of references holds may hold groups, too
        if dist.is_initialized():
            dist.destroy_process_group()
        self._take(agree(Agreement(self._store, self.round + 1, self.ranks, self.start_rank, PATIENCE_S)))

    def _take(self, decision: Decision) -> None:
        self.round, self.ranks = decision.round, decision.ranks

    def await_end(self, lost: Collection[int]) -> None:
        """Until no process of these ranks lives: one that was left out may still write what survivors are to read.

        Raises:
            RankLostError: one lives on, although the launcher should have ended it.
        """
        until_s = time.monotonic() + PATIENCE_S
        while left := [rank for rank in lost if not self._store.check([ended_key(rank)])]:
            if time.monotonic() > until_s:
                raise RankLostError(
                    f"ranks {left} were left out {PATIENCE_S:.0f} s ago and have not ended, so what they kept may "
                    "still change; start the run again to go on from its last checkpoint"
                )
            time.sleep(_LOOK_S)

    def _connection(self) -> dist.Store:  # type: ignore[reportPrivateImportUsage]
        """A connection of its own: one may wait in a call while another is used."""
        return dist.TCPStore(*self._address, is_master=False)  # type: ignore[reportPrivateImportUsage]


class _Alarm:
    """Looks for an alarm in a thread. Once it is given, connections made after this object are cut again and again
    until it is closed, because more may be in the making."""

    def __init__(
        self,
        store: dist.Store,  # type: ignore[reportPrivateImportUsage]
        number: int,
        members: tuple[int, ...],
    ) -> None:
        self._store, self._key, self._members = store, f"round/{number}/alarm", members
        self.num_waiting = 0
        self._watched = [self._key, *map(gone_key, members)]
        self._spared = open_sockets()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._look, name="evenload-alarm", daemon=True)
        self._thread.start()

    def is_given(self) -> bool:
        with self._lock:
            try:
                return any(self._store.check([key]) for key in self._watched)
            except RuntimeError:
                return True  # The store is gone, and with it the launcher.

    def give(self) -> None:
        with self._lock:
            try:
                self._store.set(self._key, "given")
            except RuntimeError:
                return  # Without a store `agree` says so.

    def cut(self) -> None:
        """Break all connections made after this object."""
        sever_all_but(self._spared)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if self.is_given():
                self.cut()
                continue
            with self._lock, suppress(RuntimeError):  # of a store that is gone: the next look finds out
                self.num_waiting = len(waiting_ranks(self._store, self._members))
