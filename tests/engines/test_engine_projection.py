"""What an engine trains of a plan: everything, once, in the shape that it needs."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.config.keys import plan_options
from evenload.engines.catalog import ENGINES, LOOP
from evenload.engines.profile import EngineProfile
from evenload.engines.projection import EngineStep, StepShape, project
from evenload.errors import ConfigError
from evenload.plan.planner import StepPlanner
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.plan import StepPlan

WHOLE = ("padded", "best_fit", "fixed_greedy", "balanced", "wlb")


def plan_of(lengths: list[int], strategy: str, *, dp: int = 2, cp: int = 1, pp: int = 1, **options) -> StepPlan:
    documents = tuple(
        Document(doc_id=100 + i, num_tokens=n, num_label_tokens=max(0, n - 1)) for i, n in enumerate(lengths)
    )
    layout = even_layout(4, dp=dp, cp=cp, pp=pp, virtual=options.pop("virtual", 1))
    fields = {"max_pack_tokens": 64, "candidates": 3, "dp_merge": False, **options}
    link = LinkSpec(bandwidth_bytes_per_s=1000.0, latency_s=0.25)
    coefficients = sample_coefficients(intra_node=link, inter_node=link, devices_per_node=8)
    planner = StepPlanner(
        sample_model(num_layers=4), coefficients, layout, None, plan_options(fields), host="unlimited"
    )
    return planner.plan(7, documents, strategy)


def trained(step: EngineStep, cp: int) -> Counter[int]:
    """How often every document is trained: once, where a context group of `cp` ranks shares it as one."""
    found: Counter[int] = Counter()
    for at, rank in enumerate(step.ranks):
        for one in rank:
            assert one.context_ranks in (1, cp)
            if one.context_ranks == 1 or at % cp == 0:
                found.update(one.doc_ids)
    return found


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=20),
    strategy=st.sampled_from(WHOLE),
    engine=st.sampled_from(sorted(ENGINES)),
    dp=st.integers(1, 3),
    multiple=st.sampled_from([1, 8]),
)
def test_every_document_is_trained_once_in_the_shape_that_the_engine_needs(lengths, strategy, engine, dp, multiple):
    plan, profile = plan_of(lengths, strategy, dp=dp), ENGINES[engine]
    step = project(plan, profile, StepShape(pack_multiple=multiple))
    assert len(step.ranks) == dp
    assert trained(step, 1) == Counter(document.doc_id for document in plan.documents)
    assert step.num_label_tokens == sum(document.num_label_tokens for document in plan.documents)
    sizes = {document.doc_id: document.num_tokens for document in plan.documents}
    counts = {len(rank) for rank in step.ranks}
    assert len(counts) == 1 or not profile.equal_counts
    for replica, rank in zip(plan.pack_plans, step.ranks, strict=True):
        for one in rank:
            assert one.padded_tokens >= max(1, sum(sizes[doc_id] for doc_id in one.doc_ids))
            assert one.padded_tokens % multiple == 0
            in_plan = () if one.pack < 0 else tuple(piece.doc_id for piece in replica.forward[one.pack].slices)
            assert one.doc_ids == in_plan
            if strategy != "padded":
                assert one.padded_tokens < max(1, sum(sizes[doc_id] for doc_id in one.doc_ids)) + multiple


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=16),
    strategy=st.sampled_from(WHOLE),
    virtual=st.sampled_from([1, 2]),
    pack_tokens=st.sampled_from([None, 64, 80]),
)
def test_a_pipeline_of_torchtitan_has_one_shape_and_one_count(lengths, strategy, virtual, pack_tokens):
    plan = plan_of(lengths, strategy, dp=2, pp=2, virtual=virtual)
    step = project(plan, ENGINES["torchtitan"], StepShape(pack_tokens=pack_tokens))
    tokens = {one.padded_tokens for rank in step.ranks for one in rank}
    assert len(tokens) == 1
    assert pack_tokens in (None, *tokens)
    assert len({len(rank) for rank in step.ranks}) == 1
    assert virtual == 1 or len(step.ranks[0]) % 2 == 0
    assert trained(step, 1) == Counter(document.doc_id for document in plan.documents)


def test_megatron_keeps_unequal_counts_and_lengths():
    plan = plan_of([60, 60, 60, 60, 10, 5], "best_fit", dp=4, pp=2)
    step = project(plan, ENGINES["megatron"])
    assert [[one.padded_tokens for one in rank] for rank in step.ranks] == [[60, 15], [60], [60], [60]]
    even = project(plan, ENGINES["torchtitan"])
    assert [[one.padded_tokens for one in rank] for rank in even.ranks] == [[60, 60]] * 4
    assert [one.doc_ids for rank in even.ranks for one in rank].count(()) == 3


def test_ranks_that_wait_in_every_micro_batch_train_alike_ones_together():
    plan = plan_of([5, 50, 64, 33, 60, 64, 9, 20], "best_fit", dp=2)
    step = project(plan, ENGINES["fsdp2"])
    for rank, times in zip(step.ranks, plan.times, strict=True):
        seconds = [times.forward_s[one.pack][0] + times.backward_s[one.pack][0] for one in rank if one.doc_ids]
        assert seconds == sorted(seconds, reverse=True)
        assert len(seconds) == len(times.forward_s)
    # Who waits nowhere keeps the plan's order.
    for rank in project(plan, ENGINES["deepspeed"]).ranks:
        assert [one.pack for one in rank] == list(range(len(rank)))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=16),
    cp=st.sampled_from([2, 4]),
    engine=st.sampled_from(["megatron", "megatron-dynamic-cp"]),
)
def test_a_group_shares_every_document_of_a_micro_batch_in_chunks(lengths, cp, engine):
    plan = plan_of(lengths, "balanced", cp=cp, max_pack_tokens=128, cp_sharding="per_document")
    step = project(plan, ENGINES[engine])
    assert len(step.ranks) == 2 * cp
    sizes = {document.doc_id: document.num_tokens for document in plan.documents}
    for at, rank in enumerate(step.ranks):
        assert rank == step.ranks[at - at % cp]
        for one in (one for one in rank if one.doc_ids):
            assert one.context_ranks == cp
            assert one.padded_tokens == sum(-(-sizes[doc_id] // (2 * cp)) * 2 * cp for doc_id in one.doc_ids)
    assert trained(step, cp) == Counter(list(sizes))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=16),
    cp=st.sampled_from([2, 3]),
    engine=st.sampled_from(["deepspeed", "deepspeed-zero3"]),
    multiple=st.sampled_from([1, 4]),
)
def test_a_group_that_shares_heads_has_whole_documents_in_packs_of_a_multiple(lengths, cp, engine, multiple):
    plan = plan_of(lengths, "best_fit", cp=cp, max_pack_tokens=128, cp_sharding="per_document")
    step = project(plan, ENGINES[engine], StepShape(pack_multiple=multiple))
    assert len(step.ranks) == 2 * cp
    sizes = {document.doc_id: document.num_tokens for document in plan.documents}
    for at, rank in enumerate(step.ranks):
        assert rank == step.ranks[at - at % cp]
        for one in rank:
            assert one.context_ranks == cp
            assert one.document_tokens == tuple(sizes[doc_id] for doc_id in one.doc_ids)
            assert one.padded_tokens % math.lcm(cp, multiple) == 0
            assert 0 <= one.padded_tokens - sum(one.document_tokens) <= math.lcm(cp, multiple)
    assert trained(step, cp) == Counter(list(sizes))


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.sampled_from([3, 5, 9, 40, 200]), min_size=1, max_size=24), cp=st.sampled_from([2, 4]))
def test_skrull_becomes_micro_batches_that_are_shared_or_not(lengths, cp):
    plan = plan_of(lengths, "skrull", cp=cp, max_pack_tokens=256)
    step = project(plan, ENGINES["megatron-dynamic-cp"])
    assert trained(step, cp) == Counter(document.doc_id for document in plan.documents)
    for replica in range(2):
        ranks = step.ranks[replica * cp : (replica + 1) * cp]
        for together in zip(*ranks, strict=True):
            assert len({one.context_ranks for one in together if one.doc_ids}) <= 1
            if together[0].context_ranks > 1:
                assert len(set(together)) == 1


def test_skrull_is_refused_where_one_group_shares_everything():
    plan = plan_of([3, 3, 3, 200], "skrull", cp=2, max_pack_tokens=256)
    assert any(-1 in pack.sharding and max(pack.sharding) >= 0 for one in plan.pack_plans for pack in one.forward)
    with pytest.raises(ConfigError, match="megatron-dynamic-cp, where a micro-batch is shared or not"):
        project(plan, ENGINES["megatron"])


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_slices_are_refused_with_what_works_instead(engine):
    plan = plan_of([40, 40], "sequential", dp=1)
    with pytest.raises(ConfigError, match=r"tokens \[0, 24\) of document 101, which has 40.*Choose balanced"):
        project(plan, ENGINES[engine])


def test_a_loop_that_accepts_slices_gets_them():
    step = project(plan_of([40, 40], "sequential", dp=1), LOOP)
    assert [one.doc_ids for one in step.ranks[0]] == [(100, 101), (101,)]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (StepShape(micro_batches=1), "needs 2 micro-batches on a rank, micro_batches is 1"),
        (StepShape(pack_tokens=50), "a micro-batch of 60 tokens, and all have 50"),
    ],
)
def test_a_shape_that_does_not_hold_the_plan_is_refused(shape: StepShape, message: str):
    with pytest.raises(ConfigError, match=message):
        project(plan_of([60, 60, 60], "best_fit", dp=2), ENGINES["fsdp2"], shape)


def topics(profile: EngineProfile) -> set[str]:
    cannot = {"slices", "sharing", "layouts", "virtual"}
    cannot |= set() if profile.schedules else {"pipeline"}
    cannot |= {"context"} if profile.context_parallel == "none" else set()
    # Who makes groups anew for every micro-batch asks a scheduler for them, and no loader.
    cannot |= {"loader"} if profile.context_parallel == "group" else {"mixed_context"}
    return cannot | ({"counts"} if profile.equal_counts else set())


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_every_engine_says_why_it_cannot_what_it_cannot(engine):
    profile = ENGINES[engine]
    assert profile.name == engine
    assert {one.topic for one in profile.limits} == topics(profile)
    for one in profile.limits:
        assert one.why
        assert one.instead
