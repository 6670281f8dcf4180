import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.plan import micro_batching
from evenload.plan.dacp import THOROUGH, MicroBatch, assign_groups, rank_tokens
from evenload.plan.micro_batching import ALL_SUBSETS, SEARCHED_DOCUMENTS, StepDocuments, deal_micro_batches


def step_documents(
    lengths, cp: int, dp: int, bucket: int, gather=0.05, pack_s=0.0, limit: int | None = None, backend="native"
) -> StepDocuments:
    tokens = np.array(lengths, np.int64)
    local_s = tokens + 0.01 * tokens.astype(float) ** 2
    columns = MicroBatch(tokens, local_s, 1.05 * local_s / cp, gather * tokens, cp, bucket)
    return StepDocuments(columns, columns.shared_s, dp, bucket * cp if limit is None else limit, pack_s, backend)


def step_seconds(step: StepDocuments, dealt) -> float:
    return max(float(step.group_seconds(groups, THOROUGH).sum()) for groups in dealt)


LENGTHS = st.one_of(
    st.lists(st.integers(1, 300), min_size=0, max_size=20),
    st.lists(st.sampled_from([1, 2, 64, 65, 128, 255, 256, 1000]), min_size=1, max_size=20),
    st.integers(1, 300).flatmap(lambda n: st.integers(1, 30).map(lambda count: [n] * count)),
)


@settings(max_examples=150, deadline=None)
@given(
    LENGTHS,
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 5]),
    st.integers(0, 300),
    st.one_of(st.none(), st.integers(1, 1000)),
    st.booleans(),
)
def test_every_document_once_within_memory_or_no_deal_at_all(lengths, cp, dp, bucket, limit, search) -> None:
    """Skrull eq. 7, 9 and 10 for any lengths, exactly full and hopeless ones among them; and every input ends."""
    step = step_documents(lengths, cp, dp, bucket, limit=limit)
    dealt = deal_micro_batches(step, search=search)
    fits_alone = all(n <= step.limit_tokens and -(-n // cp) <= bucket for n in lengths)
    assert (dealt is not None) == fits_alone
    if dealt is None:
        return
    assert len(dealt) == dp
    assert sorted(itertools.chain.from_iterable(group for groups in dealt for group in groups)) == [
        *range(len(lengths))
    ]
    for group in itertools.chain.from_iterable(dealt):
        assert group
        assert sum(lengths[i] for i in group) <= step.limit_tokens
        chosen = step.columns.chosen(np.array(group))
        owned = assign_groups(step.columns, [group])
        assert np.isfinite(owned.seconds[0])
        assert rank_tokens(chosen, owned.owner).max() <= bucket


@pytest.mark.parametrize("count", [ALL_SUBSETS, ALL_SUBSETS + 1, SEARCHED_DOCUMENTS, SEARCHED_DOCUMENTS + 1, 300])
@pytest.mark.parametrize("kind", ["equal", "doubling", "one long", "full"])
def test_adversarial_steps_of_every_size(count, kind) -> None:
    lengths = {
        "equal": [97] * count,
        "doubling": [2 ** (i % 10) for i in range(count)],
        "one long": [4 * 512] + [1] * (count - 1),
        "full": [512] * count,  # each fills a bucket: only whole on a rank or exactly shared
    }[kind]
    step = step_documents(lengths, 4, 3, 512, pack_s=10.0)
    dealt = deal_micro_batches(step)
    assert dealt is not None
    assert sorted(itertools.chain.from_iterable(group for groups in dealt for group in groups)) == [*range(count)]
    assert np.isfinite(step_seconds(step, dealt))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=16), st.sampled_from([1, 3]), st.sampled_from([1, 2]))
def test_native_equals_python(lengths, cp, dp) -> None:
    bucket = max(lengths) // 2 + sum(lengths) // (3 * cp * dp) + max(lengths) // cp + 1
    deals = [
        deal_micro_batches(step_documents(lengths, cp, dp, bucket, backend=backend), search=len(lengths) > ALL_SUBSETS)
        for backend in ("native", "python")
    ]
    assert deals[0] == deals[1]


def test_steps_beyond_all_subsets_are_close_to_the_best_of_all_subsets(monkeypatch) -> None:
    """Memory filled to the token, like documents and long tails: rarely beyond 3 %, and never far."""
    generator = np.random.default_rng(11)
    gaps = []
    for _ in range(60):
        cp, dp = int(generator.choice([1, 2, 4])), int(generator.choice([1, 2]))
        lengths = np.minimum(np.exp(generator.normal(5, generator.choice([0.1, 0.5, 1.2]), 13)).astype(int) + 1, 1000)
        room = float(generator.choice([0.5, 1.0, 1.7])) / dp / int(generator.integers(1, 4))
        bucket = max(int(room * lengths.sum() / cp), -(-int(lengths.max()) // cp))
        step = step_documents(lengths, cp, dp, bucket, float(generator.choice([0.0, 0.3, 1.0])), pack_s=10.0)
        ours = deal_micro_batches(step)
        with monkeypatch.context() as patch:
            patch.setattr(micro_batching, "ALL_SUBSETS", 13)
            best = deal_micro_batches(step)
        assert ours is not None
        assert best is not None
        gaps.append(step_seconds(step, ours) / step_seconds(step, best) - 1)
    assert np.mean(gaps) <= 0.003
    assert np.mean(np.array(gaps) <= 0.03) >= 0.97
    assert max(gaps) <= 0.06


def test_searching_is_never_worse_than_the_deal_of_the_paper() -> None:
    generator = np.random.default_rng(1)
    gains = []
    for count in (6, 12, 20, 40, 60, 200):
        lengths = np.minimum(np.exp(generator.normal(5, 1.2, count)).astype(int) + 1, 2000)
        step = step_documents(lengths, 4, 2, max(500, int(lengths.sum()) // 20), pack_s=50.0)
        printed, searched = deal_micro_batches(step, search=False), deal_micro_batches(step)
        assert printed is not None
        assert searched is not None
        gains.append(step_seconds(step, printed) / step_seconds(step, searched))
    assert min(gains) >= 1 - 1e-9
    assert max(gains) > 1.05


def test_like_documents_stay_whole_together() -> None:
    """Eight documents of a bucket each on four ranks: two micro-batches of four whole ones, no transfers.

    Pairs are slower than sharing each alone, so no single move or union leads there.
    """
    step = step_documents([148, 147, 146, 145] * 2, 4, 1, 148, gather=0.3)
    dealt = deal_micro_batches(step)
    assert dealt is not None
    assert sorted(map(len, dealt[0])) == [4, 4]
    assert step_seconds(step, dealt) == pytest.approx(2 * (148 + 1.48 * 148), rel=0.02)


def test_the_same_step_is_dealt_the_same_way() -> None:
    """Ranks plan the same step on their own; the descent keeps what it knows in sets."""
    lengths = np.random.default_rng(4).integers(1, 500, 30)
    deals = [deal_micro_batches(step_documents(lengths, 2, 2, 900)) for _ in range(3)]
    assert deals[0] == deals[1] == deals[2]
