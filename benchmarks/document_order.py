"""Asymmetric cuts of documents longest first and shortest first, for `ablation.py`.

The planner's search always lays documents out longest first. `partition_by_work` takes any order, so here packs are
cut, priced and scheduled without the search; replicas are dealt by time, share no documents and are not evened out.
"""

from collections.abc import Sequence

import numpy as np

from evenload.cost.pipeline_tasks import pipeline_tasks
from evenload.plan.packing.bin_packing import assign_replicas
from evenload.plan.problem.candidate import Candidate, scheduled_candidate
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.search.trial_space import Setting, Trial
from references import partition_by_work


def choices_in_order(
    problem: StepProblem, counts: Sequence[int], schedule: str, *, longest_first: bool
) -> tuple[ReplicaChoice, ...]:
    """Every replica with its best number of packs.

    Args:
        counts: numbers of packs to try.
        schedule: one of `trial_space.ORDERS`.
    """
    rule = Trial(Setting("asymmetric", 1), schedule).rule()
    curves = (problem.costs.forward_work(), False), (problem.costs.backward_work(), True)
    best: list[ReplicaChoice] = []
    for documents in assign_replicas(problem.document_s, problem.layout.dp):
        tokens, policy = problem.num_tokens[documents], problem.policy_of(documents)
        order = np.argsort(-tokens if longest_first else tokens, kind="stable").astype(np.int32)
        made: list[Candidate] = []
        for count in counts:
            forward, backward = (
                partition_by_work(tokens, order, curve, count, last_first=last_first) for curve, last_first in curves
            )
            tasks = pipeline_tasks(problem.costs, forward, backward, tokens, policy)
            made.append(scheduled_candidate("", forward, backward, tasks, rule, problem.cap_bytes, policy))
        best.append(ReplicaChoice(documents, min(made, key=Candidate.score)))
    return tuple(best)
