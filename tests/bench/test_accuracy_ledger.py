"""The ledger grows by rows of one format, and what they were predicted from lies beside it."""

import csv

import msgspec
import pytest

from bench_samples import batch_run, ledger_row, result_of, runs
from evenload.bench.results import BenchResult, recorded_batch
from evenload.errors import ConfigError, DataError
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from ledger import COLUMNS, append_result, current_rows, plan_again, read_inputs, read_ledger, require_ledger


def result(*strategies: str, **changes) -> BenchResult:
    results = [runs(name, batch_run((1.0, 1.1), 0.99), batch_run((2.0, 2.0), 2.5, batch=1)) for name in strategies]
    return result_of(*results, **changes)


def test_rows_are_appended_under_one_head(tmp_path):
    path = tmp_path / "accuracy.csv"
    assert append_result(path, result("best_fit", "slimpack"), "tiny") == 4
    assert append_result(path, result("auto"), "tiny", commit="abc") == 2
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["strategy"] for row in rows] == [*["best_fit"] * 2, *["slimpack"] * 2, *["auto"] * 2]
    assert rows[0]["device"] == "some device, with a comma"
    assert (rows[0]["step_time_s"], rows[0]["step_time_error"]) == ("1.050000", "-0.0571")
    assert (rows[1]["step_time_error"], rows[1]["memory_error"]) == ("+0.2500", "-0.1000")


def test_a_damaged_row_is_named(tmp_path):
    path = tmp_path / "accuracy.csv"
    append_result(path, result("slimpack"), "tiny")
    path.write_text(path.read_text().replace("1.050000", "fast"))
    with pytest.raises(DataError, match="step_time_s"):
        read_ledger(path)


def test_newer_rows_supersede_older_ones_unless_the_machine_was_busy():
    quiet, busy = ledger_row(date="1"), ledger_row(date="2", waited_share=0.5)
    assert [one.date for one in current_rows((quiet, busy))] == ["1"]
    assert [one.date for one in current_rows((quiet, busy, ledger_row(date="3")))] == ["3"]
    assert [one.date for one in current_rows((busy, ledger_row(date="4", spread=0.3)))] == ["4"]
    others = [ledger_row(batch=1), ledger_row(strategy="y"), ledger_row(layout="z"), ledger_row(case="w")]
    assert len(current_rows((quiet, *others))) == 5


def test_what_plans_were_made_from_lies_beside_and_makes_them_again(tmp_path):
    """Same digest, same prediction; other costs are another file, and the old one stays."""
    path = tmp_path / "accuracy.csv"
    results = result("slimpack")
    append_result(path, results, "tiny")
    append_result(path, msgspec.structs.replace(results, loss_difference=1.0), "tiny")
    slower = msgspec.structs.replace(results.coefficients, head_s_per_token=6.0)
    append_result(path, result("slimpack", coefficients=slower), "tiny")
    names = list(dict.fromkeys(one.inputs for one in read_ledger(path)))
    assert len(names) == 2
    assert {file.stem for file in (tmp_path / "costs").iterdir()} == set(names)
    for name, coefficients in zip(names, (results.coefficients, slower), strict=True):
        inputs, costs = read_inputs(path, name)
        assert (inputs, costs) == (results.inputs, coefficients)
        again = plan_again(inputs, costs, "slimpack", 0)
        options = PlanOptions(max_pack_tokens=64)
        planner = StepPlanner(
            inputs.model, coefficients, inputs.layout, inputs.memory_cap_bytes, options, host=inputs.host
        )
        first = planner.plan(0, again.documents, "slimpack")
        assert (again.digest, again.predicted) == (first.digest, first.predicted)
        assert recorded_batch(again) == inputs.batches[0]


def test_another_file_is_refused_and_stays_as_it_is(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("tokens\n17\n")
    with pytest.raises(ConfigError, match="is no ledger of this version"):
        require_ledger(path)
    with pytest.raises(ConfigError, match="is no ledger of this version"):
        append_result(path, result("auto"), "tiny")
    assert path.read_text() == "tokens\n17\n"
    assert not (tmp_path / "costs").exists()
