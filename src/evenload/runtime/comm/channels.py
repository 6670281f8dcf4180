"""`Channels`: one step's traffic of one rank between neighbouring virtual stages.

Shapes come from the plan. Neighbouring stages have two channels, hidden states forward and gradients backward, each
with its packs in index order on both sides. Stages on the same rank hand tensors over. A sent tensor is kept until
`types.layout.TransferOrder` says that it is safe to wait for its receipt.

Directed channels have up to `_POSTED_AHEAD` receives open each. Where all transfers share a queue a receive blocks what
is posted behind it, so they are posted when `stepplan.transfer_order` says. On a GPU receives are posted on a stream of
their own, behind what the computing stream was given before, so that memory is free again in the order of one stream.
Price: the memory of open receives.
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.errors import InvalidPlanError
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.comm.watch import RankWatch
from evenload.types.layout import Channel, Receive, TransferOrder

_NAMES = {"F": "the hidden states of forward", "B": "the gradient of backward"}


@dataclass(frozen=True, eq=False, kw_only=True)
class TransferSettings:
    """What all transfers of a rank have in common; receives are posted on `stream`, None = there is none."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    watch: RankWatch
    stream: torch.cuda.Stream | None = None


@dataclass(eq=False)
class ChannelEnd:
    """One channel's end: what it carries, the process group, the other rank, and sends that may be on their way."""

    channel: Channel
    group: dist.ProcessGroup
    peer: int
    carried: TransferSettings
    kept: deque[tuple[int, Tensor, dist.Work]] = field(default_factory=deque)
    num_sent: int = 0
    most_kept: int = 0

    def waiting(self, pack: int, before: str = "") -> AbstractContextManager[None]:
        what = f"{before}{_NAMES[self.channel[0]]} pack {pack}"
        return self.carried.watch.waiting(what, f"rank {self.peer}")

    def post_receive(self, pack: int, rows: int) -> Callable[[], Tensor]:
        """Post the receive of a pack's tensor, without waiting; the result waits for it."""
        carried = self.carried
        tensor = torch.empty(rows, carried.hidden_size, dtype=carried.dtype, device=carried.device)
        if carried.stream is not None:
            # Kernels that were queued before may still read what lay in this memory.
            carried.stream.wait_stream(torch.cuda.current_stream(carried.device))
        with torch.cuda.stream(carried.stream), self.waiting(pack, "a connection for "):
            work = dist.irecv(tensor, self.peer, group=self.group)
        assert work is not None

        def arrive() -> Tensor:
            with self.waiting(pack):
                work.wait()
            return tensor

        return arrive

    def send(self, pack: int, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        with self.waiting(pack, "a connection for "):
            work = dist.isend(tensor, self.peer, group=self.group)
        assert work is not None
        self.kept.append((pack, tensor, work))
        self.num_sent += 1
        self.most_kept = max(self.most_kept, len(self.kept))

    def free(self, count: int) -> None:
        """Wait for the first `count` sends of the step and free their tensors."""
        while self.num_sent - len(self.kept) < count:
            pack, _, work = self.kept.popleft()
            with self.waiting(pack, "the receipt of "):
                work.wait()


Rows = Mapping[Channel, Mapping[int, int]]  # rows of hidden states by pack, in the order in which packs are received
_POSTED_AHEAD = 2


class Channels:
    """Sends and receives for the executor, action by action; `RankLostError` where a neighbour died or is stuck."""

    def __init__(self, order: TransferOrder, mesh: Mesh, rows: Rows, carried: TransferSettings) -> None:
        self._order, self._rows = order, rows
        self._num_stages, self._channel = mesh.layout.num_stages, mesh.channel
        self._incoming: dict[Channel, ChannelEnd] = {}
        self._senders: dict[Channel, ChannelEnd] = {}
        for channel, group in mesh.channel_groups.items():
            ends = self._incoming if mesh.receives_on(channel) else self._senders
            ends[channel] = ChannelEnd(channel, group, mesh.other_end(channel), carried)
        self._handed_over: dict[tuple[Channel, int], Tensor] = {}
        self._posted: dict[Receive, Callable[[], Tensor]] = {}
        # Directed channels always have their next receives open.
        self._due = {channel: iter(rows[channel]) for channel in self._incoming} if order.receives is None else {}
        for channel in self._due:
            for _ in range(_POSTED_AHEAD):
                self._post_next(channel)

    def before_action(self, at: int) -> None:
        """Post receives that are due, and free sends that have arrived, before the rank's action number `at`."""
        for channel, pack in self._order.receives[at] if self._order.receives is not None else ():
            self._post(channel, pack)
        for channel, count in self._order.frees[at]:
            self._senders[channel].free(count)

    def receive_hidden(self, stage: int, pack: int) -> Tensor | None:
        """Return hidden states of a forward pack for a stage; None on the first stage."""
        return self._receive(self._channel("F", stage, pack), pack) if stage > 0 else None

    def receive_grad(self, stage: int, pack: int) -> Tensor | None:
        """Return the gradient of a backward pack for a stage; None on the last stage."""
        return self._receive(self._channel("B", stage, pack), pack) if stage < self._num_stages - 1 else None

    def send_hidden(self, stage: int, pack: int, hidden: Tensor) -> None:
        if stage < self._num_stages - 1:
            self._send(self._channel("F", stage + 1, pack), pack, hidden)

    def send_grad(self, stage: int, pack: int, grad: Tensor | None) -> None:
        if stage > 0:
            assert grad is not None
            self._send(self._channel("B", stage - 1, pack), pack, grad)

    @property
    def most_kept(self) -> int:
        return max((sender.most_kept for sender in self._senders.values()), default=0)

    def close(self) -> None:
        """Wait until everything sent has arrived."""
        assert not self._handed_over, f"packs {list(self._handed_over)} were handed over and never used"
        for sender in self._senders.values():
            sender.free(sender.num_sent)

    def _send(self, channel: Channel, pack: int, tensor: Tensor) -> None:
        if channel in self._senders:
            self._senders[channel].send(pack, tensor)
        else:
            self._handed_over[channel, pack] = tensor

    def _receive(self, channel: Channel, pack: int) -> Tensor:
        """Wait for a pack's tensor; `InvalidPlanError` where that would last for ever."""
        if channel not in self._incoming:
            return self._handed_over.pop((channel, pack))
        arrive = self._posted.pop((channel, pack), None)
        if arrive is None:
            raise InvalidPlanError(
                f"the order of transfers has no receive of pack {pack} on channel {channel[0]}{channel[1]} before the "
                "action that needs it; its sender has to come first in the plan"
            )
        tensor = arrive()
        self._post_next(channel)
        return tensor

    def _post_next(self, channel: Channel) -> None:
        if (pack := next(self._due.get(channel, iter(())), None)) is not None:
            self._post(channel, pack)

    def _post(self, channel: Channel, pack: int) -> None:
        self._posted[channel, pack] = self._incoming[channel].post_receive(pack, self._rows[channel][pack])
