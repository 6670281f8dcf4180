"""Where a pipeline's idle time goes. O(actions).

Every rank's share of the makespan is busy time or one of four kinds of idle time:

    warm-up        before its first action: the pipeline fills
    cool-down      after its last action: the other ranks drain
    communication  in a gap, the part in which the next action's producer has already ended and only its
                   hop is under way
    dependency     the rest of every gap: the producer itself runs late, because packs or stages are unequal
                   or the order makes the rank wait

so `busy + warm-up + cool-down + communication + dependency = ranks * makespan`, up to rounding. Hops inside
the warm-up count as warm-up. A rank without actions is idle in cool-down for the whole makespan.
"""

from dataclasses import dataclass

import numpy as np

from evenload.simulate.simulate import Simulation
from evenload.types.pipeline import ActionColumns, PipelineTasks


@dataclass(frozen=True)
class Bubble:
    """Seconds summed over ranks; `makespan_s` is one rank's."""

    busy_s: float
    warmup_s: float
    cooldown_s: float
    communication_s: float
    dependency_s: float
    makespan_s: float
    num_ranks: int

    @property
    def fraction(self) -> float:
        """Idle share of all ranks' time, 0 for an empty schedule."""
        available_s = self.num_ranks * self.makespan_s
        idle_s = self.warmup_s + self.cooldown_s + self.communication_s + self.dependency_s
        return idle_s / available_s if available_s else 0.0


def split_bubble(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> Bubble:
    """Split the idle time of a simulated schedule.

    Args:
        simulation: of `tasks` and `actions`.
    """
    start, end = simulation.start_s, simulation.end_s
    produced_s = _producer_ends(tasks, actions, simulation)
    first = actions.rank_offset[:-1]
    last = actions.rank_offset[1:] - 1
    used = last >= first
    inner = np.ones(len(start), dtype=bool)
    inner[first[used]] = False  # an action with an earlier one on its rank
    inner = np.flatnonzero(inner)
    gap_s = start[inner] - end[inner - 1]
    # A start is the larger of the rank's last end and the arrival; in a gap it is the arrival.
    communication_s = np.where(gap_s > 0, start[inner] - np.maximum(end[inner - 1], produced_s[inner]), 0.0)
    return Bubble(
        busy_s=float((end - start).sum()),
        warmup_s=float(start[first[used]].sum()),
        cooldown_s=float((simulation.makespan_s - end[last[used]]).sum()) + simulation.makespan_s * int((~used).sum()),
        communication_s=float(communication_s.sum()),
        dependency_s=float((gap_s - communication_s).sum()),
        makespan_s=simulation.makespan_s,
        num_ranks=actions.num_ranks,
    )


def _producer_ends(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> np.ndarray:
    """float64[n]: when the neighbour stage's action that feeds each action ended; 0 where there is none."""
    most_packs = max(tasks.num_forward, tasks.num_backward)
    # A border of zeros around the stages stands for "no neighbour".
    ends = np.zeros((3, most_packs, tasks.num_stages + 2))
    direction = np.array([0, 1, 1, 2])[actions.kind]  # I stands for B; W is fed by its own stage
    ends[direction, actions.pack, actions.stage + 1] = simulation.end_s
    source = actions.stage + np.where(direction == 0, 0, 2)
    return np.where(direction == 2, 0.0, ends[direction, actions.pack, source])
