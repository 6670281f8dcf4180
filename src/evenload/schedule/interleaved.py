"""Interleaved 1F1B (Narayanan et al. 2021, §2.2): v virtual stages on every rank, round robin.

    rank 0 (stages 0, 2):  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1 (stages 1, 3):  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

Packs go in groups: the packs of the first through the rank's first stage, then through its second, and so on. As
published a group has R packs, and steps a multiple of R; here as many groups as R goes into the packs, as even as can
be, so any number of packs is scheduled. With G packs in the largest group, and at least R, rank r runs
`2 (R - 1 - r) + (v - 1) G` forwards, then alternates. On equal packs the makespan is
`(v max(m, R) + min(m, R) - 1) (tF + tB)` with tF and tB of one virtual stage: the bubble is v times smaller than
1F1B's.

It never gets stuck. Number a rank's forwards by turn i, groups of fewer than R packs (there is one, where the step has
no more) as if they had R; backward i stands behind forward i + warmup. Give F of turn i on rank r the key i + r and B
the key i + 2 (R - 1) + (v - 1) G - r + 1/2: every edge on a rank and between ranks goes to a larger key, from a rank's
last to its next stage too, because that is at least R turns later. O(actions log actions).
"""

import numpy as np

from evenload.errors import ConfigError
from evenload.schedule.schedule_rule import ScheduleRule
from evenload.types.pipeline import ActionColumns, PipelineTasks


def interleaved_one_f_one_b(tasks: PipelineTasks) -> ActionColumns:
    """The interleaved schedule of packs that are the same in both directions, at least one.

    Raises:
        ConfigError: stages that are not assigned round robin, or packs that differ between forward and backward;
            `packflow_list` schedules those.
    """
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
