"""What is trained does not depend on how it is read: workers, prefetching, ranks; and masks reach the loss."""

import json
from pathlib import Path

import pytest

from checkpoint_cases import training_error
from dist_training import train_steps
from evenload.config.train_config import load_train_config
from training_cases import STEPS, plain_losses, write_training_config


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    """Prompts with completions, of very different lengths, some without any label."""
    rows = [
        {"prompt": f"question {i} " * (1 + i * 5 % 9), "completion": f"answer {i}" * (i * 3 % 7)} for i in range(60)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_training_config(tmp_path, tmp_path / "prompts.jsonl", 'record = "prompt_completion"')


@pytest.mark.parametrize(("pp", "dp", "strategy"), [(1, 1, "best_fit"), (2, 2, "slimpack")])
def test_only_completions_are_learnt(gloo_pool, prompts_file, pp, dp, strategy):
    """A mask that is lost on the way to the last stage would train prompts, with a plausible loss."""
    overrides = [f"parallel.pp={pp}", f"parallel.dp={dp}", f"plan.strategy={strategy}"]
    losses = gloo_pool.run(pp * dp, train_steps, str(prompts_file), overrides, STEPS)[0]
    assert losses == pytest.approx(plain_losses(load_train_config(prompts_file, overrides)), rel=1e-9)
    everything = plain_losses(load_train_config(prompts_file, [*overrides, "data.loss_on=all"]))
    assert abs(everything[0] - losses[0]) > 1e-3, "the mask makes no difference here, so this test shows nothing"


def test_losses_do_not_depend_on_workers_or_prefetching(gloo_pool, prompts_file, tmp_path):
    """To the last bit, at one layout."""
    runs = {}
    for workers, prefetch in ((0, 0), (0, 1), (2, 4)):
        here = [
            "parallel.dp=2", f"data.workers={workers}", f"data.prefetch_steps={prefetch}",
            f"train.output_dir={tmp_path}/{workers}{prefetch}",
        ]  # fmt: skip
        runs[workers, prefetch] = gloo_pool.run(2, train_steps, str(prompts_file), here, STEPS)[0]
    assert runs[0, 0] == runs[0, 1] == runs[2, 4]


@pytest.mark.parametrize(("ids", "labels"), [([5, 257, 6], [5, 5, 6]), ([5, 7, 6], [5, 300, 6])])
def test_ids_and_labels_beyond_the_model_end_the_run_by_file_and_line(gloo_pool, tmp_path, ids, labels):
    """An embedding of 257 rows; beyond it, memory would be read that belongs to something else."""
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2 + [{"input_ids": ids, "labels": labels}]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = 'record = "tokens"\nlabels_column = "labels"'
    config_file = write_training_config(tmp_path, tmp_path / "ids.jsonl", data)
    message = gloo_pool.run(1, training_error, str(config_file), [])[0]
    assert "ids.jsonl" in message
    assert "3" in message.split("ids.jsonl")[1].split("column")[0]
    assert "must be in 0 .. below the vocabulary's 257" in message
    assert gloo_pool.run(1, training_error, str(config_file), ["data.on_corrupt=skip"])[0] == ""
