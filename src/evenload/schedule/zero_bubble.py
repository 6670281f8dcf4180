"""ZB-H1: 1F1B with split backwards, whose weight gradients fill the drain (Qi et al. 2023, "Zero Bubble", §3).

Every backward runs as I, which the stage before waits for, and later W. Stage s defers W by s packs: after I of pack
j comes W of pack j - s, and what is left at the end.

    stage 0:  0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    stage 1:  1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    stage 2:  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

A stage that starts late has little to wait for and many W left over; a stage that starts early waits for gradients and
has W to run while it does. No stage holds more than P packs, which is what 1F1B's first stage holds. On equal packs
without p2p transfers, with tF, tI and tW seconds, the makespan is

    m (tF + tI + tW) + (P - 1) (tF + max(0, tI - tW))

against 1F1B's bubble of (P - 1) (tF + tI + tW). Any packs can be scheduled, sliced documents too: the forwards are
1F1B's of `one_f_one_b`. O(actions log actions).
"""

import numpy as np

from evenload.errors import ConfigError
from evenload.schedule.one_f_one_b import one_f_one_b
from evenload.schedule.schedule_rule import ScheduleRule
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.timeline import KINDS

_BACKWARD, _INPUT, _WEIGHT = (KINDS.index(name) for name in "BIW")


def zero_bubble_h1(tasks: PipelineTasks) -> ActionColumns:
    """The ZB-H1 schedule of packs whose backwards can be split.

    Raises:
        ConfigError: tasks without split columns, or several stages on a rank (`packflow_list` schedules those).
    """
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
