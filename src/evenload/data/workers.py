"""Read the blocks of this rank's streams in the background (`BlockService`), in a thread or in worker processes.

Every stream belongs to one worker, so that its open files stay with it. A request needs nothing else, so a process that
dies is replaced and gets its request again. Processes are started as programs, not by the pools of the standard
library: those import the training script again in every worker (`spawn`), cannot be used by daemonic ranks, outlive a
parent that was killed, and delay the exit of one whose source stalls.
"""

import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from multiprocessing.connection import Connection

from evenload.data.blocks import BlockReader, BlockRequest, DocumentBlock, ReadingSource
from evenload.errors import ConfigError, DataError, EvenloadError

START_TIMEOUT_S = 300.0
"""How long a process may take to start, unless `data.stall_timeout_s` is longer."""

_MOST_DEATHS = 3
"""A process that ends more often without a block in between is not started again."""
_POLL_S = 0.1

ReadingJob = tuple[ReadingSource, ...]
"""What a worker needs, by part of the mixture."""

Outcome = DocumentBlock | EvenloadError

_log = logging.getLogger("evenload.data")


class BlockService:
    """Read blocks in the background, in so many processes (0 = a thread of this one); works again after `close`."""

    def __init__(self, job: ReadingJob, num_workers: int, stall_timeout_s: float) -> None:
        self._job, self._num_workers, self._stall_timeout_s = job, num_workers, stall_timeout_s
        self._workers: list[_ThreadWorker] = []
        self._blocks: dict[BlockRequest, Future[Outcome]] = {}

    def request(self, request: BlockRequest) -> None:
        if request not in self._blocks:
            self._blocks[request] = self._worker_of(request).submit(request)

    def take(self, request: BlockRequest) -> DocumentBlock:
        """Wait for a block; `DataError` for what reading it raised, or a worker that does not start, stalls or dies."""
        self.request(request)
        worker, block = self._worker_of(request), self._blocks.pop(request)
        progress, since_s = worker.progress, time.monotonic()
        while not wait([block], _POLL_S).done:
            if worker.progress != progress:
                progress, since_s = worker.progress, time.monotonic()
            self._refuse_stall(worker, request, time.monotonic() - since_s)
        if isinstance(outcome := block.result(), EvenloadError):
            raise outcome
        return outcome

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        self._blocks.clear()

    def _worker_of(self, request: BlockRequest) -> "_ThreadWorker":
        if not self._workers:
            processes: list[_ThreadWorker] = [_ProcessWorker(self._job, index) for index in range(self._num_workers)]
            self._workers = processes or [_ThreadWorker(self._job)]
        return self._workers[request.key.owner(len(self._workers))]

    def _refuse_stall(self, worker: "_ThreadWorker", request: BlockRequest, silent_s: float) -> None:
        limit_s = self._stall_timeout_s if worker.has_started else max(START_TIMEOUT_S, self._stall_timeout_s)
        if silent_s < limit_s:
            return
        if worker.has_started:
            raise DataError(
                f"the data source gave nothing for {limit_s:g} s, reading {worker.reading or 'no file yet'} (stream "
                f"{request.key.stream}, block {request.cursor.block}); check the storage, or raise data.stall_timeout_s"
            )
        raise DataError(
            f"data worker {worker.index} has not started within {limit_s:g} s and opened no file; check whether the "
            "machine is overloaded or its disk slow, set data.workers = 0, or raise data.stall_timeout_s"
        )


class _ThreadWorker:
    """Read in a daemon thread: a source that hangs must not delay the end of the process."""

    def __init__(self, job: ReadingJob, index: int = 0, has_started: bool = True) -> None:
        self.index, self.has_started, self.progress, self.reading = index, has_started, 0, ""
        self._readers = _make_readers(job, self._record_open)
        self._requests: queue.SimpleQueue[tuple[BlockRequest, Future[Outcome]] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"evenload-read-{index}", daemon=True)
        self._thread.start()

    def submit(self, request: BlockRequest) -> Future[Outcome]:
        block: Future[Outcome] = Future()
        self._requests.put((request, block))
        return block

    def close(self) -> None:
        self._closed = True
        self._requests.put(None)

    def _run(self) -> None:
        while not self._closed and (item := self._requests.get()) is not None:
            request, block = item
            block.set_result(self._read(request))
            self.progress += 1
        for reader in self._readers:
            reader.close()

    def _read(self, request: BlockRequest) -> Outcome:
        return _read_block(self._readers, request)

    def _record_open(self, name: str) -> None:
        self.reading = name
        self.progress += 1


class _ProcessWorker(_ThreadWorker):
    """Read in a process, to which a thread passes the requests; start another one if it dies."""

    def __init__(self, job: ReadingJob, index: int) -> None:
        try:
            self._job = pickle.dumps(job)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"the data source or tokeniser cannot be sent to a worker process: {error}; set data.workers = 0, or "
                "define it in a module that can be imported"
            ) from error
        self._lock = threading.Lock()
        self._failure: DataError | None = None
        self.process, self._connection = _start_process()
        super().__init__((), index, has_started=False)

    def close(self) -> None:
        with self._lock:
            super().close()
            self.process.kill()
        self.process.wait()
        self._thread.join()
        self._connection.close()

    def _read(self, request: BlockRequest) -> Outcome:
        num_deaths = 0
        while self._failure is None:
            try:
                if not self.has_started:
                    self._connection.send_bytes(self._job)  # waits until the process has started where it is large
                    self._connection.recv()
                    self.has_started = True
                    self.progress += 1
                self._connection.send(request)
                while isinstance(answer := self._connection.recv(), str):
                    self._record_open(answer)
                return answer
            except (EOFError, OSError):
                num_deaths += 1
                self._replace(num_deaths, request)
        return self._failure

    def _replace(self, num_deaths: int, request: BlockRequest) -> None:
        code = self.process.wait()
        with self._lock:
            self.has_started = False
            if self._closed:
                self._failure = DataError("the data workers were closed")
            elif num_deaths > _MOST_DEATHS:
                self._failure = DataError(
                    f"data worker {self.index} died {num_deaths} times without reading a block in between (last exit "
                    f"code {code}, -9 is often a lack of memory), waiting for stream {request.key.stream} block "
                    f"{request.cursor.block}; the last file it opened was {self.reading or 'none'}; set "
                    "data.workers = 0 to see the error itself, or read the system's log"
                )
            else:
                message = "data worker %d (process %d) died with exit code %d; another one continues where it was"
                _log.warning(message, self.index, self.process.pid, code)
                self._connection.close()
                self.process, self._connection = _start_process()
                self.progress += 1


def _start_process() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    with theirs:
        program = f"from evenload.data import workers; workers.serve({theirs.fileno()})"
        # This process may know the package through a path of its own.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment
        )
    return process, Connection(ours.detach())


def serve(handle: int) -> None:
    """Run a worker: receive a job, then answer requests with names of opened files and a block or an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process
    connection = Connection(handle)
    try:
        readers = _make_readers(pickle.loads(connection.recv_bytes()), connection.send)
        connection.send(None)
        while True:
            connection.send(_read_block(readers, connection.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _make_readers(job: ReadingJob, on_open: Callable[[str], None]) -> list[BlockReader]:
    return [BlockReader(source, part, on_open) for part, source in enumerate(job)]


def _read_block(readers: Sequence[BlockReader], request: BlockRequest) -> Outcome:
    try:
        return readers[request.key.part].read(request)
    except EvenloadError as error:
        return error
    except Exception:
        # Not every exception survives the way to another process or rank; its text does.
        return DataError(f"reading {request} failed unexpectedly:\n{traceback.format_exc()}")
