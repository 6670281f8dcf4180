"""`Channels`: one step's traffic of one rank between neighbouring virtual stages.

Shapes come from the plan; nothing is negotiated. Every pair of neighbouring stages has two channels, hidden states
forward and gradients backward, each with its packs in index order on both sides. Stages on the same rank hand tensors
over without a transfer. Sends are asynchronous; a sent tensor is kept until it is safe to wait for its receipt.

How channels share the way between two ranks is `mesh.channels`, when receives are posted is in `receives.py`, and what
to free comes with the prepared step (`types.transfers.TransferOrder`).
"""

from torch import Tensor

from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.comm.receives import Receives, Rows
from evenload.runtime.comm.transfers import Carried, Line, Sender
from evenload.types.transfers import Channel, TransferOrder


class Channels:
    """What the executor calls, action by action.

    Raises:
        RankLostError: from any transfer, when a neighbour died or is stuck.
    """

    def __init__(self, order: TransferOrder, mesh: Mesh, rows: Rows, carried: Carried) -> None:
        self._num_stages = mesh.layout.num_stages
        incoming: dict[Channel, Line] = {}
        self._senders: dict[Channel, Sender] = {}
        for kind, groups in (("F", mesh.forward), ("B", mesh.backward)):
            for stage, group in sorted(groups.items()):
                channel, receiver = (kind, stage), mesh.rank_of_stage(stage)
                if receiver == mesh.rank:
                    sender = mesh.rank_of_stage(stage - 1 if kind == "F" else stage + 1)
                    incoming[channel] = Line(channel, group, sender, carried)
                else:
                    self._senders[channel] = Sender(Line(channel, group, receiver, carried))
        self._receives, self._frees = Receives(incoming, rows, order.receives), order.frees
        self._handed_over: dict[tuple[Channel, int], Tensor] = {}

    def before_action(self, at: int) -> None:
        """Before the rank's action number `at`: post receives that are due, free sends that have arrived."""
        self._receives.before_action(at)
        for channel, count in self._frees[at]:
            self._senders[channel].free(count)

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

    @property
    def most_kept(self) -> int:
        """Sent tensors that any one channel kept at once."""
        return max((sender.most_kept for sender in self._senders.values()), default=0)

    def close(self) -> None:
        """Wait until everything sent has arrived."""
        assert not self._handed_over, f"packs {list(self._handed_over)} were handed over and never used"
        for sender in self._senders.values():
            sender.free(sender.num_sent)

    def _receive(self, channel: Channel, pack: int) -> Tensor:
        if channel in self._receives.channels:
            return self._receives.take(channel, pack)
        return self._handed_over.pop((channel, pack))

    def _send(self, channel: Channel, pack: int, tensor: Tensor) -> None:
        if channel in self._senders:
            self._senders[channel].send(pack, tensor)
        else:
            self._handed_over[channel, pack] = tensor
