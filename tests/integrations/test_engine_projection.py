"""What an engine trains of a plan: everything, once, in the shape that it needs; what it cannot run is refused."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.config.keys import plan_options
from evenload.errors import ConfigError
from evenload.integrations.catalog import ENGINES, Topic, require_heads, require_strategy, runnable
from evenload.integrations.price import EngineMicroBatch, StepShape, project
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.layout import even_layout, split_layout
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


def trained(step: Sequence[Sequence[EngineMicroBatch]]) -> Counter[int]:
    """How often every document is trained."""
    return Counter(doc_id for replica in step for one in replica for doc_id in one.doc_ids)


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
    assert len(step) == dp
    assert trained(step) == Counter(document.doc_id for document in plan.documents)
    sizes = {document.doc_id: document.num_tokens for document in plan.documents}
    counts = {len(rank) for rank in step}
    assert len(counts) == 1 or not profile.equal_counts
    for replica, rank in zip(plan.pack_plans, step, strict=True):
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
    tokens = {one.padded_tokens for rank in step for one in rank}
    assert len(tokens) == 1
    assert pack_tokens in (None, *tokens)
    assert len({len(rank) for rank in step}) == 1
    assert virtual == 1 or len(step[0]) % 2 == 0
    assert trained(step) == Counter(document.doc_id for document in plan.documents)


def test_megatron_keeps_unequal_counts_and_lengths():
    plan = plan_of([60, 60, 60, 60, 10, 5], "best_fit", dp=4, pp=2)
    step = project(plan, ENGINES["megatron"], StepShape())
    assert [[one.padded_tokens for one in rank] for rank in step] == [[60, 15], [60], [60], [60]]
    even = project(plan, ENGINES["torchtitan"], StepShape())
    assert [[one.padded_tokens for one in rank] for rank in even] == [[60, 60]] * 4
    assert [one.doc_ids for rank in even for one in rank].count(()) == 3


def test_ranks_that_wait_in_every_micro_batch_train_alike_ones_together():
    plan = plan_of([5, 50, 64, 33, 60, 64, 9, 20], "best_fit", dp=2)
    step = project(plan, ENGINES["fsdp2"], StepShape())
    for rank, times in zip(step, plan.times, strict=True):
        seconds = [times.forward_s[one.pack][0] + times.backward_s[one.pack][0] for one in rank if one.doc_ids]
        assert seconds == sorted(seconds, reverse=True)
        assert len(seconds) == len(times.forward_s)
    # Who waits nowhere keeps the plan's order.
    for rank in project(plan, ENGINES["deepspeed"], StepShape()):
        assert [one.pack for one in rank] == list(range(len(rank)))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=16),
    cp=st.sampled_from([2, 3, 4]),
    engine=st.sampled_from(["megatron", "deepspeed", "deepspeed-zero3"]),
    multiple=st.sampled_from([1, 4]),
)
def test_a_group_shares_every_micro_batch(lengths, cp, engine, multiple):
    """Each document in chunks, or whole where ranks share heads; the micro-batch is a multiple of what they share."""
    profile = ENGINES[engine]
    plan = plan_of(lengths, "best_fit", cp=cp, max_pack_tokens=128, cp_sharding="per_document")
    step = project(plan, profile, StepShape(pack_multiple=multiple))
    sizes = {document.doc_id: document.num_tokens for document in plan.documents}
    rows = profile.document_chunks * cp
    chunk = rows if profile.context_parallel == "fixed" else 1
    for one in (one for replica in step for one in replica):
        assert one.document_tokens == tuple(-(-sizes[doc_id] // chunk) * chunk for doc_id in one.doc_ids)
        assert one.padded_tokens % math.lcm(rows, multiple) == 0
        assert 0 <= one.padded_tokens - sum(one.document_tokens) <= math.lcm(rows, multiple)
    assert trained(step) == Counter(list(sizes))


def test_skrull_is_refused_where_one_group_shares_everything():
    plan = plan_of([3, 3, 3, 200], "skrull", cp=2, max_pack_tokens=256)
    assert any(-1 in pack.sharding and max(pack.sharding) >= 0 for one in plan.pack_plans for pack in one.forward)
    with pytest.raises(ConfigError, match=r"whole on one rank of a context group.*Choose balanced"):
        project(plan, ENGINES["megatron"], StepShape())


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_slices_are_refused_with_what_works_instead(engine):
    plan = plan_of([40, 40], "sequential", dp=1)
    with pytest.raises(ConfigError, match=r"tokens \[0, 24\) of document 101, which has 40.*Choose balanced"):
        project(plan, ENGINES[engine], StepShape())


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


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_every_engine_says_why_it_cannot_what_it_cannot(engine):
    profile = ENGINES[engine]
    assert profile.name == engine
    cannot: set[Topic] = set() if profile.schedules else {"pipeline"}
    cannot |= {"context"} if profile.context_parallel == "none" else {"mixed_context"}
    cannot |= {"counts"} if profile.equal_counts else set()
    assert set(profile.cannot) == cannot
    for topic in (*cannot, "slices", "sharing", "layouts", "virtual"):
        with pytest.raises(ConfigError, match=rf"engine {engine}: this\. \w.*\. \w"):
            profile.refuse(topic, "this")


ONE = even_layout(8, dp=4)


@pytest.mark.parametrize(
    ("engine", "strategy", "layout", "message"),
    [
        ("megatron", "slimpack", even_layout(8, dp=2, pp=2), "cuts documents into slices.*Choose balanced"),
        ("deepspeed-zero3", "sequential", ONE, "cuts documents into slices"),
        ("fsdp2", "flexpipe", ONE, "changes the layout between steps"),
        ("trainer", "balanced", even_layout(8, dp=2, pp=2), "The Trainer has no pipeline.*pp=1"),
        ("fsdp2", "balanced", even_layout(8, pp=4), "pipeline of 4 stages.*or engine megatron"),
        ("deepspeed", "wlb", even_layout(8, dp=2, pp=2), "PipelineEngine"),
        ("torchtitan", "balanced", even_layout(8, cp=2), "VarlenMetadata.*'evenload train' shares"),
        ("megatron", "skrull", even_layout(8, cp=2), "one context-parallel group for all micro-batches"),
        ("deepspeed", "skrull", even_layout(8, cp=2), "a rank has some heads of all documents"),
        ("megatron", "balanced", even_layout(8, virtual=2), "2 virtual stages on 1 pipeline ranks.*virtual=1"),
        ("megatron", "skrull", even_layout(8, pp=2), "skrull: layout pp=2 has a pipeline"),
        ("megatron", "balanced", split_layout([4, 4], pp=2, devices=[1, 2]), "different numbers of devices"),
        ("megatron", "nonsense", ONE, "nonsense"),
    ],
)
def test_a_refusal_names_the_reason_and_what_works(engine, strategy, layout, message):
    with pytest.raises(ConfigError, match=message):
        require_strategy(ENGINES[engine], strategy, PlanOptions(), layout)


@pytest.mark.parametrize(
    ("engine", "strategy", "layout"),
    [
        ("megatron", "balanced", even_layout(8, dp=2, cp=2, pp=2, virtual=2)),
        ("fsdp2", "skrull", ONE),
        ("torchtitan", "wlb", even_layout(8, dp=2, pp=2, tp=2)),
        ("trainer", "auto", ONE),
        ("deepspeed", "fixed_exact", ONE),
        ("deepspeed-zero3", "wlb", even_layout(8, dp=2, cp=4)),
    ],
)
def test_what_runs_is_not_refused(engine, strategy, layout):
    require_strategy(ENGINES[engine], strategy, PlanOptions(), layout)


def test_a_schedule_of_another_runtime_is_refused():
    options = PlanOptions(schedule="zb_h1")
    with pytest.raises(ConfigError, match="Use one of 1f1b, interleaved, or leave it out"):
        require_strategy(ENGINES["megatron"], "balanced", options, even_layout(8, pp=2))
    with pytest.raises(ConfigError, match="fully_shard alone has no pipeline"):
        require_strategy(ENGINES["fsdp2"], "balanced", options, ONE)


def test_a_schedule_that_does_not_suit_the_layout_is_refused():
    for schedule, virtual in (("1f1b", 2), ("gpipe", 2), ("interleaved", 1)):
        layout = even_layout(8, pp=2, virtual=virtual)
        with pytest.raises(ConfigError, match=f"schedule is '{schedule}' on layout"):
            require_strategy(ENGINES["torchtitan"], "balanced", PlanOptions(schedule=schedule), layout)


def test_what_the_engine_decides_is_not_taken_and_forgotten():
    with pytest.raises(ConfigError, match=r"policy is 'recompute'.*the engine's checkpointing"):
        require_strategy(ENGINES["fsdp2"], "balanced", PlanOptions(policy="recompute"), ONE)


def test_what_our_adapters_refuse_is_told_of_plans_that_ask_for_it():
    def topics(engine, **sizes):
        return [one.topic for one in ENGINES[engine].not_adapted_in(even_layout(8, **sizes))]

    assert topics("megatron", dp=2, pp=2, tp=2) == []
    assert topics("megatron", pp=2, virtual=2, cp=2) == ["virtual", "context"]
    assert topics("torchtitan", dp=2) == []
    assert topics("torchtitan", pp=2, tp=2) == ["pipeline", "tensor"]
    assert topics("fsdp2", dp=2) == []


@pytest.mark.parametrize(("kv_heads", "cp", "is_refused"), [(8, 4, False), (2, 4, False), (8, 3, True), (6, 4, True)])
def test_ranks_that_would_have_no_heads_or_unequal_ones_are_refused(kv_heads, cp, is_refused):
    model = sample_model(num_heads=24 if kv_heads == 6 else 8, num_kv_heads=kv_heads)
    layout = even_layout(3, cp=cp)
    require_heads(ENGINES["megatron"], model, layout)
    if not is_refused:
        require_heads(ENGINES["deepspeed"], model, layout)
        return
    with pytest.raises(ConfigError, match=f"shares heads among {cp} ranks, and tiny has"):
        require_heads(ENGINES["deepspeed"], model, layout)


def test_all_strategies_that_run_and_why_not_the_others():
    names, left_out = runnable(ENGINES["fsdp2"], PlanOptions(), ONE)
    assert names == ("padded", "best_fit", "fixed_greedy", "balanced", "wlb", "skrull")
    assert {one.name for one in left_out} == {"sequential", "fixed_exact", "slimpack", "flexpipe"}
    assert "skrull" not in runnable(ENGINES["megatron"], PlanOptions(), even_layout(8, dp=2, pp=2))[0]
