"""`evenload bench` as a user runs it: real processes, the same batches under every strategy."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dist_training import COSTS
from evenload.bench.runs import BenchResult
from evenload.cli.main import main
from evenload.cost.coefficients import MeasuredOn, write_coefficients
from evenload.types.model_catalog import model_from
from reference_training import tiny_config


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_config("llama", tied=True, vocab_size=257).save_pretrained(tmp_path / "model")
    (tmp_path / "corpus").mkdir()
    for i in range(30):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"document {i} " * (1 + (i * 7) % 13 + (40 if i % 9 == 0 else 0)))
    model = msgspec.structs.replace(model_from(str(tmp_path / "model")), bytes_per_element=4)
    measured_on = MeasuredOn(model=model, dp=2, cp=1, pp=2, tp=1)
    write_coefficients(tmp_path / "cost.json", msgspec.structs.replace(COSTS, measured_on=measured_on))
    (tmp_path / "config.toml").write_text(
        """
        [model]
        path = "model"
        random_init = true
        [data]
        sources = ["corpus"]
        max_document_tokens = 1024
        batch_documents = 8
        epochs = 1
        [parallel]
        pp = 2
        dp = 2
        [plan.options]
        max_pack_tokens = 1024
        [train]
        output_dir = "run"
        cost_file = "cost.json"
        """
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_same_batches_are_measured_under_every_strategy(project):
    """Losses equal, memory as predicted, a row a strategy and batch; nothing else is written."""
    before = {path.name for path in project.iterdir()}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "evenload.cli.main", "bench", "config.toml"),
            *("--strategy", "best_fit,wlb,slimpack", "--steps", "2", "--rounds", "2"),
            *("--json", "result.json", "--ledger", "accuracy.csv"),
        ],
        env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in project.iterdir()} - before == {"result.json", "accuracy.csv"}
    result = msgspec.json.decode((project / "result.json").read_bytes(), type=BenchResult)
    assert [one.strategy for one in result.runs] == ["best_fit", "wlb", "slimpack"]
    assert result.left_out == ()
    assert 0 < result.loss_difference < 1e-6  # in float32, and not the same sums
    for one in result.runs:
        assert [(run.batch, run.documents, len(run.measured_s)) for run in one.batches] == [(0, 8, 2), (1, 8, 2)]
        assert [run.tokens for run in one.batches] == [run.tokens for run in result.runs[0].batches]
        # To the byte, but for the rows that do not divide evenly among ranks that share a document.
        limit = 0.005 if one.strategy == "slimpack" else 0.0
        assert all(abs(run.memory_error) <= limit for run in one.batches)
    assert len({run.plan_digest for one in result.runs for run in one.batches}) == 6
    with (project / "accuracy.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["plan_digest"] for row in rows] == [run.plan_digest for one in result.runs for run in one.batches]
    table = done.stdout.splitlines()
    assert all(any(name in line for line in table) for name in ("best_fit", "wlb", "slimpack"))
    assert "…" not in done.stdout
    assert "losses of the strategies differ by at most" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "slimpak"], "slimpack"),
        (["--strategy", "best_fit,flexpipe"], "live switching is not available"),
        (["--ledger", "config.toml"], "is no ledger of this version"),
        (["--json", "nowhere/result.json"], "its folder does not exist"),
        (["train.stepz=3"], "train.steps"),
    ],
)
def test_mistakes_are_refused_before_processes_start(project, capsys, monkeypatch, arguments, message):
    def nothing(*_, **__):
        raise AssertionError("ranks were started")

    monkeypatch.setattr("evenload.cli.launch.run_local", nothing)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "config.toml", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
