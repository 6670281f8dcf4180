"""`starts.jsonl`: which steps are trained again after a loss, in words and to be counted."""

import json

import pytest

from evenload.cli.start_record import STARTS_FILE, StartRecord, append_start, read_starts, start_record
from evenload.errors import DataError
from evenload.report.run_files import METRIC_KEYS


def write_rows(directory, steps):
    rows = (dict.fromkeys(METRIC_KEYS) | {"step": step} for step in steps)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def record(steps_done, repeated, ranks=2, layout="pp=2"):
    return StartRecord(ranks=ranks, layout=layout, steps_done=steps_done, steps_repeated=repeated)


@pytest.mark.parametrize(
    ("trained", "steps_done", "repeated"),
    [
        ([], 0, 0),
        ([0, 1, 2], 0, 3),
        ([0, 1, 2], 2, 1),
        ([0, 1, 2], 3, 0),
        ([0, 1, 2, 3, 2], 2, 1),  # 3 was lost before, and is not trained again by this start
    ],
)
def test_steps_after_the_checkpoint_are_trained_again(tmp_path, trained, steps_done, repeated):
    write_rows(tmp_path, trained)
    found = start_record(tmp_path, ranks=2, layout="pp=2", steps_done=steps_done)
    assert found == record(steps_done, repeated)


def test_a_row_of_a_step_that_not_all_finished_is_no_repetition(tmp_path):
    """Rank 0 had written it when another rank was lost; it is cut off, so each step has one row."""
    write_rows(tmp_path, [0, 1, 2])
    assert start_record(tmp_path, ranks=2, layout="pp=2", steps_done=2, is_kept=True) == record(2, 0)


def test_a_run_without_a_row_repeats_nothing(tmp_path):
    assert start_record(tmp_path, ranks=1, layout="single", steps_done=0).steps_repeated == 0


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (record(12, 3), "goes on from step 12; steps 12 to 14 are trained again"),
        (record(12, 1), "goes on from step 12; step 12 is trained again"),
        (record(12, 0), "goes on from step 12; no step is trained again"),
        (record(0, 2), "begins anew, as there is no checkpoint; steps 0 to 1 are trained again"),
    ],
)
def test_what_happened_in_words(now, words):
    before = record(8, 0, ranks=4, layout="dp=2 pp=2")
    line = now.line(before, "lost rank 3")
    assert line == f"lost rank 3: 4 ranks in layout dp=2 pp=2 before, 2 in layout pp=2 now; training {words}"
    assert now.line(None, "lost rank 3") == f"lost rank 3: 2 in layout pp=2 now; training {words}"


def test_starts_are_read_back_in_order_and_a_torn_one_is_left_out(tmp_path):
    assert read_starts(tmp_path) == []
    append_start(tmp_path, record(0, 0))
    with open(tmp_path / STARTS_FILE, "ab") as file:
        file.write(b'{"ranks":4,"layo')  # its writer was killed
    append_start(tmp_path, record(4, 2))
    assert read_starts(tmp_path) == [record(0, 0), record(4, 2)]


def test_a_line_that_is_no_start_is_named(tmp_path):
    (tmp_path / STARTS_FILE).write_text('{"ranks": 4}\n')
    with pytest.raises(DataError, match=r"starts\.jsonl, line 1 is no start"):
        read_starts(tmp_path)
