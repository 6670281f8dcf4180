"""`evenload check` as a user runs it: real processes at the layout of the configuration."""

from pathlib import Path

import msgspec
import pytest

from dist_training import COSTS
from evenload.cli.main import main
from evenload.cost.coefficients import MeasuredOn, write_coefficients
from evenload.types.model import MODELS
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train.cost_file=of_nothing.json"], "does not say on which model and layout it was measured"),
        (["train.cost_file=of_another.json"], "train.cost_file of_another.json was measured on model llama-7b"),
        (["train.setps=4"], "did you mean 'train.steps'?"),
        (["parallel.pp=9"], "4 layers cannot fill 9 stages"),
        (["plan.strategy=slimpak"], "did you mean 'slimpack'"),
    ],
)
@pytest.mark.usefixtures("no_ranks")
def test_mistakes_are_refused_before_ranks_start(project, capsys, arguments, expected):
    """In this process, which has imported it all; that errors pass from another one shows test_train_command.py."""
    write_coefficients(project / "of_nothing.json", COSTS)
    of_another = MeasuredOn(model=MODELS["llama-7b"], dp=1, cp=1, pp=2, tp=1)
    write_coefficients(project / "of_another.json", msgspec.structs.replace(COSTS, measured_on=of_another))
    with pytest.raises(SystemExit) as exit:
        main(["check", "config.toml", *arguments])
    assert exit.value.code == 2
    assert expected in capsys.readouterr().err
