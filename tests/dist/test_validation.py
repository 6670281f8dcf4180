"""Validation while training: the losses are plain transformers', and the run is the same to the bit as without it.

That forwards alone give every document's loss with every feature is a part of test_matrix.py.
"""

from pathlib import Path

import numpy as np
import pytest

from dist_training import Outcome, assert_same_training, run_outcome
from evenload.config.train_config import load_train_config
from evenload.types.run import LossOf, Validation
from sweeps import sweep
from training_cases import plain_losses, write_phases, write_training_config
from validation_cases import PlainLoss, left_out_passes, plain_validation, start_error

STEPS = 4
VALIDATION = """
[validation]
every_steps = 3
batch_tokens = 600
[[validation.mixture]]
name = "books"
weight = 2.0
sources = ["{held_out}/books"]
[[validation.mixture]]
name = "lines"
weight = 1.0
sources = ["{held_out}/lines"]
"""
LAYOUTS = {
    "single": ["plan.strategy=slimpack"],
    "pipeline": ["parallel.pp=2", "parallel.dp=2", "parallel.virtual=2", "plan.strategy=slimpack"],
    "context": ["parallel.cp=2", "parallel.dp=2", "plan.strategy=auto"],
    "tensor": ["parallel.tp=2", "parallel.pp=2", "plan.strategy=balanced", "parallel.channels=fifo"],
    "delay": ["parallel.dp=2", "plan.strategy=wlb", "plan.options.max_delay_steps=3"],
    "live": [
        *("parallel.dp=4", 'plan.layouts=["pp=2", "pp=4"]', "plan.strategy=flexpipe", "plan.options.policy=replay"),
        "plan.options.flexpipe={known_steps=2, margin=0.0, patience_steps=1, follow_measured=false}",
        *("data.shuffle_window=1", "data.streams=1", "data.batch_documents=8", "train.steps=4"),
    ],
}
PROCESSES = {"single": 1, "delay": 2}
CAP_BYTES = {"live": 6_000_000}
"""As in test_flexpipe_training.py: long batches do not fit four replicas."""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Batches of short and of long documents, and other documents to validate, some of which are too long."""
    corpus = write_phases(tmp_path / "corpus", "slls")
    for name, sizes in (("books", (3, 90, 256, 257, 700)), ("lines", (1, 2, 5, 9, 17, 30))):
        (tmp_path / "held_out" / name).mkdir(parents=True)
        for at, size in enumerate(sizes):
            text = "".join(chr(97 + (i * 5 + at) % 26) for i in range(size))
            (tmp_path / "held_out" / name / f"{at}.txt").write_text(text)
    file = write_training_config(tmp_path, corpus, num_layers=4)
    file.write_text(file.read_text() + VALIDATION.format(held_out=tmp_path / "held_out"))
    return file


def run(gloo_pool, config_file: Path, layout: str, *more: str, stop_after: int = STEPS) -> Outcome:
    settings = [*LAYOUTS[layout], f"train.output_dir={config_file.parent / layout}", *more]
    cap_bytes = CAP_BYTES.get(layout, 2**34)
    return gloo_pool.run(PROCESSES.get(layout, 4), run_outcome, str(config_file), settings, cap_bytes, stop_after)[0]


def without_validation(config_file: Path) -> Path:
    plain = config_file.with_name("plain.toml")
    plain.write_text(config_file.read_text().partition("[validation]")[0])
    return plain


@pytest.mark.parametrize("layout", sweep(list(LAYOUTS), 6))
def test_losses_are_those_of_the_plain_model_and_the_run_stays_the_same_to_the_bit(gloo_pool, config_file, layout):
    result = run(gloo_pool, config_file, layout)
    assert [one.step for one in result.validations] == [2, 3], "every third step, and the last"
    expected = plain_validation(config_file, LAYOUTS[layout], result.state)
    assert_equals(result.validations[-1], expected)
    if layout == "live":
        assert len(set(result.layouts)) > 1, "the layout changed on the way"

    plain = run(gloo_pool, without_validation(config_file), layout, f"train.output_dir={config_file.parent / 'plain'}")
    assert_same_training(result, plain, 0.0)


def assert_equals(result: Validation, expected: list[PlainLoss]) -> None:
    assert len(expected) == 15, "11 files, of which 3 are cut into 2, 2 and 3 documents"
    assert_loss(result.whole, expected)
    classes = {one.name: [e for e in expected if e.tokens.bit_length() == int(one.name.split("-")[0]).bit_length()]
               for one in result.by_length}  # fmt: skip
    assert sum(map(len, classes.values())) == len(expected)
    assert list(classes) == sorted(classes, key=lambda name: int(name.split("-")[0]))
    for one in result.by_length:
        assert_loss(one, classes[one.name])
    assert [one.name for one in result.by_source] == ["books", "lines"]
    for part, one in enumerate(result.by_source):
        assert_loss(one, [e for e in expected if e.part == part])
    assert result.left_out == ()


def assert_loss(result: LossOf, expected: list[PlainLoss]) -> None:
    assert result.documents == len(expected)
    assert result.tokens == sum(one.tokens for one in expected)
    assert result.label_tokens == sum(one.labels for one in expected)
    if not result.label_tokens:
        assert (result.loss, result.perplexity) == (None, None)
        return
    mean = sum(one.loss for one in expected) / result.label_tokens
    assert result.loss == pytest.approx(mean, rel=1e-10)
    assert result.perplexity == pytest.approx(np.exp(mean), rel=1e-9)


def test_what_overlong_documents_lose_is_told_and_a_resumed_run_validates_alike(gloo_pool, config_file):
    truncated = ["data.overlong=truncate", "validation.every_steps=1"]
    whole = run(gloo_pool, config_file, "delay", *truncated)
    here = f"train.output_dir={config_file.parent / 'resumed'}"
    first = run(gloo_pool, config_file, "delay", *truncated, here, stop_after=2)
    rest = run(gloo_pool, config_file, "delay", *truncated, here)
    (left_out,) = whole.validations[0].left_out
    assert left_out[0] == "truncated"
    assert left_out[2] == (257 - 256) + (258 - 256) + (701 - 256), "the ends of three documents"
    assert [one.step for one in whole.validations] == [0, 1, 2, 3]
    again = [*first.validations, *rest.validations]
    assert [one.whole for one in again] == [one.whole for one in whole.validations]
    assert [one.by_source for one in again] == [one.by_source for one in whole.validations]


@pytest.mark.parametrize("layout", ["pipeline", "delay"])
def test_a_share_of_the_data_validates_and_is_not_trained(gloo_pool, config_file, layout):
    """Also in a run that was stopped and goes on."""
    shared = without_validation(config_file)
    shared.write_text(shared.read_text() + "[validation]\nshare = 0.3\nevery_steps = 2\nbatch_tokens = 600\n")
    result = run(gloo_pool, shared, layout)
    assert [one.step for one in result.validations] == [1, 3]
    expected = plain_validation(shared, LAYOUTS[layout], result.state)
    assert_loss(result.validations[-1].whole, expected)
    config = load_train_config(shared, LAYOUTS[layout])
    assert config.data.held_out_share == 0.3
    assert 0.1 < len(expected) / len(list((config_file.parent / "corpus").iterdir())) < 0.5
    if layout == "pipeline":
        assert result.losses == pytest.approx(plain_losses(config), rel=1e-9)

    here = f"train.output_dir={config_file.parent / 'resumed'}"
    first = run(gloo_pool, shared, layout, here, stop_after=2)
    rest = run(gloo_pool, shared, layout, here)
    assert first.losses + rest.losses == result.losses
    assert [one.whole for one in (*first.validations, *rest.validations)] == [one.whole for one in result.validations]


def test_a_pass_that_a_stop_or_an_error_leaves_out_costs_no_step(gloo_pool, config_file):
    arguments = str(config_file), ["parallel.dp=2"], str(config_file.parent), STEPS
    result, other = gloo_pool.run(2, left_out_passes, *arguments)
    assert result.leaving_off == [], "the run goes on, so no step was its last"
    assert result.in_last_step == []
    assert result.abandoned == (1, 15, [])
    assert other.abandoned[:2] == (1, 15), "every rank leaves the pass that one was asked to leave"
    assert result.failed[1] == 3, "the step before the pass that failed is saved"
    assert "held_out" in result.failed[0]
    assert "[validation], or what it takes over from [data], has changed" in result.forgotten
    assert result.is_forgotten


def test_validation_data_without_documents_is_refused_before_the_first_step(gloo_pool, config_file):
    empty = config_file.parent / "empty"
    empty.mkdir()
    (empty / "nothing.jsonl").write_text("")
    errors = gloo_pool.run(
        2, start_error, str(config_file), ["parallel.dp=2", "validation.mixture=[]", f"validation.sources=['{empty}']"]
    )
    assert len(set(errors)) == 1
    assert "no document" in errors[0]
