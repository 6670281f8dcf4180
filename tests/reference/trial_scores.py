"""The score of a trial step by step: cut, price, schedule and simulate with the references beside this file."""

import numpy as np

from evenload.plan.problem.candidate import imbalance
from evenload.plan.search.replica_search import ReplicaSearch, TrialScore
from evenload.plan.search.trial_packs import cut_rules
from evenload.plan.search.trial_space import Trial
from evenload.schedule.packflow import packflow_static
from evenload.schedule.schedule_rule import UNLIMITED_BYTES
from reference.cuts import cut_packs
from reference.list_schedule import list_schedule
from reference.prices import pipeline_tasks
from reference.simulation import reference_simulation


def score_of(search: ReplicaSearch, trial: Trial) -> TrialScore | None:
    """What `evenload.plan.search.replica_search.score` must find; None where the packs do not exist."""
    problem = search.problem
    packs = cut_packs(cut_rules(problem), search.num_tokens, trial.setting, search.ranks)
    if packs is None or (trial.split and problem.layout.num_stages == 1):
        return None
    tasks = pipeline_tasks(problem.costs, *packs, search.num_tokens, search.policy, split=trial.split)
    if trial.order.startswith("static"):
        actions = packflow_static(tasks, inject=trial.order == "static inject")
    else:
        limited = problem.cap_bytes is not None
        actions = list_schedule(
            tasks,
            cap_bytes=problem.cap_bytes if limited else np.full(tasks.num_ranks, UNLIMITED_BYTES),
            alternate=trial.order == "list alternate",
            lookahead=trial.lookahead,
            split=trial.split,
        )
    found = reference_simulation(tasks, actions)
    excess = 0 if problem.cap_bytes is None else max(0, int((found.peak_bytes - problem.cap_bytes).max()))
    makespan_s = float(found.end_s.max(initial=0.0))
    return TrialScore(excess, makespan_s, imbalance(tasks.forward_s), imbalance(tasks.backward_s))
