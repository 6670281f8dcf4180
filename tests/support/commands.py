"""Commands of `evenload` in the tests' own process, and what they plan."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from evenload.cli.main import main

MODEL = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4,
    "intermediate_size": 128, "vocab_size": 300, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
"""config.json of a small model."""


def write_lengths(directory: Path) -> str:
    """Write a table of 200 lengths below 5,000, and return its path."""
    path = directory / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(1, 5000, 200).astype(np.uint32))
    return str(path)


def run(*arguments: str) -> int:
    """Return the exit code of a command."""
    with pytest.raises(SystemExit) as stopped:
        main([*arguments])
    return int(stopped.value.code or 0)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line with which a command refuses what a user did."""
    capsys.readouterr()
    assert run(*arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    if arguments[0] == "train" and len(lines) > 1:
        assert lines.pop(0).startswith("evenload ")  # says which run it starts
    (error,) = lines
    assert error.startswith("evenload: error: ")
    return error


def start_train(
    directory: Path, *arguments: str, command: tuple[str, ...] = ("-m", "evenload.cli.main")
) -> subprocess.Popen:
    """Start `evenload train config.toml` in a directory, in a session of its own; stderr goes to stdout."""
    return subprocess.Popen(
        [sys.executable, *command, "train", "config.toml", *arguments],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for_rows(run: Path, count: int, process: subprocess.Popen) -> None:
    """Wait until a run that goes on has so many rows of metrics."""
    deadline_s = time.monotonic() + 400
    while not ((run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
