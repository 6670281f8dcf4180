"""Checkpoints that somebody changed after they were saved are refused in words."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from checkpoint_cases import resume_error
from dist_training import train_steps
from small_run import write_small_run


@pytest.fixture
def run_directory(gloo_pool, tmp_path: Path) -> Path:
    """A configuration and a run with one checkpoint, after two steps."""
    settings = """
        max_document_tokens = 64
        batch_documents = 2
        [train]
        steps = 9
    """
    texts = (f"document {i} " * (1 + i % 3) for i in range(8))
    write_small_run(tmp_path, texts, settings, tied=True, num_hidden_layers=1)
    gloo_pool.run(1, train_steps, str(tmp_path / "config.toml"), [], 2)
    return tmp_path


class Planted:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_what_does_not_belong_together_is_refused(gloo_pool, run_directory):
    """Steps edited, a directory renamed, a loader state of another step, a planted pickle, damaged tensors."""
    saved = run_directory / "run" / "checkpoints" / "step-00000002"

    def error_of(change, steps: int = 2) -> str:
        other = run_directory / "other"
        shutil.rmtree(other, ignore_errors=True)
        copy = other / "checkpoints" / f"step-{steps:08d}"
        shutil.copytree(saved, copy)
        change(copy)
        settings = [f"train.output_dir={other}"]
        return gloo_pool.run(1, resume_error, str(run_directory / "config.toml"), settings)[0]

    def edit(name: str, **changes):
        def change(copy: Path) -> None:
            content = json.loads((copy / name).read_text()) | changes
            (copy / name).write_text(json.dumps(content))

        return change

    def cut(copy: Path) -> None:
        (file,) = copy.glob("*.distcp")
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    def plant(copy: Path) -> None:
        (copy / ".metadata").write_bytes(pickle.dumps(Planted(str(run_directory / "ran"))))

    assert error_of(lambda copy: None) == ""
    edited = error_of(edit("progress.json", steps_done=400))
    assert "progress.json tells of 400 steps, its name says 2" in edited
    renamed = error_of(edit("progress.json", steps_done=400), steps=400)
    assert "progress.json tells of 400 steps, its tensors say 2" in renamed
    assert "loader.json is not the one that progress.json belongs to" in error_of(edit("loader.json", step=1))
    assert "asks for 'posix.mkdir'" in error_of(plant)
    assert not (run_directory / "ran").exists()
    assert "is damaged or does not fit the configured model: rank 0" in error_of(cut)
