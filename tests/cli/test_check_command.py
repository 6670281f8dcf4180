"""`evenload check` as a user runs it: real processes at the layout of the configuration."""

from pathlib import Path

import pytest

from small_run import LONG_TAILED_TEXTS, write_small_costs, write_small_run

NAMES = ("isolation", "invariance", "resume", "ledger", "memory")

SETTINGS = """
max_document_tokens = 1024
batch_documents = 6
[parallel]
pp = 2
[train]
steps = 5
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_small_run(tmp_path, LONG_TAILED_TEXTS, SETTINGS, tied=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "400")
    return tmp_path


def verdicts(output: str) -> dict[str, str]:
    """Check -> verdict, from the table."""
    rows = [line.split() for line in output.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) > 1 and row[0] in NAMES}


@pytest.mark.long
def test_a_right_run_passes_and_nothing_is_written(project, command_here):
    """And the one thing that does not fit is told apart: exit code 3, all else proved."""
    write_small_costs(project, pp=2)
    code, output, errors = command_here("check", "config.toml", "plan.memory_bytes=300000", "train.cost_file=cost.json")
    assert verdicts(output) == {**dict.fromkeys(NAMES, "pass"), "memory": "fail"}, output
    assert code == 3
    assert "failed: memory" in output
    assert not (project / "run").exists()
    assert "Traceback" not in output + errors
