"""A pool of real processes that run functions as `torch.distributed` ranks over gloo.

The pool starts its processes once (`rank_server`), and gives every case a fresh process group of the size it needs.
"""

import gc
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

from rank_server import rank_context

TIMEOUT_S = 300.0
"""How long a rank waits for another: far more than any case takes beside other work, below the limit of a test."""


class GlooPool:
    """Processes are started as they are needed, up to the largest world a test asks for."""

    def __init__(self) -> None:
        self._context = rank_context()
        self._workers = []
        self._directory = tempfile.TemporaryDirectory()
        self._cases = 0

    def run(self, world_size: int, function, *arguments) -> list:
        """`function(*arguments)` on every rank of a new group; results in rank order.

        Raises:
            RuntimeError: with the traceback of every rank that failed.
        """
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # so that a worker's death ends the connection instead of leaving us waiting
            self._workers.append((process, ours))
        self._cases += 1
        store = str(Path(self._directory.name) / f"store-{self._cases}")
        for rank in range(world_size):
            self._workers[rank][1].send((rank, world_size, store, function, arguments))
        answers = [self._answer(rank) for rank in range(world_size)]
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [result for _, result in answers]

    def _answer(self, rank: int) -> tuple[bool, object]:
        process, connection = self._workers[rank]
        try:
            return connection.recv()
        except EOFError:
            process.join(10)
            return False, f"the process died with exit code {process.exitcode}"

    def close(self) -> None:
        """Stop all processes."""
        for process, connection in self._workers:
            if process.is_alive():
                connection.send(None)
            process.join(10)
            process.kill()
        self._directory.cleanup()


def _work(connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    frozen = False
    while (task := connection.recv()) is not None:
        rank, world_size, store, function, arguments = task
        environment = dict(os.environ)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            if os.environ != environment:  # a case may have set what torchrun sets
                os.environ.clear()
                os.environ.update(environment)
        # Groups in reference cycles keep their threads, which wake a hundred times a second each: after some hundred
        # cases the machine would do nothing else.
        gc.collect()
        if not frozen:
            # What the first case imported stays for good: going through it after every case takes longer than most do.
            gc.freeze()
            frozen = True
        connection.send(answer)
