"""Ranks of tests are forked from one server for each pytest process, which has imported everything once.

Importing torch, transformers and our modules takes seconds of a core, in every one of some dozens of processes.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path

_PRELOADED = [
    *("exact_ranks", "lost_rank_cases", "matrix_cases", "training_cases"),
    *("quick_commands", "evenload.cli.train_worker", "evenload.cli.measure_worker"),
]
"""Modules that import all that ranks use; the first lets float64 models compute as `tests/conftest.py` says."""

_OWN_CONTEXT: list[BaseContext] = []
"""Of a process that forks its ranks itself (`forking_after`)."""


def rank_context() -> BaseContext:
    """Where processes come from; starts the server, where there is none."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    if _OWN_CONTEXT:
        return _OWN_CONTEXT[0]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # The server of Python 3.11 does not search our `sys.path`, and passes over what it does not find without a word.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), *filter(None, (before,))))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    # torch's launcher asks for its callers by a walk through all modules: half a second of a core at every start.
    dynamic_rendezvous.get_method_name = str
    return context


def forking_after(prepare: Callable[[], object], function: Callable[..., object], *arguments: object) -> object:
    """`function(*arguments)` in a process in which `prepare()` was called once, and from which its ranks are forked:
    for engines that take seconds to import, in every one of some dozens of new ranks.

    Raises:
        RuntimeError: with the traceback, where it failed.
    """
    connection = _server_after(prepare)
    connection.send((function, arguments))
    is_done, answer = connection.recv()
    if not is_done:
        raise RuntimeError(answer)
    return answer


@cache
def _server_after(prepare: Callable[[], object]) -> Connection:
    ours, theirs = rank_context().Pipe()
    rank_context().Process(target=_serve_after, args=(theirs, prepare), daemon=True).start()
    theirs.close()
    return ours


def _serve_after(connection: Connection, prepare: Callable[[], object]) -> None:
    _OWN_CONTEXT.append(multiprocessing.get_context("fork"))
    multiprocessing.current_process()._config["daemon"] = False  # one that ends with its parent may have no ranks
    prepare()
    while True:
        function, arguments = connection.recv()
        try:
            answer = (True, function(*arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        connection.send(answer)


def run_as_torchrun(world_size: int, function: Callable[..., object], *arguments: object) -> None:
    """`function(*arguments)` on new ranks in the environment that torchrun gives them.

    Raises:
        RuntimeError: with the traceback of a rank that failed.
    """
    import torch.distributed as dist

    context = rank_context()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ends = []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        task = (theirs, rank, world_size, store.port, function, arguments)
        process = context.Process(target=_run_as_torchrun, args=task)
        process.start()
        theirs.close()
        ends.append((process, ours))
    try:
        for rank, (process, ours) in enumerate(ends):
            try:
                failure = ours.recv()
            except EOFError:
                failure = f"the process ended with exit code {process.exitcode}"
            if failure is not None:
                raise RuntimeError(f"rank {rank}:\n{failure}")
    finally:
        for process, _ in ends:
            process.join(10)
            process.kill()


def _run_as_torchrun(connection, rank: int, world_size: int, port: int, function, arguments) -> None:
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)},
        **{"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"},
    }
    try:
        function(*arguments)
    except BaseException:
        connection.send(traceback.format_exc())
        raise
    connection.send(None)
