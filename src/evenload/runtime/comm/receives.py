"""When a rank posts its receives: a little ahead on every channel, or all channels in one order.

Directed channels do not wait for each other, so each has up to `_POSTED_AHEAD` receives open, in the order in which the
schedule asks for them, and a transfer runs while the stage computes. Where all transfers share a queue a receive blocks
what is posted behind it, so they are posted when `stepplan.transfer_order` says.

Price: open receives hold their memory. Directed: two packs a channel. Queued: what is under way in the prediction,
which a directed channel would leave with the sender.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from evenload.errors import InvalidPlanError
from evenload.runtime.comm.transfers import Line, PostedReceive
from evenload.types.transfers import Channel, Receive

Rows = Mapping[Channel, Mapping[int, int]]
"""By channel of a rank's stages, rows of hidden states by pack, in the order in which packs are received."""
_POSTED_AHEAD = 2


class Receives:
    """Receives of one rank in one step.

    Args:
        lines: the rank's ends of its incoming channels.
        before: for each action of the rank the receives to post before it; None = channels are directed.
    """

    def __init__(self, lines: Mapping[Channel, Line], rows: Rows, before: Sequence[Sequence[Receive]] | None) -> None:
        self.channels = lines.keys()
        self._lines, self._rows, self._before = lines, rows, before
        self._posted: dict[Receive, PostedReceive] = {}
        self._due = {channel: iter(rows[channel]) for channel in lines} if before is None else {}
        for channel in self._due:
            for _ in range(_POSTED_AHEAD):
                self._post_next(channel)

    def before_action(self, at: int) -> None:
        """Post what has to be posted before the rank's action number `at`. Waits for nothing."""
        for channel, pack in self._before[at] if self._before is not None else ():
            self._post(channel, pack)

    def take(self, channel: Channel, pack: int) -> Tensor:
        """A pack's tensor, when it is there.

        Raises:
            InvalidPlanError: the receive was not posted: waiting for it would last for ever.
        """
        receive = self._posted.pop((channel, pack), None)
        if receive is None:
            raise InvalidPlanError(
                f"the order of transfers has no receive of pack {pack} on channel {channel[0]}{channel[1]} before the "
                "action that needs it; its sender has to come first in the plan"
            )
        tensor = receive.wait()
        self._post_next(channel)
        return tensor

    def _post_next(self, channel: Channel) -> None:
        for pack in self._due.get(channel, ()):
            self._post(channel, pack)
            return

    def _post(self, channel: Channel, pack: int) -> None:
        self._posted[channel, pack] = self._lines[channel].post_receive(pack, self._rows[channel][pack])
