"""`RankWatch`: an error that names who waited for what, and who gave no sign of life.

Every wait for another rank runs inside `waiting`. Where ranks share a store, each shows a *sign* in it every second (a
count, and what it is doing); a rank that gives up reads the signs twice and adds whose count stood still and what the
others were doing. Price: a microsecond a wait; one small write a rank and second; four seconds after a failure.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import msgspec
import torch.distributed as dist

from evenload.errors import RankLostError
from evenload.types.plan import Action

_WAIT = "a wait for "
_MAX_NAMED = 4
_PATIENCE = 4.0  # Signs that a live rank cannot miss, also on a machine with more processes than cores.
_ANSWER_S = 5.0  # For two rounds of questions to a store that is there.
_NAMES = {"F": "forward", "B": "backward", "I": "input gradients of backward", "W": "weight gradients of backward"}

T = TypeVar("T")


class Background(threading.Thread, Generic[T]):
    """Runs a call in a daemon thread: when training fails, the process ends although the call waits for a dead rank."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._call = call
        self._returned: list[T] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._returned.append(self._call())
        except BaseException as error:  # whatever it is, who waits raises it
            self._error = error

    def result(self) -> T:
        """Wait for the call; return what it returned, or raise what it raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._returned[0]


class _Sign(msgspec.Struct, array_like=True):
    """A count that grows while a rank lives, what it does and for how long, and whether it has given up."""

    count: int
    doing: str
    for_s: float
    gave_up: bool


class RankWatch:
    """Records what this rank is doing, for its own errors and, where ranks share `store`, for those of the others.

    Args:
        name: of this rank in errors; may change with the layout.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        world_size: int,
        store: dist.Store | None = None,  # type: ignore[reportPrivateImportUsage]
    ) -> None:
        self.step = -1
        self.name = name
        self._rank, self._world_size, self._store = rank, world_size, store
        self._interval_s = max(1.0, world_size / 100)
        self._doing: tuple[str | Action, float] = ("the start", time.monotonic())
        self._waiting: dict[int, tuple[str, float]] = {}
        self._main = threading.get_ident()
        self._count, self._gave_up = 0, False
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: Background[None] | None = None
        if store is not None:
            self._show()
            self._thread = Background(self._show_signs, "evenload-signs")

    def record(self, what: str | Action) -> None:
        """Record what the main thread starts; it becomes text only when it is shown."""
        self._doing = (what, time.monotonic())

    @contextmanager
    def waiting(self, what: str, peers: str = "all ranks") -> Iterator[None]:
        """Surround a transfer; `RankLostError`, naming `what` of which `peers`, instead of the transport's error."""
        thread, from_s = threading.get_ident(), time.monotonic()
        step = f" of step {self.step}" if self.step >= 0 and " of step " not in what else ""
        text = f"{what}{step} from {peers}"
        outer = self._waiting.get(thread)
        self._waiting[thread] = (text, from_s)
        try:
            yield
        except RuntimeError as error:
            if not _is_transport_error(error):
                raise
            waited_s = time.monotonic() - from_s
            reason = " ".join(str(error).split())
            how = f"nothing for {waited_s:.0f} s" if "imed out" in reason else "the connection broke"
            raise RankLostError(f"{self.name} waited for {text}: {how}. {self._diagnosis()}({reason})") from error
        finally:
            if outer is None:
                del self._waiting[thread]
            else:
                self._waiting[thread] = outer

    def close(self) -> None:
        """Show no more signs: the run ends well."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_ANSWER_S)  # it ends with the process, too

    def _show_signs(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self._show()
            except RuntimeError:
                return  # The store is gone: the launcher is, or this job ends.

    def _show(self) -> None:
        assert self._store is not None
        with self._lock:
            self._count += 1
            what, from_s = self._doing
            name = what if isinstance(what, str) else f"{_NAMES[what.kind]} pack {what.pack}"
            doing = f"{name} of step {self.step}" if self.step >= 0 else name
            if wait := self._waiting.get(self._main):
                doing, from_s = f"{_WAIT}{wait[0]}", wait[1]
            sign = _Sign(self._count, doing, time.monotonic() - from_s, self._gave_up)
            self._store.set(f"sign/{self._rank}", msgspec.json.encode(sign).decode())

    def _read(self) -> dict[int, _Sign]:
        assert self._store is not None
        signs = {}
        with self._lock:
            for rank in range(self._world_size):
                key = f"sign/{rank}"
                if rank == self._rank:
                    continue
                signs[rank] = _Sign(0, "nothing yet", 0.0, False)
                if self._store.check([key]):
                    signs[rank] = msgspec.json.decode(self._store.get(key), type=_Sign)
        return signs

    def _diagnosis(self) -> str:
        """Return a sentence about the other ranks, "" where there is no store or it is gone."""
        if self._store is None:
            return ""
        self._gave_up = True
        # In a thread: a store whose machine is cut off answers when TCP gives up, in a quarter of an hour or never.
        reading = Background(self._read_twice, "evenload-diagnosis")
        reading.join(_PATIENCE * self._interval_s + _ANSWER_S)
        if reading.is_alive():
            return "The store through which ranks met does not answer either. "
        return reading.result()

    def _read_twice(self) -> str:
        try:
            self._show()
            before = self._read()
            time.sleep(_PATIENCE * self._interval_s)
            after = self._read()
        except RuntimeError:
            return ""
        live = {rank: sign for rank, sign in after.items() if not sign.gave_up}
        if still := {rank: sign for rank, sign in live.items() if sign.count == before[rank].count}:
            return _sentence("No sign of life from", still, "last seen at")
        if busy := {rank: sign for rank, sign in live.items() if not sign.doing.startswith(_WAIT)}:
            return _sentence("All ranks are alive, and not waiting is", busy, "now at")
        gone = {rank: sign for rank, sign in after.items() if sign.gave_up}
        return _sentence("Gave up before:", gone, "while") if gone else ""


def _sentence(start: str, signs: dict[int, _Sign], when: str) -> str:
    shown = sorted(signs.items())[:_MAX_NAMED]
    named = [f"rank {rank} ({when} {sign.doing}, for {sign.for_s:.0f} s)" for rank, sign in shown]
    more = f" and {len(signs) - _MAX_NAMED} more" if len(signs) > _MAX_NAMED else ""
    return f"{start} {', '.join(named)}{more} "


def comes_of_transport(error: BaseException) -> bool:
    """Say whether an error, or one that it was raised from, is that of a transfer between ranks."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, RuntimeError) and _is_transport_error(at):
            return True
        at = at.__cause__ if at.__suppress_context__ else at.__context__
    return False


def _is_transport_error(error: RuntimeError) -> bool:
    # gloo raises plain RuntimeErrors, which name its source files.
    return isinstance(error, dist.DistError) or "gloo" in str(error)
