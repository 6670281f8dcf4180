"""Local training processes of which some may be killed while the others go on (`train.on_lost_rank = "shrink"`).

The launcher holds the store through which ranks meet, so that it outlives any of them, and marks there whose process
has ended by a signal: survivors then agree without waiting for it (`runtime.comm.membership`). Whom they leave out,
because it gave no sign of life, is killed here, so that it can do no harm when it wakes up. A process that ends with
an error ends the run, as everywhere: what one rank cannot read or compute, its survivors could not either.

Where asked to (`train.replace_lost_ranks`), the launcher starts a process in the place of a killed one, under the next
number; it waits in the store to be taken in (`Membership.wait_to_join`).
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from evenload import errors
from evenload.cli.child_process import begin_rank, start_fork_server
from evenload.cli.launch import SignalGuard, tell
from evenload.cli.stop_request import StopLine
from evenload.errors import EvenloadError
from evenload.runtime.checkpoint.shared_directory import remove_left_over, shared_directory
from evenload.runtime.comm.agreement import (
    OVER_KEY,
    PROCESSES_KEY,
    AgreementStore,
    decision_key,
    decision_of,
    ended_key,
    gone_key,
    is_waiting,
)
from evenload.types.scaled_units import format_bytes

SURVIVOR_FOLDER = "EVENLOAD_SURVIVOR_FOLDER"
"""In the environment of ranks: where they keep their last steps; "" = nowhere."""

_LOOK_S = 1.0


class _StoppedError(Exception):
    """A signal ended the launcher."""

    def __init__(self, text: str, number: signal.Signals) -> None:
        super().__init__(text)
        self.number = int(number)


def run_surviving(
    function,
    arguments: tuple,
    num_processes: int,
    *,
    grace_s: float,
    num_replacements: int = 0,
    keeps_state: bool = False,
) -> None:
    """As `launch.run_local`, but a killed process is not the end while others are left.

    Args:
        function: as there; it deals with lost ranks by itself, and where its rank is not below the number of processes,
            with being taken in.
        num_replacements: processes that may be started in all in the place of killed ones.
        keeps_state: give ranks a folder in shared memory (`SURVIVOR_FOLDER`), which goes when the launcher ends.

    Raises:
        EvenloadError: the error of the first process that ends with one, or all were killed.
        SystemExit: after a signal.
    """
    start_fork_server()
    import torch.distributed as dist

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[reportPrivateImportUsage]
    line = StopLine()
    try:
        with _survivor_folder(keeps_state) as folder, SignalGuard(line, grace_s, _StoppedError).watching():
            task = (num_processes, store.port, folder, function, arguments, line)
            ranks = _Ranks(store, line, task, num_replacements)
            for _ in range(num_processes):
                ranks.start()
            while ranks.are_running:
                ranks.look()
    except _StoppedError as stopped:
        raise SystemExit(128 + stopped.number) from None
    if ranks.failure is not None:
        raise ranks.failure
    if ranks.signal:
        raise SystemExit(128 + ranks.signal)


@contextlib.contextmanager
def _survivor_folder(is_wanted: bool) -> Iterator[str]:
    """Where ranks keep their last steps; "" = nowhere."""
    for path, num_bytes in remove_left_over():
        tell(f"{path} ({format_bytes(num_bytes)} of shared memory) of a run that was killed is removed")
    if not is_wanted:
        yield ""
        return
    with shared_directory() as folder:
        yield str(folder)


class _Ranks:
    """Processes by rank, and what became of those that ended.

    Attributes:
        failure: of the first that ended with an error.
        signal: because of which they ended early, or 0.
    """

    def __init__(self, store: AgreementStore, line: StopLine, task: tuple, num_replacements: int) -> None:
        self.failure: EvenloadError | None = None
        self.signal = 0
        self._store, self._line, self._task = store, line, task
        self._num_replacements, self._num_left = num_replacements, num_replacements
        self._running: dict[int, tuple[BaseProcess, Connection]] = {}
        self._num_started = 0
        self._round = 0
        self._left_out: set[int] = set()
        self._has_been_member = set(range(task[0]))

    @property
    def are_running(self) -> bool:
        return bool(self._running)

    def start(self) -> int:
        """One more process; its number."""
        rank, context = self._num_started, multiprocessing.get_context("forkserver")
        self._num_started += 1
        self._store.set(PROCESSES_KEY, str(self._num_started))
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(theirs, rank, *self._task))
        process.start()
        theirs.close()
        self._running[rank] = process, ours
        return rank

    def look(self) -> None:
        """Wait until a process ends, or a while, and see what has happened."""
        connection.wait([process.sentinel for process, _ in self._running.values()], timeout=_LOOK_S)
        # Before decisions are read: one that ended because of a decision is known to be left out when it is looked at.
        ended = [(rank, *found) for rank, found in self._running.items() if not found[0].is_alive()]
        self._end_left_out()
        for rank, process, ours in ended:
            process.join()
            del self._running[rank]
            said = _outcome(ours)
            self._store.set(ended_key(rank), "ended")
            if rank in self._left_out:
                continue  # whatever it says: the others are the run
            if isinstance(said, EvenloadError):
                self._fail(said)
            elif said is not None:
                self.signal = max(self.signal, said)
                # Where others still train this one would wait if it could be needed: the run has come to its end.
                self._store.set(OVER_KEY, "ended")
            elif self.failure is None:
                self._lose(rank, process)

    def _fail(self, failure: EvenloadError) -> None:
        self.failure = self.failure or failure
        self._line.has_failed.value = True
        self._store.set(OVER_KEY, "failed")

    def _lose(self, rank: int, process: BaseProcess) -> None:
        """Tell survivors and people of a killed process, and start another one where there may be one."""
        code = process.exitcode or 0
        if code >= 0:
            self._fail(EvenloadError(f"rank {rank} ended with exit code {code} and without a word"))
            return
        name = signal.Signals(-code).name
        self._store.set(gone_key(rank), "ended")
        if all(self._waits(other) for other in self._running):
            self._fail(
                EvenloadError(
                    f"rank {rank} was killed by {name} (process {process.pid}), the last one that was left; if the "
                    "machine ran out of memory, lower plan.options.max_pack_tokens or raise parallel.pp. The same "
                    "command goes on from the last checkpoint"
                )
            )
            return
        tell(f"rank {rank} was killed by {name} (process {process.pid}); the others go on (train.on_lost_rank)")
        self._replace(rank)

    def _replace(self, lost: int) -> None:
        """Start another one in its place, where there may be one."""
        if self._num_left:
            self._num_left -= 1
            nth, new = self._num_replacements - self._num_left, self.start()
            tell(
                f"rank {new} is started in place of rank {lost} (the {nth}. of {self._num_replacements}, "
                "train.replace_lost_ranks)"
            )

    def _waits(self, rank: int) -> bool:
        """It is no member: it has just been started, or says in the store that it waits."""
        return rank not in self._has_been_member or is_waiting(self._store, rank)

    def _end_left_out(self) -> None:
        """Kill whom the others have left out."""
        while self._store.check([decision_key(self._round + 1)]):
            self._round += 1
            decision = decision_of(self._store, self._round)
            self._has_been_member |= set(decision.ranks)
            for rank in self._running.keys() - set(decision.ranks) - self._left_out:
                if self._waits(rank):
                    continue
                self._left_out.add(rank)
                self._store.set(gone_key(rank), "left out")
                tell(f"rank {rank} gave no sign of life and is ended; the others go on (train.on_lost_rank)")
                self._running[rank][0].kill()
                self._replace(rank)


def _outcome(ours: Connection) -> int | EvenloadError | None:
    """What a process said before it ended; None = nothing."""
    try:
        found = ours.recv() if ours.poll() else None
    except EOFError:
        return None
    if not isinstance(found, tuple):
        return found
    rank, name, text = found
    kind = getattr(errors, name, None)
    is_ours = isinstance(kind, type) and issubclass(kind, EvenloadError)
    return kind(f"{text} (rank {rank})") if is_ours else EvenloadError(f"rank {rank} failed: {name}: {text}")


def _run_rank(
    said: Connection, rank: int, world_size: int, port: int, folder: str, function, arguments: tuple, line: StopLine
) -> None:
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)},
        **{"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
        SURVIVOR_FOLDER: folder,
    }
    begin_rank()
    try:
        said.send(function(*arguments, line) or 0)
    except Exception as error:
        said.send((rank, type(error).__name__, " ".join(str(error).split())))
