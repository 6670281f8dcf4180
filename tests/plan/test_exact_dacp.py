import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.plan.dacp import SHARED, MicroBatch, assign_groups, assign_owners, rank_seconds, rank_tokens
from evenload.plan.exact_dacp import exact_micro_batches, exact_owners
from evenload.plan.micro_batching import THOROUGH, StepDocuments, deal_micro_batches


def micro_batch(lengths, cp: int, bucket: int, gather: float, overhead: float = 1.05) -> MicroBatch:
    tokens = np.array(lengths, np.int64)
    local_s = tokens + 0.01 * tokens.astype(float) ** 2
    return MicroBatch(tokens, local_s, overhead * local_s / cp, gather * tokens, cp, bucket)


def least_seconds(batch: MicroBatch) -> float:
    """Over all owners, one by one; infinite where none fits."""
    best = np.inf
    for owner in itertools.product(range(SHARED, batch.cp), repeat=len(batch.num_tokens)):
        owner = np.array(owner, np.int64)
        if rank_tokens(batch, owner).max(initial=0) <= batch.bucket_tokens:
            best = min(best, float(rank_seconds(batch, owner).max()))
    return best


def partitions(items: list[int]):
    if not items:
        yield []
        return
    for below in partitions(items[1:]):
        yield [[items[0]], *below]
        for number, group in enumerate(below):
            yield [*below[:number], [items[0], *group], *below[number + 1 :]]


def least_step_seconds(step: StepDocuments) -> float:
    """Over all micro-batches, replicas and owners."""
    count = len(step.columns.num_tokens)
    known: dict[tuple[int, ...], float] = {}

    def seconds(group: list[int]) -> float:
        key = tuple(sorted(group))
        if key not in known:
            chosen = step.columns.chosen(np.array(key))
            fits = int(chosen.num_tokens.sum()) <= step.limit_tokens
            known[key] = step.pack_s + least_seconds(chosen) if fits else np.inf
        return known[key]

    best = np.inf
    for groups in partitions(list(range(count))):
        times = [seconds(group) for group in groups]
        for ranks in itertools.product(range(step.dp), repeat=len(groups)):
            best = min(best, max(np.bincount(ranks, weights=times, minlength=step.dp)))
    return float(best)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=5),
    st.sampled_from([1, 2, 3]),
    st.floats(0.8, 2.0),
    st.sampled_from([0.0, 0.2, 2.0]),
    st.sampled_from([1.0, 1.2]),
)
def test_owners_equal_brute_force(lengths, cp, room, gather, overhead) -> None:
    """Skrull eq. 1-7: the solver's answer is the optimum, or it says that there is none."""
    batch = micro_batch(lengths, cp, int(room * sum(lengths) / cp), gather, overhead)
    best_s = least_seconds(batch)
    if best_s == np.inf:
        with pytest.raises(InfeasiblePlanError, match="do not fit"):
            exact_owners(batch)
        return
    found = exact_owners(batch)
    assert found.seconds == pytest.approx(best_s, rel=2e-6)
    assert found.is_optimal
    assert rank_tokens(batch, found.owner).max() <= batch.bucket_tokens
    assert rank_seconds(batch, found.owner).max() == found.seconds


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.floats(0.3, 1.5),
    st.sampled_from([0.0, 0.2, 2.0]),
    st.sampled_from([0.0, 5.0]),
    st.booleans(),
)
def test_micro_batches_equal_brute_force(lengths, cp, dp, room, gather, pack_s, with_start) -> None:
    """Skrull eq. 8-11, replicas and micro-batches by eq. 10 included; the heuristic is within 3 % of it."""
    columns = micro_batch(lengths, cp, max(-(-max(lengths) // cp), int(room * sum(lengths) / cp / dp)), gather)
    step = StepDocuments(columns, columns.shared_s, dp, columns.bucket_tokens * cp, pack_s)
    best_s = least_step_seconds(step)
    dealt = deal_micro_batches(step)
    assert dealt is not None
    heuristic_s = max(float(step.group_seconds(groups, THOROUGH).sum()) for groups in dealt)
    assert best_s * (1 - 1e-9) <= heuristic_s <= best_s * 1.03
    found = exact_micro_batches(step, start=dealt if with_start else None)
    assert found.seconds == pytest.approx(best_s, rel=2e-6)
    assert found.is_optimal
    assert sorted(d for groups in found.replicas for group in groups for d in group) == list(range(len(lengths)))
    exact_s = [sum(least_seconds(columns.chosen(np.array(g))) + pack_s for g in groups) for groups in found.replicas]
    assert max(exact_s) == pytest.approx(best_s, rel=2e-6)


@pytest.mark.parametrize("sigma", [0.2, 1.0])
@pytest.mark.parametrize("count", [8, 12, 16, 24, 32])
def test_owners_are_within_three_percent_of_exact(count, sigma) -> None:
    """On more documents than brute force can do."""
    generator = np.random.default_rng(count)
    lengths = np.minimum(np.exp(generator.normal(5, sigma, count)).astype(int) + 1, 2000)
    bucket = max(int(generator.uniform(1.05, 1.6) * lengths.sum() / 4), -(-int(lengths.max()) // 4))
    batch = micro_batch(lengths, 4, bucket, float(generator.choice([0.0, 0.3, 1.0])))
    owner = assign_owners(batch)
    assert owner is not None
    # Up to 12 documents take the solver a fraction of a second: the long limit is for a loaded machine.
    found = exact_owners(batch, time_limit_s=60 if count <= 12 else 0.2, start=owner)
    assert found.is_optimal or count > 12
    # Where the solver stopped early, what it found is held to the same, and its bound must still be below it.
    assert rank_seconds(batch, owner).max() <= 1.03 * found.seconds
    assert found.bound <= found.seconds <= rank_seconds(batch, owner).max() * (1 + 1e-9)


@pytest.mark.parametrize("count", [7, 9, 11, 14])
def test_micro_batches_are_within_three_percent_of_exact(count) -> None:
    generator = np.random.default_rng(count)
    lengths = np.minimum(np.exp(generator.normal(5, 0.8, count)).astype(int) + 1, 2000)
    columns = micro_batch(lengths, 2, max(int(lengths.max()) // 2 + 1, int(lengths.sum()) // 3), 0.3)
    step = StepDocuments(columns, columns.shared_s, 1, columns.bucket_tokens * 2, 20.0)
    dealt = deal_micro_batches(step)
    assert dealt is not None
    heuristic_s = max(float(step.group_seconds(groups, THOROUGH).sum()) for groups in dealt)
    found = exact_micro_batches(step, time_limit_s=60 if count <= 11 else 0.2, start=dealt)
    assert found.is_optimal or count > 11
    assert heuristic_s <= 1.03 * found.seconds


def test_stopping_early_says_so_and_is_never_worse_than_the_start() -> None:
    lengths = np.random.default_rng(7).integers(1, 900, 40)
    batch = micro_batch(lengths, 8, int(lengths.sum()) // 6, 0.3)
    start = assign_owners(batch)
    assert start is not None
    found = exact_owners(batch, time_limit_s=1e-3, start=start)
    assert found.bound <= found.seconds <= rank_seconds(batch, start).max()
    assert not found.is_optimal
    assert found.gap > 0


def test_misuse_is_named() -> None:
    batch = micro_batch([10, 10], 2, 10, 0.1)
    with pytest.raises(ConfigError, match="start does not fit"):
        exact_owners(batch, start=np.array([0, 0]))
    with pytest.raises(ConfigError, match=r"time_limit_s 0\.0"):
        exact_owners(batch, time_limit_s=0.0)
    step = StepDocuments(batch, batch.shared_s, 1, 5)
    with pytest.raises(InfeasiblePlanError, match="micro-batches of 2 documents, 20 tokens, do not fit"):
        exact_micro_batches(step)


def test_without_documents_there_is_nothing_to_do() -> None:
    empty = micro_batch([], 2, 10, 0.1)
    assert exact_owners(empty).seconds == 0
    assert exact_micro_batches(StepDocuments(empty, empty.shared_s, 2, 10)).replicas == [[], []]
    assert assign_groups(empty, [[]]).seconds.tolist() == [0.0]
