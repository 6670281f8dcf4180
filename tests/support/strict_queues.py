"""What happens when transfers wait for each other: ranks as lists of events, under the strictest rules.

A rank has a queue of posted transfers (one, or one for each peer). A transfer ends when it is at the head of its queue
on both ends, sent on one and received on the other. Posting waits for nothing; nothing else ever lets a rank go on.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Hashable
from typing import NamedTuple

from evenload.stepplan.transfer_order import queued_order
from evenload.types.layout import Channel
from evenload.types.plan import StepPlan, block_of, completing_actions

Rank = tuple[int, int]
"""(dp_rank, pp_rank)."""


class Transfer(NamedTuple):
    """A pack's tensor on a channel."""

    source: Rank
    target: Rank
    channel: Channel
    pack: int


class Event(NamedTuple):
    """What a rank does next: "post" a transfer, "wait" until one has ended, or "meet" all ranks that name the same."""

    does: str
    what: Hashable


def rank_events(plan: StepPlan, rank: Rank, sums: str) -> list[Event]:
    """The events of a rank.

    Args:
        sums: "downwards": gradients of a stage are summed over all replicas where its last backward completes them,
            those of the highest stage first; "as complete": in each rank's own order; "behind": after the rank's last
            action. A sum stands behind all transfers posted before it and in front of all after it; the rank waits
            for it here, as if it could do nothing meanwhile. Replicas that share packs sum nothing before the order of
            transfers allows it, but "at once" as the others.
    """
    names, order = node_names(plan, rank[0]), queued_order(plan, *rank)
    dp_rank, pp_rank = rank
    ranks, num_stages = plan.layout.stage_to_rank, plan.layout.num_stages
    events: list[Event] = []
    sent: dict[Channel, list[Transfer]] = {}
    before_sums = 0 if sums == "at once" else order.num_before_sums
    completing = completing_actions(((a.kind, a.stage) for a in plan.schedules[dp_rank].ranks[pp_rank]), before_sums)
    left = [stage for stage, owner in enumerate(ranks) if owner == pp_rank] if sums else []
    complete = set() if completing or sums == "behind" else set(left)

    def sum_complete() -> None:
        while left and (left[-1] in complete or (sums == "as complete" and complete & set(left))):
            stage = max(complete & set(left)) if sums == "as complete" else left[-1]
            left.remove(stage)
            events.extend([Event("wait", event.what) for event in events if event.does == "post"])
            events.append(Event("meet", ("sum", pp_rank, stage)))

    sum_complete()
    for at, action in enumerate(plan.schedules[dp_rank].ranks[pp_rank]):
        for channel, pack in order.receives[at]:
            events.append(Event("post", incoming(plan, rank, channel, pack)))
        for channel, count in order.frees[at]:
            # The channel is first in, first out, so the last one stands for all.
            events.append(Event("wait", sent[channel][count - 1]))
        kind, step = ("F", 1) if action.kind == "F" else ("B", -1)
        if action.kind != "W" and 0 <= action.stage - step < num_stages and ranks[action.stage - step] != pp_rank:
            events.append(Event("wait", incoming(plan, rank, (kind, action.stage), action.pack)))
        if action.kind != "W":
            events.append(Event("meet", names[pp_rank, at]))
        complete |= set() if sums == "behind" else set(completing.get(at, ()))
        if at >= before_sums:
            sum_complete()
            if action.kind != "W":  # sums stand between layers, in which members meet again
                events.append(Event("meet", ("rest", *names[pp_rank, at])))
        if action.kind != "W" and 0 <= action.stage + step < num_stages and ranks[action.stage + step] != pp_rank:
            channel = kind, action.stage + step
            transfer = Transfer(rank, (dp_rank, ranks[channel[1]]), channel, action.pack)
            sent.setdefault(channel, []).append(transfer)
            events.append(Event("post", transfer))
        sum_complete()
    complete |= set(left) if sums == "behind" else set()
    sum_complete()
    assert not left
    return events


def incoming(plan: StepPlan, rank: Rank, channel: Channel, pack: int) -> Transfer:
    """What a rank receives."""
    kind, stage = channel
    source = plan.layout.stage_to_rank[stage - 1 if kind == "F" else stage + 1]
    return Transfer((rank[0], source), rank, channel, pack)


def plan_events(plan: StepPlan, *, sums: str = "") -> dict[Rank, list[Event]]:
    """All ranks, as the runtime runs them with `parallel.channels = "fifo"`."""
    ranks = itertools.product(range(plan.layout.dp), range(plan.layout.pp))
    return {rank: rank_events(plan, rank, sums) for rank in ranks}


def node_names(plan: StepPlan, dp_rank: int) -> dict[tuple[int, int], tuple]:
    """By (rank, place): an action's name, the same for all replicas that share its pack."""
    packs, names = plan.pack_plans[dp_rank], {}
    for rank, row in enumerate(plan.schedules[dp_rank].ranks):
        for at, action in enumerate(row):
            pack = (packs.forward if action.kind == "F" else packs.backward)[action.pack]
            block = block_of(plan, dp_rank, pack)
            names[rank, at] = (*block, action.kind, action.stage, tuple(map(str, pack.slices)))
    return names


def stuck_ranks(events: dict[Rank, list[Event]], *, one_queue: bool) -> list[Rank]:
    """Ranks that do not reach the end of their events.

    Args:
        one_queue: a rank runs one transfer at a time, with whatever peer; False = one with each peer.
    """
    queues: dict[Rank, dict[Rank | None, deque[tuple[Transfer, bool]]]] = {rank: {} for rank in events}
    ended: set[Hashable] = set()
    members, met = defaultdict(set), defaultdict(set)
    for rank, mine in events.items():
        for event in mine:
            members[event.what].add(rank)
    done = dict.fromkeys(events, 0)

    def end_transfers(rank: Rank) -> None:
        """End what is at the heads of a rank's queues, and what that lets end elsewhere."""
        look = deque([rank])
        while look:
            rank = look.popleft()
            for queue in queues[rank].values():
                while queue:
                    transfer, is_send = queue[0]
                    peer = transfer.target if is_send else transfer.source
                    theirs = queues[peer].get(None if one_queue else rank)
                    if not theirs or theirs[0] != (transfer, not is_send):
                        break
                    queue.popleft()
                    theirs.popleft()
                    ended.add(transfer)
                    look.append(peer)

    moved = True
    while moved:
        moved = False
        for rank, mine in events.items():
            while done[rank] < len(mine):
                does, what = mine[done[rank]]
                if does == "post":
                    assert isinstance(what, Transfer)
                    is_send = what.source == rank
                    peer = what.target if is_send else what.source
                    queues[rank].setdefault(None if one_queue else peer, deque()).append((what, is_send))
                    end_transfers(rank)
                elif does == "wait":
                    if what not in ended:
                        break
                else:
                    met[what].add(rank)
                    if met[what] != members[what]:
                        break
                done[rank] += 1
                moved = True
    return [rank for rank, count in done.items() if count < len(events[rank])]


def waiting_ranks(plan: StepPlan) -> list[Rank]:
    """Ranks that do not reach the end of their actions although transfers arrive as soon as they are sent. Members run
    a shared action together, each when it is its next one; W's run alone."""
    rows = {(dp, pp): row for dp, schedule in enumerate(plan.schedules) for pp, row in enumerate(schedule.ranks)}
    names = [node_names(plan, dp_rank) for dp_rank in range(plan.layout.dp)]
    members: dict[Hashable, set[Rank]] = defaultdict(set)
    for (dp_rank, pp_rank), row in rows.items():
        for at, action in enumerate(row):
            if action.kind != "W":
                members[pp_rank, names[dp_rank][pp_rank, at]].add((dp_rank, pp_rank))
    done, ran, last = dict.fromkeys(rows, 0), set(), plan.layout.num_stages - 1

    def next_of(rank: Rank) -> Hashable:
        """What all ranks that take part in a rank's next action name alike; None where its input is missing."""
        at = done[rank]
        action = rows[rank][at]
        if action.kind == "W":
            return "W", rank
        is_forward = action.kind == "F"
        source = action.stage + (-1 if is_forward else 1)
        if 0 <= source <= last and (rank[0], is_forward, source, action.pack) not in ran:
            return None
        return rank[1], names[rank[0]][rank[1], at]

    moved = True
    while moved:
        moved = False
        for rank in rows:
            while done[rank] < len(rows[rank]) and (name := next_of(rank)) is not None:
                together = {rank} if name[0] == "W" else members[name]  # type: ignore[index]
                if any(done[one] == len(rows[one]) or next_of(one) != name for one in together):
                    break
                for one in together:
                    action = rows[one][done[one]]
                    ran.add((one[0], action.kind == "F", action.stage, action.pack))
                    done[one] += 1
                moved = True
    return [rank for rank, count in done.items() if count < len(rows[rank])]
