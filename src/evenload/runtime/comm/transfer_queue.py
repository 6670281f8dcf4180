"""Transfers of one group that are started now and waited for later, in the order in which they were started.

On a GPU they run in a stream of their own, behind what the computing stream was given before; elsewhere in a thread,
because gloo's collectives block their caller. There is one queue a device for the whole process: whoever uses it waits
for all its transfers before another group's may start. `side_queue.py` is for calls that nobody waits for one by one.

Price: on a CPU two wakes of a thread a transfer, some 50 µs; on a GPU two events.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from evenload.runtime.comm.side_queue import Span
from evenload.runtime.device import HostClock, step_clock


class Pending(Protocol):
    """A transfer under way. It holds the tensors of its call until it was waited for."""

    def wait(self) -> None:
        """What is computed from now on finds its result; raises what the call raised. A second wait does nothing."""
        ...


class TransferTimes(NamedTuple):
    """Seconds of some transfers, and of these the ones in which nothing was computed meanwhile."""

    transfer_s: float
    waited_s: float

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.transfer_s - self.waited_s)


NO_TRANSFERS = TransferTimes(0.0, 0.0)


class TransferQueue:
    """What both devices have in common: when transfers ran, and when computing waited for them."""

    def __init__(self, device: torch.device) -> None:
        self._clock: HostClock = step_clock(device)
        self._clock.start()
        self._spans: list[Span] = []
        self._waits: list[Span] = []

    def start(self, call: Callable[[], object]) -> Pending:
        """Run a blocking collective behind those before it. Does not wait."""
        raise NotImplementedError

    def begin_times(self) -> None:
        """Forget what was measured; between steps, when nothing is under way."""
        self._spans, self._waits = [], []
        self._clock.start()

    def times(self) -> TransferTimes:
        """Since `begin_times`, of transfers that were waited for. Waits for a GPU."""
        return TransferTimes(self._total_s(self._spans), self._total_s(self._waits))

    def _total_s(self, spans: list[Span]) -> float:
        starts, ends = (self._clock.seconds([span[side] for span in spans]) for side in (0, 1))
        return sum(ends) - sum(starts)


class _ThreadPending:
    def __init__(self, owner: "ThreadTransfers", call: Callable[[], object]) -> None:
        self._owner = owner
        self._call: Callable[[], object] | None = call
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        assert self._call is not None
        try:
            self._call()
        except BaseException as error:  # whatever it is, `wait` raises it
            self._error = error
        self._call = None  # its tensors belong to who waits
        self._done.set()

    def wait(self) -> None:
        self._owner.wait(self._done)
        if self._error is not None:
            raise self._error


class ThreadTransfers(TransferQueue):
    """A thread as long as the process lives. A daemon: a collective whose other ranks are gone must not keep that."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._calls: queue.SimpleQueue[_ThreadPending] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="evenload-transfers", daemon=True).start()

    def start(self, call: Callable[[], object]) -> Pending:
        pending = _ThreadPending(self, call)
        self._calls.put(pending)
        return pending

    def wait(self, done: threading.Event) -> None:
        if done.is_set():
            return
        from_s = self._clock.mark()
        done.wait()
        self._waits.append(Span(from_s, self._clock.mark()))

    def _run(self) -> None:
        while True:
            pending = self._calls.get()
            from_s = self._clock.mark()
            pending.run()
            self._spans.append(Span(from_s, self._clock.mark()))
            del pending  # its tensors are not this thread's to keep


class _StreamPending:
    def __init__(self, owner: "StreamTransfers", done: Any, call: Callable[[], object]) -> None:
        self._owner, self._done = owner, done
        self._call: Callable[[], object] | None = call

    def wait(self) -> None:
        if self._done is not None:
            self._owner.wait(self._done)
            # The computing stream is behind the transfer: its memory may be used again.
            self._done = self._call = None


class StreamTransfers(TransferQueue):
    """A stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, call: Callable[[], object]) -> Pending:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            start = self._clock.mark()
            call()
            self._spans.append(Span(start, self._clock.mark()))
        done = torch.cuda.Event()
        done.record(self._stream)
        return _StreamPending(self, done, call)

    def wait(self, done: Any) -> None:
        start = self._clock.mark()
        torch.cuda.current_stream(self._device).wait_event(done)
        self._waits.append(Span(start, self._clock.mark()))


_queues: dict[torch.device, TransferQueue] = {}


def transfer_queue(device: torch.device) -> TransferQueue:
    """The process's queue of a device, made at first use."""
    if device not in _queues:
        _queues[device] = StreamTransfers(device) if device.type == "cuda" else ThreadTransfers(device)
    return _queues[device]
