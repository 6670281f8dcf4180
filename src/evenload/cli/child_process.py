"""Processes of a command come from a fork server that has imported torch, transformers and our modules once.

    launcher -- starts --> fork server -- forks --> what is checked before the run; ranks

Importing these takes seconds of a core, so a process that imported them anew would cost more than all of a small run.
The server only imports and forks: no thread pool of torch's and nothing of CUDA is started there, which a child could
not use. A child has the environment of its launcher's start, as a spawned one would.

Children end with the launcher, however that ends: each watches a pipe that multiprocessing keeps open in its parent
(`parent_process`), which is the launcher and not the server. The server ends by itself after launcher and children.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from typing import ParamSpec, TypeVar

from evenload.cli.stop_request import STOP_SIGNALS
from evenload.errors import ConfigError, EvenloadError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MOST_BYTES = 103 - len("/pymp-12345678/listener-12345678")  # of a socket's path on macOS; Linux takes 4 more
_SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")


def start_fork_server(*modules: str) -> None:
    """Let a fork server import these while this process goes on; nothing happens where one runs already."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["evenload.cli.fork_server_start", *modules])
    own = tempfile.gettempdir()
    short = [
        one for one in (own, *_SHORT_DIRECTORIES) if len(os.fsencode(one)) <= _MOST_BYTES and os.access(one, os.W_OK)
    ]
    if not short:
        raise ConfigError(f"TMPDIR is {own}, too long for paths of sockets; set one of at most {_MOST_BYTES} bytes")
    tempfile.tempdir = short[0]  # children make their sockets beside the server's, and other files where TMPDIR says
    try:
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = own


def call_in_child(function: Callable[_P, _R], *arguments: _P.args, **options: _P.kwargs) -> _R:
    """`function(*arguments)` in a process that has imported everything already. It, its arguments and what it returns
    are importable by name, and not large. Raises what the function raises; `EvenloadError` where it was killed."""
    context = multiprocessing.get_context("forkserver")
    try:
        with ProcessPoolExecutor(1, mp_context=context, initializer=_begin_errand) as pool:
            return pool.submit(function, *arguments, **options).result()
    except BrokenProcessPool as error:
        raise EvenloadError(f"the process that checks the settings ended before it had an answer ({error})") from error


def begin_rank() -> None:
    """First of all in a rank: signals end it again, and so does the launcher's end."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _end_with_launcher()


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
