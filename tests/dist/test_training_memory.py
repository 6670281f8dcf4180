"""Whole training runs with several stages on a rank, recomputed and offloaded documents, and split backwards."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dist_training import memory_steps, train_steps
from evenload.config.train_config import layout_of, load_train_config
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import ConfigError
from sweeps import sweep
from training_cases import STEPS, plain_losses, write_training_config


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A tiny tied Llama on documents of very different lengths, in float64."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i}.txt").write_text(f"document {i} " * (1 + (i * 7) % 13 + (30 if i % 11 == 0 else 0)))
    return write_training_config(tmp_path, corpus, num_layers=4)


@pytest.mark.parametrize(
    ("pp", "dp", "virtual", "strategy", "policy"),
    [
        *sweep(
            [
                (2, 1, 2, "auto", "recompute"),
                (2, 2, 2, "balanced", "offload"),
                (1, 2, 2, "slimpack", "replay"),
                (4, 1, 1, "auto", "offload"),
            ],
            2,
        ),
    ],
)
def test_loss_trajectory_equals_plain_adamw(gloo_pool, config_file, pp, dp, virtual, strategy, policy):
    """Optimizer, shards and tied weights over virtual stages: every update, to 1e-9."""
    overrides = [
        *(f"parallel.{name}={value}" for name, value in (("pp", pp), ("dp", dp), ("virtual", virtual))),
        *(f"plan.strategy={strategy}", f"plan.options.policy={policy}"),
    ]
    ranks = gloo_pool.run(pp * dp, memory_steps, str(config_file), overrides, STEPS)
    losses = plain_losses(load_train_config(config_file, overrides))
    assert [step.loss for step in ranks[0]] == pytest.approx(losses, rel=1e-9)
    assert {policy} == frozenset.union(*(step.policies for step in ranks[0]))
    if strategy == "auto":
        assert "W" in frozenset.union(*(step.kinds for step in ranks[0])), "backwards are really split"


def test_where_memory_is_short_a_run_goes_on_with_less_of_it(gloo_pool, config_file, tmp_path):
    """Under a limit between what replay and what recomputing needs, `choose` plans what fits, and it does."""

    def run(name, *overrides):
        common = ["parallel.pp=2", f"train.output_dir={tmp_path}/{name}"]
        return gloo_pool.run(2, memory_steps, str(config_file), [*common, *overrides], 2)[0]

    free = run("free")
    least = run("least", "plan.options.policy=offload")
    needed, possible = (max(step.predicted_bytes for step in steps) for steps in (free, least))
    assert possible < needed
    limit = possible + (needed - possible) // 4
    short = run("short", f"plan.memory_bytes={limit}")
    assert frozenset.union(*(step.policies for step in free)) == {"replay"}
    assert frozenset.union(*(step.policies for step in short)) > {"replay"}
    assert max(step.peak_bytes for step in free) > max(step.peak_bytes for step in short)
    assert all(step.peak_bytes <= step.predicted_bytes <= limit for step in short)
    assert [step.loss for step in short] == pytest.approx([step.loss for step in free], rel=1e-9)


def test_a_checkpoint_moves_between_virtual_and_plain_stages(gloo_pool, config_file, tmp_path):
    """Checkpoints know layers, not stages: four virtual stages go on as two, and those as one rank."""
    base = [f"train.output_dir={tmp_path}/moved"]
    virtual = [*base, "parallel.pp=2", "parallel.virtual=2"]
    assert layout_of(load_train_config(config_file, virtual).parallel, 4).stage_to_rank == (0, 1, 0, 1)
    first = gloo_pool.run(2, train_steps, str(config_file), virtual, 2)[0]
    second = gloo_pool.run(2, train_steps, str(config_file), [*base, "parallel.pp=2"], 3)[0]
    uneven = [*base, "parallel.virtual=2", "parallel.stage_layers=[3, 1]"]
    third = gloo_pool.run(1, train_steps, str(config_file), uneven, STEPS)[0]
    losses = plain_losses(load_train_config(config_file, base))
    assert first + second + third == pytest.approx(losses, rel=1e-9)


def test_a_model_of_virtual_stages_loads_in_transformers(gloo_pool, config_file, tmp_path):
    """Every rank writes the layers of all its stages; the next loss is that of the written model."""
    overrides = ["parallel.pp=2", "parallel.virtual=2", f"train.output_dir={tmp_path}/out"]
    gloo_pool.run(2, train_steps, str(config_file), overrides, 2, True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype=torch.float64)
    loader = GlobalBatchLoader(load_train_config(config_file, overrides).data)
    for _ in range(3):
        batch = loader.next_batch()
    assert batch is not None
    total = 0.0
    for tokens in batch.tokens.values():
        row = torch.from_numpy(tokens).long()
        total += nn.functional.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="sum").item()
    continued = gloo_pool.run(2, train_steps, str(config_file), overrides, 3)[0]
    assert continued[0] == pytest.approx(total / batch.num_label_tokens, rel=1e-9)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("parallel.virtual=0", "parallel.virtual is 0, must be at least 1"),
        ("parallel.virtual=3", "4 layers cannot fill 6 stages"),
        ("parallel.stage_layers=[2, 2]", r"must be 4 numbers .* parallel.pp x parallel.virtual stages"),
    ],
)
def test_virtual_stages_that_the_model_does_not_have_are_refused(config_file, value, message) -> None:
    overrides = ["parallel.pp=2", "parallel.virtual=2", value]
    with pytest.raises(ConfigError, match=message):
        layout_of(load_train_config(config_file, overrides).parallel, 4)
