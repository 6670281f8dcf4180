"""The best of a search's trials as they run: never worse than its favourite, within host memory first."""

from dataclasses import replace

import numpy as np
import pytest

from evenload.cost.analytic import analytic_coefficients
from evenload.explore.stage_layers import usable_bytes
from evenload.hub.model_files import model_from
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.search.chosen_as_run import TRIED, chosen_as_run
from evenload.plan.search.found_step import FoundStep
from evenload.plan.search.halved_search import in_one_go, searched_as_if_halved
from evenload.plan.search.host_order import host_excess_bytes
from evenload.plan.sharing.as_run import as_run, choices_as_run
from evenload.plan.strategies.auto import searched, step_score
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout

DRAWN = np.sort(np.random.default_rng(3).lognormal(8.2, 1.2, 120).astype(np.int64) + 16)[::-1]
LENGTHS = np.minimum(DRAWN, 32_768)


def problem_in(policy: int | None = None, **sizes: int) -> StepProblem:
    model, cluster, layout = model_from("llama-7b"), cluster_from("h100x32"), even_layout(32, **sizes)
    planner = StepPlanner(
        model,
        analytic_coefficients(model, cluster, layout),
        layout,
        usable_bytes(cluster),
        PlanOptions(max_pack_tokens=32_768),
        host="unlimited",
    )
    caps = np.full(layout.pipeline_ranks, usable_bytes(cluster))
    policies = None if policy is None else np.full(len(LENGTHS), policy, np.int8)
    return StepProblem(np.arange(len(LENGTHS)), LENGTHS, planner.costs, caps, planner.options, policies)


def halved_step(problem: StepProblem) -> FoundStep:
    ((origin, found),) = searched_as_if_halved([problem], searched)
    assert origin is problem
    return found


@pytest.mark.parametrize("sizes", [{"tp": 8, "pp": 2, "dp": 2}, {"tp": 4, "pp": 4, "dp": 2, "virtual": 2}])
def test_never_worse_than_the_searchs_favourite(sizes) -> None:
    problem = problem_in(**sizes)
    found = halved_step(problem)
    favourite = tuple(
        replace(choice, candidate=as_run(problem, in_one_go(problem, choice))) for choice in found.choices()
    )
    chosen = chosen_as_run(problem, found, in_one_go)
    assert step_score(chosen) <= step_score(favourite)
    for one, other in zip(chosen, favourite, strict=True):
        assert one.documents.tolist() == other.documents.tolist()


def test_the_slowest_replica_has_nothing_better_among_its_best_settings() -> None:
    """By brute force over the trials that are tried, in the order that the search gives them."""
    problem = problem_in(tp=8, pp=2)
    found = halved_step(problem)
    (chosen,) = chosen_as_run(problem, found, in_one_go)
    settings = list(dict.fromkeys(trial.setting for trial in found.own[0].ranking()))[:TRIED]
    assert len(settings) > 1
    shared = found.shared()
    for setting in settings:
        trial = next(trial for trial in found.own[0].ranking() if trial.setting == setting)
        made = as_run(problem, in_one_go(problem, found.choice(0, shared, trial)))
        assert chosen.candidate.score() <= made.score(), trial


def test_where_the_searchs_price_is_what_runs_its_favourite_is_taken() -> None:
    problem = problem_in(pp=4, dp=2)
    ((_, found),) = searched([problem])
    chosen = chosen_as_run(problem, found, lambda _, choice: choice.candidate)
    assert step_score(chosen) == step_score(choices_as_run(problem, found.choices()))


def test_what_host_memory_lacks_counts_before_seconds() -> None:
    """Under a limit that the fastest packs exceed in any order, others are taken that do not."""
    free = replace(problem_in(policy=2, tp=8, pp=2), host_device_bytes=2**62)
    found = halved_step(free)

    def held(choice: ReplicaChoice) -> int:
        return host_excess_bytes(replace(free, host_device_bytes=0), choice)

    (fastest,) = chosen_as_run(free, found, in_one_go)
    limited = replace(free, host_device_bytes=int(0.8 * held(fastest)))
    (chosen,) = chosen_as_run(limited, found, in_one_go)
    assert held(chosen) < held(fastest)
    assert host_excess_bytes(limited, chosen) == 0
    assert chosen.candidate.makespan_s >= fastest.candidate.makespan_s
