"""`run_ahead`: what a replica runs alone begins in the gaps that packs shared with other replicas leave.

Packs of larger blocks come first (`plan.packing.dp_merge`), and a pipeline that runs one phase after the other drains
before it fills again. While it drains, ranks wait for gradients; there the next phase's first forwards can run:

    rank 0   F F F F . . . B . B . B . B f f f f . . .        one after the other
    rank 0   F F F F f f f B f B . B . B . . .                in the gaps

Members of a block must meet at every shared pack without waiting for each other, and replicas are simulated apart. So a
shared action never moves: an action is put before one only where it ends before that one starts, within memory, and
never before shared packs of its own stage and direction, because packs pass every channel in index order. Every action
stands in each rank's list as in one timeline in which shared packs run at the same times on all members, so no two can
wait for each other in a circle, whatever they really take. Of several phases each runs ahead into those before it,
which are alike on all its members.

The order of every rank within a phase stays, so nothing starts later than one phase after the other. The core runs
it, O(actions · phases); `tests/reference/phase_overlap.py` is the same in Python, action by action.
"""

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.schedule.tasks import split_arrays, task_arrays
from evenload.types.pipeline import ActionColumns, PipelineTasks


def run_ahead(
    tasks: PipelineTasks,
    actions: ActionColumns,
    phase_of_forward: NDArray[np.int64],
    phase_of_backward: NDArray[np.int64],
    cap_bytes: NDArray[np.int64] | None,
) -> ActionColumns:
    """The same actions, later phases in the gaps of earlier ones.

    Args:
        actions: phase after phase on every rank.
        phase_of_forward, phase_of_backward: of every pack, not falling; int64[m_f], int64[m_b].
        cap_bytes: int64[R] that ranks may hold, None = not limited.

    Raises:
        ConfigError, ValueError: columns or values out of range, or phases that cannot run.
    """
    columns = actions.kind, actions.stage, actions.pack, actions.rank_offset
    phases = phase_of_forward.astype(np.int64), phase_of_backward.astype(np.int64)
    cap = np.empty(0, np.int64) if cap_bytes is None else np.ascontiguousarray(cap_bytes, np.int64)
    return ActionColumns(*_native.run_ahead(task_arrays(tasks), *columns, *phases, cap, split_arrays(tasks)))
