"""`StepProfile`: where training fails, the file is of the steps that ended, and the failure is what one hears of."""

from pathlib import Path

import pytest

from evenload.cli.run_observers import DIRECTORY, StepProfile


def run_until(directory: Path, failing_step: int) -> None:
    """Steps 0 to 7, of which 2 to 5 are profiled, until one fails."""
    with StepProfile((2, 6), directory, is_cuda=False, rank=0, steps_done=0) as profile:
        for step in range(8):
            if step == failing_step:
                raise ValueError(f"step {step} failed")
            profile.after_step(step + 1)


def written(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.glob(f"{DIRECTORY}/*"))


def test_the_file_is_named_by_the_steps_that_ended(tmp_path):
    for failing_step, files in ((2, []), (4, ["steps-2-to-3-rank-00000.json"])):
        with pytest.raises(ValueError, match=f"step {failing_step} failed"):
            run_until(tmp_path / str(failing_step), failing_step)
        assert written(tmp_path / str(failing_step)) == files


def test_a_profile_that_cannot_be_written_does_not_hide_why_training_failed(tmp_path, capfd):
    (tmp_path / DIRECTORY).write_text("a file where the directory should be")
    with pytest.raises(ValueError, match="step 4 failed"):
        run_until(tmp_path, 4)
    assert "warning: the profile of rank 0 could not be written" in capfd.readouterr().err
    with pytest.raises(FileExistsError):
        run_until(tmp_path, 8)
