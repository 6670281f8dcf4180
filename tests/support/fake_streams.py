"""`torch.cuda`'s streams as queues: what is queued runs when something that must come first is forced, and nothing else
says when.

Two devices stand for all: one that runs its second stream at once, before everything that it was not ordered behind,
and one that runs it as late as anything waits for it. What is right on both does not depend on timing.
"""

from collections.abc import Callable
from contextlib import contextmanager

import torch


class Stream:
    """Work in order; an entry may be "wait until that stream has done so much"."""

    def __init__(self) -> None:
        self.entries: list[Callable[[], object]] = []
        self.num_done = 0

    def queue(self, work: Callable[[], object]) -> None:
        self.entries.append(work)

    def run(self, until: int | None = None) -> None:
        while self.num_done < (len(self.entries) if until is None else until):
            self.num_done += 1
            self.entries[self.num_done - 1]()

    def synchronize(self) -> None:
        self.run()

    def wait_stream(self, other: "Stream") -> None:
        until = len(other.entries)
        self.queue(lambda: other.run(until))

    def wait_event(self, event: "Event") -> None:
        stream, until = event.stream, event.until
        self.queue(lambda: stream.run(until))


class Event:
    stream: Stream
    until: int

    def record(self, stream: Stream) -> None:
        self.stream, self.until = stream, len(stream.entries)


class Cudart:
    """Page-locks nothing, and knows what of it is locked: bytes by address.

    Args (attributes):
        refuses: answers with CUDA's error for memory that there is not.
    """

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address % 4096 == 0
        assert address not in self.locked
        assert flags == 0
        if self.refuses:
            return 2
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def has(self, tensor: torch.Tensor) -> bool:
        """All of its bytes are locked, in one range."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(first <= start and stop <= first + size for first, size in self.locked.items())


class Device:
    """The parts of `torch.cuda` that copies use; whatever else they called is not there."""

    Event = Event

    def __init__(self, *, copies_at_once: bool) -> None:
        self.compute, self.copying = Stream(), Stream()
        self.cuda = Cudart()
        self._current = self.compute
        self._copies_at_once = copies_at_once
        self.recorded: list[tuple[torch.Tensor, Stream, int]] = []

    def Stream(self, device: torch.device) -> Stream:
        return self.copying

    def current_stream(self, device: torch.device) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream):
        before, self._current = self._current, stream
        yield
        self._current = before
        if self._copies_at_once:
            stream.run()

    def cudart(self) -> Cudart:
        return self.cuda

    def copy_rows(self, moves) -> None:
        for into, rows in moves:
            assert self.cuda.has(into) or self.cuda.has(rows)
            self._current.queue(lambda into=into, rows=rows: into.copy_(rows))

    def end(self) -> None:
        self.compute.run()
        self.copying.run()

    def replace(self, monkeypatch) -> "Device":
        """Stand in for `torch.cuda`."""
        for name in ("Stream", "Event", "current_stream", "stream", "cudart"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            self.recorded.append((tensor, stream, len(stream.entries)))

        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
        return self
