"""`Candidate`: packs of one replica, priced, scheduled and simulated.

    SliceColumns ─► PipelineTasks (seconds, bytes, dependencies) ─► ActionColumns ─► Simulation ─► score

The score looks at time and memory together (oracle §2: memory, not balance, binds): a candidate within memory
beats any beyond it; within memory the shorter makespan wins, beyond it the smaller excess.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import pipeline_bytes
from evenload.cost.native_price import native_pipeline_tasks
from evenload.cost.pack_cost import PackCosts
from evenload.cost.split_backward import split_backward
from evenload.plan.options import PlanOptions
from evenload.schedule.one_f_one_b import one_f_one_b
from evenload.schedule.packflow import packflow_list, packflow_word
from evenload.simulate.simulate import Simulation, simulate
from evenload.types.backend import Backend
from evenload.types.columns import SliceColumns
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.timeline import KINDS
from evenload.types.work import sum_in_order

UNLIMITED_BYTES = 2**62
"""Cap of the list schedule where no memory limit is given."""
PACKFLOW_ORDERS = ("list", "list alternate", "word", "word inject")
"""Orders of PackFlow: the memory-capped list schedule, backward or forward first after a backward, and the static
word, catching up or injecting forwards."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to run a replica's documents.

    Args:
        label: how it was made, for reports: cuts, pack count, schedule.
        excess_bytes: peak above the memory limit on the worst rank; 0 = fits.
        policy: int8[k] of the replica's documents, indices into `cost.activation.POLICIES`; None = all replay.
        sharding: how ranks share every pack (`MicroPack.sharding`), forward and backward alike; None = "mixed" where
            they do.
    """

    label: str
    forward: SliceColumns
    backward: SliceColumns
    tasks: PipelineTasks
    actions: ActionColumns
    simulation: Simulation
    excess_bytes: int
    policy: NDArray[np.int8] | None = None
    sharding: tuple[str, ...] | None = None

    @property
    def makespan_s(self) -> float:
        """Seconds from the first forward to the last backward."""
        return self.simulation.makespan_s

    def score(self) -> tuple[int, float]:
        """Smaller is better."""
        return self.excess_bytes, self.makespan_s


def pipeline_tasks(
    costs: PackCosts,
    forward: SliceColumns,
    backward: SliceColumns,
    num_tokens: NDArray[np.int64],
    policy: NDArray[np.int8] | None = None,
    *,
    split: bool = False,
    backend: Backend = "native",
) -> PipelineTasks:
    """Price packs.

    Args:
        num_tokens: int64[k] of the replica's documents, indexed by `SliceColumns.doc`.
        policy: int8[k], indices into `cost.activation.POLICIES`; None = all replay.
        split: also price backwards as I and W.
    """
    if backend == "native":
        return native_pipeline_tasks(costs, forward, backward, num_tokens, policy, split=split)
    held = pipeline_bytes(costs.model, costs.layout, forward, backward, num_tokens, policy)
    tasks = PipelineTasks(
        forward_s=costs.pack_seconds(forward, "forward", policy),
        backward_s=costs.pack_seconds(backward, "backward", policy),
        p2p_forward_s=costs.p2p_seconds(forward),
        p2p_backward_s=costs.p2p_seconds(backward),
        forwards_needed=forwards_needed(forward, backward, num_tokens),
        stage_to_rank=np.array(costs.layout.stage_to_rank, np.int32),
        static_bytes=held.static_bytes,
        forward_kept_bytes=held.forward_kept_bytes,
        forward_temp_bytes=held.forward_temp_bytes,
        backward_freed_bytes=held.backward_freed_bytes,
        backward_temp_bytes=held.backward_temp_bytes,
    )
    return replace(tasks, split=split_backward(costs, tasks, backward, policy)) if split else tasks


def with_times_that_run(found: Candidate, tp: int) -> Candidate:
    """The same candidate, in whose times I and W of every backward add up to the whole, as plans promise.

    Under tensor parallelism parts that run take longer than the whole that does not (`cost.split_backward`). A backward
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


def forwards_needed(forward: SliceColumns, backward: SliceColumns, num_tokens: NDArray[np.int64]) -> NDArray[np.int32]:
    """`D[j]` of DESIGN §7: forward packs that hold any slice of a document of backward pack j; int32[m_b]."""
    last = np.zeros(len(num_tokens), np.int32)
    is_last = forward.stop == num_tokens[forward.doc]
    last[forward.doc[is_last]] = forward.pack_of_slice()[is_last] + 1
    needed = np.zeros(backward.num_packs, np.int32)
    # `at`, not `reduceat`: an empty pack must give 0, not its neighbour's value.
    np.maximum.at(needed, backward.pack_of_slice(), last[backward.doc])
    return needed


def candidate(
    label: str,
    forward: SliceColumns,
    backward: SliceColumns,
    tasks: PipelineTasks,
    actions: ActionColumns,
    cap_bytes: NDArray[np.int64] | None,
    options: PlanOptions,
    policy: NDArray[np.int8] | None = None,
) -> Candidate:
    """Simulate one schedule of priced packs."""
    simulation = simulate(tasks, actions, backend=options.backend)
    excess = 0 if cap_bytes is None else max(0, int((simulation.peak_bytes - cap_bytes).max()))
    return Candidate(label, forward, backward, tasks, actions, simulation, excess, policy)


def one_f_one_b_candidate(
    label: str,
    forward: SliceColumns,
    num_tokens: NDArray[np.int64],
    costs: PackCosts,
    cap_bytes: NDArray[np.int64] | None,
    options: PlanOptions,
    policy: NDArray[np.int8] | None = None,
) -> Candidate:
    """Whole documents, backward packs equal to forward packs, 1F1B: the form of the baselines."""
    tasks = pipeline_tasks(costs, forward, forward, num_tokens, policy, backend=options.backend)
    actions = one_f_one_b(tasks) if forward.num_packs else no_actions(tasks.num_ranks)
    return candidate(label, forward, forward, tasks, actions, cap_bytes, options, policy)


def packflow_candidate(
    label: str,
    forward: SliceColumns,
    backward: SliceColumns,
    tasks: PipelineTasks,
    order: str,
    cap_bytes: NDArray[np.int64] | None,
    options: PlanOptions,
    policy: NDArray[np.int8] | None = None,
    *,
    lookahead: int | None = None,
    split: bool = False,
) -> Candidate:
    """Priced packs under one of `PACKFLOW_ORDERS`.

    Args:
        lookahead, split: of the list schedule (`schedule.packflow`).
    """
    if not forward.num_packs:
        actions = no_actions(tasks.num_ranks)
    elif order.startswith("word"):
        actions = packflow_word(tasks, inject=order == "word inject")
    else:
        cap = np.full(tasks.num_ranks, UNLIMITED_BYTES, np.int64) if cap_bytes is None else cap_bytes
        actions = packflow_list(
            tasks,
            cap_bytes=cap,
            alternate=order == "list alternate",
            lookahead=lookahead,
            split=split,
            backend=options.backend,
        )
    return candidate(label, forward, backward, tasks, actions, cap_bytes, options, policy)


def no_actions(num_ranks: int) -> ActionColumns:
    """The schedule of a replica without documents."""
    return ActionColumns(
        kind=np.zeros(0, np.uint8),
        stage=np.zeros(0, np.int32),
        pack=np.zeros(0, np.int32),
        rank_offset=np.zeros(num_ranks + 1, np.int64),
    )


def imbalance(pack_s: NDArray[np.float64]) -> float:
    """max / mean over packs of the time on their slowest stage (as `types.pack_times`); 1 without packs."""
    if not len(pack_s):
        return 1.0
    slowest = pack_s.max(axis=1)
    total_s = sum_in_order(slowest)
    return float(slowest.max()) / (total_s / len(slowest)) if total_s else 1.0
