"""`steps.jsonl`: the steps that a run's page can show."""

import numpy as np
import pytest

import evenload.cli.run_files as step_file
from cost_samples import sample_coefficients, sample_model
from evenload.cli.run_files import StepFile, read_steps
from evenload.errors import DataError
from evenload.plan.planner import StepPlanner
from evenload.report.run_files import drop_torn_line
from evenload.types.document import Document
from evenload.types.layout import even_layout
from predicted_timeline import predicted_timeline

MODEL = sample_model()
PLANNER = StepPlanner(MODEL, sample_coefficients(), even_layout(3), None, host="unlimited")


def step_of(step, tokens=9):
    """A plan with a timeline; as many tasks in every step."""
    documents = tuple(Document(doc_id=i, num_tokens=tokens + i, num_label_tokens=8) for i in range(3))
    plan = PLANNER.plan(step, documents, "balanced")
    return plan, predicted_timeline(plan, MODEL)


def steps_in(path):
    return [plan.step for plan, _ in read_steps(path)]


def fill(path, steps, **changes):
    file = StepFile(path)
    for step in steps:
        file.add(*step_of(step, **changes))


def test_plans_and_timelines_come_back_the_last_of_a_step(tmp_path):
    path = tmp_path / "steps.jsonl"
    assert steps_in(path) == []
    fill(path, range(3))
    fill(path, [1, 2], tokens=20)
    found = list(read_steps(path))
    assert [plan.step for plan, _ in found] == [0, 1, 2]
    for plan, measured in found:
        expected, timeline = step_of(plan.step, tokens=20 if plan.step else 9)
        assert plan == expected
        assert np.array_equal(measured.end_s, timeline.end_s)
    assert [plan.step for plan, _ in read_steps(path, newest=2)] == [1, 2]


def test_more_than_a_page_takes_are_thinned_evenly_and_a_resumed_run_goes_on_so(tmp_path, monkeypatch):
    """Room for eight steps."""
    tasks = step_of(0)[1].num_tasks
    monkeypatch.setattr(step_file, "MOST_TASKS", 8 * tasks)
    path = tmp_path / "steps.jsonl"
    fill(path, range(8))
    assert steps_in(path) == list(range(8))
    fill(path, range(8, 13))
    assert steps_in(path) == [0, 2, 4, 6, 8, 10, 12]
    fill(path, range(13, 36))
    assert steps_in(path) == [0, 8, 16, 24, 32]
    monkeypatch.setattr(step_file, "MOST_STEPS", 4)
    fill(path, [36, 40])
    assert steps_in(path) == [0, 16, 32]
    # A step that no page takes is not kept; the others stay.
    monkeypatch.setattr(step_file, "MOST_TASKS", tasks - 1)
    fill(path, [64])
    assert steps_in(path) == [0, 16, 32]


def test_a_torn_last_line_is_left_out_and_cut_off_and_other_lines_are_errors(tmp_path):
    path = tmp_path / "steps.jsonl"
    fill(path, range(3))
    with open(path, "ab") as file:
        file.write(b'{"step":3,"ta')
    assert steps_in(path) == [0, 1, 2]
    drop_torn_line(path)
    fill(path, [3])
    assert steps_in(path) == [0, 1, 2, 3]
    path.write_text('{"step": 1}\n')
    with pytest.raises(DataError, match="line 1 is no step"):
        steps_in(path)
    path.write_text('{"step": 1, "tasks": 2, "plan": "AAAA", "measured": ""}\n')
    with pytest.raises(DataError, match="step 1 is no plan and timeline"):
        steps_in(path)
