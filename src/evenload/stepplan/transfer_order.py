"""Order a rank's receives, and choose when it waits for its own sends to free their tensors (`transfer_order`).

A send is over when its receiver has posted the receive, which transports do not report, and waiting at a bad moment is
a deadlock. So both ends follow the plan's predicted starts (`freed_sends`): before an action that starts at t, a rank
waits for the sends of a channel whose pack i is followed by a pack i + LAG that its receiver starts strictly before t.
Every edge of the schedule goes to an equal or later start and every such wait to a strictly later one, so they form no
circle, whatever the real durations. Replicas that share packs (DP-Merge) go by the places of actions in the order
below, which they have in common, also where their predictions differ.

Where all transfers of a rank share one first-in-first-out queue (`queued_order`), two ranks must post what they
exchange in the same order. Both follow one order of all actions, in which each comes after what it needs, and a
transfer has the place of the action that sends it: before an action a rank posts all receives with an earlier place, in
their order, and waits for a send when its channel has sent LAG more.

Nothing deadlocks. Let A be the first action of the order that has not run, on any rank: all that it waits for has an
earlier place, so it was sent. Of all transfers sent and not arrived take the first, which is before A: its sender
posted it and all before it; its receiver's next action is A or later, so the receiver did too; so it arrives, and the
next, until A runs. The order is by predicted ends (Kahn's algorithm with a heap). A rank keeps what is in flight in the
prediction plus LAG packs a channel. O(actions log actions).
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from evenload.errors import InvalidPlanError
from evenload.schedule.simulate import simulate
from evenload.schedule.step_collectives import num_before_sums, replicas_alike
from evenload.stepplan.resimulation import timed_tasks
from evenload.types.document import ReplicaBlock
from evenload.types.layout import (
    Channel,
    ChannelMode,
    FreedSends,
    ParallelLayout,
    Receive,
    TransferOrder,
    sending_channels,
)
from evenload.types.pipeline import ActionColumns, action_columns
from evenload.types.plan import Action, StepPlan, block_of
from evenload.types.timeline import KINDS

LAG = 4
_FORWARD, _WEIGHT = KINDS.index("F"), KINDS.index("W")


def freed_sends(plan: StepPlan, dp_rank: int, pp_rank: int) -> FreedSends:
    """Return the sends that a pipeline rank waits for and frees before each of its actions."""
    channels = sending_channels(plan.layout, pp_rank)
    actions = action_columns(plan.schedules[dp_rank])
    own = actions.of_rank(pp_rank)
    if not channels:
        return ((),) * (own.stop - own.start)
    is_alone = _sharing_replicas(plan, dp_rank).size == 1
    when = simulate(timed_tasks(plan, dp_rank), actions).start_s if is_alone else action_places(plan, dp_rank)
    # Packs of a stage run in index order, so their starts do not fall.
    over = {channel: when[received_runs(plan.layout, actions, channel, pp_rank)] for channel in channels}
    return freed_before(over, when[own])


def freed_before(over: Mapping[Channel, NDArray[np.number]], own: NDArray[np.number]) -> FreedSends:
    """Return the sends to free before each action: all but the last LAG that are over before it, from when each send of
    a channel is over and each action comes, on one scale, not falling."""
    waits: list[list[tuple[Channel, int]]] = [[] for _ in own]
    for channel, times in over.items():
        before = 0
        for at, count in enumerate((np.searchsorted(times, own, side="left") - LAG).tolist()):
            if count > before:
                waits[at].append((channel, count))
                before = count
    return tuple(map(tuple, waits))


def received_runs(layout: ParallelLayout, actions: ActionColumns, channel: Channel, pp_rank: int) -> NDArray[np.bool_]:
    """Choose the actions that receive what a pipeline rank sends on a channel; bool[n]."""
    kind, stage = channel[:2]
    chosen = runs_of(actions, kind, stage)
    if layout.has_replicated_stages:
        (sending,) = layout.stages_of_rank(pp_rank)
        width, first = layout.devices[sending], layout.stage_to_rank[sending]
        chosen = chosen & (actions.rank == channel[-1]) & (actions.pack % width == pp_rank - first)
    return chosen


def runs_of(actions: ActionColumns, kind: str, stage: int) -> NDArray[np.bool_]:
    """Choose the forwards ("F") or the backwards ("B": B or I) of a stage; bool[n]."""
    is_backward = (actions.kind != _FORWARD) & (actions.kind != _WEIGHT)
    return (actions.stage == stage) & (actions.kind == _FORWARD if kind == "F" else is_backward)


def _sharing_replicas(plan: StepPlan, dp_rank: int) -> ReplicaBlock:
    """Return the replicas that share packs with this one, or with each other: blocks are nested."""
    packs = plan.pack_plans[dp_rank]
    blocks = (block_of(plan, dp_rank, pack) for pack in (*packs.forward, *packs.backward))
    return max(blocks, key=lambda block: block.size, default=ReplicaBlock(dp_rank, 1))


def transfer_order(plan: StepPlan, dp_rank: int, pp_rank: int, channels: ChannelMode) -> TransferOrder:
    """Return what a pipeline rank posts and waits for before each of its actions."""
    if channels == "fifo":
        return queued_order(plan, dp_rank, pp_rank)
    actions = action_columns(plan.schedules[dp_rank])
    before_sums = _before_sums(
        plan, dp_rank, pp_rank, actions, lambda: simulate(timed_tasks(plan, dp_rank), actions).end_s
    )
    return TransferOrder(None, freed_sends(plan, dp_rank, pp_rank), before_sums)


def queued_order(plan: StepPlan, dp_rank: int, pp_rank: int) -> TransferOrder:
    """Do the same where all transfers of a rank share a queue, in layouts without stages of several ranks."""
    assert not plan.layout.has_replicated_stages, "refused at the start of a run (`config.planner`)"
    actions, ranks = action_columns(plan.schedules[dp_rank]), plan.layout.stage_to_rank
    places = action_places(plan, dp_rank)
    own = places[actions.of_rank(pp_rank)]
    over: dict[Channel, NDArray[np.int64]] = {}
    for channel in sending_channels(plan.layout, pp_rank):
        kind, stage = channel[:2]
        over[channel] = places[runs_of(actions, kind, stage - 1 if kind == "F" else stage + 1)]
    due: list[tuple[int, Receive]] = []
    for stage in (stage for stage, rank in enumerate(ranks) if rank == pp_rank):
        for kind, source in (("F", stage - 1), ("B", stage + 1)):
            if 0 <= source < len(ranks) and ranks[source] != pp_rank:
                sent = places[runs_of(actions, kind, source)].tolist()
                due += [(place, ((kind, stage), pack)) for pack, place in enumerate(sent)]
    due.sort()
    stops = np.searchsorted([place for place, _ in due], own).tolist()
    receives = [tuple(receive for _, receive in due[lo:hi]) for lo, hi in itertools.pairwise([0, *stops])]
    before_sums = _before_sums(plan, dp_rank, pp_rank, actions, lambda: places)
    return TransferOrder(tuple(receives), freed_before(over, own), before_sums)


def _before_sums(
    plan: StepPlan, dp_rank: int, pp_rank: int, actions: ActionColumns, end_s: Callable[[], NDArray[np.number]]
) -> int:
    """Return `num_before_sums` of one pipeline rank; asks for `end_s` only where replicas share packs."""
    packs = plan.pack_plans[dp_rank]
    sizes = [
        np.array([block_of(plan, dp_rank, pack).size for pack in side], np.int64)
        for side in (packs.forward, packs.backward)
    ]
    least = [
        min((block_of(plan, member, pack).size for pack in one.backward), default=1)
        for member, one in enumerate(plan.pack_plans)
    ]
    alike = replicas_alike(least, dp_rank)
    return int(num_before_sums(actions, sizes, alike, end_s())[pp_rank]) if (sizes[0] > alike).any() else 0


def action_places(plan: StepPlan, dp_rank: int) -> NDArray[np.int64]:
    """Return each action's place in the one order of all replicas that share packs; int64[n], aligned with
    `action_columns`. `InvalidPlanError` where actions wait for each other in a circle."""
    nodes_of: dict[int, list[int]] = {}
    end_s: list[float] = []
    needs: list[list[int]] = []
    shared: dict[tuple, int] = {}
    for member in _sharing_replicas(plan, dp_rank).replicas:
        schedule = plan.schedules[member]
        ends = iter(simulate(timed_tasks(plan, member), action_columns(schedule)).end_s.tolist())
        nodes = nodes_of[member] = []
        outputs: dict[tuple[bool, int, int], int] = {}
        for rank, row in enumerate(schedule.ranks):
            own = []
            for name in _shared_names(plan, member, rank, row):
                node = len(needs) if name is None else shared.setdefault(name, len(needs))
                if node == len(needs):
                    needs.append([])
                    end_s.append(0.0)
                needs[node] += own[-1:]
                end_s[node] = max(end_s[node], next(ends))
                own.append(node)
            nodes += own
            outputs |= {(a.kind == "F", a.stage, a.pack): n for a, n in zip(row, own, strict=True) if a.kind != "W"}
        for (is_forward, stage, pack), node in outputs.items():
            source = outputs.get((is_forward, stage - 1 if is_forward else stage + 1, pack))
            if source is not None:
                needs[node].append(source)
    return np.array(_ordered(needs, end_s), np.int64)[nodes_of[dp_rank]]


def _ordered(needs: list[list[int]], end_s: list[float]) -> list[int]:
    """Return each action's place in an order by ends in which all that it needs comes before it."""
    waiting: list[list[int]] = [[] for _ in needs]
    for node, before in enumerate(needs):
        for one in before:
            waiting[one].append(node)
    counts, places, num_placed = [len(before) for before in needs], [0] * len(needs), 0
    ready = [(end_s[node], node) for node, count in enumerate(counts) if not count]
    heapq.heapify(ready)
    while ready:
        _, node = heapq.heappop(ready)
        places[node], num_placed = num_placed, num_placed + 1
        for after in waiting[node]:
            counts[after] -= 1
            if not counts[after]:
                heapq.heappush(ready, (end_s[after], after))
    if num_placed < len(places):
        raise InvalidPlanError(
            f"{len(places) - num_placed} of {len(places)} actions of replicas that share packs wait for each other "
            "in a circle, so no order of transfers lets the step end; members have to run shared packs in one order"
        )
    return places


def _shared_names(plan: StepPlan, dp_rank: int, rank: int, row: Sequence[Action]) -> list[tuple | None]:
    """Return for each action of a rank a name that is the same on all replicas that share its pack, None where none
    does: they run shared packs in one order, so a count names them. W needs no other replica."""
    packs, seen = plan.pack_plans[dp_rank], Counter()
    names: list[tuple | None] = []
    for action in row:
        listed = packs.forward if action.kind == "F" else packs.backward
        block = block_of(plan, dp_rank, listed[action.pack])
        if action.kind == "W" or block.size == 1:
            names.append(None)
            continue
        names.append((*block, rank, seen[block]))
        seen[block] += 1
    return names
