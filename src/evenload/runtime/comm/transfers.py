"""One rank's transfers to and from pipeline neighbours: posted receives, and sends whose tensors may still be needed.

On a GPU "wait" orders the computing stream behind the transfer and the host goes on. Receives are posted on a stream of
their own, which does not come behind what is computed after them. Their memory is the computing stream's, and they
come behind what that stream was given before: so what the host posts far ahead of the device holds no more memory there
than the posted receives that `Channels` allows, and memory is free again in the order of one stream.
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.runtime.comm.watch import RankWatch
from evenload.types.transfers import Channel

_WORDS = {"F": "the hidden states of forward", "B": "the gradient of backward"}


@dataclass(frozen=True, eq=False, kw_only=True)
class Carried:
    """What all transfers of a rank have in common: [rows, hidden_size] of a dtype on a device. Receives are posted on
    `stream`; None = the device has none."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    watch: RankWatch
    stream: torch.cuda.Stream | None = None


@dataclass(frozen=True, eq=False)
class Line:
    """One channel's end: what it carries, the process group and the other rank."""

    channel: Channel
    group: dist.ProcessGroup
    peer: int
    carried: Carried

    def waiting(self, pack: int, before: str = "") -> AbstractContextManager[None]:
        what = f"{before}{_WORDS[self.channel[0]]} pack {pack}"
        return self.carried.watch.waiting(what, f"rank {self.peer}")

    def post_receive(self, pack: int, rows: int) -> "PostedReceive":
        """Let a pack's tensor come. Does not wait for it."""
        carried = self.carried
        tensor = torch.empty(rows, carried.hidden_size, dtype=carried.dtype, device=carried.device)
        where = nullcontext()
        if carried.stream is not None:
            # Kernels that were queued before may still read what lay in this memory.
            carried.stream.wait_stream(torch.cuda.current_stream(carried.device))
            where = torch.cuda.stream(carried.stream)
        with where, self.waiting(pack, "a connection for "):
            work = dist.irecv(tensor, self.peer, group=self.group)
        assert work is not None
        return PostedReceive(self, pack, tensor, work)


@dataclass(frozen=True, eq=False)
class PostedReceive:
    """A tensor on its way."""

    line: Line
    pack: int
    tensor: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        with self.line.waiting(self.pack):
            self.work.wait()
        return self.tensor


@dataclass(eq=False)
class Sender:
    """Sends of one channel and what of them may still be on its way."""

    line: Line
    kept: deque[tuple[int, Tensor, dist.Work]] = field(default_factory=deque)
    num_sent: int = 0
    most_kept: int = 0

    def send(self, pack: int, tensor: Tensor) -> None:
        """Let a tensor go to the peer. Does not wait for its receipt."""
        line, tensor = self.line, tensor.contiguous()
        with line.waiting(pack, "a connection for "):
            work = dist.isend(tensor, line.peer, group=line.group)
        assert work is not None
        self.kept.append((pack, tensor, work))
        self.num_sent += 1
        self.most_kept = max(self.most_kept, len(self.kept))

    def free(self, count: int) -> None:
        """Wait for the first `count` sends of the step and free their tensors."""
        while self.num_sent - len(self.kept) < count:
            pack, _, work = self.kept.popleft()
            with self.line.waiting(pack, "the receipt of "):
                work.wait()
