"""Whole training runs: equal to plain AdamW, and exactly resumable."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dist_training import train_steps
from evenload.config.train_config import layout_of, load_train_config
from evenload.data.batches import decode_state
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import ConfigError
from evenload.runtime.checkpoint.checkpoint import Progress
from sweeps import sweep
from training_cases import STEPS, plain_losses, write_training_config


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A tiny Llama on documents of very different lengths, in float64."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i}.txt").write_text(f"document {i} " * (1 + (i * 7) % 13 + (30 if i % 11 == 0 else 0)))
    return write_training_config(tmp_path, corpus, num_layers=3)


@pytest.mark.parametrize(
    ("pp", "dp", "strategy"), [(1, 1, "slimpack"), (2, 1, "slimpack"), (2, 2, "balanced"), (1, 3, "best_fit")]
)
def test_loss_trajectory_equals_plain_adamw(gloo_pool, config_file, pp, dp, strategy):
    """Clipping, warm-up, weight-decay groups, sharded state, tied weights and all: every update, to 1e-9."""
    overrides = [f"parallel.pp={pp}", f"parallel.dp={dp}", f"plan.strategy={strategy}"]
    ranks = gloo_pool.run(pp * dp, train_steps, str(config_file), overrides, STEPS)
    assert ranks[0] == pytest.approx(plain_losses(load_train_config(config_file, overrides)), rel=1e-9)
    assert ranks[0][-1] < ranks[0][0]


@pytest.mark.parametrize(
    ("dtype", "stops"), sweep([("bfloat16", (2,)), ("bfloat16", (1, 3)), ("float32", (1, 3))], 1), ids=str
)
def test_resume_at_any_step_is_exact_to_the_bit(gloo_pool, config_file, tmp_path, dtype, stops):
    """A new trainer after every stop: the same losses, to the last bit (bf16: master weights survive)."""
    fixed = ["parallel.pp=2", "parallel.dp=2", f"model.dtype={dtype}"]
    whole = gloo_pool.run(4, train_steps, str(config_file), [*fixed, f"train.output_dir={tmp_path}/whole"], STEPS)[0]
    assert len(whole) == STEPS
    resumed = []
    for stop in (*sorted(stops), STEPS):
        here = [*fixed, f"train.output_dir={tmp_path}/resumed"]
        resumed += gloo_pool.run(4, train_steps, str(config_file), here, stop)[0]
    assert resumed == whole


DELAYING = {
    "wlb": ["plan.strategy=wlb", "plan.options.max_delay_steps=3"],
    "wlb queues": [
        "plan.strategy=wlb",
        "plan.options.wlb.release=queues",
        "plan.options.wlb.outlier_lengths=[120]",
        "plan.options.max_delay_steps=3",
    ],
    "fixed_greedy": ["plan.strategy=fixed_greedy", "plan.options.window=3"],
}


def progress_after(directory: Path, steps: int) -> Progress:
    """What a checkpoint knows besides tensors."""
    found = directory / "checkpoints" / f"step-{steps:08d}" / "progress.json"
    return msgspec.json.decode(found.read_bytes(), type=Progress)


@pytest.mark.parametrize("strategy", sweep(list(DELAYING), 1))
def test_resume_while_documents_wait_is_exact_to_the_bit(gloo_pool, config_file, tmp_path, strategy):
    """Which documents wait, and since when, must travel with the step that is saved, not with those prepared ahead."""
    fixed = ["parallel.dp=2", *DELAYING[strategy]]
    whole = gloo_pool.run(2, train_steps, str(config_file), [*fixed, f"train.output_dir={tmp_path}/whole"], STEPS)[0]
    resumed, waiting = [], []
    for stop in (*sorted(sweep((2, 1, 3), 2)), STEPS):
        here = [*fixed, f"train.output_dir={tmp_path}/resumed"]
        resumed += gloo_pool.run(2, train_steps, str(config_file), here, stop)[0]
        waiting.append(len(progress_after(tmp_path / "resumed", stop).planner.waiting))
    assert resumed == whole
    assert sum(count > 0 for count in waiting) >= len(waiting) // 2, f"documents were put off: {waiting}"


@pytest.mark.parametrize("strategy", list(DELAYING))
def test_documents_put_off_are_trained_before_the_data_ends(gloo_pool, config_file, tmp_path, strategy):
    """Queues are flushed: what was read is trained, whatever waited."""
    overrides = [*DELAYING[strategy], "data.epochs=1", "train.steps=50", f"train.output_dir={tmp_path}/out"]
    losses = gloo_pool.run(2, train_steps, str(config_file), ["parallel.dp=2", *overrides], 50)[0]
    progress = progress_after(tmp_path / "out", len(losses))
    saved = tmp_path / "out" / "checkpoints" / f"step-{len(losses):08d}" / "loader.json"
    ledger = decode_state(saved.read_bytes()).ledger
    assert ledger.trained == ledger.read
    assert progress.planner.waiting == ()


def test_a_checkpoint_continues_under_another_layout(gloo_pool, config_file, tmp_path):
    """State is by unit and layout-free: pp2 x dp2 goes on as pp1 x dp3, equal up to summation order."""
    base = [f"train.output_dir={tmp_path}/moved"]
    whole = gloo_pool.run(1, train_steps, str(config_file), [f"train.output_dir={tmp_path}/whole"], STEPS)[0]
    first = gloo_pool.run(4, train_steps, str(config_file), [*base, "parallel.pp=2", "parallel.dp=2"], 3)[0]
    rest = gloo_pool.run(3, train_steps, str(config_file), [*base, "parallel.dp=3"], STEPS)[0]
    assert first + rest == pytest.approx(whole, rel=1e-9)


def test_layers_given_to_stages_train_the_same_and_continue_from_an_even_split(gloo_pool, config_file, tmp_path):
    """Checkpoints know layers, not stages: 2 + 1 goes on as 1 + 2, equal up to summation order."""
    base = [f"train.output_dir={tmp_path}/moved", "parallel.pp=2"]
    uneven = [*base, "parallel.stage_layers=[1, 2]"]
    assert layout_of(load_train_config(config_file, uneven).parallel, 3).stage_layers == ((0, 1), (1, 3))
    first = gloo_pool.run(2, train_steps, str(config_file), base, 3)[0]
    rest = gloo_pool.run(2, train_steps, str(config_file), uneven, STEPS)[0]
    assert first + rest == pytest.approx(plain_losses(load_train_config(config_file, base)), rel=1e-9)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[2, 2, 1]", r"parallel.stage_layers is \[2, 2, 1\], must be 2 numbers"),
        ("[4, 0]", "of at least 1"),
        ("[2, 3]", "hold 5 layers, the model has 4"),
    ],
)
def test_stage_layers_that_are_not_the_models_are_refused(config_file, value, message) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(load_train_config(config_file, ["parallel.pp=2", f"parallel.stage_layers={value}"]).parallel, 4)


def test_exported_model_loads_in_transformers(gloo_pool, config_file, tmp_path):
    """Safetensors of two stages, tied weights once, the trained values."""
    overrides = ["parallel.pp=2", f"train.output_dir={tmp_path}/out"]
    gloo_pool.run(2, train_steps, str(config_file), overrides, 2, True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype=torch.float64)
    config = load_train_config(config_file, overrides)
    loader = GlobalBatchLoader(config.data)
    for _ in range(3):
        batch = loader.next_batch()
    total = sum(
        nn.functional.cross_entropy(
            model(torch.from_numpy(t).long()[None]).logits[0, :-1], torch.from_numpy(t).long()[1:], reduction="sum"
        ).item()
        for t in batch.tokens.values()
    )
    continued = gloo_pool.run(2, train_steps, str(config_file), overrides, 3)[0]
    assert continued[0] == pytest.approx(total / batch.num_label_tokens, rel=1e-9)
    from_export = [
        f"model.path={tmp_path / 'out' / 'model'}",
        "model.random_init=false",
        f"train.output_dir={tmp_path}/again",
    ]
    assert gloo_pool.run(1, train_steps, str(config_file), from_export, 1)[0][0] > 0


def test_an_epochs_small_last_batch_trains_under_interleaved_stages(gloo_pool, tmp_path):
    """Two pipeline ranks of two virtual stages, batches of 6, 6 and 1 documents: packs are no multiple of the ranks."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(13):
        (corpus / f"{i}.txt").write_text(f"document {i} " * (1 + (i * 7) % 13))
    config = write_training_config(tmp_path, corpus, data="epochs = 1", num_layers=4)
    overrides = [
        *("parallel.pp=2", "parallel.virtual=2", "plan.strategy=balanced", "plan.options.schedule=interleaved"),
        *("data.batch_documents=6", "train.steps=3"),
    ]
    ranks = gloo_pool.run(2, train_steps, str(config), overrides, 4)
    assert len(ranks[0]) == 3
    assert ranks[0] == pytest.approx(plain_losses(load_train_config(config, overrides)), rel=1e-9)
