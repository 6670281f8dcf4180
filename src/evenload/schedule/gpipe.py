"""GPipe (Huang et al. 2019): all forwards, then all backwards; every pack is held at once.

    stage 0:  0F0 0F1 0F2 0B0 0B1 0B2
    stage 1:  1F0 1F1 1F2 1B0 1B1 1B2

Backwards run in pack order, as everywhere here, not reversed as in the paper's figure.
"""

import numpy as np

from evenload.schedule.schedule_rule import ScheduleRule
from evenload.schedule.static_order import static_order
from evenload.types.pipeline import ActionColumns, PipelineTasks


def gpipe(tasks: PipelineTasks) -> ActionColumns:
    counts = np.full(tasks.num_backward, tasks.num_forward, np.int64)
    return static_order(tasks, counts, np.zeros(tasks.num_stages, dtype=np.int64))


GPIPE = ScheduleRule(
    name="gpipe",
    description="all forwards, then all backwards; every pack is held at once",
    order=lambda tasks, cap_bytes: gpipe(tasks),
)
