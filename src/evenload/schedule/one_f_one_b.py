"""1F1B: the static order with `w[s] = P - 1 - s` and the least f, the running maximum of D.

With whole documents and equal forward and backward packs (`D[j] = j + 1`) it is the plain 1F1B of
PipeDream-Flush (Narayanan et al. 2021): after `P - 1 - s` warm-up forwards every stage alternates

    stage 0:  0F0 0F1 0B0 0F2 0B1 0B2
    stage 1:  1F0 1B0 1F1 1B1 1F2 1B2

On sliced packs it is SlimPack's 1F1B without injected forwards. A stage holds at most P - s packs when
`D[j] = j + 1`.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.schedule.dealt import dealt_one_f_one_b
from evenload.schedule.schedule_rule import ScheduleRule
from evenload.schedule.static_order import static_order
from evenload.types.pipeline import ActionColumns, PipelineTasks


def one_f_one_b(tasks: PipelineTasks) -> ActionColumns:
    if tasks.num_ranks > tasks.num_stages:
        return dealt_one_f_one_b(tasks)
    least_counts = np.maximum.accumulate(tasks.forwards_needed.astype(np.int64))
    return static_order(tasks, least_counts, one_a_stage(tasks))


def one_a_stage(tasks: PipelineTasks) -> NDArray[np.int64]:
    """The w of 1F1B, a forward for every later stage; int64[P]."""
    return np.arange(tasks.num_stages - 1, -1, -1, dtype=np.int64)


ONE_F_ONE_B = ScheduleRule(
    name="1f1b",
    description="one forward, one backward, after as many forwards as there are later stages",
    order=lambda tasks, cap_bytes: one_f_one_b(tasks),
    deals_packs=True,
)
