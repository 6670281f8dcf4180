"""Packs of whole documents for all replicas: shared out, priced in one go, one schedule each.

    shares: per replica, per pack, documents ─► one long SliceColumns ─► prices ─► rows of each replica ─► simulation

A replica's packs are consecutive rows of the step's, so numpy's fixed cost is paid once a step and not once a replica;
replicas with equally many packs share one schedule. O(documents + packs · stages).

Evenly shared, replicas have equal counts and equal time: longest first by time with at most ceil(packs / dp) a replica,
so that no pipeline runs one more than another. Inside a replica the longest go first: the pipeline drains on short
ones. O(n log n).
"""

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pipeline_tasks import pipeline_tasks
from evenload.plan.packing.bin_packing import longest_first
from evenload.plan.problem.candidate import candidate
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.schedule.static_schedules import ONE_F_ONE_B
from evenload.types.columns import SliceColumns, whole_document_columns
from evenload.types.counted import counted
from evenload.types.pipeline import ActionColumns, PipelineTasks

Shares = list[list[list[int]]]
"""Per replica, per pack, document indices of the problem."""


@dataclass(frozen=True, eq=False)
class PricedPacks:
    """All packs of a step, replica after replica.

    Args:
        documents: int64[n], indices of the problem in pack order; `columns.doc` counts these.
        columns: the packs, forward and backward alike.
        tasks: prices and bytes of all packs as if they were one replica's.
        first_pack: int64[dp + 1]; replica r has packs `[first_pack[r], first_pack[r + 1])`.
    """

    documents: NDArray[np.int64]
    columns: SliceColumns
    tasks: PipelineTasks
    first_pack: NDArray[np.int64]


def assign_evenly(problem: StepProblem, groups: list[list[int]], note: str = "") -> tuple[ReplicaChoice, ...]:
    """Whole documents of every micro-batch to replicas; empty ones are left out."""
    return run_packs(problem, price_packs(problem, even_shares(problem, groups)), note)


def assign_in_turn(problem: StepProblem, packs: list[list[int]], *, padded: bool = False) -> tuple[ReplicaChoice, ...]:
    """Pack i goes to replica `i mod dp`; 1F1B in that order."""
    shares = [packs[dp_rank :: problem.layout.dp] for dp_rank in range(problem.layout.dp)]
    return run_packs(problem, price_packs(problem, shares, padded=padded))


def even_shares(problem: StepProblem, groups: list[list[int]]) -> Shares:
    """The micro-batches of every replica; empty ones are left out."""
    groups = [group for group in groups if group]
    dp = problem.layout.dp
    group_of = np.repeat(np.arange(len(groups)), np.array([len(group) for group in groups], np.int64))
    documents = np.array(list(chain.from_iterable(groups)), np.int64)
    group_s = np.bincount(group_of, weights=problem.document_s[documents], minlength=len(groups)).astype(np.float64)
    one_each = np.ones(len(groups), np.int64)
    shares = longest_first(group_s, dp, num_tokens=one_each, capacity=max(1, -(-len(groups) // dp)))
    return [[groups[index] for index in share] for share in shares]


def price_packs(problem: StepProblem, shares: Shares, *, padded: bool = False) -> PricedPacks:
    """Price every pack of every replica."""
    packs = [pack for share in shares for pack in share]
    columns = whole_document_columns(packs, problem.num_tokens, problem.layout.cp, padded=padded)
    documents = columns.doc.astype(np.int64)
    columns = replace(columns, doc=np.arange(len(documents), dtype=np.int32))
    split = problem.options.rule(ONE_F_ONE_B).splits_backward
    tasks = pipeline_tasks(problem.costs, columns, columns, columns.stop, problem.policy_of(documents), split=split)
    first_pack = np.concatenate([[0], np.cumsum([len(share) for share in shares])]).astype(np.int64)
    return PricedPacks(documents, columns, tasks, first_pack)


def run_packs(problem: StepProblem, priced: PricedPacks, note: str = "") -> tuple[ReplicaChoice, ...]:
    """Every replica's packs in the order given, under the schedule that was asked for (1F1B), simulated."""
    choices: list[ReplicaChoice] = []
    rule = problem.options.rule(ONE_F_ONE_B)
    actions: dict[int, ActionColumns] = {}
    for first, last in zip(priced.first_pack[:-1].tolist(), priced.first_pack[1:].tolist(), strict=True):
        count = last - first
        lo, hi = priced.columns.pack_offset[[first, last]].tolist()
        columns = priced.columns.pack_range(first, last)
        columns = replace(columns, doc=np.arange(hi - lo, dtype=np.int32))
        tasks = priced.tasks.rows(first, last)
        if rule.reads_times or count not in actions:
            actions[count] = rule.actions(tasks, problem.cap_bytes)
        documents = priced.documents[lo:hi]
        found = candidate(
            f"{counted(count, 'pack')}, {rule.name}",
            columns,
            columns,
            tasks,
            actions[count],
            problem.cap_bytes,
            problem.policy_of(documents),
            schedule=rule.name,
        )
        choices.append(ReplicaChoice(documents, found, note))
    return tuple(choices)
