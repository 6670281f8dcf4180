"""`Prefetcher`: items made by a thread before they are needed, at most `depth` ahead.

The thread's work may be collective (`StepMaker`), so it never stops in the middle: after `close` it still makes the
items that it was allowed to. As every rank allows equally many, all ranks make the same calls, provided that all close
after the same item.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

_END_S = 5.0
"""How long dropping or exit waits for what is being made: a thread that comes back from a collective in C++ when the
interpreter is gone aborts the process; one that waits for a dead peer must not hold up its end."""


class Prefetcher(Generic[Item]):
    """Gives items in the order in which they are made.

    Args:
        make: returns the next item; None = there are no more. Called by one thread only. If it holds this object, or
            one that does, only `close` or the end of the items ends the thread.
        depth: items made ahead; 0 = when they are needed, by the caller's thread.
        name: of the thread.
    """

    def __init__(self, make: Callable[[], Item | None], depth: int, name: str) -> None:
        self._make = make
        # One entry per item that may be made; False = none after those before it.
        self._permits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
        self._seen: list[Item | BaseException | None] = []  # at most one, the next
        self._ended = False
        self._thread: threading.Thread | None = None
        for _ in range(depth):
            self._permits.put(True)
        if depth:
            # A daemon: when the main thread fails, the process must end even if this thread waits for a dead peer.
            channels = (make, self._permits, self._ready)
            self._thread = threading.Thread(target=_make_ahead, args=channels, name=name, daemon=True)
            self._thread.start()
            # Nothing that the thread calls refers to this object: dropping it, as the interpreter's exit does, ends the
            # thread, which then releases all that `make` holds.
            weakref.finalize(self, _end, self._permits, self._thread)

    def has_next(self) -> bool:
        """Return whether `next` will give an item, or raise; waits until that is known, so it is alike on all ranks."""
        if not self._seen and not self._ended:
            self._seen.append(_make_one(self._make) if self._thread is None else self._ready.get())
        return not self._ended and self._seen[0] is not None

    def next(self) -> Item | None:
        """Return the next item, None at the end and ever after; raise what making it raised, which is the end too."""
        if not self.has_next():
            self._ended = True
            return None
        item = self._seen.pop()
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        if self._thread is not None:
            self._permits.put(True)
        return item

    def close(self) -> None:
        """End the thread; what it was allowed to make is made, and dropped."""
        self._ended = True
        if self._thread is not None:
            self._permits.put(False)
            self._thread.join()


def _end(permits: "queue.SimpleQueue[bool]", thread: threading.Thread) -> None:
    permits.put(False)
    if thread is not threading.current_thread():  # garbage may be collected there, too
        thread.join(_END_S)


def _make_ahead(make: Callable[[], Any], permits: "queue.SimpleQueue[bool]", ready: "queue.SimpleQueue[Any]") -> None:
    while permits.get():
        item = _make_one(make)
        ready.put(item)
        if item is None or isinstance(item, BaseException):
            return


def _make_one(make: Callable[[], Item | None]) -> Item | BaseException | None:
    try:
        return make()
    except BaseException as error:
        return error
