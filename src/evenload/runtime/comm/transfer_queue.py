"""Transfers of one group that are started now and waited for later, in the order in which they were started.

On a GPU they run in a stream of their own, behind what the computing stream was given before; elsewhere in a thread,
because gloo's collectives block their caller. There is one queue a device for the whole process: whoever uses it waits
for all its transfers before another group's may start. `side_queue.py` is for calls that nobody waits for one by one.

It measures nothing; `beside_times.py` does, of transfers of one kind.

Price: on a CPU two wakes of a thread a transfer, some 50 µs; on a GPU an event.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Pending(Protocol):
    """A transfer under way. It holds the tensors of its call until it was waited for."""

    def wait(self) -> None:
        """What is computed from now on finds its result; raises what the call raised. A second wait does nothing."""
        ...


class Transfers(Protocol):
    """Whatever starts transfers of this process's queue: the queue itself, or what times some of them."""

    def start(self, call: Callable[[], object]) -> Pending:
        """Run a blocking collective behind those before it. Does not wait."""
        ...


class _ThreadPending:
    def __init__(self, call: Callable[[], object]) -> None:
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
        self._done.wait()
        if self._error is not None:
            raise self._error


class ThreadTransfers:
    """A thread as long as the process lives. A daemon: a collective whose other ranks are gone must not keep that."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_ThreadPending] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="evenload-transfers", daemon=True).start()

    def start(self, call: Callable[[], object]) -> Pending:
        """See `Transfers`."""
        pending = _ThreadPending(call)
        self._calls.put(pending)
        return pending

    def _run(self) -> None:
        while True:
            pending = self._calls.get()
            pending.run()
            del pending  # its tensors are not this thread's to keep


class _StreamPending:
    def __init__(self, device: torch.device, done: Any, call: Callable[[], object]) -> None:
        self._device, self._done = device, done
        self._call: Callable[[], object] | None = call

    def wait(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            # The computing stream is behind the transfer: its memory may be used again.
            self._done = self._call = None


class StreamTransfers:
    """A stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, call: Callable[[], object]) -> Pending:
        """See `Transfers`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            call()
        done = torch.cuda.Event()
        done.record(self._stream)
        return _StreamPending(self._device, done, call)


_queues: dict[torch.device, Transfers] = {}


def transfer_queue(device: torch.device) -> Transfers:
    """The process's queue of a device, made at first use."""
    if device not in _queues:
        _queues[device] = StreamTransfers(device) if device.type == "cuda" else ThreadTransfers()
    return _queues[device]
