"""Starts local training processes and watches them: when one fails, the others stop and its error is shown.

Built on torch's elastic launcher, the same that `torchrun` uses, so a run started here and one started by
`torchrun` are the same run. Signals are our own: the first one asks the ranks to end after the running step.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evenload import errors
from evenload.cli.child_process import begin_rank, start_fork_server
from evenload.cli.stop_request import SAME_REQUEST_S, STOP_SIGNALS, StopLine, signal_name
from evenload.errors import ConfigError, EvenloadError

_END_AFTER_FAILURE_S = 10.0
"""How long ranks may take to end after another has failed; a stopped process never would."""


def require_own_launch(command: str) -> None:
    """Refuse to run under torchrun, for a command that starts its processes itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(f"{command} starts its own processes on one machine; run it without torchrun")


def run_local(function, arguments: tuple, num_processes: int, *, grace_s: float | None = None) -> None:
    """Run `function(*arguments, line)` in that many processes with the environment of `torchrun`.

    SIGTERM, SIGHUP and Ctrl-C end this process with exit code 128 + signal, after the ranks.

    Args:
        function: importable by name in a new process; its last argument is a `StopLine`. Returns the number of
            the signal because of which it ended early, or 0.
        grace_s: seconds that ranks which train have after the first signal before they are killed; None = none.

    Raises:
        EvenloadError: the first failing process's error, with its rank.
        SystemExit: after a signal.
    """
    start_fork_server("torch.distributed.elastic.multiprocessing.api")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Its own report of a failure is a page long; ours says the same in a line.
    for name in ("", ".multiprocessing.api", ".agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        signals_to_handle="SIGQUIT",
    )
    line = StopLine()
    guard = SignalGuard(line, grace_s, SignalException)
    try:
        with guard.watching():
            returned = elastic_launch(config, _run_rank)(function, arguments, line)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        raise _as_evenload_error(rank, failure) from None
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from None
    if number := max(returned.values()):
        raise SystemExit(128 + number)


def _run_rank(function: Callable[..., int | None], arguments: tuple, line: StopLine) -> int | None:
    from torch.distributed.elastic.multiprocessing.errors import record

    begin_rank()
    try:
        return record(function)(*arguments, line)
    except BaseException:
        line.has_failed.value = True
        raise


class SignalGuard:
    """Signals to the launcher, and ranks that do not end. All killing happens in signal handlers, on the main thread,
    which alone looks after the child processes."""

    def __init__(self, line: StopLine, grace_s: float | None, ended: type[Exception]) -> None:
        self._line, self._grace_s, self._ended = line, grace_s, ended
        self._signal = 0
        self._since_s = 0.0
        self._over = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        # Stays: the watch may still send its signal when all is over, and there is nobody left to kill then.
        signal.signal(signal.SIGALRM, self._on_alarm)
        watch = threading.Thread(target=self._watch_failures, name="evenload-launcher", daemon=True)
        watch.start()
        try:
            yield
        finally:
            self._over.set()
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._signal:
            if time.monotonic() - self._since_s >= SAME_REQUEST_S:
                self._end(number)
            return
        self._signal, self._since_s = number, time.monotonic()
        if self._grace_s is None:
            self._end(number)
        if not self._line.is_training.value:
            tell(f"{signal_name(number)} before training began: ended, there is nothing to save")
            self._end(number)
        self._line.asked.value = number
        tell(
            f"{signal_name(number)}: the running step is finished and a checkpoint saved, for which there are "
            f"{self._grace_s:.0f} s (train.stop_grace_s); a second signal ends the run at once"
        )
        signal.setitimer(signal.ITIMER_REAL, self._grace_s or 0.0)

    def _on_alarm(self, number: int, frame: object) -> None:
        if self._signal and time.monotonic() - self._since_s >= (self._grace_s or 0.0) - 0.1:
            tell(f"no checkpoint within train.stop_grace_s = {self._grace_s:.0f}: killed; the one before is complete")
            self._end(self._signal)
        _kill_ranks()

    def _end(self, number: int) -> None:
        _kill_ranks()
        raise self._ended(f"stopped by {signal_name(number)}", signal.Signals(number))

    def _watch_failures(self) -> None:
        """When a rank has failed, see that the others end, too."""
        while not self._over.wait(0.25):
            if self._line.has_failed.value:
                if not self._over.wait(_END_AFTER_FAILURE_S):
                    os.kill(os.getpid(), signal.SIGALRM)
                return


def _kill_ranks() -> None:
    for process in multiprocessing.active_children():
        process.kill()


def tell(text: str) -> None:
    """A line to people."""
    try:
        sys.stderr.write(f"evenload: {text}\n")
        sys.stderr.flush()
    except OSError:
        pass  # SIGHUP: the terminal is gone.


def _as_evenload_error(rank: int, failure) -> EvenloadError:
    message = failure.message if isinstance(failure.message, str) else failure.message["message"]
    name, colon, text = message.partition(": ")
    kind = getattr(errors, name, None)
    if colon and isinstance(kind, type) and issubclass(kind, EvenloadError):
        return kind(f"{text} (rank {rank})")
    if failure.exitcode < 0:
        return EvenloadError(
            f"rank {rank} was killed by {failure.signal_name()} (process {failure.pid}); "
            "if the machine ran out of memory, lower plan.options.max_pack_tokens or raise parallel.pp"
        )
    return EvenloadError(f"rank {rank} failed with exit code {failure.exitcode}: {message}")
