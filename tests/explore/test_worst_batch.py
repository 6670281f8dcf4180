"""The batch that needs most memory: found among all that a small table can draw, and said truly."""

import itertools

import numpy as np
import pytest

from cost_samples import documents, sample_coefficients, sample_model
from evenload.explore.batches import BatchRule
from evenload.explore.worst_batch import find_worst
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.types.layout import even_layout

TABLE = np.array([200, 150, 90, 90, 40, 12, 5, 3], np.int64)


def make_planner(cap: int | None = None, policy: str = "replay") -> StepPlanner:
    options = PlanOptions(max_pack_tokens=256, candidates=2, policy=policy)
    return StepPlanner(sample_model(), sample_coefficients(), even_layout(3), cap, options, host="unlimited")


def peak_bytes(planner: StepPlanner, lengths) -> int:
    return planner.propose(0, documents(lengths), "best_fit").plan.predicted.peak_memory_bytes


def test_it_is_the_worst_of_all_batches_that_a_small_table_can_draw():
    planner = make_planner()
    every = [peak_bytes(planner, lengths) for lengths in itertools.permutations(TABLE, 3)]
    result = find_worst(planner, TABLE, BatchRule(num_documents=3, context=256), "best_fit", 100, seed=0)
    assert result.peak_memory_bytes == max(every) > min(every)
    assert (result.searched, result.documents, result.fits, result.policies) == (100, 3, True, {"replay": 3})


@pytest.mark.parametrize("rule", [BatchRule(num_documents=4, context=256), BatchRule(num_tokens=300, context=256)])
def test_what_is_said_is_of_the_batch_that_was_found(rule):
    result = find_worst(make_planner(), TABLE, rule, "best_fit", 20, seed=1)
    assert result.documents == len(result.longest)
    assert result.tokens == sum(result.longest)
    assert list(result.longest) == sorted(result.longest, reverse=True)
    # The order of arrival may decide what meets in a pack.
    assert result.peak_memory_bytes in {
        peak_bytes(make_planner(), lengths) for lengths in itertools.permutations(result.longest)
    }


def test_what_does_not_fit_says_why_and_fits_where_policies_are_chosen():
    rule = BatchRule(num_documents=4, context=256)
    most = find_worst(make_planner(), TABLE, rule, "best_fit", 10, seed=0).peak_memory_bytes
    result = find_worst(make_planner(cap=int(0.9 * most)), TABLE, rule, "best_fit", 10, seed=0)
    assert not result.fits
    assert "needs" in result.why
    chosen = find_worst(make_planner(cap=int(0.9 * most), policy="choose"), TABLE, rule, "best_fit", 10, seed=0)
    assert chosen.fits
    assert set(chosen.policies) - {"replay"}


def test_where_policies_are_chosen_the_batch_that_memory_holds_least_of_is_the_worst():
    """All batches fill memory then; the peak alone would call any of them the worst."""
    rule = BatchRule(num_documents=4, context=256)
    most = find_worst(make_planner(), TABLE, rule, "best_fit", 10, seed=0).peak_memory_bytes
    planner = make_planner(cap=int(0.9 * most), policy="choose")
    result = find_worst(planner, TABLE, rule, "best_fit", 60, seed=0)

    def tokens_not_stored(lengths) -> int:
        (packs,) = planner.propose(0, documents(lengths), "best_fit").plan.pack_plans
        return sum(lengths[doc_id] for doc_id in packs.policies)

    every = [tokens_not_stored(lengths) for lengths in itertools.permutations(TABLE.tolist(), 4)]
    assert max(tokens_not_stored(lengths) for lengths in itertools.permutations(result.longest)) == max(every) > 0
