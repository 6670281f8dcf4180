import json
import logging
import math

import pytest

from evenload.errors import DataError
from evenload.report.run_files import METRIC_KEYS, append_metrics, drop_torn_line, latest_per_step, read_metrics
from report_samples import make_row


def test_the_fixed_keys_and_their_order(tmp_path):
    """Other tools read these names; a rename would break them silently."""
    fixed = (
        "step loss grad_norm lr tokens label_tokens padding_tokens documents "
        "total_tokens total_label_tokens elapsed_s unix_time_s step_time_s exchange_s "
        "predicted_step_time_s "
        "reduction_s reduction_hidden_s predicted_reduction_s predicted_reduction_hidden_s "
        "gather_s gather_hidden_s predicted_gather_s predicted_gather_hidden_s "
        "tokens_per_s path_tokens_per_s tree_token_ratio recomputed_tokens "
        "mfu mfu_of_data_sheet bubble_fraction imbalance_forward imbalance_backward imbalance_dp "
        "pack_efficiency plan_time_s plan_cut_short data_wait_s peak_memory_bytes predicted_peak_memory_bytes "
        "deferred_documents mean_token_delay_steps layout"
    )
    assert " ".join(METRIC_KEYS) == fixed
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, dict(reversed(make_row(1).items())))
    assert list(json.loads(path.read_text())) == list(METRIC_KEYS)


def test_rows_come_back_as_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [make_row(step) for step in range(3)]
    for row in rows:
        append_metrics(path, row)
    assert read_metrics(path) == rows


def test_a_diverged_loss_is_written_as_valid_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, make_row(1, loss=math.nan, grad_norm=math.inf, lr=-math.inf, layout="NaN"))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (row,) = read_metrics(path)
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["lr"], row["layout"]) == (math.inf, -math.inf, "NaN")


def test_missing_and_unknown_keys_are_refused_by_name(tmp_path):
    row = make_row(7) | {"los": 1.0}
    del row["loss"]
    with pytest.raises(DataError, match=r"step 7: missing keys \['loss'\], unknown keys \['los'\]"):
        append_metrics(tmp_path / "metrics.jsonl", row)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_crash_in_any_byte_of_the_last_line_loses_only_that_line(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, make_row(1))
    whole = path.stat().st_size
    append_metrics(path, make_row(2))
    content = path.read_bytes()
    for size in range(whole + 1, len(content), 17):
        path.write_bytes(content[:size])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert read_metrics(path) == [make_row(1)]
        assert "torn last line 2" in caplog.text
        with pytest.raises(DataError, match="drop_torn_line"):
            append_metrics(path, make_row(2))
        assert drop_torn_line(path) == content[whole:size].decode()
        append_metrics(path, make_row(2))
        assert path.read_bytes() == content


def test_whole_files_have_no_torn_line(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    assert drop_torn_line(path) == ""
    append_metrics(path, make_row(1))
    assert drop_torn_line(path) == ""
    assert read_metrics(path) == [make_row(1)]
    assert not caplog.records


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    """Only a crash while writing explains a broken last line; elsewhere rows would be lost silently."""
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, make_row(1))
    good = path.read_bytes()
    path.write_bytes(good[:30] + b"\n" + good)
    with pytest.raises(DataError, match="line 1 is no JSON object"):
        read_metrics(path)
    path.write_bytes(good + b'{"step": 2}\n')
    with pytest.raises(DataError, match=r"line 2 is not a metrics row: missing keys \['loss'"):
        read_metrics(path)
    with pytest.raises(DataError, match="no metrics file"):
        read_metrics(tmp_path / "other.jsonl")


def test_a_resumed_run_shows_the_later_row_of_a_repeated_step():
    rows = [make_row(1), make_row(2, loss=9.0), make_row(3), make_row(2, loss=8.0)]
    assert [(row["step"], row["loss"]) for row in latest_per_step(rows)][1] == (2, 8.0)
    assert [row["step"] for row in latest_per_step(rows)] == [1, 2, 3]
