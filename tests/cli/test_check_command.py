"""`evenload check` as a user runs it: real processes at the layout of the configuration."""

import pytest

NAMES = ("isolation", "invariance", "resume", "ledger", "memory")

SETTINGS = """
max_document_tokens = 1024
batch_documents = 6
[parallel]
pp = 2
[train]
steps = 5
"""


@pytest.mark.long
def test_a_right_run_passes_and_nothing_is_written(small_project, monkeypatch, command_here):
    """And the one thing that does not fit is told apart: exit code 3, all else proved."""
    monkeypatch.setenv("COLUMNS", "400")
    project = small_project(SETTINGS, pp=2)
    code, output, errors = command_here("check", "config.toml", "plan.memory_bytes=300000", "train.cost_file=cost.json")
    rows = [line.split() for line in output.splitlines()]
    verdicts = {row[0]: row[1] for row in rows if len(row) > 1 and row[0] in NAMES}
    assert verdicts == {**dict.fromkeys(NAMES, "pass"), "memory": "fail"}, output
    assert code == 3
    assert "failed: memory" in output
    assert not (project / "run").exists()
    assert "Traceback" not in output + errors
