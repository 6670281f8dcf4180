"""Local processes of a command: ranks, through torch's elastic launcher, and checks before them; and stop signals.

    launcher -- starts --> fork server -- forks --> what is checked before the run; ranks

The elastic launcher is `torchrun`'s, so ranks see the same environment and get stop signals as signals (`StopRequest`).
What is ours is how they start, the time that they have after a signal, and that a failure is one line.

Processes come from a fork server that has imported torch, transformers and our modules once, which takes seconds of a
core. It only imports and forks: it starts no thread pool of torch's and nothing of CUDA, which a child could not use.
Children end with the launcher, however that ends: each watches its pipe (`parent_process`).

Containers, batch systems and old terminals do not always give what commands need of their environment: a name and a
home of the user, which torch and others read, and characters for tables and odd file names (`prepare_environment`).
"""

import codecs
import io
import logging
import multiprocessing
import os
import pwd
import re
import signal
import sys
import tempfile
import threading
import time
import unicodedata
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar

from evenload import errors
from evenload.errors import ConfigError, EvenloadError, needs_train_extra

_ALIKE = str.maketrans("×·→−–►▶▸★│─█▉▊▋▌▍▎▏▁▲▼µ", "x.>-->>>*|-########_^vu") | {ord("±"): "+-"}


def prepare_environment() -> None:
    """Give this process, and those that it starts, a user's name and home, and streams that can write anything.
    `ConfigError` where no home is known, and none can be made among temporary files."""
    uid = os.getuid()
    try:
        home = pwd.getpwuid(uid).pw_dir
    except KeyError:
        home = ""
        os.environ.setdefault("USER", f"uid{uid}")
    if not os.environ.get("HOME") and not home:
        home = f"{tempfile.gettempdir()}/evenload-home-{uid}"
        try:
            os.mkdir(home, 0o700)
        except OSError as error:  # another process's, or another user's, who must not give us files
            if not os.path.isdir(home) or os.lstat(home).st_uid != uid:
                raise ConfigError(f"HOME is not set, and {home} is another's or no directory; set HOME") from error
    os.environ["HOME"] = os.environ.get("HOME") or home
    replace_unknown_characters()


def replace_unknown_characters() -> None:
    """Let standard output and error write characters that look alike for those that their encoding lacks."""
    codecs.register_error("evenload-alike", _alike)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="evenload-alike")


def _alike(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    plain = ""
    for one in error.object[error.start : error.end].translate(_ALIKE):
        is_byte = "\udc80" <= one <= "\udcff"  # of a file name that is no text
        known = unicodedata.normalize("NFKD", one).encode("ascii", "ignore").decode() or "?"
        plain += f"\\x{ord(one) - 0xDC00:02x}" if is_byte else known
    return plain, error.end


def with_home(argument: str) -> str:
    """Expand `~` in an argument, which shells leave alone after "="."""
    return re.sub(r"^(-[\w-]*=)?(~[^/\s]*)(?=/)", lambda at: (at[1] or "") + os.path.expanduser(at[2]), argument)


_R = TypeVar("_R")
_MOST_BYTES = 103 - len("/pymp-12345678/listener-12345678")  # of a socket's path on macOS; Linux takes 4 more
_SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
SAME_REQUEST_S = 2.0


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def require_own_launch(command: str) -> None:
    """Refuse to run under torchrun, for a command that starts its processes itself."""
    if under_torchrun():
        raise ConfigError(f"{command} starts its own processes on one machine; run it without torchrun")


def call(target: str, *arguments: Any) -> Any:
    """Call "module:function", imported here, so that the launcher need not import what its children do."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)(*arguments)


def measure(command: str, name: str, *request: Any) -> bytes:
    """Check a request in a child process, run its ranks on this machine, and return what rank 0 wrote. Under torchrun
    this process is one of the ranks, and other ones than 0 return b"".

    `{name}_task` of `measure_worker` turns the answer's path and the request into the arguments of `{name}_rank`, which
    runs one rank, and the number of ranks.
    """
    task_of, rank = f"evenload.cli.measure_worker:{name}_task", f"evenload.cli.measure_worker:{name}_rank"
    with tempfile.TemporaryDirectory(prefix=f"evenload-{name}-") as directory, needs_train_extra(command):
        answer = Path(directory) / "answer.json"
        if under_torchrun():
            task, _ = call(task_of, answer, *request)
            call(rank, *task)
            return answer.read_bytes() if answer.is_file() else b""
        task, num_ranks = checked_in_child(task_of, answer, *request)
        run_local(call, (rank, *task), num_ranks)
        return answer.read_bytes()


def checked_in_child(target: str, *arguments: Any) -> Any:
    """Return what "module:function" returns in a child process, whose server imports the module meanwhile."""
    start_fork_server(target.partition(":")[0])
    import torch.distributed.launcher.api  # noqa: F401  # while the server imports the rest

    return call_in_child(call, target, *arguments)


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


def call_in_child(function: Callable[..., _R], *arguments: Any) -> _R:
    """Call a function in a process that has imported everything already, and return its result. Raises what the
    function raises, and `EvenloadError` where the process was killed."""
    context = multiprocessing.get_context("forkserver")
    try:
        with ProcessPoolExecutor(1, mp_context=context, initializer=_begin_check) as pool:
            return pool.submit(function, *arguments).result()
    except BrokenProcessPool as error:
        raise EvenloadError(f"the process that checks the settings ended before it had an answer ({error})") from error


def run_local(function: Callable[..., int], arguments: tuple, num_processes: int, *, grace_s: float = 0.0) -> None:
    """Run `function(*arguments)` in that many processes with the environment of `torchrun`; it returns the number of
    the signal that ended it early, or 0.

    SIGTERM, SIGHUP and Ctrl-C go to the ranks, which are killed `grace_s` seconds later, and then end this process with
    exit code 128 + signal (`SystemExit`). Where a rank fails the others are stopped, and killed 30 s later.
    Raises `EvenloadError`: the first failing process's error, with its rank.
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
    signals = _LauncherSignals(grace_s, SignalException)
    try:
        with _handling(dict.fromkeys(STOP_SIGNALS, signals.on_signal) | {signal.SIGALRM: signals.on_alarm}):
            try:
                returned = elastic_launch(config, _run_rank)(function, arguments)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except ChildFailedError as failed:
        if signals.first:  # a rank that did not listen yet has ended by it
            raise SystemExit(128 + signals.first) from None
        raise _as_evenload_error(*failed.get_first_failure()) from None
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from None
    if number := max(returned.values()):
        raise SystemExit(128 + number)


def print_error(text: str) -> None:
    """Write a line to standard error, unless the terminal is gone (SIGHUP)."""
    with suppress(OSError):
        sys.stderr.write(f"evenload: {text}\n")
        sys.stderr.flush()


def signal_name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable]) -> Iterator[None]:
    """Handle signals in here. Main thread only."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _LauncherSignals:
    """Passes the first stop signal on to the ranks, and kills them at the second, or when the grace is over, always in
    signal handlers, on the main thread, which alone handles the child processes."""

    def __init__(self, grace_s: float, ended: type[Exception]) -> None:
        self.first = 0
        """The number of the first signal; 0 = none has come."""
        self._grace_s, self._ended = grace_s, ended
        self._since_s = 0.0

    def on_signal(self, number: int, frame: object) -> None:
        ranks = multiprocessing.active_children()
        if self.first:
            if time.monotonic() - self._since_s >= SAME_REQUEST_S:
                self._kill(number)
            return
        self.first, self._since_s = number, time.monotonic()
        if not ranks or not self._grace_s:
            self._kill(number)
        print_error(
            f"{signal_name(number)}: the running step is finished and a checkpoint saved, for which there are "
            f"{self._grace_s:.0f} s (train.stop_grace_s); a second signal ends the run at once"
        )
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid or 0, number)

    def on_alarm(self, number: int, frame: object) -> None:
        print_error(f"no checkpoint within train.stop_grace_s = {self._grace_s:.0f}: killed; the last one is complete")
        self._kill(self.first)

    def _kill(self, number: int) -> None:
        for rank in multiprocessing.active_children():
            rank.kill()
        raise self._ended(f"stopped by {signal_name(number)}", signal.Signals(number))


class StopRequest:
    """Records in a rank a signal that requests the run to end after the running step. One that comes `SAME_REQUEST_S`
    or more after the first ends the process at once; closer ones are the same request, as a terminal, a scheduler,
    `timeout` and a launcher may each send one."""

    def __init__(self) -> None:
        self.signal = 0
        """The number of the signal that requested it; 0 = go on."""
        self._since_s = 0.0
        self._parent = os.getppid()
        self._had_terminal = os.isatty(2)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record signals in here instead of ending by them. Main thread only."""
        with _handling(dict.fromkeys(STOP_SIGNALS, self._record)):
            yield

    def _record(self, number: int, frame: object) -> None:
        # torch has the kernel send SIGINT to ranks whose parent, the fork server, died: nobody reports how they end.
        if os.getppid() != self._parent or (self.signal and time.monotonic() - self._since_s >= SAME_REQUEST_S):
            os._exit(128 + number)
        if not self.signal:
            self.signal, self._since_s = number, time.monotonic()
        if number == signal.SIGHUP and self._had_terminal and not os.isatty(2):
            # The terminal is gone, and what is printed would be an error instead of a checkpoint.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.close(nowhere)


def _run_rank(function: Callable[..., int], arguments: tuple) -> int:
    from torch.distributed.elastic.multiprocessing.errors import record

    for number in STOP_SIGNALS:  # the fork server ignores them
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _end_with_launcher()
    return record(function)(*arguments) or 0


def _begin_check() -> None:
    # Ctrl-C stays ignored, as in the server: the launcher gets it, too, and says what there is to say.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _end_with_launcher()


def _end_with_launcher() -> None:
    def watch() -> None:
        launcher = multiprocessing.parent_process()
        assert launcher is not None
        launcher.join()
        # Not an exception: the main thread may wait for another rank, and nobody is left to read it.
        os._exit(1)

    threading.Thread(target=watch, name="evenload-life-line", daemon=True).start()


def _as_evenload_error(rank: int, failure: Any) -> EvenloadError:
    message = failure.message if isinstance(failure.message, str) else failure.message["message"]
    name, _, text = message.partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, EvenloadError):
        return kind(f"{text} (rank {rank})")
    if failure.exitcode < 0:
        return EvenloadError(
            f"rank {rank} was killed by {failure.signal_name()} (process {failure.pid}); "
            "if the machine ran out of memory, lower plan.options.max_pack_tokens or raise parallel.pp"
        )
    return EvenloadError(f"rank {rank} failed with exit code {failure.exitcode}: {message}")
