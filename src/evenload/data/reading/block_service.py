"""`BlockService`: the blocks of this rank's streams, read ahead by a thread or by worker processes.

Every stream belongs to one worker, so that its open files stay with it. A request names stream, epoch and cursor and
needs nothing else, so a worker that dies is replaced and asked the same again: nothing is lost or repeated. Memory is
bounded by what is asked for: the loader asks for one block of a stream beyond the one it takes documents from.
"""

import threading
import time
from collections import deque

from evenload.data.reading.block import BlockRequest, DocumentBlock, StreamKey
from evenload.data.reading.stall_clock import StallClock
from evenload.data.reading.workers import ProcessWorker, ReadingJob, ThreadWorker
from evenload.errors import EvenloadError


class BlockService:
    """Reads blocks in the background. Starts at the first request, and again at the first one after `close`.

    Args:
        num_workers: processes; 0 = a thread of this one.
        stall_timeout_s: how long a worker may give no sign of life (`StallClock`).
    """

    def __init__(self, job: ReadingJob, num_workers: int, stall_timeout_s: float) -> None:
        self._job, self._num_workers = job, num_workers
        self._arrived = threading.Condition()
        self._clock = StallClock(self._arrived, stall_timeout_s)
        self._blocks: dict[StreamKey, deque[tuple[BlockRequest, DocumentBlock | EvenloadError]]] = {}
        self._failure: EvenloadError | None = None
        self._workers: list[ThreadWorker] | list[ProcessWorker] = []

    def request(self, request: BlockRequest) -> None:
        """Ask for a block; returns at once."""
        self._worker_of(request.key).request(request)

    def take(self, request: BlockRequest) -> DocumentBlock:
        """A block that was asked for, waiting for it if need be.

        Raises:
            DataError: what reading it raised; the worker does not start; the source gives nothing for
                `stall_timeout_s`; workers die again and again.
        """
        worker = self._worker_of(request.key).index
        asked_s = time.monotonic()
        wanted = f"stream {request.key.stream}, block {request.cursor.block}"
        with self._arrived:
            while not self._blocks.get(request.key):
                if self._failure is not None:
                    raise self._failure
                self._arrived.wait(self._clock.left_s(worker, asked_s, wanted))
            answered, outcome = self._blocks[request.key].popleft()
        assert answered == request, f"asked for {request}, got {answered}"
        if isinstance(outcome, EvenloadError):
            raise outcome
        return outcome

    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if isinstance(worker, ProcessWorker)]

    def close(self) -> None:
        """End threads and processes. Blocks that were asked for and not taken are dropped."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        self._blocks.clear()
        self._failure = None

    def _worker_of(self, key: StreamKey) -> ThreadWorker | ProcessWorker:
        if not self._workers and not self._num_workers:
            self._workers = [ThreadWorker(0, self._job, self._deliver, self._clock)]
        elif not self._workers:
            channels = (self._job, self._deliver, self._clock, self._fail)
            self._workers = [ProcessWorker(index, *channels) for index in range(self._num_workers)]
        return self._workers[(key.part + key.stream) % len(self._workers)]

    def _deliver(self, request: BlockRequest, outcome: DocumentBlock | EvenloadError) -> None:
        with self._arrived:
            self._blocks.setdefault(request.key, deque()).append((request, outcome))
            self._arrived.notify_all()

    def _fail(self, error: EvenloadError) -> None:
        with self._arrived:
            self._failure = error
            self._arrived.notify_all()
