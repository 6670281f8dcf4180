"""What a run leaves behind is read again, whatever layout its last step ran in."""

import msgspec

from cost_samples import sample_coefficients, sample_model
from evenload.cli.run_files import RunFacts, read_run
from evenload.cost.coefficients import MeasuredOn, write_coefficients
from evenload.cost.validity import completed_between_layouts
from evenload.plan.planner import StepPlanner
from evenload.report.run_files import append_rows
from evenload.stepplan.plan_file import encode_plan_file
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.run import LayoutDecision
from evenload.types.timeline import write_timeline
from predicted_timeline import predicted_timeline


def test_a_step_in_another_layout_is_priced_with_the_links_that_its_planner_had(tmp_path):
    """The run starts as a pipeline, so nobody measured the reduction of gradients that replicas need."""
    model, two_replicas = sample_model(), even_layout(3, dp=2)
    measured = sample_coefficients(
        reduce_bandwidth_bytes_per_s=None,
        reduce_latency_s=0.0,
        measured_on=MeasuredOn(model=model, dp=1, cp=1, pp=2, tp=1),
    )
    completed, _ = completed_between_layouts(measured, two_replicas)
    documents = tuple(Document(doc_id=i, num_tokens=9 + i, num_label_tokens=8 + i) for i in range(4))
    plan = StepPlanner(model, completed, two_replicas, None, host="unlimited").plan(0, documents, "balanced")
    write_coefficients(tmp_path / "cost.json", measured)
    (tmp_path / "plan.json").write_bytes(encode_plan_file((plan,)))
    write_timeline(tmp_path / "measured.npz", predicted_timeline(plan, model))
    facts = RunFacts(model=model, memory_cap_bytes=2**30, facts=(), ledger=())
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(facts))
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    grown = LayoutDecision(
        step=0,
        layout=two_replicas.describe(),
        before="pp=2",
        action="shrink",
        case=4,
        fits=True,
        switching_is_slower=False,
        fits_saving=True,
        switching_is_slower_than_saving=False,
    )
    append_rows(tmp_path / "layouts.jsonl", [grown])

    section, _ = read_run(tmp_path)
    assert section.layout_decisions == (grown,)
    # Fp32 gradients there and weights back, one step of a ring of two each, over the link between stages.
    assert section.time_split is not None
    assert section.time_split.reduction_s > 0
    assert section.steps[0].predicted.step_time_s == plan.predicted.step_time_s
