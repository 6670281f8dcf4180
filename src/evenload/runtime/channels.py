"""`Channels`: the two directed FIFO channels between neighbouring stages.

Shapes come from the plan; nothing is negotiated. Receives are posted a little ahead, in the order in
which the schedule will ask for them, so that a transfer runs while the stage computes. Sends are
asynchronous; their tensors are kept until the step ends (hidden states only, about 1/12 of a layer's
recorded activations).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.runtime.watch import RankWatch

_POSTED_AHEAD = 2


@dataclass(eq=False)
class _Receiver:
    """Posts receives of one channel in order and hands them out in the same order."""

    group: dist.ProcessGroup
    peer: int
    what: str
    waiting: deque[tuple[int, int]]
    posted: deque[tuple[int, Tensor, dist.Work]]
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    watch: RankWatch

    def post(self) -> None:
        while self.waiting and len(self.posted) < _POSTED_AHEAD:
            pack, rows = self.waiting.popleft()
            tensor = torch.empty(rows, self.hidden_size, dtype=self.dtype, device=self.device)
            with self.watch.waiting(f"a connection for {self.what} pack {pack}", f"rank {self.peer}"):
                work = dist.irecv(tensor, self.peer, group=self.group)
            assert work is not None
            self.posted.append((pack, tensor, work))

    def take(self, pack: int) -> Tensor:
        expected, tensor, work = self.posted.popleft()
        assert expected == pack, f"{self.what}: pack {pack} asked for, pack {expected} is next"
        with self.watch.waiting(f"{self.what} pack {pack}", f"rank {self.peer}"):
            work.wait()
        self.post()
        return tensor


class Channels:
    """One step's traffic of one stage.

    Args:
        previous, next: global ranks of the neighbouring stages, None at the ends.
        forward, backward: one group per direction of traffic.
        forward_rows, backward_rows: (pack, rows) in the order in which this stage receives them.
        watch: names who failed.

    Raises:
        RankLostError: from any transfer, when a neighbour died or is stuck.
    """

    def __init__(
        self,
        *,
        previous: int | None,
        next: int | None,
        forward: dist.ProcessGroup,
        backward: dist.ProcessGroup,
        forward_rows: Sequence[tuple[int, int]],
        backward_rows: Sequence[tuple[int, int]],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        watch: RankWatch,
    ) -> None:
        self._previous, self._next = previous, next
        self._forward, self._backward = forward, backward
        self._watch = watch
        self._sent: list[tuple[Tensor, dist.Work, str, int]] = []
        shape = {"hidden_size": hidden_size, "dtype": dtype, "device": device, "watch": watch}

        def receiver(group, peer, what, rows) -> _Receiver | None:
            if peer is None:
                return None
            result = _Receiver(group, peer, what, deque(rows), deque(), **shape)
            result.post()
            return result

        self._from_previous = receiver(forward, previous, "the hidden states of forward", forward_rows)
        self._from_next = receiver(backward, next, "the gradient of backward", backward_rows)

    def receive_hidden(self, pack: int) -> Tensor | None:
        """Hidden states of a forward pack; None on the first stage."""
        return self._from_previous.take(pack) if self._from_previous else None

    def receive_grad(self, pack: int) -> Tensor | None:
        """Gradient of a backward pack; None on the last stage."""
        return self._from_next.take(pack) if self._from_next else None

    def send_hidden(self, pack: int, hidden: Tensor) -> None:
        """To the next stage, if there is one."""
        self._send(hidden, self._next, self._forward, f"the hidden states of forward pack {pack}")

    def send_grad(self, pack: int, grad: Tensor | None) -> None:
        """To the stage before, if there is one."""
        if grad is not None:
            self._send(grad, self._previous, self._backward, f"the gradient of backward pack {pack}")

    def close(self) -> None:
        """Wait until everything sent has arrived."""
        for _, work, what, peer in self._sent:
            with self._watch.waiting(f"the receipt of {what}", f"rank {peer}"):
                work.wait()
        self._sent.clear()

    def _send(self, tensor: Tensor, peer: int | None, group: dist.ProcessGroup, what: str) -> None:
        if peer is None:
            return
        tensor = tensor.contiguous()
        with self._watch.waiting(f"a connection for {what}", f"rank {peer}"):
            work = dist.isend(tensor, peer, group=group)
        assert work is not None
        self._sent.append((tensor, work, what, peer))
