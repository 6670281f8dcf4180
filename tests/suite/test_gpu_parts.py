"""`make gpu` on a machine without a GPU: its parts are commands, and a bad one does not stop the others."""

import runpy
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "gpu_parts.py"


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(TOOL))


def test_parts_fit_their_limits_and_name_files_that_exist(tool):
    assert all(part.limit_s <= 9 * 60 for part in tool["PARTS"])
    assert sum(part.limit_s for part in tool["PARTS"]) <= 25 * 60
    for part in tool["PARTS"]:
        command = part.command[: part.command.index("-o")] if "-o" in part.command else part.command
        files = [word for word in command if word.startswith(("tests/", "tools/", "benchmarks/"))]
        assert files or "evenload.cli.main" in command
        assert all((TOOL.parent.parent / word).exists() for word in files)
