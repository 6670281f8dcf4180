"""`evenload plan --cost`: only a file of this model is accepted, and what it lacks is said."""

import json

import msgspec
import pytest

from commands import refused, run
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import CostCoefficients, MeasuredOn, Noise, write_coefficients
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout
from evenload.types.model import MODELS, ModelSpec

SMALL = MODELS["qwen2.5-0.5b"]


def measured_on_one_device(model: ModelSpec) -> CostCoefficients:
    """As a calibration leaves them where there is one device: without links."""
    analytic = analytic_coefficients(model, cluster_from("h100x1"), even_layout(model.num_layers))
    return msgspec.structs.replace(
        analytic,
        source="calibrated",
        device="slow",
        p2p_bandwidth_bytes_per_s=None,
        reduce_bandwidth_bytes_per_s=None,
        intra_node=None,
        inter_node=None,
        devices_per_node=1,
        host_link=None,
        measured_on=MeasuredOn(model=model, dp=1, cp=1, pp=1, tp=1),
    )


def test_links_that_were_not_measured_are_the_clusters_and_said(table, tmp_path, capsys) -> None:
    """`auto` was infeasible for want of a link, and the reduction of gradients cost nothing."""
    write_coefficients(tmp_path / "cost.json", measured_on_one_device(SMALL))
    common = [table, "--model", SMALL.name, "--cluster", "h100x8", "--layout", "dp=4,pp=2", "--documents", "30"]
    common += ["--strategy", "best_fit,auto"]
    assert run("plan", *common, "--cost", str(tmp_path / "cost.json"), "--json", str(tmp_path / "measured.json")) == 0
    shown = capsys.readouterr().out
    assert "cost: measured on slow, model qwen2.5-0.5b in bfloat16, layout dp=1,cp=1,pp=1,tp=1" in shown
    assert "the seconds were measured on slow and are taken as they are; cluster h100x8 has H100-80GB" in shown
    assert "reduction of gradients over 4 devices was not measured" in shown
    assert "taken from cluster h100x8, 400 GB/s" in shown
    assert run("plan", *common, "--json", str(tmp_path / "sheet.json")) == 0
    measured, sheet = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("measured", "sheet"))
    for one, other in zip(measured["strategies"], sheet["strategies"], strict=True):
        assert one["feasible"]
        assert one["step_time_s"] == pytest.approx(other["step_time_s"], rel=1e-6)


@pytest.mark.parametrize(
    ("waited_share", "words"),
    [(0.0, "there 0.88 to 1.16; here processes stood without a core for 0% of the time"), (0.4, "no 90 % interval of")],
    ids=["quiet", "busy"],
)
def test_costs_of_a_busy_machine_give_no_interval_anywhere(table, tmp_path, capsys, waited_share, words) -> None:
    """Neither in the line, nor in the sentence and column of the strategies, nor in the files."""
    costs = measured_on_one_device(SMALL)
    assert costs.measured_on is not None
    noise = Noise(waited_share=waited_share, spread=0.0)
    where = msgspec.structs.replace(costs.measured_on, noise=noise)
    write_coefficients(tmp_path / "cost.json", msgspec.structs.replace(costs, measured_on=where))
    names = {"cost": "cost.json", "json": "plan.json", "html": "page"}
    files = [word for name, file in names.items() for word in (f"--{name}", str(tmp_path / file))]
    common = [table, "--model", SMALL.name, "--cluster", "h100x1", "--documents", "20", "--strategy", "best_fit"]
    assert run("plan", *common, *files) == 0
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    assert words in shown
    assert words in (tmp_path / "page").read_text()
    is_quiet = not waited_share
    assert ("90 % of steps" in shown) == is_quiet
    assert (found["step_time_interval"]["low"] is not None) == is_quiet
    assert (found["strategies"][0]["step_time_interval_s"] is not None) == is_quiet


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SMALL, "was measured on model qwen2.5-0.5b and this is llama-7b"),
        (None, "does not say on which model and layout it was measured"),
    ],
    ids=["another model", "no model"],
)
def test_a_file_of_another_model_is_refused(table, tmp_path, capsys, model, message) -> None:
    costs = measured_on_one_device(SMALL)
    if model is None:
        costs = msgspec.structs.replace(costs, measured_on=None)
    write_coefficients(tmp_path / "cost.json", costs)
    arguments = (table, "--model", "llama-7b", "--cluster", "h100x8", "--cost", str(tmp_path / "cost.json"))
    assert message in refused(capsys, "plan", *arguments)
