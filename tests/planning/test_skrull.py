from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import documents, sample_coefficients, sample_model
from evenload.cost.layer_counts import POLICIES
from evenload.cost.memory import static_bytes
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.skrull import bucket_tokens, can_fit
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout
from predicted_timeline import predicted_timeline

LINKS = {"intra_node": LinkSpec(bandwidth_bytes_per_s=1e4, latency_s=1e-3), "devices_per_node": 64}


def planner(cap: int | None, limit: int | None = None, policy="replay", **layout) -> StepPlanner:
    options = PlanOptions(max_pack_tokens=limit, policy=policy)
    return StepPlanner(
        sample_model(), sample_coefficients(**LINKS), even_layout(3, **layout), cap, options, host="unlimited"
    )


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
    result = planner(cap, policy=policy, dp=dp, cp=cp).propose(0, documents(lengths), "skrull")
    validate_plan(result.plan)
    assert result.feasible == (result.plan.predicted.peak_memory_bytes <= cap)
    if room_tokens > 2 * max(lengths):
        assert result.feasible


def test_owners_survive_the_plan_file_and_the_timeline() -> None:
    lengths = [400, *[50] * 8]
    static = int(static_bytes(sample_model(), even_layout(3, cp=4)).max())
    result = planner(static + 300_000, cp=4).propose(0, documents(lengths), "skrull")
    packs = result.plan.pack_plans[0].forward
    pieces = [(piece, owner) for p in packs for piece, owner in zip(p.slices, p.sharding, strict=True)]
    assert {piece.cp for piece, _ in pieces} == {1, 4}
    assert all((piece.cp == 4) == (owner == -1) for piece, owner in pieces)
    (read,) = decode_plan_file(encode_plan_file([result.plan]))
    assert read == result.plan
    assert predicted_timeline(read, sample_model()).memory_bytes.max() == result.plan.predicted.peak_memory_bytes


@pytest.mark.parametrize("policy", ["replay", "recompute"])
@pytest.mark.parametrize("room", [0, 1, 10_000, 345_678, 2_000_000])
def test_the_bucket_is_the_largest_that_fits(policy, room) -> None:
    """Skrull C.1 by the memory model: searched many sizes at a time, it must not stop one short or one over."""
    cp = 4
    static = int(static_bytes(sample_model(), even_layout(3, cp=cp)).max())
    step = planner(static + room, policy=policy, cp=cp)
    codes = None if policy == "replay" else np.full(9, POLICIES.index(policy), np.int8)
    problem = replace(step._problem(0, documents([4000, *[500] * 8])), policy=codes)
    bucket = bucket_tokens(problem)
    assert can_fit(problem) == (bucket >= 4000 / cp)
    assert not step.propose(0, documents([(bucket + 1) * cp]), "skrull").feasible or bucket == 8000
    if bucket:
        assert step.propose(0, documents([bucket * cp]), "skrull").feasible


def test_pipelines_are_refused_and_documents_beyond_memory_named() -> None:
    with pytest.raises(ConfigError, match="has a pipeline and skrull has none"):
        planner(None, pp=3).plan(0, documents([5]), "skrull")
    with pytest.raises(InfeasiblePlanError, match="skrull needs"):
        planner(1000).plan(0, documents([500]), "skrull")
