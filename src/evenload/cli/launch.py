"""Local processes of a command: ranks, through torch's elastic launcher, and errands before them.

    launcher -- starts --> fork server -- forks --> what is checked before the run; ranks

The elastic launcher is the one that `torchrun` uses, so a run started here and one started by `torchrun` are the same
run: ranks see the same environment and get stop signals as signals (`stop_request`). What is ours is how they start,
the time that they have after a signal, and that a failure is one line.

Processes come from a fork server that has imported torch, transformers and our modules once. Importing these takes
seconds of a core, so a process that imported them anew would cost more than all of a small run. The server only imports
and forks: no thread pool of torch's and nothing of CUDA is started there, which a child could not use. A child has the
environment of its launcher's start, as a spawned one would.

Children end with the launcher, however that ends: each watches a pipe that multiprocessing keeps open in its parent
(`parent_process`), which is the launcher and not the server. The server ends by itself after launcher and children.
"""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from typing import ParamSpec, TypeVar

from evenload import errors
from evenload.cli.stop_request import SAME_REQUEST_S, STOP_SIGNALS, signal_name
from evenload.errors import ConfigError, EvenloadError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MOST_BYTES = 103 - len("/pymp-12345678/listener-12345678")  # of a socket's path on macOS; Linux takes 4 more
_SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")


def require_own_launch(command: str) -> None:
    """Refuse to run under torchrun, for a command that starts its processes itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(f"{command} starts its own processes on one machine; run it without torchrun")


def start_fork_server(*modules: str) -> None:
    """Let a fork server import these while this process goes on; nothing happens where one runs already."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["evenload.cli.fork_server_start", *modules])
    own = tempfile.gettempdir()
    short = [
        one for one in (own, *_SHORT_DIRECTORIES) if len(os.fsencode(one)) <= _MOST_BYTES and os.access(one, os.W_OK)
    ]
    if not short:
        raise ConfigError(f"TMPDIR is {own}, too long for paths of sockets; set one of at most {_MOST_BYTES} bytes")
    tempfile.tempdir = short[0]  # children make their sockets where the server's is, and other files where TMPDIR says
    try:
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = own


def call_in_child(function: Callable[_P, _R], *arguments: _P.args, **options: _P.kwargs) -> _R:
    """Call a function in a process that has imported everything already, and return its result.

    It, its arguments and what it returns are importable by name, and not large. Raises what the function raises, and
    `EvenloadError` where the process was killed.
    """
    context = multiprocessing.get_context("forkserver")
    try:
        with ProcessPoolExecutor(1, mp_context=context, initializer=_begin_errand) as pool:
            return pool.submit(function, *arguments, **options).result()
    except BrokenProcessPool as error:
        raise EvenloadError(f"the process that checks the settings ended before it had an answer ({error})") from error


def run_local(function: Callable[..., int], arguments: tuple, num_processes: int, *, grace_s: float = 0.0) -> None:
    """Run `function(*arguments)` in that many processes with the environment of `torchrun`.

    SIGTERM, SIGHUP and Ctrl-C go to the ranks, and end this process with exit code 128 + signal after them. Where a
    rank fails the others are stopped, and killed after the 30 s of torch.

    Args:
        function: importable by name in a new process. Returns the number of the signal because of which it ended
            early, or 0.
        grace_s: seconds that ranks have after the first signal before they are killed.

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
    signals = _StopSignals(grace_s, SignalException)
    try:
        with signals.handled():
            returned = elastic_launch(config, _run_rank)(function, arguments)
    except ChildFailedError as failed:
        if signals.first:  # a rank that did not listen yet has ended by it
            raise SystemExit(128 + signals.first) from None
        rank, failure = failed.get_first_failure()
        raise _as_evenload_error(rank, failure) from None
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from None
    if number := max(returned.values()):
        raise SystemExit(128 + number)


def tell(text: str) -> None:
    """Write a line to people."""
    try:
        sys.stderr.write(f"evenload: {text}\n")
        sys.stderr.flush()
    except OSError:
        pass  # SIGHUP: the terminal is gone.


class _StopSignals:
    """Passes the first stop signal on to the ranks, and kills them at the second, or when the grace is over.

    All of it happens in signal handlers, on the main thread, which alone handles the child processes.
    """

    def __init__(self, grace_s: float, ended: type[Exception]) -> None:
        self.first = 0
        """The number of the first signal; 0 = none has come."""
        self._grace_s, self._ended = grace_s, ended
        self._since_s = 0.0

    @contextmanager
    def handled(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        ranks = multiprocessing.active_children()
        if self.first:
            if time.monotonic() - self._since_s >= SAME_REQUEST_S:
                self._kill(number)
            return
        self.first, self._since_s = number, time.monotonic()
        if not ranks or not self._grace_s:
            self._kill(number)
        tell(
            f"{signal_name(number)}: the running step is finished and a checkpoint saved, for which there are "
            f"{self._grace_s:.0f} s (train.stop_grace_s); a second signal ends the run at once"
        )
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid or 0, number)

    def _on_alarm(self, number: int, frame: object) -> None:
        tell(f"no checkpoint within train.stop_grace_s = {self._grace_s:.0f}: killed; the one before is complete")
        self._kill(self.first)

    def _kill(self, number: int) -> None:
        for rank in multiprocessing.active_children():
            rank.kill()
        raise self._ended(f"stopped by {signal_name(number)}", signal.Signals(number))


def _run_rank(function: Callable[..., int], arguments: tuple) -> int:
    from torch.distributed.elastic.multiprocessing.errors import record

    for number in STOP_SIGNALS:  # the fork server ignores them
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _end_with_launcher()
    return record(function)(*arguments) or 0


def _begin_errand() -> None:
    # Ctrl-C stays ignored, as in the server: the launcher gets it, too, and says what there is to say.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _end_with_launcher()


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        # Not an exception: the main thread may wait for another rank, and nobody is left to tell.
        os._exit(1)

    threading.Thread(target=watch, name="evenload-life-line", daemon=True).start()


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
