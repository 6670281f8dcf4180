"""The score of a trial step by step: cut, price, schedule and simulate with the references beside this file."""

import numpy as np

from evenload.planning.candidates import Order, ReplicaSearch, Trial, TrialScore, cut_rules
from evenload.planning.problem import imbalance
from evenload.schedule.packflow import packflow_static
from evenload.schedule.schedule_rule import UNLIMITED_BYTES
from reference.cuts import cut_packs
from reference.list_schedule import list_schedule
from reference.prices import pipeline_tasks
from reference.simulation import reference_simulation


def score_of(search: ReplicaSearch, trial: Trial) -> TrialScore | None:
    """What `evenload.planning.candidates.score` must find; None where the packs do not exist."""
    problem = search.problem
    packs = cut_packs(cut_rules(problem), search.num_tokens, trial.setting, search.ranks, search.trees)
    if packs is None or (trial.split and problem.layout.num_stages == 1):
        return None
    tasks = pipeline_tasks(problem.costs, problem.packs_of(search.documents, *packs), split=trial.split)
    assert isinstance(trial.order, Order)
    if trial.order.is_static:
        actions = packflow_static(tasks, inject=trial.order is Order.STATIC_INJECT)
    else:
        limited = problem.cap_bytes is not None
        actions = list_schedule(
            tasks,
            cap_bytes=problem.cap_bytes if limited else np.full(tasks.num_ranks, UNLIMITED_BYTES),
            alternate=trial.order is Order.LIST_ALTERNATE,
            lookahead=trial.lookahead,
            split=trial.split,
        )
    result = reference_simulation(tasks, actions)
    excess = 0 if problem.cap_bytes is None else max(0, int((result.peak_bytes - problem.cap_bytes).max()))
    makespan_s = float(result.end_s.max(initial=0.0))
    return TrialScore(excess, makespan_s, imbalance(tasks.forward_s), imbalance(tasks.backward_s))
