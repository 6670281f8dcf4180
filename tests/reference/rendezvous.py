"""Replay of the runtime's point-to-point channels: does every rank reach the end of its list?

What is replayed. Before an action a rank posts receives so that up to `prefetch` of every channel lie
open, in channel order, then waits for the one the action needs (posting it if it is not yet); after the
action it posts the send of its result and does not wait for it.

`directed` (what the runtime uses): every pair of neighbouring stages has two channels, one for
activations, one for gradients. Transfer i of a channel completes when its send is the oldest open one at
one end and its receive at the other: packs in index order on both sides always do.

`single`: the two ranks of a pair share one first-in-first-out queue for everything, as unbatched NCCL
point-to-point does. A transfer completes only when its send is the oldest of one rank's queue and its
receive the oldest of the other's; a receive posted early therefore blocks the sends behind it. Most
schedules deadlock so; this mode tells which do not. (The runtime's own single queue, `parallel.channels =
"fifo"`, posts in one order of the whole plan instead, which never does: `stepplan/transfer_order.py`.)

`schedule.validate.check_schedule` must find the same schedules free of deadlock. O(actions).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from evenload.types.pipeline import ActionColumns
from evenload.types.timeline import KINDS

ChannelSharing = Literal["directed", "single"]
_INPUT, _WEIGHT = KINDS.index("I"), KINDS.index("W")
_Message = tuple[int, int, int]  # (kind, receiving stage, pack)
_Channel = tuple[int, int, int]  # (kind, receiving stage, the other end's rank)
_Post = tuple[bool, _Message]  # (is a send, message)


@dataclass
class _Rank:
    actions: list[_Message]  # (kind, stage, pack); as a message: what the action receives
    incoming: dict[_Channel, deque[_Message]]  # receives not yet posted, in order
    done: int = 0
    open_receives: dict[_Channel, int] = field(default_factory=dict)  # posted, not consumed
    posted: set[_Message] = field(default_factory=set)


class _Replay:
    def __init__(
        self, actions: ActionColumns, needed: list[int], ranks: list[int], prefetch: int, channels: ChannelSharing
    ):
        self.needed, self.first, self.prefetch, self.channels = needed, ranks, prefetch, channels
        self.num_stages = len(ranks)
        wide = actions.num_ranks > self.num_stages
        ends = [*ranks[1:], actions.num_ranks] if wide else [rank + 1 for rank in ranks]
        self.widths = [end - rank for rank, end in zip(ranks, ends, strict=True)]
        self.ran: set[_Message] = set()
        self.arrived: set[_Message] = set()
        self.queues: dict[tuple[int, int, tuple[int, int]], deque[_Post]] = {}  # [rank, peer, (kind, stage)]
        self.ends: dict[tuple[int, _Channel], tuple[deque[_Post], deque[_Post]]] = {}
        self.ranks = [self._rank(actions, rank) for rank in range(actions.num_ranks)]
        self.runnable = deque(range(actions.num_ranks))

    def _rank(self, actions: ActionColumns, rank: int) -> _Rank:
        lo, hi = int(actions.rank_offset[rank]), int(actions.rank_offset[rank + 1])
        columns = (actions.kind[lo:hi].tolist(), actions.stage[lo:hi].tolist(), actions.pack[lo:hi].tolist())
        own = list(zip(*columns, strict=True))
        incoming: dict[_Channel, deque[_Message]] = {}
        # On channels I is B: both bring the same gradient on.
        own = [(1 if kind == _INPUT else kind, stage, pack) for kind, stage, pack in own]
        for kind, stage, pack in own:
            if kind != _WEIGHT and (peer := self._peer(kind, stage, pack)) not in (None, rank):
                incoming.setdefault((kind, stage, peer), deque()).append((kind, stage, pack))
        return _Rank(actions=own, incoming=incoming, open_receives=dict.fromkeys(incoming, 0))

    def _rank_of(self, stage: int, pack: int) -> int:
        return self.first[stage] + pack % self.widths[stage]

    def _peer(self, kind: int, stage: int, pack: int) -> int | None:
        """The rank that sends this stage's input; None at the pipeline's ends."""
        source = stage - 1 if kind == 0 else stage + 1
        return self._rank_of(source, pack) if 0 <= source < self.num_stages else None

    def run(self) -> bool:
        while self.runnable:
            rank = self.runnable.popleft()
            while self.ranks[rank].done < len(self.ranks[rank].actions) and self._step(rank):
                self.ranks[rank].done += 1
        return all(rank.done == len(rank.actions) for rank in self.ranks)

    def _step(self, rank: int) -> bool:
        """Run the rank's next action if its input is there."""
        state = self.ranks[rank]
        message = kind, stage, pack = state.actions[state.done]
        if kind == _WEIGHT:
            return (1, stage, pack) in self.ran  # transfers go on without the rank
        for channel in state.incoming:
            while state.incoming[channel] and state.open_receives[channel] < self.prefetch:
                self._post_receive(rank, channel)
        peer = self._peer(kind, stage, pack)
        if peer is not None and peer != rank:
            while message not in state.posted:  # terminates: the channel holds every message of this rank
                self._post_receive(rank, (kind, stage, peer))
            if message not in self.arrived:
                return False
        elif peer == rank and (kind, stage - 1 if kind == 0 else stage + 1, pack) not in self.ran:
            return False
        width = self.widths[stage]
        own = range(pack % width, self.needed[pack], width) if kind == 1 else ()  # forwards it needs of its own rank
        if any((0, stage, forward) not in self.ran for forward in own):
            return False
        if peer is not None and (kind, stage, peer) in state.open_receives:
            state.open_receives[kind, stage, peer] -= 1
        self.ran.add(message)
        target = stage + 1 if kind == 0 else stage - 1
        if 0 <= target < self.num_stages and (receiver := self._rank_of(target, pack)) != rank:
            self._post(rank, receiver, (True, (kind, target, pack)))
        return True

    def _post_receive(self, rank: int, channel: _Channel) -> None:
        state = self.ranks[rank]
        message = state.incoming[channel].popleft()
        state.posted.add(message)
        state.open_receives[channel] += 1
        self._post(rank, channel[2], (False, message))

    def _ends(self, rank: int, peer: int, channel: tuple[int, int]) -> tuple[deque[_Post], deque[_Post]]:
        """What the rank and its peer have posted on a channel, oldest first; `single` shares one per pair."""
        ends = self.ends.get((rank, (*channel, peer)))
        if ends is None:
            name = (0, 0) if self.channels == "single" else channel
            mine, theirs = (self.queues.setdefault((*pair, name), deque()) for pair in ((rank, peer), (peer, rank)))
            ends = self.ends[rank, (*channel, peer)] = (mine, theirs)
        return ends

    def _post(self, rank: int, peer: int, post: _Post) -> None:
        """Put a send or receive behind the rank's earlier ones and complete what now matches."""
        mine, theirs = self._ends(rank, peer, post[1][:2])
        mine.append(post)
        while mine and theirs and mine[0][1] == theirs[0][1] and mine[0][0] != theirs[0][0]:
            message = mine.popleft()[1]
            theirs.popleft()
            self.arrived.add(message)
            self.runnable.append(self._rank_of(*message[1:]))


def reaches_the_end(
    actions: ActionColumns,
    *,
    forwards_needed: Sequence[int],
    stage_to_rank: Sequence[int],
    prefetch: int = 2,
    channels: ChannelSharing = "directed",
) -> bool:
    """Whether every rank runs all its actions, without times.

    Args:
        actions: of a schedule whose counts are right.
        forwards_needed: D, one entry per backward pack.
        stage_to_rank: pipeline rank of every virtual stage, the first of several where ranks are more than stages.
        prefetch: receives of a channel posted ahead; 0 posts each just before its action.
        channels: see the module docstring.
    """
    return _Replay(actions, list(forwards_needed), list(stage_to_rank), prefetch, channels).run()
