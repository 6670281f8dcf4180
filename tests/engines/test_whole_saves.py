"""`Fsdp2Loop.save` leaves a whole checkpoint, whatever happens while it writes the next."""

import pytest

from evenload.errors import CheckpointError, ConfigError
from evenload.integrations.fsdp2_loop import latest_place, new_place
from packed_cases import write_texts
from whole_save_cases import errors_of_rank_zero, load_with_other_batches, places_of_saves, save_again_and_fail


def test_a_save_that_fails_leaves_the_one_before(gloo_pool, tmp_path):
    write_texts(tmp_path / "corpus")
    for found in gloo_pool.run(2, save_again_and_fail, tmp_path / "corpus", tmp_path / "saved"):
        assert found.first == ["latest", "step-0"]
        assert "could not be written" in found.message
        assert "an earlier checkpoint is intact" in found.message
        assert found.num_steps == 0, "what was loaded is the first one"
        assert found.last == ["latest", "step-1"], "the next save takes away what the failed one left"


def test_a_loader_of_other_batches_says_so_itself(gloo_pool, tmp_path):
    write_texts(tmp_path / "corpus")
    ((kind, message),) = gloo_pool.run(1, load_with_other_batches, tmp_path / "corpus", tmp_path / "saved")
    assert kind == "ConfigError"
    assert "batch_documents" in message


def test_a_folder_without_a_whole_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        latest_place(tmp_path)
    with pytest.raises(ConfigError, match="a folder that all ranks reach"):
        new_place("s3://bucket/run", 0)


def test_a_second_save_of_a_step_goes_beside_the_first(gloo_pool, tmp_path):
    assert gloo_pool.run(2, places_of_saves, tmp_path) == [["step-3", "step-3-again", "step-3"]] * 2


def test_what_fails_on_rank_zero_fails_on_all_ranks(gloo_pool, tmp_path):
    """Others would wait for it."""
    for unnamed, missing in gloo_pool.run(2, errors_of_rank_zero, tmp_path):
        assert "could not be named the last checkpoint" in unnamed
        assert "holds no whole checkpoint" in missing
