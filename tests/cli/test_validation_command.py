"""`evenload train` with `[validation]`: what it writes, which checkpoints stay, also where it goes on."""

import json
import math
from pathlib import Path

import pytest

from commands import refused
from evenload.report.run_files import read_metrics, read_validations
from small_run import LONG_TAILED_TEXTS

SETTINGS = """
max_document_tokens = 256
overlong = "truncate"
batch_documents = 6
[parallel]
dp = 2
[optimizer]
learning_rate = 1e-3
[validation]
every_steps = 1
sources = ["held_out"]
[train]
steps = 2
cost_file = "cost.json"
keep_checkpoints = 1
keep_best = 1
export_hf = false
"""
FAR_TOO_MUCH = "optimizer.learning_rate=3.0"


@pytest.fixture
def project(small_project) -> Path:
    directory = small_project(SETTINGS, dp=2)
    (directory / "held_out").mkdir()
    for at, text in enumerate(LONG_TAILED_TEXTS[:5]):
        (directory / "held_out" / f"{at}.txt").write_text(text[::-1])
    return directory


@pytest.mark.long
def test_the_best_and_the_newest_checkpoints_stay_also_in_a_run_that_goes_on(project, command_here):
    """The third step ruins the model, so the checkpoint after the second is the best one for ever."""
    assert command_here("train", "config.toml")[0] == 0
    assert command_here("train", "config.toml", "train.steps=3", FAR_TOO_MUCH)[0] == 0
    assert kept(project) == [2, 3]
    assert command_here("train", "config.toml", "train.steps=4", FAR_TOO_MUCH)[0] == 0
    assert kept(project) == [2, 4]

    result = read_validations(project / "run" / "validation.jsonl")
    assert [one.step for one in result] == [0, 1, 2, 3]
    losses = [one.whole.loss for one in result]
    assert all(loss is not None and math.isfinite(loss) for loss in losses)
    assert losses.index(min(losses)) == 1
    assert result[0].whole.documents == 5
    assert all(one.left_out == result[0].left_out for one in result)
    assert result[0].metrics()["validation/loss"] == losses[0]
    assert {f"validation/perplexity/length/{one.name}" for one in result[0].by_length} <= result[0].metrics().keys()
    best = json.loads((project / "run" / "checkpoints" / "best.json").read_text())
    assert best == {"checkpoint": "step-00000002", "steps_done": 2, "validation_loss": losses[1]}
    rates = [row["lr"] for row in read_metrics(project / "run" / "metrics.jsonl")]
    assert rates == pytest.approx([1e-3, 1e-3, 3.0, 3.0])


def kept(project: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (project / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["validation.sources=['nowhere']"], "nowhere"),
        (["validation.eval_steps=3"], "did you mean 'validation.every_steps'"),
        (["validation.sources=[]"], "validation.sources is [] and validation.mixture has 0 parts"),
        (["validation.share=0.1"], "set exactly one of them: a share of [data], which is then not trained, or other"),
        (["validation.share=1.5", "validation.sources=[]"], "validation.share is 1.5, must be above 0 and below 1"),
        (
            ["validation.share=0.1", "validation.sources=[]", "validation.record=messages"],
            "validation.share is 0.1 and validation.record is set, but documents of [data] are read as it says",
        ),
        (
            ["validation.share=0.1", "validation.sources=[]", "data.held_out_share=0.2"],
            "validation.share is 0.1 and data.held_out_share is 0.2",
        ),
        (["data.held_out_share=0.2", "data.reads=held_out"], "the run would train on what is held out"),
        (["data.reads=held_out"], "data.held_out_share is 0, so nothing is"),
        (["data.held_out_share=1.0"], "data.held_out_share is 1.0, must be at least 0"),
        (["validation.every_steps=0", "validation.at_end=false"], "so nothing is ever validated"),
        (["validation.record=messages"], "held_out/0.txt is read as text"),
        (["optimizer.schedule=rates:sawtooth"], "'optimizer.schedule' is gone"),
        (["optimizer.decay=custom"], "choices: constant, cosine, linear, wsd"),
    ],
)
@pytest.mark.usefixtures("no_ranks", "project")
def test_mistakes_are_refused_before_ranks_start(capsys, arguments, expected):
    assert expected in refused(capsys, "train", "config.toml", *arguments)
