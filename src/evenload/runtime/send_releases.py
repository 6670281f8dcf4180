"""When a rank may wait for its own sends, so that it need not keep every sent tensor to the end of the step.

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

from evenload.plan.validate_groups import Block, block_of
from evenload.simulate.simulate import simulate
from evenload.types.layout import ParallelLayout
from evenload.types.pipeline import ActionColumns, PipelineTasks, SplitBackward, action_columns
from evenload.types.plan import StepPlan
from evenload.types.timeline import KINDS

LAG = 4
Channel = tuple[str, int]
"""("F", stage that receives hidden states) or ("B", stage that receives gradients)."""
_FORWARD, _WEIGHT = KINDS.index("F"), KINDS.index("W")


def channels_of_rank(layout: ParallelLayout, pp_rank: int) -> list[Channel]:
    """Channels on which a rank sends to another."""
    ranks = layout.stage_to_rank
    found: list[Channel] = []
    for stage, rank in enumerate(ranks):
        for kind, to in (("F", stage + 1), ("B", stage - 1)):
            if rank == pp_rank and 0 <= to < len(ranks) and ranks[to] != pp_rank:
                found.append((kind, to))
    return found


def send_releases(plan: StepPlan, dp_rank: int, pp_rank: int) -> tuple[tuple[tuple[Channel, int], ...], ...]:
    """For every action of a rank the channels whose first so many sends to wait for before it."""
    channels = channels_of_rank(plan.layout, pp_rank)
    actions = action_columns(plan.schedules[dp_rank])
    own = slice(int(actions.rank_offset[pp_rank]), int(actions.rank_offset[pp_rank + 1]))
    if not channels:
        return ((),) * (own.stop - own.start)
    if not _members_agree(plan):
        return ((),) * (own.stop - own.start)
    start_s = simulate(timed_tasks(plan, dp_rank), actions).start_s
    # Packs of a stage run in index order, so their starts do not fall.
    return releases_before({channel: start_s[runs_of(actions, *channel)] for channel in channels}, start_s[own])


def releases_before(
    over: Mapping[Channel, NDArray[np.number]], own: NDArray[np.number]
) -> tuple[tuple[tuple[Channel, int], ...], ...]:
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
    if all(size == 1 for of_replica in sizes for _, size in of_replica.values()):
        return True
    starts: dict[Block, list[list[tuple]]] = defaultdict(list)
    for dp_rank, blocks in enumerate(sizes):
        start_s = simulate(timed_tasks(plan, dp_rank), action_columns(plan.schedules[dp_rank])).start_s.tolist()
        actions = [action for row in plan.schedules[dp_rank].ranks for action in row]
        met: dict[Block, list[tuple]] = defaultdict(list)
        for action, start in zip(actions, start_s, strict=True):
            block = blocks["forward" if action.kind == "F" else "backward", action.pack]
            if block[1] > 1:
                met[block].append((action.kind, action.stage, start))
        for block, rows in met.items():
            starts[block].append(rows)
    return all(rows == of_members[0] for of_members in starts.values() for rows in of_members)


def timed_tasks(plan: StepPlan, dp_rank: int) -> PipelineTasks:
    """The predicted seconds of a replica, without bytes."""
    packs, times, stages = plan.pack_plans[dp_rank], plan.times[dp_rank], plan.layout.num_stages
    shapes = (len(packs.forward), stages), (len(packs.backward), stages)
    forward_bytes, backward_bytes = (np.zeros(shape, np.int64) for shape in shapes)
    split = None
    if times.input_s:
        split = SplitBackward(
            input_s=np.array(times.input_s, np.float64).reshape(shapes[1]),
            weight_s=np.array(times.weight_s, np.float64).reshape(shapes[1]),
            input_freed_bytes=backward_bytes,
            input_temp_bytes=backward_bytes,
            weight_freed_bytes=backward_bytes,
        )
    return PipelineTasks(
        forward_s=np.array(times.forward_s, np.float64).reshape(shapes[0]),
        backward_s=np.array(times.backward_s, np.float64).reshape(shapes[1]),
        p2p_forward_s=np.array(times.p2p_forward_s, np.float64),
        p2p_backward_s=np.array(times.p2p_backward_s, np.float64),
        forwards_needed=np.array(packs.forwards_needed(), np.int32),
        stage_to_rank=np.array(plan.layout.stage_to_rank, np.int32),
        static_bytes=np.zeros(plan.layout.pp, np.int64),
        forward_kept_bytes=forward_bytes,
        forward_temp_bytes=forward_bytes,
        backward_freed_bytes=backward_bytes,
        backward_temp_bytes=backward_bytes,
        split=split,
    )
