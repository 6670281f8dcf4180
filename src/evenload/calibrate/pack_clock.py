"""Seconds of a pack on its device, and apart from them the seconds of the host that queues it.

On a CPU both are one: the call is the work, and the host's part is 0.

On a GPU the host queues a pack's kernels one by one. Between two CUDA events the device's own seconds are only seen if
it never waited for the next kernel, so it is kept busy until all of the pack is queued: by matrix products that take a
little longer than the host took before. The host's seconds are of its own clock, from the first call to the return of
the last; it does not wait for the device meanwhile, unless the pack has more kernels than the device's queue (1,024),
which is why few layers are timed at a time (`rounds.part_of`).

That the device had not come to the pack when the host was done is looked at every time. Where it had (a first time, a
host that was held up), and in layers whose host asks the device (experts: how many tokens each has), the device's
seconds hold its waits: still what the pack takes.

Price: one matrix product at the start, then about twice the host's seconds a pack. Written from CUDA's and torch's
documentation, run on stand-ins of the clock only (tests/calibrate/test_pack_clock.py): no GPU was at hand.
"""

import math
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import torch.distributed as dist

from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.device import seconds_now
from evenload.runtime.replay.stage import PipelineStage

_PRODUCT_SIZE = 8192  # few of them last long, so that they leave the device's queue to the pack
_TIMED_PRODUCTS = 10
_HEAD_START = 1.5
"""Times the seconds that the host took before."""
_LONGEST_HEAD_START_S = 0.2
"""A first call that compiles or loads kernels takes seconds, the next one does not."""


class PackSeconds(NamedTuple):
    """Of one pack: the device's, and those until the host had queued it (0 where the device is the host)."""

    device_s: float
    host_s: float


class PackClock:
    """Times calls that compute when they are called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, pack: Hashable, work: Callable[[], object]) -> PackSeconds:
        """Do the work once.

        Args:
            pack: names what is timed; the same work is timed again and again.
        """
        start_s = seconds_now(self._device)
        work()
        return PackSeconds(seconds_now(self._device) - start_s, 0.0)


class QueueClock(PackClock):
    """Times work that calls only queue.

    Args:
        keep_busy: queues work that takes the device so many seconds.
        meet: queues a wait for the ranks that work at the same packs together, whose devices begin them at once.
    """

    def __init__(
        self, device: torch.device, keep_busy: Callable[[float], object], meet: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(device)
        self._keep_busy, self._meet = keep_busy, meet
        self._host_s: dict[Hashable, float] = {}

    def time(self, pack: Hashable, work: Callable[[], object]) -> PackSeconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        before_s = self._host_s.get(pack)
        seconds_now(self._device)
        if before_s is not None:
            self._keep_busy(min(_HEAD_START * before_s, _LONGEST_HEAD_START_S))
        self._meet()
        start.record(stream)
        from_s = time.perf_counter()
        work()
        host_s = time.perf_counter() - from_s
        was_ahead = not start.query()
        end.record(stream)
        seconds_now(self._device)
        # The shortest so far: a call that was held up asks for no longer head start than others need, unless the device
        # was not kept busy for long enough.
        self._host_s[pack] = host_s if before_s is None or not was_ahead else min(before_s, host_s)
        return PackSeconds(start.elapsed_time(end) / 1e3, host_s)


class AskingClock(QueueClock):
    """Times layers whose host waits for answers of the device: what each of the two takes is not to be told apart, and
    all of it counts as the device's."""

    def time(self, pack: Hashable, work: Callable[[], object]) -> PackSeconds:
        self._host_s.pop(pack, None)  # no head start, which the first answer would wait for
        return PackSeconds(super().time(pack, work).device_s, 0.0)


def pack_clock(stage: PipelineStage, mesh: Mesh) -> PackClock:
    """For packs of a stage. On a GPU its first use of matrix products may be here."""
    device = stage.device
    if device.type != "cuda":
        return PackClock(device)
    kind = QueueClock if stage.model.architecture.experts is None else AskingClock
    tensor, flag = mesh.tensor, torch.zeros(1, device=device)
    if tensor is None:
        return kind(device, _busy_products(device))
    return kind(device, _busy_products(device), lambda: tensor.all_reduce(flag, "calibration", dist.ReduceOp.MAX))


def _busy_products(device: torch.device) -> Callable[[float], None]:
    square = torch.zeros(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device, dtype=torch.bfloat16)
    into = torch.empty_like(square)

    def run(count: int) -> None:
        for _ in range(count):
            torch.mm(square, square, out=into)

    run(1)
    start_s = seconds_now(device)
    run(_TIMED_PRODUCTS)
    product_s = (seconds_now(device) - start_s) / _TIMED_PRODUCTS
    return lambda seconds: run(math.ceil(seconds / product_s))
