"""Ranks of tests are forked from one server for each pytest process, which has imported everything once.

Importing torch, transformers and our modules takes seconds of a core, in every one of some dozens of processes.
"""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

_PRELOADED = ["lost_rank_cases", "matrix_cases", "training_cases"]
"""Modules of this folder that import all that ranks use."""


def rank_context() -> ForkServerContext:
    """Where processes come from; starts the server, where there is none."""
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
    return context


def tell_modules(connection) -> None:
    """As a process: send the names of what is imported at its start."""
    connection.send(set(sys.modules))
