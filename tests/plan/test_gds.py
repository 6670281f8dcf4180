import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.plan import dacp as gds
from evenload.plan.dacp import MicroBatch, StepDocuments, assign_micro_batches, assign_owners
from reference.dacp import chosen, rank_tokens


def step_documents(lengths, cp: int, dp: int, bucket: int, gather=0.05, pack_s=0.0, limit: int | None = None):
    tokens = np.array(lengths, np.int64)
    local_s = tokens + 0.01 * tokens.astype(float) ** 2
    columns = MicroBatch(tokens, local_s, 1.05 * local_s / cp, gather * tokens, cp, bucket)
    return StepDocuments(columns, dp, bucket * cp if limit is None else limit, pack_s)


def step_seconds(step: StepDocuments, replicas) -> float:
    return max(float(step.group_seconds(groups).sum()) for groups in replicas)


LENGTHS = st.one_of(
    st.lists(st.integers(1, 300), min_size=0, max_size=20),
    st.lists(st.sampled_from([1, 2, 64, 65, 128, 255, 256, 1000]), min_size=1, max_size=20),
    st.integers(1, 300).flatmap(lambda n: st.integers(1, 30).map(lambda count: [n] * count)),
)


@settings(max_examples=300, deadline=None)
@given(
    LENGTHS,
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 5]),
    st.integers(0, 300),
    st.one_of(st.none(), st.integers(1, 1000)),
)
def test_every_document_once_within_memory_or_no_micro_batches_at_all(lengths, cp, dp, bucket, limit) -> None:
    """Skrull eq. 7, 9 and 10 for any lengths, exactly full and hopeless ones among them; and every input ends."""
    step = step_documents(lengths, cp, dp, bucket, limit=limit)
    replicas = assign_micro_batches(step)
    fits_alone = all(n <= step.limit_tokens and -(-n // cp) <= bucket for n in lengths)
    assert (replicas is not None) == fits_alone
    if replicas is None:
        return
    assert len(replicas) == dp
    groups = list(itertools.chain.from_iterable(replicas))
    assert sorted(itertools.chain.from_iterable(groups)) == [*range(len(lengths))]
    for group in groups:
        assert group
        assert sum(lengths[i] for i in group) <= step.limit_tokens
        owned = assign_owners(step.columns, [group])
        assert np.isfinite(owned.seconds[0])
        assert rank_tokens(chosen(step.columns, group), owned.owner).max() <= bucket


def test_never_slower_than_algorithm_2_and_faster_where_lengths_are_mixed() -> None:
    generator = np.random.default_rng(1)
    gains = []
    for count in (6, 12, 20, 40, 60, 200):
        lengths = np.minimum(np.exp(generator.normal(5, 1.2, count)).astype(int) + 1, 2000)
        step = step_documents(lengths, 4, 1, max(500, int(lengths.sum()) // 20), pack_s=50.0)
        ascending = np.argsort(lengths, kind="stable")
        (groups,) = assign_micro_batches(step)
        gains.append(step_seconds(step, [gds._interleaved(step, ascending)]) / step_seconds(step, [groups]))
    assert min(gains) >= 1
    assert max(gains) > 1.05


def test_algorithm_2_forms_the_fewest_interleaved_micro_batches_that_fit() -> None:
    """Each holds at most 20 tokens; two hold the sum of 40, but `Subset[0::2]` holds 25, so there are three."""
    step = step_documents([1, 2, 3, 4, 7, 9, 14], 2, 1, 10)
    assert gds._interleaved(step, np.arange(7)) == [[0, 3, 6], [1, 4], [2, 5]]
