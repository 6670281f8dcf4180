"""What a run leaves behind is read again: the steps that its page can show, and steps in other layouts."""

import msgspec
import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.cli import run_files
from evenload.cli.run_files import RunFacts, StepFile, read_run, read_steps
from evenload.cost.coefficients import MeasuredOn, write_coefficients
from evenload.cost.validity import fill_between_layouts
from evenload.errors import DataError
from evenload.planning.planner import StepPlanner
from evenload.report.run_files import append_rows, drop_torn_line
from evenload.stepplan.plan_file import encode_plan_file
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.run import LayoutDecision
from evenload.types.timeline import write_timeline
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
    result = list(read_steps(path))
    assert [plan.step for plan, _ in result] == [0, 1, 2]
    for plan, measured in result:
        expected, timeline = step_of(plan.step, tokens=20 if plan.step else 9)
        assert plan == expected
        assert np.array_equal(measured.end_s, timeline.end_s)
    assert [plan.step for plan, _ in read_steps(path, newest=2)] == [1, 2]


def test_more_than_a_page_takes_are_thinned_evenly_and_a_resumed_run_goes_on_so(tmp_path, monkeypatch):
    """Room for eight steps."""
    tasks = step_of(0)[1].num_tasks
    monkeypatch.setattr(run_files, "MOST_TASKS", 8 * tasks)
    path = tmp_path / "steps.jsonl"
    fill(path, range(8))
    assert steps_in(path) == list(range(8))
    fill(path, range(8, 13))
    assert steps_in(path) == [0, 2, 4, 6, 8, 10, 12]
    fill(path, range(13, 36))
    assert steps_in(path) == [0, 8, 16, 24, 32]
    monkeypatch.setattr(run_files, "MOST_STEPS", 4)
    fill(path, [36, 40])
    assert steps_in(path) == [0, 16, 32]
    # A step that no page takes is not kept; the others stay.
    monkeypatch.setattr(run_files, "MOST_TASKS", tasks - 1)
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


def test_a_step_in_another_layout_is_priced_with_the_links_that_its_planner_had(tmp_path):
    """The run starts as a pipeline, so nobody measured the reduction of gradients that replicas need."""
    two_replicas = even_layout(3, dp=2)
    where = MeasuredOn(model=MODEL, dp=1, cp=1, pp=2, tp=1)
    measured = sample_coefficients(reduce_bandwidth_bytes_per_s=None, reduce_latency_s=0.0, measured_on=where)
    completed, _ = fill_between_layouts(measured, two_replicas)
    documents = tuple(Document(doc_id=i, num_tokens=9 + i, num_label_tokens=8 + i) for i in range(4))
    plan = StepPlanner(MODEL, completed, two_replicas, None, host="unlimited").plan(0, documents, "balanced")
    write_coefficients(tmp_path / "cost.json", measured)
    (tmp_path / "plan.json").write_bytes(encode_plan_file((plan,)))
    write_timeline(tmp_path / "measured.npz", predicted_timeline(plan, MODEL))
    facts = RunFacts(model=MODEL, memory_cap_bytes=2**30, facts=(), ledger=())
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(facts))
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    conditions = {"fits": True, "fits_saving": True}
    conditions |= {"switching_is_slower": False, "switching_is_slower_than_saving": False}
    layout = two_replicas.describe()
    grown = LayoutDecision(step=0, layout=layout, before="pp=2", action="shrink", case=4, **conditions)
    append_rows(tmp_path / "layouts.jsonl", [grown])

    section, _ = read_run(tmp_path)
    assert section.layout_decisions == (grown,)
    # Fp32 gradients there and weights back, one step of a ring of two each, over the link between stages.
    assert section.time_split is not None
    assert section.time_split.reduction_s > 0
    assert section.steps[0].predicted.step_time_s == plan.predicted.step_time_s
