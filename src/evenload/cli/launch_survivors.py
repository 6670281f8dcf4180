"""Local training processes of which some may be killed while the others go on (`train.on_lost_rank = "shrink"`).

The launcher holds the store through which ranks meet, so that it outlives any of them, and marks there whose process
has ended by a signal: survivors then agree without waiting for it (`runtime.comm.membership`). Whom they leave out,
because it gave no sign of life, is killed here, so that it can do no harm when it wakes up. A process that ends with
an error ends the run, as everywhere: what one rank cannot read or compute, its survivors could not either.
"""

import multiprocessing
import os
import signal
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec

from evenload import errors
from evenload.cli.child_process import begin_rank, start_fork_server
from evenload.cli.launch import SignalGuard, tell
from evenload.cli.stop_request import StopLine
from evenload.errors import EvenloadError
from evenload.runtime.comm.agreement import AgreementStore, Decision, decision_key, gone_key

_LOOK_S = 1.0


class _StoppedError(Exception):
    """A signal ended the launcher."""

    def __init__(self, text: str, number: signal.Signals) -> None:
        super().__init__(text)
        self.number = int(number)


def run_surviving(function, arguments: tuple, num_processes: int, *, grace_s: float) -> None:
    """As `launch.run_local`, but a killed process is not the end while others are left.

    Args:
        function: as there; it deals with lost ranks by itself.

    Raises:
        EvenloadError: the error of the first process that ends with one, or all were killed.
        SystemExit: after a signal.
    """
    start_fork_server()
    import torch.distributed as dist

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[reportPrivateImportUsage]
    line = StopLine()
    try:
        with SignalGuard(line, grace_s, _StoppedError).watching():
            ranks = _Ranks(store, line)
            ranks.start(num_processes, store.port, (function, arguments, line))
            while ranks.are_running:
                ranks.look()
    except _StoppedError as stopped:
        raise SystemExit(128 + stopped.number) from None
    if ranks.failure is not None:
        raise ranks.failure
    if ranks.signal:
        raise SystemExit(128 + ranks.signal)


class _Ranks:
    """Processes by rank, and what became of those that ended.

    Attributes:
        failure: of the first that ended with an error.
        signal: because of which they ended early, or 0.
    """

    def __init__(self, store: AgreementStore, line: StopLine) -> None:
        self.failure: EvenloadError | None = None
        self.signal = 0
        self._store, self._line = store, line
        self._running: dict[int, tuple[BaseProcess, Connection]] = {}
        self._round = 0
        self._left_out: set[int] = set()

    @property
    def are_running(self) -> bool:
        return bool(self._running)

    def start(self, world_size: int, port: int, task: tuple) -> None:
        context = multiprocessing.get_context("forkserver")
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(theirs, rank, world_size, port, *task))
            process.start()
            theirs.close()
            self._running[rank] = process, ours

    def look(self) -> None:
        """Wait until a process ends, or a while, and see what has happened."""
        connection.wait([process.sentinel for process, _ in self._running.values()], timeout=_LOOK_S)
        self._end_left_out()
        for rank, (process, ours) in list(self._running.items()):
            if process.is_alive():
                continue
            process.join()
            del self._running[rank]
            said = _outcome(ours)
            if rank in self._left_out:
                continue  # whatever it says: the others are the run
            if isinstance(said, EvenloadError):
                self.failure = self.failure or said
                self._line.has_failed.value = True
            elif said is not None:
                self.signal = max(self.signal, said)
            elif self.failure is None:
                self._lose(rank, process)

    def _lose(self, rank: int, process: BaseProcess) -> None:
        """Tell survivors and people of a killed process."""
        code = process.exitcode or 0
        if code >= 0:
            self.failure = EvenloadError(f"rank {rank} ended with exit code {code} and without a word")
            self._line.has_failed.value = True
            return
        name = signal.Signals(-code).name
        if not self._running:
            self.failure = EvenloadError(
                f"rank {rank} was killed by {name} (process {process.pid}), the last one that was left; if the machine "
                "ran out of memory, lower plan.options.max_pack_tokens or raise parallel.pp. The same command goes on "
                "from the last checkpoint"
            )
            return
        self._store.set(gone_key(rank), "ended")
        tell(f"rank {rank} was killed by {name} (process {process.pid}); the others go on (train.on_lost_rank)")

    def _end_left_out(self) -> None:
        """Kill whom the others have left out."""
        while self._store.check([key := decision_key(self._round + 1)]):
            self._round += 1
            decision = msgspec.json.decode(self._store.get(key), type=Decision)
            for rank in self._running.keys() - set(decision.ranks) - self._left_out:
                self._left_out.add(rank)
                tell(f"rank {rank} gave no sign of life and is ended; the others go on (train.on_lost_rank)")
                self._running[rank][0].kill()


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
    said: Connection, rank: int, world_size: int, port: int, function, arguments: tuple, line: StopLine
) -> None:
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)},
        **{"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
    }
    begin_rank()
    try:
        said.send(function(*arguments, line) or 0)
    except Exception as error:
        said.send((rank, type(error).__name__, " ".join(str(error).split())))
