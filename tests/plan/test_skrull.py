import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.memory import static_bytes
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.plan.dacp import SHARED, MicroBatch, assign_owners, rank_seconds, rank_tokens
from evenload.plan.options import PlanOptions
from evenload.plan.plan_file import decode_plan_file, encode_plan_file
from evenload.plan.planner import StepPlanner
from evenload.plan.predicted_timeline import predicted_timeline
from evenload.plan.validate import validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.layout import even_layout

LINKS = {"intra_node": LinkSpec(bandwidth_bytes_per_s=1e4, latency_s=1e-3), "devices_per_node": 64}


def micro_batch(lengths, cp: int, bucket: int, gather: float = 0.02) -> MicroBatch:
    tokens = np.array(lengths, np.int64)
    local_s = tokens + 0.01 * tokens.astype(float) ** 2
    return MicroBatch(tokens, local_s, local_s / cp, gather * tokens, cp, bucket)


def planner(cap: int | None, limit: int | None = None, policy="replay", **layout) -> StepPlanner:
    options = PlanOptions(max_pack_tokens=limit, policy=policy)
    return StepPlanner(sample_model(), sample_coefficients(**LINKS), even_layout(3, **layout), cap, options)


def documents(lengths) -> tuple[Document, ...]:
    return tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths))


@settings(max_examples=300)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=20), st.sampled_from([1, 2, 4, 8]), st.integers(1, 300))
def test_dacp_never_breaks_its_bucket_and_ends(lengths, cp, bucket) -> None:
    """Skrull eq. 7; as printed, roll-back books a shared document on one rank only and overfills the others."""
    batch = micro_batch(lengths, cp, bucket)
    owner = assign_owners(batch)
    if owner is None:
        # Never refused where all documents shared would fit: that is what roll-back ends with.
        assert batch.share_tokens().sum() > bucket
    else:
        assert set(owner.tolist()) <= {SHARED, *range(cp)}
        assert rank_tokens(batch, owner).max() <= bucket


def test_dacp_is_close_to_the_optimum_of_small_inputs() -> None:
    """Within 3 % of brute force nearly always; it is a heuristic, so the worst of 120 may be further off."""
    generator = np.random.default_rng(0)
    gaps = []
    for _ in range(120):
        cp = int(generator.choice([2, 3]))
        lengths = np.minimum(np.exp(generator.normal(3.5, 1.2, generator.integers(1, 7))).astype(int) + 1, 400)
        bucket = int(generator.integers(max(1, lengths.sum() // cp), 2 * lengths.sum() // cp + 2))
        batch = micro_batch(lengths, cp, bucket, float(generator.choice([0.0, 0.02, 0.2])))
        others = (np.array(other) for other in itertools.product(range(SHARED, cp), repeat=len(lengths)))
        times = [rank_seconds(batch, other).max() for other in others if rank_tokens(batch, other).max() <= bucket]
        owner = assign_owners(batch)
        if owner is not None:
            gaps.append(rank_seconds(batch, owner).max() / min(times) - 1)
    assert len(gaps) > 100
    assert np.mean(gaps) <= 0.003
    assert np.mean(np.array(gaps) <= 0.03) >= 0.97
    assert max(gaps) <= 0.35


def test_roll_back_frees_the_largest_document_of_the_fullest_rank() -> None:
    """Bucket 10, two ranks: 4 and 6 go local, then 8 needs 4 on each: the 6 must give way, not the 4."""
    batch = micro_batch([4, 6, 8], 2, 10)
    owner = assign_owners(batch)
    assert owner is not None
    assert rank_tokens(batch, owner).max() <= 10
    assert owner[2] == SHARED


def test_seconds_are_those_of_eq_2() -> None:
    batch = MicroBatch(
        np.array([4, 6, 8]), np.array([4.0, 6.0, 8.0]), np.array([2.0, 3.0, 4.0]), np.array([9.0, 9.0, 5.0]), 2, 99
    )
    assert rank_seconds(batch, np.array([0, 1, SHARED])).tolist() == [max(5, 4) + 4, max(5, 6) + 4]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(0, 400),
    st.sampled_from(["replay", "recompute"]),
)
def test_steps_stay_within_memory_or_say_that_they_do_not(lengths, cp, dp, room_tokens, policy) -> None:
    """Eq. 7 and 10 on bytes, the planner's own simulation the judge; every input ends."""
    static = int(static_bytes(sample_model(), even_layout(3, dp=dp, cp=cp)).max())
    cap = static + room_tokens * 1_200
    found = planner(cap, policy=policy, dp=dp, cp=cp).propose(0, documents(lengths), "skrull")
    validate_plan(found.plan)
    assert found.feasible == (found.plan.predicted.peak_memory_bytes <= cap)
    if room_tokens > 2 * max(lengths):
        assert found.feasible


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 128), min_size=1, max_size=40), st.sampled_from([1, 2, 4]))
def test_micro_batches_keep_the_token_limit(lengths, cp) -> None:
    found = planner(None, 128, dp=2, cp=cp).propose(0, documents(lengths), "skrull")
    validate_plan(found.plan, max_pack_tokens=128)
    assert found.cap_violations == 0


def test_owners_survive_the_plan_file_and_the_timeline() -> None:
    lengths = [400, *[50] * 8]
    static = int(static_bytes(sample_model(), even_layout(3, cp=4)).max())
    found = planner(static + 300_000, cp=4).propose(0, documents(lengths), "skrull")
    packs = found.plan.pack_plans[0].forward
    pieces = [(piece, owner) for p in packs for piece, owner in zip(p.slices, p.sharding[5:].split(","), strict=True)]
    assert {piece.cp for piece, _ in pieces} == {1, 4}
    assert all((piece.cp == 4) == (owner == "-1") for piece, owner in pieces)
    (read,) = decode_plan_file(encode_plan_file([found.plan]))
    assert read == found.plan
    assert predicted_timeline(read, sample_model()).memory_bytes.max() == found.plan.predicted.peak_memory_bytes


def test_pipelines_are_refused_and_documents_beyond_memory_named() -> None:
    with pytest.raises(ConfigError, match="has a pipeline and Skrull has none"):
        planner(None, pp=3).plan(0, documents([5]), "skrull")
    with pytest.raises(InfeasiblePlanError, match="skrull needs"):
        planner(1000).plan(0, documents([500]), "skrull")
