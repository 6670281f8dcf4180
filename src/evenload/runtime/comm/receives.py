"""When a rank posts its receives: `DirectedReceives` a little ahead on every channel, `QueuedReceives` in one order.

Directed channels do not wait for each other, so each has up to `_POSTED_AHEAD` receives open, in the order in which the
schedule asks for them, and a transfer runs while the stage computes. Where all transfers share a queue a receive blocks
what is posted behind it, so they are posted when `stepplan.transfer_order` says.

Price: open receives hold their memory. Directed: two packs a channel. Queued: what is under way in the prediction,
which a directed channel would leave with the sender.
"""

from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from torch import Tensor

from evenload.errors import InvalidPlanError
from evenload.runtime.comm.transfers import Line, PostedReceive
from evenload.types.transfers import Channel, Receive

Rows = Mapping[Channel, Sequence[tuple[int, int]]]
"""By channel of a rank's stages, (pack, rows of hidden states) in the order in which they are received."""
_POSTED_AHEAD = 2


class Receives(Protocol):
    """Receives of one rank in one step."""

    @property
    def channels(self) -> Set[Channel]:
        """On which another rank sends."""
        ...

    def before_action(self, at: int) -> None:
        """Post what has to be posted before the rank's action number `at`. Waits for nothing."""
        ...

    def take(self, channel: Channel, pack: int) -> Tensor:
        """A pack's tensor, when it is there."""
        ...


class DirectedReceives:
    """Each channel by itself.

    Args:
        lines: the rank's ends of its incoming channels.
    """

    def __init__(self, lines: Mapping[Channel, Line], rows: Rows) -> None:
        self.channels = lines.keys()
        self._lines = lines
        self._due = {channel: deque(rows[channel]) for channel in lines}
        self._posted: dict[Channel, deque[tuple[int, PostedReceive]]] = {channel: deque() for channel in lines}
        for channel in lines:
            self._post(channel)

    def before_action(self, at: int) -> None:
        """See `Receives`. Here others follow when one is taken."""

    def take(self, channel: Channel, pack: int) -> Tensor:
        expected, receive = self._posted[channel].popleft()
        assert expected == pack, f"pack {pack} asked for, {receive.name} is next"
        tensor = receive.wait()
        self._post(channel)
        return tensor

    def _post(self, channel: Channel) -> None:
        due, posted = self._due[channel], self._posted[channel]
        while due and len(posted) < _POSTED_AHEAD:
            pack, rows = due.popleft()
            posted.append((pack, self._lines[channel].post_receive(pack, rows)))


class QueuedReceives:
    """All channels in one order.

    Args:
        lines: the rank's ends of its incoming channels.
        before: for each action of the rank the receives to post before it.
    """

    def __init__(self, lines: Mapping[Channel, Line], rows: Rows, before: Sequence[Sequence[Receive]]) -> None:
        self.channels = lines.keys()
        self._lines = lines
        self._rows = {channel: dict(rows[channel]) for channel in lines}
        self._before = before
        self._posted: dict[Receive, PostedReceive] = {}

    def before_action(self, at: int) -> None:
        for channel, pack in self._before[at]:
            self._posted[channel, pack] = self._lines[channel].post_receive(pack, self._rows[channel][pack])

    def take(self, channel: Channel, pack: int) -> Tensor:
        """See `Receives`.

        Raises:
            InvalidPlanError: the receive was not posted: waiting for it would last for ever.
        """
        receive = self._posted.pop((channel, pack), None)
        if receive is None:
            raise InvalidPlanError(
                f"the order of transfers has no receive of pack {pack} on channel {channel[0]}{channel[1]} before the "
                "action that needs it; its sender has to come first in the plan"
            )
        return receive.wait()
