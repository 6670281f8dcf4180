"""When every action of a schedule runs and what every rank holds (SlimPack §4.3). O(actions).

A backward runs whole (B) or as I, for which the neighbours wait, and later W (`PipelineTasks.split`).

An action starts when the previous action of its rank has ended and its inputs are there:

    start = max(end of the previous action on the rank, end of the neighbour stage's action + p2p)

A backward also needs `forwards_needed` forwards on its own stage; those stand before it in the rank's
order, so they cost no time, only their absence is a deadlock. A p2p transfer is an edge delay (asynchronous copies);
transfers of one link do not queue behind each other. Memory of a rank is sequential: a forward adds what it
keeps when it starts, a backward gives back when it ends, temporary bytes are held while an action runs.
Both follow SlimPack's simulator, whose per-slice edges D replaces by one count.

The core runs it, some 20 ns an action; `tests/reference/simulation.py` is the same as an explicit graph of nodes and
edges, equal to the last bit.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.errors import ConfigError, ScheduleDeadlockError
from evenload.schedule.tasks import split_arrays, stuck_grid, task_arrays
from evenload.types.pipeline import ActionColumns, PipelineTasks


@dataclass(frozen=True, eq=False)
class Simulation:
    """Predicted execution of one replica's schedule.

    Args:
        start_s, end_s: float64[n], aligned with the action columns.
        makespan_s: end of the last action, 0 without actions.
        peak_bytes: int64[R], the most each rank holds at any time, static bytes included.
    """

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    makespan_s: float
    peak_bytes: NDArray[np.int64]


def simulate(tasks: PipelineTasks, actions: ActionColumns) -> Simulation:
    """Run the schedule in simulated time.

    A schedule may lack actions at the end (a prefix is simulated); `check_schedule` checks completeness.

    Raises:
        ConfigError, ValueError: columns or values out of range, or packs of a stage not in index order.
        ScheduleDeadlockError: actions that wait for each other in a circle, or for one that never runs.
    """
    arrays, split = task_arrays(tasks), split_arrays(tasks)
    _check_actions(tasks, actions)
    start_s, end_s, peak_bytes, done = _native.simulate(
        arrays, actions.kind, actions.stage, actions.pack, actions.rank_offset, split
    )
    if int(done.sum()) < len(actions.kind):
        raise ScheduleDeadlockError(stuck_grid(tasks, actions, done))
    return Simulation(start_s, end_s, float(end_s.max(initial=0.0)), peak_bytes)


def _check_actions(tasks: PipelineTasks, actions: ActionColumns) -> None:
    expected = (("kind", np.uint8), ("stage", np.int32), ("pack", np.int32), ("rank_offset", np.int64))
    for name, dtype in expected:
        column = getattr(actions, name)
        if column.dtype != dtype or column.ndim != 1 or not column.flags.c_contiguous:
            raise ConfigError(
                f"actions.{name} is {column.dtype}{list(column.shape)}, expected a contiguous column of "
                f"{np.dtype(dtype)}"
            )
    if actions.num_ranks != tasks.num_ranks:
        raise ConfigError(f"actions of {actions.num_ranks} ranks for tasks on {tasks.num_ranks} ranks")
