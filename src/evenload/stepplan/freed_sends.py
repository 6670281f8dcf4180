"""When a rank may wait for its own sends and free them, so that it need not keep them to the end of the step.

A send is over when its receiver has posted the receive, which it does in its own order. Transports do not tell (with
gloo `Work.is_completed()` stays False until `wait`), and waiting at a bad moment is a deadlock: two ranks that wait for
each other's receives. So both ends need one order of all actions that no wait goes against. The plan has one, its
predicted start times:

    before an action that starts at t, wait for the sends of a channel whose pack number i is followed by a pack
    i + LAG that its receiver starts strictly before t

Every edge of the schedule goes to an equal or later start and every such wait to a strictly later one, so they form
no circle, whatever the real durations. By then the receiver has long posted the receive, unless it is LAG packs
behind its prediction; then the sender waits for it, once it would run LAG packs further ahead than planned.

Replicas that share packs (DP-Merge) meet in their transfers, so the argument needs one order of all their actions.
Plans run shared packs first and alike on all members, whose predictions then agree on them to the bit. Where they do
not (plans made by hand), no send is waited for before the end of the step.

A rank keeps what is under way in the prediction plus LAG packs a channel. O(actions log actions).
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from evenload.simulate.simulate import simulate
from evenload.stepplan.plan_tasks import timed_tasks
from evenload.stepplan.validate_groups import block_of
from evenload.types.layout import ParallelLayout
from evenload.types.pipeline import ActionColumns, action_columns
from evenload.types.plan import StepPlan
from evenload.types.replica_block import ReplicaBlock
from evenload.types.timeline import KINDS
from evenload.types.transfers import Channel, FreedSends, sending_channels

LAG = 4
_FORWARD, _WEIGHT = KINDS.index("F"), KINDS.index("W")


def freed_sends(plan: StepPlan, dp_rank: int, pp_rank: int) -> FreedSends:
    """What a pipeline rank waits for and frees."""
    channels = sending_channels(plan.layout, pp_rank)
    actions = action_columns(plan.schedules[dp_rank])
    own = actions.of_rank(pp_rank)
    if not channels or not _members_agree(plan):
        return ((),) * (own.stop - own.start)
    start_s = simulate(timed_tasks(plan, dp_rank), actions).start_s
    # Packs of a stage run in index order, so their starts do not fall.
    over = {channel: start_s[received_runs(plan.layout, actions, channel, pp_rank)] for channel in channels}
    return freed_before(over, start_s[own])


def freed_before(over: Mapping[Channel, NDArray[np.number]], own: NDArray[np.number]) -> FreedSends:
    """For every own action the channels whose first so many sends are over: LAG packs further ones are over before it.

    Args:
        over: by channel, when each send is over; not falling.
        own: when each action of the rank comes, on the same scale; not falling.
    """
    waits: list[list[tuple[Channel, int]]] = [[] for _ in own]
    for channel, times in over.items():
        before = 0
        for at, count in enumerate((np.searchsorted(times, own, side="left") - LAG).tolist()):
            if count > before:
                waits[at].append((channel, count))
                before = count
    return tuple(map(tuple, waits))


def received_runs(layout: ParallelLayout, actions: ActionColumns, channel: Channel, pp_rank: int) -> NDArray[np.bool_]:
    """Which actions are those that a pipeline rank sends to on a channel; bool[n]."""
    kind, stage = channel[:2]
    found = runs_of(actions, kind, stage)
    if layout.has_wide_stages:
        (sending,) = layout.stages_of_rank(pp_rank)
        width, first = layout.devices[sending], layout.stage_to_rank[sending]
        found = found & (actions.rank == channel[-1]) & (actions.pack % width == pp_rank - first)
    return found


def runs_of(actions: ActionColumns, kind: str, stage: int) -> NDArray[np.bool_]:
    """Which actions are the forwards ("F") or the backwards ("B": B or I) of a stage; bool[n]."""
    is_backward = (actions.kind != _FORWARD) & (actions.kind != _WEIGHT)
    return (actions.stage == stage) & (actions.kind == _FORWARD if kind == "F" else is_backward)


def _members_agree(plan: StepPlan) -> bool:
    """Whether all replicas predict the same starts of the packs that they share."""
    sizes = [
        {(pack.direction, pack.index): block_of(plan, dp_rank, pack) for pack in (*packs.forward, *packs.backward)}
        for dp_rank, packs in enumerate(plan.pack_plans)
    ]
    if all(block.size == 1 for of_replica in sizes for block in of_replica.values()):
        return True
    starts: dict[ReplicaBlock, list[list[tuple]]] = defaultdict(list)
    for dp_rank, blocks in enumerate(sizes):
        start_s = simulate(timed_tasks(plan, dp_rank), action_columns(plan.schedules[dp_rank])).start_s.tolist()
        actions = [action for row in plan.schedules[dp_rank].ranks for action in row]
        met: dict[ReplicaBlock, list[tuple]] = defaultdict(list)
        for action, start in zip(actions, start_s, strict=True):
            block = blocks["forward" if action.kind == "F" else "backward", action.pack]
            if block.size > 1:
                met[block].append((action.kind, action.stage, start))
        for block, rows in met.items():
            starts[block].append(rows)
    return all(rows == of_members[0] for of_members in starts.values() for rows in of_members)
