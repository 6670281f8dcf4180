"""One neutral judge for every planner: the same cost model, pipeline simulator and checks.

A peer's packs are whole documents and run in 1F1B, as the frameworks they come from run them; Evenload's strategies
bring their own packs and schedules. All run in Evenload's runtime, so what it does with any pack it does with a peer's:
the sharding of packs that context ranks share. All times are predictions of
Evenload's analytic cost model, simulated.

Twice: once as if memory did not matter, which shows the plan alone, and once within a device's memory, where every
plan may store, recompute or offload activations by the same ladder (`plan.search.policy_order`), offloading within its
nodes' host memory (`plan.search.host_limit`), and takes the first storing level that fits, or else the fastest of the
others that does.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import POLICIES
from evenload.cost.host_memory import HostMemory
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pipeline_tasks import pipeline_tasks
from evenload.plan.deferral.delay import DelayedChoice
from evenload.plan.problem.candidate import imbalance, scheduled_candidate
from evenload.plan.problem.options import PlanOptions
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.search.host_limit import offloaded_node_bytes, plan_within_host
from evenload.plan.search.policy_choice import worst_score
from evenload.plan.search.policy_order import policies_in_order
from evenload.plan.sharing.as_run import choices_as_run
from evenload.schedule.static_schedules import ONE_F_ONE_B
from evenload.types.columns import SliceColumns, whole_document_columns


@dataclass(frozen=True)
class Score:
    """What a plan is worth.

    Args:
        packs: forward packs of all replicas; one that some of them share is a pack of each.
        fill: tokens over `packs · capacity`.
        dropped: documents that no pack holds.
        over_cap: packs, forward and backward, above the capacity.
        pack_forward, pack_backward: max/mean time over the packs of a replica, each on its slowest stage; the worst
            replica. Packs of different replicas need not be alike: they never wait for each other.
        dp: max/mean forward + backward time over replicas.
        step_s: simulated, slowest replica plus gradient reduction and optimizer.
        fraction: lower bound / `step_s`.
        peak_gib: fullest pipeline rank when everything is stored.
        within_s, within_fraction: the same within a device's memory; None = it does not fit by any policy.
        within_policy: what documents keep then, the longest first.
    """

    packs: int
    fill: float
    dropped: int
    over_cap: int
    pack_forward: float
    pack_backward: float
    dp: float
    step_s: float
    fraction: float
    peak_gib: float
    within_s: float | None
    within_fraction: float | None
    within_policy: str


def whole_documents(
    replicas: list[list[list[int]]], lengths: NDArray[np.int64], costs: PackCosts
) -> tuple[ReplicaChoice, ...]:
    """Packs of whole documents in 1F1B, in the given order, as they run where memory does not matter."""
    problem = StepProblem(np.arange(len(lengths)), lengths, costs, None, PlanOptions())
    return choices_as_run(problem, _priced(replicas, lengths, costs))


def _priced(
    replicas: list[list[list[int]]],
    lengths: NDArray[np.int64],
    costs: PackCosts,
    cap_bytes: int | None = None,
    policy: NDArray[np.int8] | None = None,
) -> tuple[ReplicaChoice, ...]:
    """As planners compare them, in one go, and in the mean over the ranks that share a pack.

    Args:
        policy: int8[n] of all documents; None = all replay.
    """
    cap = None if cap_bytes is None else np.full(costs.layout.pp, cap_bytes, dtype=np.int64)
    choices = []
    for packs in replicas:
        packs = [pack for pack in packs if pack]
        documents = np.array([index for pack in packs for index in pack], dtype=np.int64)
        edges = np.cumsum([0, *map(len, packs)]).tolist()
        groups = [list(range(lo, hi)) for lo, hi in itertools.pairwise(edges)]
        num_tokens = lengths[documents]
        columns = whole_document_columns(groups, num_tokens, costs.layout.cp)
        own = None if policy is None else policy[documents]
        tasks = pipeline_tasks(costs, columns, columns, num_tokens, own)
        found = scheduled_candidate(f"{len(packs)} packs", columns, columns, tasks, ONE_F_ONE_B, cap, own)
        choices.append(ReplicaChoice(documents, found))
    return tuple(choices)


def whole_documents_within(
    replicas: list[list[list[int]]], lengths: NDArray[np.int64], costs: PackCosts, cap_bytes: int, host: HostMemory
) -> tuple[ReplicaChoice, ...] | None:
    """The same under the fastest policy that fits memory, of devices and of nodes; None where none does."""
    ids, can_offload = np.arange(len(lengths)), costs.coefficients.host_link is not None
    problems = [
        StepProblem(ids, lengths, costs, None, PlanOptions(), policy)
        for policy in policies_in_order(lengths, "choose", can_offload=can_offload)
    ]

    def fastest(problems: Sequence[StepProblem]) -> tuple[StepProblem, DelayedChoice]:
        found: list[tuple[tuple[int, float], StepProblem, tuple[ReplicaChoice, ...]]] = []
        for problem in problems:
            choices = _priced(replicas, lengths, costs, cap_bytes, problem.policy)
            found.append((worst_score(choices), problem, choices))
            if problem.policy is None and not found[-1][0][0]:
                break  # every other policy costs time
        _, problem, choices = min(found, key=lambda one: one[0])
        return problem, DelayedChoice(choices)

    def host_bytes(problem: StepProblem, choices: Sequence[ReplicaChoice]) -> int:
        return offloaded_node_bytes(costs, lengths, choices, host.devices_per_node)

    problem, answer, _ = plan_within_host(problems, fastest, host_bytes, host)
    return None if worst_score(answer.choices)[0] else choices_as_run(problem, answer.choices)


def score_choices(
    choices: tuple[ReplicaChoice, ...],
    within: tuple[ReplicaChoice, ...] | None,
    lengths: NDArray[np.int64],
    costs: PackCosts,
    capacity: int,
) -> Score:
    """Check and judge a plan.

    Args:
        choices: of every replica, memory ignored; `documents` index `lengths`.
        within: the same within memory; None = it does not fit.

    Raises:
        AssertionError: a document that is placed twice, or in part, or that replicas share otherwise than all alike.
    """
    found = [choice.candidate for choice in choices]
    placed = _placed_once(choices, lengths, costs.layout.cp)
    pack_tokens = [columns.rank_tokens() for one in found for columns in (one.forward, one.backward)]
    packs = sum(one.forward.num_packs for one in found)
    busy_s = np.array([one.tasks.forward_s.sum() + one.tasks.backward_s.sum() for one in found])
    step_s = _step_seconds(choices, costs)
    bound_s = costs.lower_bound_seconds(lengths[placed])
    within_s = None
    if within is not None:
        same = _placed_once(within, lengths, costs.layout.cp) == placed
        assert same.all(), "fewer documents are trained within memory"
        within_s = _step_seconds(within, costs)
    peak_bytes = max(int(one.simulation.peak_bytes.max()) for one in found)
    return Score(
        packs=packs,
        fill=float(lengths[placed].sum()) / (packs * capacity),
        dropped=int((~placed).sum()),
        over_cap=int(sum((tokens > capacity).sum() for tokens in pack_tokens)),
        pack_forward=max(imbalance(one.tasks.forward_s) for one in found),
        pack_backward=max(imbalance(one.tasks.backward_s) for one in found),
        dp=float(busy_s.max() / busy_s.mean()),
        step_s=step_s,
        fraction=bound_s / step_s,
        peak_gib=peak_bytes / 2**30,
        within_s=within_s,
        within_fraction=None if within_s is None else bound_s / within_s,
        within_policy="" if within is None else _policy_name(within, lengths),
    )


def _step_seconds(choices: tuple[ReplicaChoice, ...], costs: PackCosts) -> float:
    slowest_s = max(choice.candidate.makespan_s for choice in choices)
    return slowest_s + costs.reduction_seconds() + costs.optimizer_seconds()


def _policy_name(choices: tuple[ReplicaChoice, ...], lengths: NDArray[np.int64]) -> str:
    """Policies from the longest document to the shortest, each once."""
    codes = np.zeros(len(lengths), dtype=np.int64)
    for choice in choices:
        if choice.candidate.policy is not None:
            codes[choice.documents] = choice.candidate.policy
    by_length = codes[np.argsort(-lengths, kind="stable")].tolist()
    return " + ".join(POLICIES[code] for code in dict.fromkeys(by_length))


def _placed_once(choices: tuple[ReplicaChoice, ...], lengths: NDArray[np.int64], cp: int) -> NDArray[np.bool_]:
    """bool[n]: documents that are trained; every token of them once each way.

    A slice that ranks of several replicas share is listed by each of these, and counts for its part.
    """
    placed = np.zeros(len(lengths), dtype=bool)
    for choice in choices:
        placed[choice.documents] = True
    for way in ("forward", "backward"):
        tokens = np.zeros(len(lengths))
        for choice in choices:
            columns: SliceColumns = getattr(choice.candidate, way)
            np.add.at(tokens, choice.documents[columns.doc], (columns.stop - columns.start) * cp / columns.cp)
        assert np.allclose(tokens, np.where(placed, lengths, 0), rtol=1e-9), "a document is trained in part, or twice"
    return placed
