"""Trees of shared prefixes are cut into slices of equal work and dealt by it; the core cuts as its reference does."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError
from evenload.explore.timelines import split_step_of_plan
from evenload.planning.candidates import (
    CUTS,
    TAPERS,
    Order,
    ReplicaSearch,
    Setting,
    Trial,
    cut_rules,
    score,
    trial_packs,
)
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions, StepProblem
from evenload.planning.strategies.registry import STRATEGIES
from evenload.schedule.simulate import simulate
from evenload.stepplan.resimulation import replica_columns, tasks_of_columns
from evenload.stepplan.validate import validate_plan
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.pipeline import action_columns
from evenload.types.tree_columns import TreeColumns
from reference.cuts import cut_packs
from reference.slice_work import rows_work_s
from reference.trial_scores import score_of
from tree_samples import branched, documents_with_trees, group_of, plain_document, tree_document


def problem_of(
    documents: tuple[Document, ...],
    *,
    limit: int | None = None,
    low: int = 1,
    pp: int = 3,
    windows: tuple[int, ...] = (),
    tile: int = 1,
) -> StepProblem:
    model = sample_model(num_layers=6, sliding_windows=windows)
    return StepProblem(
        np.array([one.doc_id for one in documents]),
        np.array([one.num_tokens for one in documents], np.int64),
        PackCosts(model, sample_coefficients(attention_tile=tile), even_layout(6, pp=pp)),
        None,
        PlanOptions(max_pack_tokens=limit, min_slice_tokens=low),
        trees=TreeColumns.of(documents),
    )


SETTINGS = st.builds(
    Setting,
    cut=st.sampled_from(CUTS),
    num_packs=st.integers(1, 24),
    token_weight=st.integers(1, 2),
    taper=st.sampled_from(TAPERS),
)
PROBLEMS = {
    "limit": st.sampled_from([None, 64, 300]),
    "low": st.sampled_from([1, 5]),
    "windows": st.sampled_from([(), (0, 16, 0, 16, 0, 16), (32,) * 6, (-24,) * 6]),
    "tile": st.sampled_from([1, 4]),
}


@settings(max_examples=200, deadline=None)
@given(documents_with_trees(most_tokens=120), SETTINGS, st.fixed_dictionaries(PROBLEMS))
def test_cuts_of_trees_equal_their_reference(documents: tuple[Document, ...], setting: Setting, changes: dict) -> None:
    problem = problem_of(documents, **changes)
    rules = cut_rules(problem)
    core = trial_packs(problem, rules, problem.num_tokens, setting, 1, problem.trees)
    reference = cut_packs(rules, problem.num_tokens, setting, 1, problem.trees)
    assert (core is None) == (reference is None)
    for one, other in zip(core or (), reference or (), strict=True):
        for name in ("pack_offset", "doc", "start", "stop"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


@settings(max_examples=60, deadline=None)
@given(
    documents_with_trees(most_tokens=60),
    st.lists(
        st.builds(Trial, setting=SETTINGS, order=st.sampled_from(Order), lookahead=st.sampled_from([None, 0])),
        min_size=1,
        max_size=9,
    ),
)
def test_scores_of_trees_equal_their_reference(documents: tuple[Document, ...], trials: list[Trial]) -> None:
    search = ReplicaSearch(problem_of(documents, limit=200), np.arange(len(documents)))
    score([(search, trials)])
    for trial, result in search.scores.items():
        expected = score_of(search, trial)
        assert (result is None) == (expected is None)
        if result and expected:
            assert result[:2] == expected[:2]
            assert result[2:] == pytest.approx(expected[2:])  # numpy's mean adds in another order


@settings(max_examples=60, deadline=None)
@given(documents_with_trees(most_tokens=200, most=3), st.integers(2, 9))
def test_asymmetric_packs_are_equal_to_a_row(documents: tuple[Document, ...], num_packs: int) -> None:
    """A border lies nearest to its share of the work, so packs differ by the dearest row and a piece's constant."""
    problem = problem_of(documents)
    rules = cut_rules(problem)
    packs = trial_packs(problem, rules, problem.num_tokens, Setting("asymmetric", num_packs), 1, problem.trees)
    assert packs is not None
    for curve, columns in zip((rules.forward, rules.backward), packs, strict=True):
        bare = dataclasses.replace(curve, slice_s=0.0)
        works = columns.pack_sums(
            np.array(
                [
                    rows_work_s(bare, problem.trees, doc, start, stop)
                    for doc, start, stop in zip(
                        columns.doc.tolist(), columns.start.tolist(), columns.stop.tolist(), strict=True
                    )
                ]
            )
        )
        edges = [(doc, row) for doc, one in enumerate(documents) for row in range(one.num_tokens)]
        dearest_s = max(rows_work_s(bare, problem.trees, doc, row, row + 1) for doc, row in edges)
        constants_s = curve.slice_s * (1 + int(problem.trees.count.max()) + len(documents))
        assert works.max() - works.min() <= 2 * dearest_s + constants_s


def mixed_step() -> tuple[Document, ...]:
    rng = np.random.default_rng(3)
    groups = [group_of(400, rng.integers(20, 800, 8).tolist()) for _ in range(5)]
    agents = [branched(rng.integers(50, 300, 15).tolist(), rng.integers(0, 3, 15).tolist()) for _ in range(3)]
    trees = [tree_document(at, segments) for at, segments in enumerate([*groups, *agents])]
    return (*trees, *(plain_document(100 + at, int(n)) for at, n in enumerate(rng.integers(20, 2000, 12))))


def planner_of(dp: int, pp: int, **options) -> StepPlanner:
    return StepPlanner(
        sample_model(), sample_coefficients(attention_tile=8), even_layout(3, dp=dp, pp=pp), None,
        PlanOptions(**options), host="unlimited",
    )  # fmt: skip


@pytest.mark.parametrize("strategy", ["slimpack", "auto", "balanced", "best_fit", "sequential"])
def test_plans_of_trees_and_documents_hold(strategy: str) -> None:
    planner, documents = planner_of(2, 3, max_pack_tokens=8000), mixed_step()
    plan = planner.plan(0, documents, strategy)
    validate_plan(plan, max_pack_tokens=8000)
    lengths, trees = np.array([one.num_tokens for one in documents]), TreeColumns.of(documents)
    assert plan.predicted.step_time_s >= planner.costs.lower_bound_seconds(lengths, trees)
    peaks = []
    for dp_rank, seconds in enumerate(plan.predicted.per_replica_s):
        packs = replica_columns(plan, dp_rank)
        again = simulate(
            tasks_of_columns(plan, dp_rank, planner.costs.model, packs), action_columns(plan.schedules[dp_rank])
        )
        assert again.makespan_s == seconds
        peaks.append(again.peak_bytes.max())
    assert max(peaks) == plan.predicted.peak_memory_bytes
    split = split_step_of_plan(plan, planner.costs)
    assert split.total_s() == pytest.approx(plan.predicted.step_time_s)


def test_strategies_that_do_not_plan_trees_say_so() -> None:
    planner, documents = planner_of(1, 1, max_pack_tokens=8000), mixed_step()
    for strategy in STRATEGIES.values():
        if not strategy.plans_trees and not strategy.changes_layout and not strategy.needs_solver:
            with pytest.raises(ConfigError, match=f"strategy {strategy.name} does not plan trees"):
                planner.plan(0, documents, strategy.name)


def test_sharing_is_off_in_a_step_with_trees() -> None:
    """Groups of replicas share documents by rows, which a tree's keys do not follow."""
    planner, documents = planner_of(2, 1, dp_merge=True), mixed_step()
    assert {piece.cp for packs in planner.plan(0, documents, "slimpack").pack_plans for pack in packs.forward
            for piece in pack.slices} == {1}  # fmt: skip


def test_replicas_are_balanced_by_the_trees_work() -> None:
    """Two trees of equally many rows differ by 2.5 in work: by rows the first replica would take twice the second's."""
    chain, star = group_of(1000, [1000]), group_of(1, [10] * 200)
    documents = tuple(tree_document(at, segments) for at, segments in enumerate([chain, *[star] * 5]))
    costs = planner_of(2, 1).costs
    seconds = [costs.document_seconds(np.array([one.num_tokens]), trees=TreeColumns.of((one,)))[0] for one in documents]
    plan = planner_of(2, 1).plan(0, documents, "balanced")
    loads = [sum({piece.doc_id: seconds[piece.doc_id] for pack in packs.forward for piece in pack.slices}.values())
             for packs in plan.pack_plans]  # fmt: skip
    best = min(
        max(sum(seconds[at] for at in chosen), sum(seconds) - sum(seconds[at] for at in chosen))
        for count in range(7)
        for chosen in itertools.combinations(range(6), count)
    )
    assert max(loads) == pytest.approx(best)
    # No division is faster than the bound.
    lengths = np.array([one.num_tokens for one in documents])
    assert costs.lower_bound_seconds(lengths, TreeColumns.of(documents)) <= best
