"""`Lifeline`: a process whose job's store no longer answers ends itself.

A link that is cut in silence breaks no connection. Transfers between ranks have a time limit, but calls of torch's
store have none on the side that was cut off: the answer is waited for until TCP gives up, a quarter of an hour by
default (`net.ipv4.tcp_retries2`), or for ever where only the answer was lost. So a thread asks the store once a second,
and another one, which calls nothing, looks when it last had an answer.

A store that breaks the connection is another matter: the process that held it has ended, and whoever started the ranks
knows. Price: a small read a second; two threads.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_ANSWER_S = 10.0
"""For an answer that is on its way when the run ends."""


class AskedStore(Protocol):
    """What is needed of `torch.distributed.Store`."""

    def check(self, keys: list[str], /) -> bool: ...


class Lifeline:
    """Watches from now on.

    Args:
        connect: to the store; may take its time, and fail, as any later call.
        limit_s: without an answer.
        end: called once, from a thread, with what to say; ends the process.
    """

    def __init__(
        self, connect: Callable[[], AskedStore], limit_s: float, end: Callable[[str], None], *, interval_s: float = 1.0
    ) -> None:
        self._connect, self._limit_s, self._end, self._interval_s = connect, limit_s, end, interval_s
        self._answered_s = time.monotonic()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"evenload-lifeline-{name}", daemon=True)
            for name, work in (("asks", self._ask), ("watches", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """The run ends well, or by an error of its own. Waits for both threads, because Python aborts where it ends
        while one is inside the store; but not for ever, because the store may just have gone silent."""
        self._over.set()
        for thread in self._threads:
            thread.join(_ANSWER_S)

    def _ask(self) -> None:
        has_answered = False
        with suppress(RuntimeError):
            store = self._connect()
            while not self._over.is_set():
                store.check(["lifeline"])
                has_answered, self._answered_s = True, time.monotonic()
                self._over.wait(self._interval_s)
        if has_answered:
            self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self._interval_s / 2):
            silent_s = time.monotonic() - self._answered_s
            if silent_s > self._limit_s:
                self._end(
                    f"the job's store has not answered for {silent_s:.0f} s: the link to its machine is cut, or the "
                    "machine is gone, so this rank cannot go on with the others"
                )
                return
