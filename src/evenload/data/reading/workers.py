"""Workers that read blocks: a thread, or a process of its own.

A process is started with `python -m evenload.data.reading.worker_process` and not through `multiprocessing`: forking a
process with threads is unsafe, and spawning imports the user's script again. It ends when its connection does, so none
outlives the training process, however that ends.
"""

import logging
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from evenload.data.config import DataConfig
from evenload.data.encoding.document_encoder import DocumentEncoder
from evenload.data.reading.block import BlockRequest, DocumentBlock
from evenload.data.reading.block_reader import BlockReader
from evenload.data.reading.part_files import PartFiles
from evenload.data.reading.stall_clock import StallClock
from evenload.errors import ConfigError, DataError, EvenloadError

_MOST_DEATHS = 3
"""A worker that ends so often without delivering a block in between is not started again."""

ReadingJob = tuple[tuple[DataConfig, PartFiles, DocumentEncoder], ...]
"""All that a worker needs: per part of the mixture its settings, files and encoder. Can be pickled."""

Deliver = Callable[[BlockRequest, DocumentBlock | EvenloadError], None]
Fail = Callable[[EvenloadError], None]

_log = logging.getLogger("evenload.data")


def make_readers(job: ReadingJob, on_open: Callable[[str], None]) -> list[BlockReader]:
    return [BlockReader(config, files, encoder, part, on_open) for part, (config, files, encoder) in enumerate(job)]


def read_block(readers: Sequence[BlockReader], request: BlockRequest) -> DocumentBlock | EvenloadError:
    try:
        return readers[request.key.part].read(request.key.stream, request.epoch, request.cursor)
    except EvenloadError as error:
        return error
    except Exception:
        # Not every exception survives the way to another process or rank; its text does.
        return DataError(f"reading {request} failed unexpectedly:\n{traceback.format_exc()}")


class ThreadWorker:
    """Reads in a thread of this process."""

    def __init__(self, index: int, job: ReadingJob, deliver: Deliver, clock: StallClock) -> None:
        self.index = index
        self._deliver, self._clock = deliver, clock
        clock.starts(index)
        self._readers = make_readers(job, lambda name: clock.opens(index, name))
        self._requests: queue.SimpleQueue[BlockRequest | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._run, name="evenload-read", daemon=True).start()

    def request(self, request: BlockRequest) -> None:
        self._requests.put(request)

    def close(self) -> None:
        """Stop after the block that is being read; from now on nothing is delivered."""
        with self._lock:
            self._closed = True
        self._requests.put(None)

    def _run(self) -> None:
        self._clock.has_started(self.index)
        while (request := self._requests.get()) is not None:
            outcome = read_block(self._readers, request)
            with self._lock:
                if self._closed:
                    return  # whoever asks now asked for another block
                self._clock.delivers(self.index)
                self._deliver(request, outcome)


class ProcessWorker:
    """Reads in a process; starts another one if it dies.

    Args:
        deliver, clock, fail: called from this worker's receiving thread.
    """

    def __init__(self, index: int, job: ReadingJob, deliver: Deliver, clock: StallClock, fail: Fail) -> None:
        self.index = index
        self._job, self._deliver, self._clock, self._fail = _pickle(job), deliver, clock, fail
        self._lock = threading.Lock()
        self._asked: dict[BlockRequest, None] = {}
        self._closing = self._started = False
        self._deaths = 0
        clock.starts(index)
        self._process, self._connection = _start()
        self._thread = threading.Thread(target=self._receive, name=f"evenload-receive-{index}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, request: BlockRequest) -> None:
        with self._lock:
            self._asked[request] = None
            if self._started:
                self._send(request)

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
            # It just died; the receiving thread notices, and its successor is asked for everything outstanding.
            _log.debug("worker %d is gone; %s is asked again", self.index, request)

    def _receive(self) -> None:
        job: bytes | None = self._job
        while True:
            try:
                # Only here: a job larger than the connection's buffer waits until the process has started.
                if job is not None:
                    self._connection.send_bytes(job)
                    job = None
                kind, *content = self._connection.recv()
            except (EOFError, OSError):
                if self._closing or not self._replace():
                    return
                job = self._job
                continue
            if kind == "started":
                self._clock.has_started(self.index)
                with self._lock:
                    self._started = True
                    for request in self._asked:
                        self._send(request)
                continue
            if kind == "open":
                self._clock.opens(self.index, content[0])
                continue
            request, outcome = content
            self._clock.delivers(self.index)
            with self._lock:
                self._asked.pop(request)
                self._deaths = 0
            self._deliver(request, outcome)

    def _replace(self) -> bool:
        """Start another process, which is asked for everything outstanding; False when that is given up."""
        code = self._process.wait()
        with self._lock:
            self._deaths += 1
            if self._closing:
                return False
            if self._deaths > _MOST_DEATHS:
                waiting = ", ".join(
                    f"stream {request.key.stream} block {request.cursor.block}" for request in self._asked
                )
                self._fail(
                    DataError(
                        f"data worker {self.index} died {self._deaths} times without reading a block in between (last "
                        f"exit code {code}, -9 is often a lack of memory), waiting for {waiting}; set data.workers = 0 "
                        "to see the error itself, or look into the system's log"
                    )
                )
                return False
            _log.warning(
                "data worker %d (process %d) died with exit code %d; another one goes on where it was",
                self.index,
                self._process.pid,
                code,
            )
            self._connection.close()
            self._started = False
            self._clock.starts(self.index)
            self._process, self._connection = _start()
        return True


def _pickle(job: ReadingJob) -> bytes:
    try:
        return pickle.dumps(job)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"the data source or tokeniser cannot be sent to a worker process: {error}; set data.workers = 0, or "
            "define it in a module that can be imported"
        ) from error


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    """A process that waits for its pickled job, and the connection to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "evenload.data.reading.worker_process", str(theirs.fileno())]
        # Its working directory may lack the package that this process found through its own path.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment)
    return process, Connection(ours.detach())
