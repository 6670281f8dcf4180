"""`Channels`: the directed FIFO channels between neighbouring virtual stages.

Shapes come from the plan; nothing is negotiated. Every pair of neighbouring stages has two channels, hidden states
forward and gradients backward. With several stages on a rank they go round the ranks, and every channel still has its
packs in index order on both sides (`schedule/rendezvous.py` replays exactly these rules). Stages on the same rank
hand tensors over without a transfer.

Receives are posted a little ahead, in the order in which the schedule will ask for them, so that a transfer runs while
the stage computes. Sends are asynchronous; a sent tensor is kept until it is safe to wait for its receipt
(`send_releases.py`), a few packs later.

On a GPU "wait" orders the computing stream behind the transfer and the host goes on. Receives are posted on a stream of
their own: a transfer waits for work queued before it on the stream that posts it, and a receive depends on none.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.runtime.mesh import Mesh
from evenload.runtime.send_releases import Channel
from evenload.runtime.watch import RankWatch

_POSTED_AHEAD = 2
_WORDS = {"F": "the hidden states of forward", "B": "the gradient of backward"}


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
    stream: torch.cuda.Stream | None

    def post(self) -> None:
        while self.waiting and len(self.posted) < _POSTED_AHEAD:
            pack, rows = self.waiting.popleft()
            where = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
            with where, self.watch.waiting(f"a connection for {self.what} pack {pack}", f"rank {self.peer}"):
                tensor = torch.empty(rows, self.hidden_size, dtype=self.dtype, device=self.device)
                work = dist.irecv(tensor, self.peer, group=self.group)
            assert work is not None
            self.posted.append((pack, tensor, work))

    def take(self, pack: int) -> Tensor:
        expected, tensor, work = self.posted.popleft()
        assert expected == pack, f"{self.what}: pack {pack} asked for, pack {expected} is next"
        with self.watch.waiting(f"{self.what} pack {pack}", f"rank {self.peer}"):
            work.wait()
        if self.stream is not None:
            # Made on the stream of receives, read on this one: its memory is not reused before that is done.
            tensor.record_stream(torch.cuda.current_stream(self.device))
        self.post()
        return tensor


@dataclass(eq=False)
class _Sender:
    """Sends of one channel and what of them may still be on its way."""

    group: dist.ProcessGroup
    peer: int
    what: str
    watch: RankWatch
    kept: deque[tuple[int, Tensor, dist.Work]] = field(default_factory=deque)
    num_sent: int = 0
    most_kept: int = 0

    def send(self, pack: int, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        with self.watch.waiting(f"a connection for {self.what} pack {pack}", f"rank {self.peer}"):
            work = dist.isend(tensor, self.peer, group=self.group)
        assert work is not None
        self.kept.append((pack, tensor, work))
        self.num_sent += 1
        self.most_kept = max(self.most_kept, len(self.kept))

    def release(self, count: int) -> None:
        """Wait for the first `count` sends of the step and let their tensors go."""
        while self.num_sent - len(self.kept) < count:
            pack, _, work = self.kept.popleft()
            with self.watch.waiting(f"the receipt of {self.what} pack {pack}", f"rank {self.peer}"):
                work.wait()


class Channels:
    """One step's traffic of one rank.

    Args:
        mesh: names peers and groups.
        rows: by channel of this rank's stages, (pack, rows) in the order in which they receive them.
        stream: receives are posted on it; None = the device has no streams.

    Raises:
        RankLostError: from any transfer, when a neighbour died or is stuck.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        rows: Mapping[Channel, Sequence[tuple[int, int]]],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._num_stages = mesh.layout.num_stages
        self._receivers: dict[Channel, _Receiver] = {}
        self._senders: dict[Channel, _Sender] = {}
        self._handed_over: dict[tuple[Channel, int], Tensor] = {}
        shape = {
            "hidden_size": hidden_size,
            "dtype": dtype,
            "device": device,
            "watch": mesh.watch,
            "stream": stream,
        }
        for kind, groups, step in (("F", mesh.forward, 1), ("B", mesh.backward, -1)):
            for stage, group in sorted(groups.items()):
                sender, receiver = mesh.rank_of_stage(stage - step), mesh.rank_of_stage(stage)
                if receiver == mesh.rank:
                    due = deque(rows[kind, stage])
                    self._receivers[kind, stage] = _Receiver(group, sender, _WORDS[kind], due, deque(), **shape)
                else:
                    self._senders[kind, stage] = _Sender(group, receiver, _WORDS[kind], mesh.watch)
        for receiver in self._receivers.values():
            receiver.post()

    def receive_hidden(self, stage: int, pack: int) -> Tensor | None:
        """Hidden states of a forward pack for a stage; None on the first stage."""
        return self._receive(("F", stage), pack) if stage > 0 else None

    def receive_grad(self, stage: int, pack: int) -> Tensor | None:
        """Gradient of a backward pack for a stage; None on the last stage."""
        return self._receive(("B", stage), pack) if stage < self._num_stages - 1 else None

    def send_hidden(self, stage: int, pack: int, hidden: Tensor) -> None:
        """From a stage to the next one, if there is one."""
        if stage < self._num_stages - 1:
            self._send(("F", stage + 1), pack, hidden)

    def send_grad(self, stage: int, pack: int, grad: Tensor | None) -> None:
        """From a stage to the one before, if there is one."""
        if stage > 0:
            assert grad is not None
            self._send(("B", stage - 1), pack, grad)

    def release(self, sends: Iterable[tuple[Channel, int]]) -> None:
        """Wait for the first so many sends of channels and let their tensors go."""
        for channel, count in sends:
            self._senders[channel].release(count)

    @property
    def most_kept(self) -> int:
        """Sent tensors that any one channel kept at once."""
        return max((sender.most_kept for sender in self._senders.values()), default=0)

    def close(self) -> None:
        """Wait until everything sent has arrived."""
        assert not self._handed_over, f"packs {list(self._handed_over)} were handed over and never used"
        for sender in self._senders.values():
            sender.release(sender.num_sent)

    def _receive(self, channel: Channel, pack: int) -> Tensor:
        if channel in self._receivers:
            return self._receivers[channel].take(pack)
        return self._handed_over.pop((channel, pack))

    def _send(self, channel: Channel, pack: int, tensor: Tensor) -> None:
        if channel in self._senders:
            self._senders[channel].send(pack, tensor)
        else:
            self._handed_over[channel, pack] = tensor
