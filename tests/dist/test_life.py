"""A run's life: it stops when it is asked, saves by time, and takes no step that is not finite."""

import re
import signal
from pathlib import Path

import msgspec
import pytest

from dist_training import COSTS, train_steps
from evenload.config.train_config import load_train_config
from evenload.cost.coefficients import CostCoefficients
from life_cases import costs_of_a_resume, stop_when_one_rank_is_asked, train_with_a_poisoned_token, warnings_of
from small_run import write_small_run

POISON = "~"
PIPELINE = ["parallel.pp=2"]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Steps of five documents; that with the poisoned letter is the last of the second step."""
    settings = """
        max_document_tokens = 256
        batch_documents = 5
        shuffle_window = 1
        epochs = 1
        [optimizer]
        learning_rate = 1e-2
        [train]
    """
    letters = (POISON if i == 9 else "" for i in range(20))
    texts = (f"document {i} {letter}" * (1 + (i * 7) % 5) for i, letter in enumerate(letters))
    return write_small_run(tmp_path, texts, settings)


def checkpoints(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("requested_rank", [0, 1])
def test_all_ranks_stop_after_the_step_in_which_one_was_asked(gloo_pool, config_file, requested_rank):
    ended = gloo_pool.run(2, stop_when_one_rank_is_asked, str(config_file), PIPELINE, requested_rank)
    assert ended == [(2, signal.SIGTERM)] * 2


def test_checkpoints_come_by_the_clock_of_rank_0(gloo_pool, config_file, tmp_path):
    """An interval that is always over: a checkpoint after every step, on all ranks alike."""
    more = ["parallel.dp=2", "train.checkpoint_every_s=1e-9", "train.keep_checkpoints=0"]
    gloo_pool.run(2, train_steps, str(config_file), more, 3)
    assert checkpoints(tmp_path) == [f"step-{step:08d}" for step in (1, 2, 3)]


def test_by_default_a_run_loses_ten_minutes_at_most(config_file):
    for settings, interval_s in (
        ([], 600),
        (["train.checkpoint_every_steps=50"], 0),
        (["train.checkpoint_every_steps=50", "train.checkpoint_every_s=60"], 60),
        (["train.checkpoint_every_s=0"], 0),
    ):
        assert load_train_config(config_file, settings).train.checkpoint_interval_s == interval_s


def test_a_step_that_is_not_finite_stops_the_run_before_its_update(gloo_pool, config_file, tmp_path):
    more = [*PIPELINE, "train.checkpoint_every_steps=1"]
    ends = gloo_pool.run(2, train_with_a_poisoned_token, str(config_file), more, ord(POISON), None)
    assert ends[0].error == ends[1].error
    error = ends[0].error
    assert error.startswith("step 1: the loss is nan and the gradient norm nan"), error
    place = r"backward pack \d+ of replica 0 with document 9 \(\d+ tokens, number \d+ of the block"
    assert re.search(place, error), error
    assert f"begins in {tmp_path / 'corpus'}" in error
    assert "document 8" not in error
    for part in ("step-00000001, is from before", "optimizer.learning_rate", "train.on_nonfinite=skip"):
        assert part in error, error
    assert all(end.updated == [True] and end.adamw_steps == 1 for end in ends)
    assert checkpoints(tmp_path) == ["step-00000001"]


def test_such_steps_can_be_left_out_and_are_counted(gloo_pool, config_file):
    more = [*PIPELINE, "train.on_nonfinite=skip", "train.checkpoint_every_steps=1", "train.keep_checkpoints=0"]
    ends = gloo_pool.run(2, train_with_a_poisoned_token, str(config_file), more, ord(POISON), None)
    for end in ends:
        assert end.error == ""
        assert end.updated == [True, False, True, True]
        assert end.adamw_steps == 3
    (warning,) = ends[0].warnings
    assert "with document 9 " in warning
    assert "its documents count as dropped (not finite)" in warning
    assert re.search(r"dropped \(not finite\) +5 documents", "\n".join(ends[0].ledger))
    assert re.search(r"trained +15 documents", "\n".join(ends[0].ledger))


def test_the_account_and_the_updates_of_left_out_steps_are_resumed(gloo_pool, config_file):
    more = [*PIPELINE, "train.on_nonfinite=skip"]
    gloo_pool.run(2, train_with_a_poisoned_token, str(config_file), more, ord(POISON), 2)
    again = gloo_pool.run(2, train_with_a_poisoned_token, str(config_file), more, ord(POISON), None)[0]
    assert again.updated == [True, True]
    assert again.adamw_steps == 3
    assert re.search(r"dropped \(not finite\) +5 documents", "\n".join(again.ledger))
    assert re.search(r"trained +15 documents", "\n".join(again.ledger))


def test_a_step_without_any_label_is_taken(gloo_pool, config_file, tmp_path):
    """Documents of one token have nothing to predict."""
    for path in (tmp_path / "corpus").iterdir():
        path.write_text("a" if int(path.stem) < 5 else "more than a letter")
    (warnings,) = gloo_pool.run(1, warnings_of, str(config_file), ["data.append_eos=false"])
    assert warnings[0].startswith("step 0: none of its 5 documents has a token with a loss")
    assert not any(warnings[1:])


def test_a_resume_under_a_layout_that_the_saved_costs_do_not_cover_measures_it(gloo_pool, config_file, tmp_path):
    """As from pipelines to tensor parallelism. Costs that cover it stay, so that plans stay the same."""
    tensor, cache = ["parallel.tp=2"], str(tmp_path / "cache")
    without = msgspec.structs.replace(COSTS, intra_node=None)
    (_, lacks, output, _), *others = gloo_pool.run(2, costs_of_a_resume, str(config_file), tensor, without, cache)
    assert lacks == ()
    assert "do not cover layout tp=2 (group link)" in output
    assert all(missing == () for _, missing, _, _ in others)
    for kept, _, output, _ in gloo_pool.run(2, costs_of_a_resume, str(config_file), tensor, COSTS, cache):
        assert msgspec.json.decode(kept, type=CostCoefficients) == COSTS
        assert output == ""


def test_costs_are_measured_anew_on_demand_and_kept_where_nothing_disturbed_them(gloo_pool, config_file, tmp_path):
    arguments = (str(config_file), ["train.recalibrate=true"], COSTS, str(tmp_path / "cache"))
    ((result, _, output, num_cached),) = gloo_pool.run(1, costs_of_a_resume, *arguments)
    assert msgspec.json.decode(result, type=CostCoefficients).source == "calibrated"
    assert num_cached == (0 if "calibration was disturbed" in output else 1), output
