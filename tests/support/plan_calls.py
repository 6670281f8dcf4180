"""Calls of `evenload plan` in the tests' own process, and a table of lengths for them."""

from pathlib import Path

import numpy as np
import pytest

from evenload.cli.main import main


def write_lengths(directory: Path) -> str:
    """The path of a table of 200 lengths below 5,000."""
    path = directory / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(1, 5000, 200).astype(np.uint32))
    return str(path)


def run_plan(*arguments: str) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    return int(stopped.value.code or 0)
