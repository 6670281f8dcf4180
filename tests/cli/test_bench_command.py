"""`evenload bench` as a user runs it: real processes, the same batches under every strategy."""

import re

import msgspec
import pytest

from bench_samples import batch_run, result_of, runs
from cost_samples import sample_coefficients, sample_model
from evenload.bench.results import BenchResult, MachineLoad
from evenload.cli.measure import show_result
from evenload.cost.coefficients import MeasuredOn, Noise
from ledger import plan_again

SETTINGS = """
max_document_tokens = 1024
batch_documents = 8
epochs = 1
[parallel]
pp = 2
[plan.options]
max_pack_tokens = 1024
[train]
cost_file = "cost.json"
"""


@pytest.mark.long
def test_the_same_batches_are_measured_under_every_strategy(small_project, monkeypatch, command_here):
    """Losses equal, memory as predicted, plans and predictions that can be made again; nothing else is written."""
    project = small_project(SETTINGS, pp=2)
    before = {path.name for path in project.iterdir()}
    monkeypatch.setenv("COLUMNS", "80")
    code, output, errors = command_here(
        *("bench", "config.toml", "--strategy", "best_fit,wlb,slimpack", "--steps", "2", "--rounds", "2"),
        *("--json", "result.json", "--html", "page.html"),
    )
    assert code == 0, output + errors
    assert {path.name for path in project.iterdir()} - before == {"result.json", "page.html"}
    result = msgspec.json.decode((project / "result.json").read_bytes(), type=BenchResult)
    assert [one.strategy for one in result.runs] == ["best_fit", "wlb", "slimpack"]
    assert result.left_out == ()
    assert 0 < result.loss_difference < 1e-6  # in float32, and not the same sums
    for one in result.runs:
        assert [(run.batch, run.documents, len(run.measured_s)) for run in one.batches] == [(0, 8, 2), (1, 8, 2)]
        assert [run.tokens for run in one.batches] == [run.tokens for run in result.runs[0].batches]
        assert all(run.memory_error == 0 for run in one.batches)
    assert len({run.plan_digest for one in result.runs for run in one.batches}) == 6
    for one in result.runs:
        for run in one.batches:
            again = plan_again(result.inputs, result.coefficients, one.strategy, run.batch)
            assert (again.digest, again.predicted.step_time_s) == (run.plan_digest, run.predicted_s)
    assert 0 <= result.load.waited_share <= 1
    page = (project / "page.html").read_text()
    # Of three strategies and two batches: predicted, measured and plan.
    assert page.count('type="application/gzip"') == 3 * 2 * 3
    for name in ("best_fit", "wlb", "slimpack"):
        assert re.search(rf"<th[^>]*>(?:▶ )?{name}</th>", page), name
    table = output.splitlines()
    assert all(any(name in line for line in table) for name in ("best_fit", "wlb", "slimpack"))
    assert "losses of the strategies differ by at most" in output
    for ratio in result.ratios:
        assert len(ratio.rounds) == 2
        assert f"{ratio.by_round}; predicted {ratio.predicted:.2f}: {ratio.verdict}" in output


QUIET, BUSY = Noise(waited_share=0.0, spread=0.0), Noise(waited_share=0.4, spread=0.4)


@pytest.mark.parametrize(
    ("load", "noise", "seconds", "held", "words"),
    [
        (0.0, QUIET, (1.0, 1.0, 1.0), "1 of 1", "0.88 to 1.16 times the predicted"),
        (0.0, QUIET, (1.8, 1.8, 1.8), "0 of 1", "here 0 of 1"),
        (0.3, QUIET, (1.8, 1.8, 1.8), "", "machine busy while steps were measured: no core for 30% of the time"),
        (0.0, QUIET, (1.0, 1.9, 1.8), "", "rounds differ by 50%"),
        (0.0, BUSY, (1.8, 1.8, 1.8), "", "no 90 % interval of step times: the machine was busy while its costs were"),
    ],
)
def test_steps_are_held_against_an_interval_where_it_holds(capsys, load, noise, seconds, held, words):
    where = MeasuredOn(model=sample_model(), dp=1, cp=1, pp=2, tp=1, noise=noise)
    costs = sample_coefficients(device="never seen, 1 thread a process", measured_on=where)
    machine = MachineLoad(demand=1.0, waited_share=load)
    result = result_of(runs("slimpack", batch_run(seconds)), load=machine, coefficients=costs)
    assert result.compare_with_interval()[1] == held
    show_result(result, 1.0)
    out = capsys.readouterr().out
    assert words in out
    assert ("0 of 1" in out) == (held == "0 of 1")
    assert ("0.88 to 1.16" in out) == bool(held), "no interval where anything was disturbed"
