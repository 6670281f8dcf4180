"""Where a pipeline's idle time goes. O(actions) in practice, see below.

Every rank's share of the makespan is busy time or one of five kinds of idle time:

    warm-up        before its first action: the pipeline fills
    cool-down      after its last action: the other ranks drain
    communication, imbalance, dependency    the gaps between its actions

A gap is explained by the chain of actions and hops that made the rank wait (`simulate/critical_path.py`): followed
back from the action after the gap, it covers the gap without a hole. What the chain spends in

    hops                                                         is communication,
    actions, beyond the mean of their kind (their last part)     is imbalance: packs or stages are unequal,
    the rest of actions                                          is dependency: with equal actions in this order
                                                                 the rank would wait as well

so `busy + warm-up + cool-down + communication + imbalance + dependency = ranks * makespan`, up to rounding. The mean is
over packs and stages, of each kind of action on its own. Hops and imbalance inside the warm-up count as warm-up. A
rank without actions is idle in cool-down for the whole makespan.

Price: one numpy pass for every action of the longest chain inside one gap; chains are short, about one action a
stage, because their actions follow each other in time within the gap.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.simulate.critical_path import binding_predecessors
from evenload.simulate.simulate import Simulation
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.timeline import KINDS


@dataclass(frozen=True)
class Bubble:
    """Seconds summed over ranks; `makespan_s` is one rank's."""

    busy_s: float
    warmup_s: float
    cooldown_s: float
    communication_s: float
    imbalance_s: float
    dependency_s: float
    makespan_s: float
    num_ranks: int

    @property
    def idle_s(self) -> float:
        """All but busy time."""
        return self.warmup_s + self.cooldown_s + self.communication_s + self.imbalance_s + self.dependency_s

    @property
    def fraction(self) -> float:
        """Idle share of all ranks' time, 0 for an empty schedule."""
        available_s = self.num_ranks * self.makespan_s
        return self.idle_s / available_s if available_s else 0.0


def split_bubble(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> Bubble:
    """Split the idle time of a simulated schedule.

    Args:
        simulation: of `tasks` and `actions`.
    """
    start, end = simulation.start_s, simulation.end_s
    first = actions.rank_offset[:-1]
    last = actions.rank_offset[1:] - 1
    used = last >= first
    communication_s, imbalance_s, dependency_s = _split_gaps(tasks, actions, simulation)
    return Bubble(
        busy_s=float((end - start).sum()),
        warmup_s=float(start[first[used]].sum()),
        cooldown_s=float((simulation.makespan_s - end[last[used]]).sum()) + simulation.makespan_s * int((~used).sum()),
        communication_s=communication_s,
        imbalance_s=imbalance_s,
        dependency_s=dependency_s,
        makespan_s=simulation.makespan_s,
        num_ranks=actions.num_ranks,
    )


def _split_gaps(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> tuple[float, float, float]:
    """(communication, imbalance, dependency) seconds of all gaps."""
    start, end = simulation.start_s, simulation.end_s
    source = binding_predecessors(tasks, actions, simulation).source
    beyond_s = _seconds_beyond_mean(actions.kind, end - start)
    inner = np.ones(len(start), dtype=bool)
    inner[actions.rank_offset[:-1][np.diff(actions.rank_offset) > 0]] = False
    at = np.flatnonzero(inner)  # actions with an earlier one on their rank
    low = end[at - 1]
    waits = start[at] > low
    at, low = at[waits], low[waits]
    communication_s = imbalance_s = dependency_s = 0.0
    while len(at):
        # From the start of `at` back to the end of what it waited for: a hop, or nothing on the same rank.
        producer = source[at]
        arrived = np.maximum(low, end[producer])
        communication_s += float((start[at] - arrived).sum())
        computed_s = arrived - np.maximum(low, np.minimum(arrived, start[producer]))
        unequal_s = np.minimum(computed_s, beyond_s[producer])
        imbalance_s += float(unequal_s.sum())
        dependency_s += float((computed_s - unequal_s).sum())
        more = start[producer] > low  # then its start is later than the step's, so it has a producer, too
        at, low = producer[more], low[more]
    return communication_s, imbalance_s, dependency_s


def _seconds_beyond_mean(kind: NDArray[np.uint8], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """By how much each action takes longer than the mean of its kind; float64[n], 0 where it does not."""
    counts = np.bincount(kind, minlength=len(KINDS))
    means = np.bincount(kind, weights=seconds, minlength=len(KINDS)) / np.maximum(counts, 1)
    beyond = seconds - means[kind]
    # Sums of equal numbers round: what is below a billionth of the mean is no inequality.
    return np.where(beyond > 1e-9 * means[kind], beyond, 0.0)
