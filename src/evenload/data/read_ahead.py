"""`ReadAhead`: items made by a thread before they are asked for, so many ahead and no more.

The thread's own work may be collective (`StepMaker`), so it never stops in the middle: told to close, it still makes
the items that it was allowed to. As every rank allows equally many, all ranks make the same calls and none waits for
one that has left, provided that all close after the same item.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """Items in order.

    Args:
        make: gives the next item; None = there are no more. Called by one thread only.
        depth: items made ahead; 0 = when they are asked for, by the caller's thread.
        name: of the thread.
    """

    def __init__(self, make: Callable[[], Item | None], depth: int, name: str) -> None:
        self._shared = _Shared(make, depth)
        self._ended = False
        self._thread: threading.Thread | None = None
        if depth:
            # A daemon: when the main thread fails, the process must end even if this thread waits for a dead peer.
            self._thread = threading.Thread(target=self._shared.run, name=name, daemon=True)
            self._thread.start()
            # The thread knows nothing of this object, so dropping the object ends the thread.
            weakref.finalize(self, self._shared.finish)

    def next(self) -> Item | None:
        """The next item; None at the end, and ever after. Raises what making it raised, and then has ended."""
        if self._ended:
            return None
        if self._thread is None:
            item: Item | BaseException | None = self._shared.make_one()
        else:
            item = self._shared.ready.get()
            self._shared.allow_one()
        if item is None or isinstance(item, BaseException):
            self._ended = True
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop: what was being made ahead is made, and dropped."""
        self._ended = True
        if self._thread is not None:
            self._shared.finish()
            self._thread.join()


class _Shared(Generic[Item]):
    """What the thread works with."""

    def __init__(self, make: Callable[[], Item | None], depth: int) -> None:
        self.make = make
        self.ready: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._allowed = depth
        self._finishing = False

    def run(self) -> None:
        made = 0
        while True:
            with self._changed:
                while made == self._allowed:
                    if self._finishing:
                        return
                    self._changed.wait()
            item = self.make_one()
            made += 1
            self.ready.put(item)
            if item is None or isinstance(item, BaseException):
                return

    def make_one(self) -> Item | BaseException | None:
        try:
            return self.make()
        except BaseException as error:
            return error

    def allow_one(self) -> None:
        with self._changed:
            self._allowed += 1
            self._changed.notify()

    def finish(self) -> None:
        with self._changed:
            self._finishing = True
            self._changed.notify()
