"""`Candidate`: packs of one replica, priced, scheduled and simulated.

    SliceColumns ─► PipelineTasks (seconds, bytes, dependencies) ─► ActionColumns ─► Simulation ─► score

The score looks at time and memory together (memory, not balance, binds): a candidate within memory
beats any beyond it; within memory the shorter makespan wins, beyond it the smaller excess.
"""

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from evenload.schedule.schedule_rule import ScheduleRule
from evenload.schedule.simulate import Simulation, simulate
from evenload.schedule.step_ends import SimulatedReplica
from evenload.types.columns import SliceColumns
from evenload.types.micropack import PackSharding
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.plan import PackTimes
from evenload.types.timeline import KINDS


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to run a replica's documents.

    Args:
        label: how it was made, for reports: cuts, pack count, schedule.
        excess_bytes: peak above the memory limit on the worst rank; 0 = fits.
        policy: int8[k] of the replica's documents, indices into `cost.layer_counts.POLICIES`; None = all replay.
        schedule: name of the rule that ordered the packs.
        shardings: how ranks share each forward pack (`MicroPack.sharding`), whose slowest rank's seconds `tasks` has;
            None = not decided yet, and seconds are means over ranks (`plan.sharing.as_run`).
    """

    label: str
    forward: SliceColumns
    backward: SliceColumns
    tasks: PipelineTasks
    actions: ActionColumns
    simulation: Simulation
    excess_bytes: int
    policy: NDArray[np.int8] | None = None
    schedule: str = ""
    shardings: tuple[PackSharding, ...] | None = None

    @property
    def makespan_s(self) -> float:
        """Seconds from the first forward to the last backward."""
        return self.simulation.makespan_s

    def simulated(self) -> SimulatedReplica:
        """What start and end of the step follow from."""
        return SimulatedReplica(self.forward, self.backward, self.tasks, self.actions, self.simulation)

    def score(self) -> tuple[int, float]:
        """Smaller is better."""
        return self.excess_bytes, self.makespan_s

    def pack_times(self) -> PackTimes:
        """The seconds that a plan records."""
        tasks, split = self.tasks, self.tasks.split
        return PackTimes(
            forward_s=_rows(tasks.forward_s),
            backward_s=_rows(tasks.backward_s),
            p2p_forward_s=tuple(tasks.p2p_forward_s.tolist()),
            p2p_backward_s=tuple(tasks.p2p_backward_s.tolist()),
            input_s=_rows(split.input_s) if split else (),
            weight_s=_rows(split.weight_s) if split else (),
        )


def with_times_that_run(found: Candidate, tp: int) -> Candidate:
    """The same candidate, in whose times I and W of every backward add up to the whole, as plans promise.

    Under tensor parallelism parts that run take longer than the whole that does not (`cost.pipeline_tasks`). A backward
    runs one way or the other on a stage, so seconds of the way that does not run follow those of the way that does.
    """
    tasks, split = found.tasks, found.tasks.split
    if tp == 1 or split is None:
        return found
    weights = found.actions.kind == KINDS.index("W")
    is_split = np.zeros(tasks.backward_s.shape, bool)
    is_split[found.actions.pack[weights], found.actions.stage[weights]] = True
    parts = replace(split, weight_s=np.where(is_split, split.weight_s, tasks.backward_s - split.input_s))
    whole_s = np.where(is_split, split.input_s + split.weight_s, tasks.backward_s)
    return replace(found, tasks=replace(tasks, backward_s=whole_s, split=parts))


def candidate(
    label: str,
    forward: SliceColumns,
    backward: SliceColumns,
    tasks: PipelineTasks,
    actions: ActionColumns,
    cap_bytes: NDArray[np.int64] | None,
    policy: NDArray[np.int8] | None = None,
    *,
    schedule: str,
) -> Candidate:
    """Simulate one order of priced packs; `schedule` names the rule that made it."""
    simulation = simulate(tasks, actions)
    excess = _excess_bytes(simulation, cap_bytes)
    return Candidate(label, forward, backward, tasks, actions, simulation, excess, policy, schedule)


def in_order(
    found: Candidate,
    actions: ActionColumns,
    cap_bytes: NDArray[np.int64] | None,
    *,
    tasks: PipelineTasks | None = None,
) -> Candidate:
    """The same packs in another order, or with other seconds (`tasks`), simulated."""
    tasks = found.tasks if tasks is None else tasks
    simulation = simulate(tasks, actions)
    excess = _excess_bytes(simulation, cap_bytes)
    return replace(found, tasks=tasks, actions=actions, simulation=simulation, excess_bytes=excess)


def _excess_bytes(simulation: Simulation, cap_bytes: NDArray[np.int64] | None) -> int:
    """Above the limit, on the worst rank."""
    return 0 if cap_bytes is None else max(0, int((simulation.peak_bytes - cap_bytes).max()))


def scheduled_candidate(
    label: str,
    forward: SliceColumns,
    backward: SliceColumns,
    tasks: PipelineTasks,
    rule: ScheduleRule,
    cap_bytes: NDArray[np.int64] | None,
    policy: NDArray[np.int8] | None = None,
) -> Candidate:
    """Priced packs under a schedule, which label and report name; a `ConfigError` where it does not suit them."""
    actions = rule.actions(tasks, cap_bytes)
    return candidate(f"{label}, {rule.name}", forward, backward, tasks, actions, cap_bytes, policy, schedule=rule.name)


def imbalance(pack_s: NDArray[np.float64]) -> float:
    """max / mean over packs of the time on their slowest stage (as `types.pack_times`); 1 without packs."""
    if not len(pack_s):
        return 1.0
    slowest = pack_s.max(axis=1)
    return float(slowest.max() / slowest.mean()) if slowest.any() else 1.0


def _rows(seconds: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return cast("tuple[tuple[float, ...], ...]", tuple(map(tuple, seconds.tolist())))
