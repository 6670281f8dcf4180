"""Transfers between stages as the simulator charges them: one starts when its producer has ended, and transfers of
one link do not queue behind each other (an edge delay).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.simulate.critical_path import hop_seconds, producers
from evenload.simulate.simulate import Simulation
from evenload.types.pipeline import ActionColumns, PipelineTasks


@dataclass(frozen=True, eq=False)
class Hops:
    """Transfers between stages, one for every action whose input comes from another stage.

    Args:
        producer, consumer: int64[h], indices into the action columns.
        start_s, end_s: float64[h].
    """

    producer: NDArray[np.int64]
    consumer: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


def hops(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> Hops:
    """The transfers of a simulated schedule.

    Args:
        simulation: of `tasks` and `actions`.
    """
    producer = producers(tasks, actions)
    consumer = np.flatnonzero(producer >= 0)
    producer = producer[consumer]
    start_s = simulation.end_s[producer]
    return Hops(producer, consumer, start_s, start_s + hop_seconds(tasks, actions)[consumer])
