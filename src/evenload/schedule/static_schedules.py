"""Order packs by their number and dependencies alone: GPipe, 1F1B (also where stages have several ranks), interleaved
1F1B and ZB-H1."""

import itertools

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.schedule.schedule_rule import ScheduleRule, static_order
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.timeline import KINDS

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = (KINDS.index(name) for name in "FBIW")


def gpipe(tasks: PipelineTasks) -> ActionColumns:
    """Run all forwards, then all backwards (Huang et al. 2019); every pack is held at once."""
    counts = np.full(tasks.num_backward, tasks.num_forward, np.int64)
    return static_order(tasks, counts, np.zeros(tasks.num_stages, dtype=np.int64))


GPIPE = ScheduleRule(
    name="gpipe",
    description="all forwards, then all backwards; every pack is held at once",
    order=lambda tasks, cap_bytes: gpipe(tasks),
)


def one_f_one_b(tasks: PipelineTasks) -> ActionColumns:
    """Run the static order with `w[s] = P - 1 - s` and the least f, the running maximum of D.

        stage 0:  0F0 0F1 0B0 0F2 0B1 0B2
        stage 1:  1F0 1B0 1F1 1B1 1F2 1B2

    With whole documents it is 1F1B of PipeDream-Flush (Narayanan et al. 2021), whose stages hold at most P - s packs;
    on sliced packs SlimPack's 1F1B without injected forwards. Where stages have several ranks, which take packs in turn
    (FlexPipe's part pipelines), a `ConfigError` where a backward pack needs another forward than its own.
    """
    count = tasks.num_forward
    is_whole = tasks.num_backward == count and (tasks.forwards_needed == np.arange(1, count + 1)).all()
    if tasks.num_ranks > tasks.num_stages and not is_whole:
        raise ConfigError(
            f"1f1b: stages have {tasks.widths.tolist()} ranks, so every backward pack has to be a forward pack, in the "
            "same order, of whole documents; use balanced or flexpipe, or one rank a stage"
        )
    least_counts = np.maximum.accumulate(tasks.forwards_needed.astype(np.int64))
    return static_order(tasks, least_counts, packs_ahead(tasks))


def packs_ahead(tasks: PipelineTasks) -> NDArray[np.int64]:
    """Return the w of 1F1B, a forward for every rank of a later stage, rounded up to equally many on all ranks of this
    one; int64[P]."""
    ahead = [0]
    for later, width in itertools.pairwise(tasks.widths[::-1].tolist()):
        ahead.append(-(-(ahead[-1] + later) // width) * width)
    return np.array(ahead[::-1], np.int64)


ONE_F_ONE_B = ScheduleRule(
    name="1f1b",
    description="one forward, one backward, after as many forwards as there are later stages",
    order=lambda tasks, cap_bytes: one_f_one_b(tasks),
    runs_replicated_stages=True,
)


# Interleaved 1F1B (Narayanan et al. 2021, §2.2): v virtual stages on every rank, round robin.
#
#     rank 0 (stages 0, 2):  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
#     rank 1 (stages 1, 3):  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
#
# Packs go in groups through the rank's first stage, then through its second, and so on: as many groups as R goes into
# the packs, as even as can be, so that any number of packs is scheduled. With G packs in the largest group, and at
# least R, rank r runs `2 (R - 1 - r) + (v - 1) G` forwards, then alternates. The bubble is v times smaller than 1F1B's.
#
# It never gets stuck. Number a rank's forwards by turn i, groups of fewer than R packs as if they had R. Give F of turn
# i on rank r the key i + r and its B the key i + 2 (R - 1) + (v - 1) G - r + 1/2: every edge goes to a larger key, from
# a rank's last to its next stage too, because that is at least R turns later. O(actions log actions).


def interleaved_one_f_one_b(tasks: PipelineTasks) -> ActionColumns:
    """Order at least one pack; `ConfigError` where stages are not assigned round robin, or packs differ between forward
    and backward (`packflow_list` schedules those)."""
    num_ranks, num_packs, num_stages = tasks.num_ranks, tasks.num_forward, tasks.num_stages
    if tasks.stage_to_rank.tolist() != [stage % num_ranks for stage in range(num_stages)] or num_stages % num_ranks:
        raise ConfigError(f"interleaved: stages are on ranks {tasks.stage_to_rank.tolist()}, expected round robin")
    if tasks.forwards_needed.tolist() != list(range(1, num_packs + 1)):
        raise ConfigError(
            f"interleaved: needs backward packs equal to forward packs, got {num_packs} forward and "
            f"{tasks.num_backward} backward packs; use the list schedule"
        )
    virtual = num_stages // num_ranks
    packs, chunk = np.arange(num_packs), np.arange(virtual)
    sizes = np.array([len(group) for group in np.array_split(packs, max(1, num_packs // num_ranks))])
    strides = np.maximum(sizes, num_ranks)  # turns of a group in one of a rank's stages
    first_turn = np.repeat(virtual * (np.cumsum(strides) - strides) - (np.cumsum(sizes) - sizes), sizes) + packs
    turn = (first_turn + chunk[:, None] * np.repeat(strides, sizes)).ravel()
    kind, pack = np.repeat([0, 1], len(turn)), np.tile(packs, 2 * virtual)
    stage = np.repeat(np.concatenate([chunk, virtual - 1 - chunk]), num_packs) * num_ranks
    rows = []
    for rank in range(num_ranks):
        warmup = 2 * (num_ranks - 1 - rank) + (virtual - 1) * int(strides.max())
        # Backward i stands right behind forward warmup + i.
        order = np.argsort(np.concatenate([2 * turn, 2 * (turn + warmup) + 1]), kind="stable")
        rows.append((kind[order], stage[order] + rank, pack[order]))
    return ActionColumns.of_ranks(rows)


INTERLEAVED = ScheduleRule(
    name="interleaved",
    description="1F1B over the virtual stages of every rank, packs in groups of at least as many as there are ranks",
    order=lambda tasks, cap_bytes: interleaved_one_f_one_b(tasks),
    needs_equal_packs=True,
)


# ZB-H1: 1F1B with split backwards, whose weight gradients fill the drain (Qi et al. 2023, "Zero Bubble", §3). Stage s
# defers W by s packs: after I of pack j comes W of pack j - s, and what is left at the end.
#
#     stage 0:  0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
#     stage 1:  1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
#     stage 2:  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
#
# No stage holds more than P packs, as 1F1B's first. On equal packs without p2p the makespan is `m (tF + tI + tW) + (P -
# 1) (tF + max(0, tI - tW))`. Any packs can be scheduled, sliced documents too. O(actions log actions).


def zero_bubble_h1(tasks: PipelineTasks) -> ActionColumns:
    """Order packs; `ConfigError` where they have no split columns, or ranks several stages (`packflow_list` schedules
    those)."""
    if tasks.split is None:
        raise ConfigError("zero bubble: the tasks have no split columns; price backwards as I and W first")
    if tasks.stage_to_rank.tolist() != list(range(tasks.num_ranks)):
        raise ConfigError(
            f"zero bubble: stages are on ranks {tasks.stage_to_rank.tolist()}, expected one stage a rank in order; "
            "use packflow_list with split for virtual stages"
        )
    whole = one_f_one_b(tasks)
    rows = []
    for stage in range(tasks.num_stages):
        own = whole.of_rank(stage)
        kind, pack = whole.kind[own], whole.pack[own]
        place = np.flatnonzero(kind == _BACKWARD)
        # W of pack j stands right behind I of pack j + stage, or behind the last I; there in pack order.
        behind = place[np.minimum(np.arange(len(place)) + stage, len(place) - 1)]
        order = np.argsort(np.concatenate([2 * np.arange(len(kind)), 2 * behind + 1]), kind="stable")
        split = np.where(kind == _BACKWARD, _INPUT, kind)
        split = np.concatenate([split, np.full(len(place), _WEIGHT)])
        rows.append((split[order], np.full(len(order), stage), np.concatenate([pack, pack[place]])[order]))
    return ActionColumns.of_ranks(rows)


ZB_H1 = ScheduleRule(
    name="zb_h1",
    description="1F1B with split backwards: weight gradients fill the drain, in the memory of 1F1B's first stage",
    order=lambda tasks, cap_bytes: zero_bubble_h1(tasks),
    splits_backward=True,
    one_stage_per_rank=True,
    tried_by_auto=True,
)
