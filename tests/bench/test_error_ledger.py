"""The ledger grows by rows of one format."""

import csv

import pytest

from bench_samples import batch_run, runs
from evenload.bench.ledger import COLUMNS, KEYS, append_result, require_ledger
from evenload.bench.runs import BenchResult
from evenload.errors import ConfigError


def result(*strategies: str) -> BenchResult:
    facts = tuple((key, f"some {key}, with a comma") for key in (*KEYS, "tokenizer"))
    found = tuple(runs(name, batch_run((1.0, 1.1), 0.99), batch_run((2.0, 2.0), 2.5)) for name in strategies)
    return BenchResult(facts=facts, runs=found, left_out=(), loss_difference=0.0)


def test_rows_are_appended_under_one_head(tmp_path):
    path = tmp_path / "accuracy.csv"
    assert append_result(path, result("best_fit", "slimpack")) == 4
    assert append_result(path, result("auto")) == 2
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["strategy"] for row in rows] == [*["best_fit"] * 2, *["slimpack"] * 2, *["auto"] * 2]
    assert rows[0]["device"] == "some device, with a comma"
    assert (rows[0]["step_time_s"], rows[0]["step_time_error"]) == ("1.050000", "-0.0571")
    assert (rows[1]["step_time_error"], rows[1]["memory_error"]) == ("+0.2500", "-0.1000")


def test_another_file_is_refused_and_stays_as_it_is(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("tokens\n17\n")
    with pytest.raises(ConfigError, match="is no ledger of this version"):
        require_ledger(path)
    with pytest.raises(ConfigError, match="is no ledger of this version"):
        append_result(path, result("auto"))
    assert path.read_text() == "tokens\n17\n"


def test_a_new_or_empty_file_is_a_ledger(tmp_path):
    require_ledger(tmp_path / "new.csv")
    (tmp_path / "empty.csv").touch()
    require_ledger(tmp_path / "empty.csv")
