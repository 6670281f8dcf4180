"""Interleaved 1F1B (Narayanan et al. 2021, §2.2): v virtual stages on every rank, round robin.

    rank 0 (stages 0, 2):  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1 (stages 1, 3):  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

Packs go in groups of R: the first R packs through the rank's first stage, then through its second, and so on.
Rank r runs `2 (R - 1 - r) + (v - 1) R` forwards, then alternates. On equal packs the makespan is
`(m v + R - 1) (tF + tB)` with tF and tB of one virtual stage: the bubble is v times smaller than 1F1B's.
O(actions).
"""

import numpy as np

from evenload.errors import ConfigError
from evenload.schedule.schedule_rule import ScheduleRule
from evenload.types.pipeline import ActionColumns, PipelineTasks


def interleaved_one_f_one_b(tasks: PipelineTasks) -> ActionColumns:
    """The interleaved schedule of packs that are the same in both directions.

    Raises:
        ConfigError: stages that are not assigned round robin, packs that differ between forward and backward, or a
            number of packs that is no multiple of the ranks; `packflow_list` schedules all of those.
    """
    num_ranks, num_packs, num_stages = tasks.num_ranks, tasks.num_forward, tasks.num_stages
    if tasks.stage_to_rank.tolist() != [stage % num_ranks for stage in range(num_stages)] or num_stages % num_ranks:
        raise ConfigError(f"interleaved: stages are on ranks {tasks.stage_to_rank.tolist()}, expected round robin")
    if tasks.forwards_needed.tolist() != list(range(1, num_packs + 1)) or num_packs % num_ranks:
        raise ConfigError(
            f"interleaved: needs backward packs equal to forward packs and a multiple of {num_ranks} of them, "
            f"got {num_packs} forward and {tasks.num_backward} backward packs; use the list schedule"
        )
    virtual = num_stages // num_ranks
    turn = np.arange(num_packs * virtual)
    group, within = np.divmod(turn, num_ranks * virtual)
    chunk, pack = within // num_ranks, group * num_ranks + within % num_ranks
    rows = []
    for rank in range(num_ranks):
        warmup = min(len(turn), 2 * (num_ranks - 1 - rank) + (virtual - 1) * num_ranks)
        # Backward i stands right behind forward warmup + i.
        key = np.concatenate([2 * turn, 2 * (turn + warmup) + 1])
        order = np.argsort(key, kind="stable")
        stage = np.concatenate([chunk, virtual - 1 - chunk]) * num_ranks + rank
        rows.append((np.repeat([0, 1], len(turn))[order], stage[order], np.tile(pack, 2)[order]))
    return ActionColumns.of_ranks(rows)


INTERLEAVED = ScheduleRule(
    name="interleaved",
    description="1F1B over the virtual stages of every rank, packs in groups of as many as there are ranks",
    order=lambda tasks, cap_bytes: interleaved_one_f_one_b(tasks),
    needs_equal_packs=True,
)
