"""`BlockService`: the blocks of this rank's streams, read ahead by a thread or by worker processes.

Every stream belongs to one worker, so that its open files stay with it. A request names stream, epoch and cursor and
needs nothing else, so a process that dies is replaced and given the same requests again: nothing is lost or repeated.
Memory is bounded by what is requested: the loader requests one block of a stream beyond the one it takes documents
from.

Processes are started as programs, not by the pools of the standard library: those import the training script again in
every worker (`spawn`), cannot be used by daemonic ranks, outlive a parent that was killed, and hold up the exit of one
whose source stalls. Such a process ends when its connection does.
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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection

from evenload.data.blocks import BlockReader, BlockRequest, DocumentBlock
from evenload.data.config import DataConfig
from evenload.data.encoders import DocumentEncoder
from evenload.data.part_files import PartFiles
from evenload.errors import ConfigError, DataError, EvenloadError

START_TIMEOUT_S = 300.0
"""How long a process may take to start, whatever the source does; where `data.stall_timeout_s` is longer, that long."""

_MOST_DEATHS = 3
"""A process that ends more often without delivering a block in between is not started again."""
_POLL_S = 0.1

ReadingJob = tuple[tuple[DataConfig, PartFiles, DocumentEncoder], ...]
"""All that a worker needs: per part of the mixture its settings, files and encoder. Can be pickled."""

Outcome = DocumentBlock | EvenloadError

_log = logging.getLogger("evenload.data")


class BlockService:
    """Reads blocks in the background. Starts at the first request, and again at the first one after `close`.

    Args:
        num_workers: processes; 0 = a thread of this one.
        stall_timeout_s: how long a worker may neither open a file nor deliver a block while one is waited for.
    """

    def __init__(self, job: ReadingJob, num_workers: int, stall_timeout_s: float) -> None:
        self._job, self._num_workers, self._stall_timeout_s = job, num_workers, stall_timeout_s
        self._workers: list[_ThreadWorker] | list[_ProcessWorker] = []
        self._blocks: dict[BlockRequest, Future[Outcome]] = {}

    def request(self, request: BlockRequest) -> None:
        """Request a block; returns at once."""
        self._blocks[request] = self._worker_of(request).submit(request)

    def take(self, request: BlockRequest) -> DocumentBlock:
        """Wait for a requested block.

        Raises:
            DataError: what reading it raised; the worker does not start, or gives no sign of life for
                `stall_timeout_s`; its process dies again and again.
        """
        worker, block = self._worker_of(request), self._blocks.pop(request)
        num_signs, since_s = worker.num_signs, time.monotonic()
        while True:
            try:
                outcome = block.result(_POLL_S)
                break
            except TimeoutError:
                if worker.num_signs != num_signs:
                    num_signs, since_s = worker.num_signs, time.monotonic()
                elif problem := self._stall(worker, request, time.monotonic() - since_s):
                    raise DataError(problem) from None
        if isinstance(outcome, EvenloadError):
            raise outcome
        return outcome

    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if isinstance(worker, _ProcessWorker)]

    def close(self) -> None:
        """End threads and processes. Blocks that were requested and not taken are dropped."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        self._blocks.clear()

    def _worker_of(self, request: BlockRequest) -> "_ThreadWorker | _ProcessWorker":
        if not self._workers:
            self._workers = (
                [_ProcessWorker(index, self._job) for index in range(self._num_workers)]
                if self._num_workers
                else [_ThreadWorker(self._job)]
            )
        return self._workers[(request.key.part + request.key.stream) % len(self._workers)]

    def _stall(self, worker: "_ThreadWorker | _ProcessWorker", request: BlockRequest, silent_s: float) -> str | None:
        """What is wrong where a worker that a block is waited for has been silent for too long."""
        limit_s = self._stall_timeout_s if worker.has_started else max(START_TIMEOUT_S, self._stall_timeout_s)
        if silent_s < limit_s:
            return None
        if worker.has_started:
            return (
                f"the data source gave nothing for {limit_s:g} s; it was reading {worker.reading or 'no file yet'} "
                f"(stream {request.key.stream}, block {request.cursor.block}); check the storage, or raise "
                "data.stall_timeout_s"
            )
        return (
            f"data worker {worker.index} has not started within {limit_s:g} s: its process is still importing Python "
            "modules or receiving its settings, and no file was opened; check whether the machine is overloaded or "
            "the disk that holds Python is slow, set data.workers = 0 to read in the training process, or raise "
            "data.stall_timeout_s"
        )


class _Worker:
    """Its signs of life, which the thread that waits for it compares: files opened and blocks delivered."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.has_started, self.num_signs, self.reading = False, 0, ""

    def note_open(self, name: str) -> None:
        self.reading = name
        self.num_signs += 1


class _ThreadWorker(_Worker):
    """Reads in a thread of this process: a daemon, since a source that hangs must not hold up the process's end."""

    def __init__(self, job: ReadingJob) -> None:
        super().__init__(0)
        self.has_started = True
        self._readers = _make_readers(job, self.note_open)
        self._requests: queue.SimpleQueue[tuple[BlockRequest, Future[Outcome]] | None] = queue.SimpleQueue()
        self._closed = False
        threading.Thread(target=self._run, name="evenload-read", daemon=True).start()

    def submit(self, request: BlockRequest) -> Future[Outcome]:
        block: Future[Outcome] = Future()
        self._requests.put((request, block))
        return block

    def close(self) -> None:
        """Stop after the block that is being read."""
        self._closed = True
        self._requests.put(None)

    def _run(self) -> None:
        while not self._closed and (item := self._requests.get()) is not None:
            request, block = item
            block.set_result(_read_block(self._readers, request))
            self.num_signs += 1


class _ProcessWorker(_Worker):
    """Reads in a process, which a thread of this one receives blocks from; starts another one if it dies."""

    def __init__(self, index: int, job: ReadingJob) -> None:
        super().__init__(index)
        try:
            self._job = pickle.dumps(job)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"the data source or tokeniser cannot be sent to a worker process: {error}; set data.workers = 0, or "
                "define it in a module that can be imported"
            ) from error
        self._lock = threading.Lock()
        self._waiting: deque[tuple[BlockRequest, Future[Outcome]]] = deque()
        self._closing = False
        self._failure: DataError | None = None
        self._process, self._connection = _start_process()
        self._thread = threading.Thread(target=self._receive, name=f"evenload-receive-{index}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, request: BlockRequest) -> Future[Outcome]:
        block: Future[Outcome] = Future()
        with self._lock:
            if self._failure is not None:
                block.set_result(self._failure)
                return block
            self._waiting.append((request, block))
            if self.has_started:
                self._send(request)
        return block

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._process.kill()
        self._process.wait()
        self._thread.join()
        self._connection.close()

    def _send(self, request: BlockRequest) -> None:
        try:
            self._connection.send(request)
        except OSError:
            # It just died; the receiving thread notices, and its successor gets everything that is waiting.
            _log.debug("worker %d is gone; %s is sent again", self.index, request)

    def _receive(self) -> None:
        num_deaths = 0
        while True:
            try:
                if not self.has_started:
                    self._begin()
                answer = self._connection.recv()
            except (EOFError, OSError):
                num_deaths += 1
                if not self._replace(num_deaths):
                    return
                continue
            if isinstance(answer, str):
                self.note_open(answer)
                continue
            num_deaths = 0
            with self._lock:
                _, block = self._waiting.popleft()
            block.set_result(answer)
            self.num_signs += 1

    def _begin(self) -> None:
        """Send the job, which waits until the process has started where it is large; then all that is waiting."""
        self._connection.send_bytes(self._job)
        self._connection.recv()
        with self._lock:
            self.has_started = True
            self.num_signs += 1
            for request, _ in self._waiting:
                self._send(request)

    def _replace(self, num_deaths: int) -> bool:
        """Start another process; False where the worker is closed, or too many have died."""
        code = self._process.wait()
        with self._lock:
            if self._closing:
                return False
            self.has_started = False
            if num_deaths > _MOST_DEATHS:
                wanted = ", ".join(f"stream {one.key.stream} block {one.cursor.block}" for one, _ in self._waiting)
                self._failure = DataError(
                    f"data worker {self.index} died {num_deaths} times without reading a block in between (last exit "
                    f"code {code}, -9 is often a lack of memory), waiting for {wanted}; the last file it opened was "
                    f"{self.reading or 'none'}; set data.workers = 0 to see the error itself, or read the system's log"
                )
                for _, block in self._waiting:
                    block.set_result(self._failure)
                return False
            _log.warning(
                "data worker %d (process %d) died with exit code %d; another one continues where it was",
                self.index,
                self._process.pid,
                code,
            )
            self._connection.close()
            self._process, self._connection = _start_process()
            self.num_signs += 1
        return True


def _start_process() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    with theirs:
        program = f"from evenload.data import workers; workers.serve({theirs.fileno()})"
        # Its working directory may lack the package that this process found through its own path.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment
        )
    return process, Connection(ours.detach())


def serve(handle: int) -> None:
    """Be a worker process: receive a job, then answer each request with a block or an error, until the other side ends.

    Args:
        handle: file descriptor of the connection. The names of files that are opened go through it, too.
    """
    # Ctrl-C is for the training process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(handle)
    try:
        readers = _make_readers(pickle.loads(connection.recv_bytes()), connection.send)
        connection.send(None)
        while True:
            connection.send(_read_block(readers, connection.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _make_readers(job: ReadingJob, on_open: Callable[[str], None]) -> list[BlockReader]:
    return [BlockReader(config, files, encoder, part, on_open) for part, (config, files, encoder) in enumerate(job)]


def _read_block(readers: Sequence[BlockReader], request: BlockRequest) -> Outcome:
    try:
        return readers[request.key.part].read(request.key.stream, request.epoch, request.cursor)
    except EvenloadError as error:
        return error
    except Exception:
        # Not every exception survives the way to another process or rank; its text does.
        return DataError(f"reading {request} failed unexpectedly:\n{traceback.format_exc()}")
