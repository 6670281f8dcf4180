"""`PackedLoader(engine=NAME)`: format, counts and padding follow from the engine, contradictions are refused."""

import pytest

from evenload.errors import ConfigError
from packed_cases import loader_of, write_texts


@pytest.mark.parametrize(
    ("engine", "format", "is_equal"),
    [
        ("megatron", "megatron", False),
        ("deepspeed", "hf", False),
        ("deepspeed-zero3", "hf", True),
        ("fsdp2", "hf", True),
    ],
)
def test_the_engine_sets_what_is_left_out(tmp_path, engine, format, is_equal):
    write_texts(tmp_path)
    loader = loader_of(tmp_path, engine=engine, rank=0, world_size=2)
    assert (loader.options.format, loader.options.equal_micro_batches) == (format, is_equal)
    assert loader.start_messages[1].startswith(f"engine        {engine}: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "megatron", "strategy": "slimpack"}, "engine megatron: strategy slimpack cuts.*Choose balanced"),
        ({"engine": "megatron", "format": "hf"}, "format is 'hf', its models take megatron"),
        ({"engine": "fsdp2", "equal_micro_batches": False}, "equal_micro_batches is False.*wait for ever"),
        ({"engine": "deepspeed-zero3", "equal_micro_batches": False}, "ZeRO-3 gathers.*use engine deepspeed"),
        ({"engine": "deepspeed", "plan_options": {"dp_merge": True}}, "dp_merge = true.*no collective in attention"),
        (
            {"engine": "deepspeed", "strategy": "auto", "plan_options": {"window": 4}},
            "window is 4 with strategy auto.*Name fixed_greedy",
        ),
        (
            {"engine": "megatron", "plan_options": {"cp_sharding": "adaptive"}},
            "cp_sharding is 'adaptive'.*set 'per_document'",
        ),
        ({"engine": "deepsped"}, "did you mean 'deepspeed'"),
        ({"strategy": "sequential", "fixed_shapes": True}, "cuts documents.*keeps no keys and values"),
    ],
)
def test_a_contradiction_is_refused_before_anything_is_opened(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        loader_of(tmp_path / "nothing", **settings)


def test_a_trainer_needs_one_number_for_all_steps(tmp_path):
    """Which `PackedTrainer` gives a loader before its first step."""
    write_texts(tmp_path)
    loader = loader_of(tmp_path, engine="trainer")
    with pytest.raises(ConfigError, match=r"micro_batches is left out.*gradient_accumulation_steps"):
        next(iter(loader))
    loader.set_micro_batches(8)
    assert len(next(loader.steps())) == 8


def test_unequal_counts_where_the_engine_allows_them(tmp_path):
    (tmp_path / "long.jsonl").write_text("".join(f'{{"text": "{"a" * size}"}}\n' for size in (60, 60, 60, 5)))
    settings = {"engine": "deepspeed", "strategy": "best_fit", "batch_documents": 4, "shuffle_window": 1}
    steps = [next(loader_of(tmp_path, rank=rank, world_size=3, **settings).steps()) for rank in range(3)]
    assert sorted(len(step) for step in steps) == [1, 1, 2]
    assert all((pack.doc_ids >= 0).all() for step in steps for pack in step.packs)


@pytest.mark.parametrize(("strategy", "is_over_batches"), [("fixed_greedy", True), ("balanced", False), ("wlb", False)])
def test_only_strategies_that_read_the_window_are_said_to_pack_over_batches(tmp_path, strategy, is_over_batches):
    write_texts(tmp_path)
    loader = loader_of(tmp_path, strategy=strategy, plan_options={"window": 4})
    assert ("packed over 4 batches" in "\n".join(loader.start_messages)) == is_over_batches


def test_an_engines_auto_is_described_as_what_it_is(tmp_path):
    write_texts(tmp_path)
    lines = "\n".join(loader_of(tmp_path, engine="deepspeed", strategy="auto").start_messages)
    assert "auto: every global batch by the strategy that is fastest by this engine's price" in lines
    assert "that wait when you stop" not in lines
