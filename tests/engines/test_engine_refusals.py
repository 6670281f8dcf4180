"""What an engine cannot run is refused by name, with the reason and the nearest thing that works."""

import pytest

from cost_samples import sample_model
from evenload.errors import ConfigError
from evenload.integrations.catalog import ENGINES, engine_named
from evenload.integrations.engine_profile import require_heads, require_strategy, runnable
from evenload.plan.problem.options import PlanOptions
from evenload.types.layout import even_layout, split_layout

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


def test_a_misspelt_engine_is_named():
    with pytest.raises(ConfigError, match="did you mean 'torchtitan'"):
        engine_named("torchtitn")
