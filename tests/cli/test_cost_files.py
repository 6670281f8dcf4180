"""Measured costs: `evenload plan --cost`, this machine where no cluster is named, and `train.cost_file`. Those of
another model are refused, and what they lack, or another device, is named."""

import json
from pathlib import Path

import msgspec
import pytest

from commands import refused, run
from dist_training import COSTS
from evenload.cli import plan_inputs
from evenload.cli.plan_inputs import cost_file_warnings, measured_message, other_device_message
from evenload.config.planner import machine_memory_bytes
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import (
    CopySpec,
    CostCoefficients,
    FitError,
    MeasuredOn,
    Noise,
    OverlapCost,
    Profile,
    digest_of,
    read_coefficients,
    write_coefficients,
)
from evenload.data.hub import model_from
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
    [(0.0, "there 0.88 to 1.16; here ranks waited 0% of the time for a core"), (0.4, "no 90 % interval of")],
    ids=["quiet", "busy"],
)
def test_costs_of_a_busy_machine_give_no_interval_anywhere(table, tmp_path, capsys, waited_share, words) -> None:
    """Neither in the line, nor in the sentence and column of the strategies, nor in the files."""
    noise = Noise(waited_share=waited_share, spread=0.0)
    where = MeasuredOn(model=SMALL, dp=1, cp=1, pp=1, tp=1, noise=noise)
    costs = msgspec.structs.replace(measured_on_one_device(SMALL), measured_on=where)
    write_coefficients(tmp_path / "cost.json", costs)
    names = {"cost": "cost.json", "json": "plan.json", "html": "page"}
    files = [word for name, file in names.items() for word in (f"--{name}", str(tmp_path / file))]
    common = [table, "--model", SMALL.name, "--cluster", "h100x1", "--documents", "20", "--strategy", "best_fit"]
    assert run("plan", *common, *files, *(["--details"] if not waited_share else [])) == 0
    shown, result = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    assert words in shown
    assert words in (tmp_path / "page").read_text()
    is_quiet = not waited_share
    assert ("90 % of" in shown) == is_quiet
    assert (result["step_time_interval"]["low"] is not None) == is_quiet
    assert (result["strategies"][0]["step_time_interval_s"] is not None) == is_quiet


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


SETTINGS = """
max_document_tokens = 1024
batch_documents = 16
[parallel]
dp = 2
pp = 2
[train]
steps = 5
"""


@pytest.fixture
def config(small_project) -> Path:
    """Of a run of two by two processes on the CPU."""
    return small_project(SETTINGS, dp=2, pp=2) / "config.toml"


def write_costs(file: Path, **changes) -> None:
    """As a calibration of the run on this machine leaves them."""
    model = msgspec.structs.replace(model_from("model"), bytes_per_element=4)
    result = analytic_coefficients(model, cluster_from("h100x4"), even_layout(4, dp=2, pp=2))
    measured = MeasuredOn(model=model, dp=2, cp=1, pp=2, tp=1)
    changes = {"source": "calibrated", "device": "slow CPU, 1 thread a process", "measured_on": measured} | changes
    file.parent.mkdir(exist_ok=True)
    write_coefficients(file, msgspec.structs.replace(result, **changes))


def test_a_run_that_was_started_once_is_planned_in_its_own_seconds(config, tmp_path, capsys) -> None:
    """Its cost.json says how fast the machine is; each of four processes has a quarter of the memory."""
    write_costs(tmp_path / "run" / "cost.json")
    assert run("plan", "config.toml", "--strategy", "best_fit,auto", "--json", "out.json") == 0, capsys.readouterr().err
    shown, result = capsys.readouterr().out, json.loads(Path("out.json").read_text())
    assert "cluster this machine, layout dp=2 pp=2, 16 documents a step" in shown.splitlines()[-2]
    assert "cost: measured on slow CPU, 1 thread a process, model" in shown
    assert "and are taken as they are" not in shown, "it is the same device"
    inputs = result["inputs"]
    assert (inputs["cluster"], inputs["devices"], inputs["cost"]) == (
        "this machine",
        4,
        str(tmp_path / "run" / "cost.json"),
    )
    assert inputs["memory_cap_bytes"] == int(machine_memory_bytes() * 0.8 / 4)
    assert result["headline"].startswith(f"Fastest with dp=2,pp=2: {result['equally_fast'][0]}")


def test_a_cost_file_of_the_run_wins_over_what_it_left_and_an_asked_one_over_both(config, tmp_path) -> None:
    write_costs(tmp_path / "run" / "cost.json")
    for name in ("mine.json", "asked.json"):
        write_costs(tmp_path / name)
    config.write_text(config.read_text() + 'cost_file = "mine.json"\n')
    for request, expected in (((), "mine.json"), (("--cost", "asked.json"), "asked.json")):
        assert run("plan", "config.toml", "--strategy", "best_fit", *request, "--json", "out.json") == 0
        assert json.loads(Path("out.json").read_text())["inputs"]["cost"] == expected


def test_gpus_are_those_that_the_driver_names(config, tmp_path, capsys, monkeypatch) -> None:
    config.write_text(config.read_text() + 'device = "cuda"\n')
    monkeypatch.setattr(plan_inputs, "_DRIVER", tmp_path / "gpus")
    request = ("config.toml", "--strategy", "best_fit", "--json", "out.json")
    assert "the run computes on GPUs, and NVIDIA's driver tells of none here" in refused(capsys, "plan", *request)
    for place in range(4):
        (tmp_path / "gpus" / f"0000:{place}").mkdir(parents=True)
        (tmp_path / "gpus" / f"0000:{place}" / "information").write_text("Model: \t NVIDIA H200\nIRQ: 3\n")
    assert run("plan", *request) == 0, capsys.readouterr().err
    inputs = json.loads(Path("out.json").read_text())["inputs"]
    assert (inputs["devices"], inputs["cost"]) == (4, "analytic")
    assert inputs["memory_cap_bytes"] == cluster_from("h200x4").device.usable_bytes
    (tmp_path / "gpus" / "0000:3" / "information").write_text("Model: \t NVIDIA L4\n")
    error = refused(capsys, "plan", *request)
    assert "this machine has NVIDIA H200, NVIDIA L4, of which not all are one of the built-in" in error


@pytest.mark.parametrize(
    ("requested", "changes", "message"),
    [
        (("corpus", "--model", "model"), None, "--cluster is missing; name one such as h100x8, or give the"),
        (("config.toml",), None, "how fast this one is was not measured; run evenload profile or the run itself"),
        (("config.toml",), {"tp": 2}, "tp=2"),
        (("config.toml",), {"tp": 1}, "knows no link, and the layout has 4 processes; measure it with evenload"),
    ],
)
def test_what_nothing_says_is_refused(config, tmp_path, capsys, requested, changes, message) -> None:
    if changes:
        model = msgspec.structs.replace(model_from("model"), bytes_per_element=4)
        where = MeasuredOn(model=model, dp=2, cp=1, pp=2, **changes)
        links = ("p2p_bandwidth_bytes_per_s", "reduce_bandwidth_bytes_per_s", "intra_node", "inter_node")
        none = dict.fromkeys(links if changes["tp"] == 1 else ())
        write_costs(tmp_path / "run" / "cost.json", measured_on=where, **none)
    assert message in refused(capsys, "plan", *requested)


@pytest.mark.parametrize(
    ("changes", "of_model", "message"),
    [
        ({}, {"intermediate": True}, "was measured on model llama-7b and this is model, whose layers differ"),
        ({}, {"bytes_per_element": 2}, "bytes_per_element 2 there and 4 here"),
        ({"tp": 2}, {}, "was measured under tp=2"),
        ({"pp": 1}, {}, "the transfer between pipeline stages was not measured between so many devices"),
    ],
    ids=["another model", "another precision", "another tp", "fewer devices"],
)
@pytest.mark.usefixtures("no_ranks", "config")
def test_costs_of_something_else_are_refused(capsys, changes, of_model, message):
    model = msgspec.structs.replace(model_from("model"), bytes_per_element=4)
    measured = MODELS["llama-7b"] if "intermediate" in of_model else msgspec.structs.replace(model, **of_model)
    where = MeasuredOn(model=measured, **{"dp": 1, "cp": 1, "pp": 2, "tp": 1, **changes})
    write_coefficients("cost.json", msgspec.structs.replace(COSTS, measured_on=where))
    assert message in refused(capsys, "train", "config.toml", "parallel.dp=1", "train.cost_file=cost.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b'{"source": "calibrated", ', "is not valid"),
        (b'{"source": "guessed"}', "is not valid"),
    ],
    ids=["none", "cut off", "another form"],
)
@pytest.mark.usefixtures("no_ranks", "config")
def test_a_file_that_is_no_cost_file_is_refused(capsys, content, message):
    Path("cost.json").unlink()
    if content is not None:
        Path("cost.json").write_bytes(content)
    error = refused(capsys, "train", "config.toml", "train.cost_file=cost.json")
    assert "cost.json" in error
    assert message in error


def profiled(model: ModelSpec):
    """Costs with a record, as `evenload profile` leaves them."""
    error = FitError(packs=20, folds=5, median=0.03, p90=0.08)
    record = Profile(
        date="2026-11-22T21:00:00+00:00", versions={"evenload": "1", "torch": "2"}, dtype="float32",
        attention="cpu_flash", layers=4, passes=9, seconds=120.0, outliers=3, timings=400,
        forward=error, backward=error, packs=(),
        activation_bytes={"replay": 8}, held_bytes=3, counted_bytes=2,
    )  # fmt: skip
    where = MeasuredOn(model=model, dp=1, cp=1, pp=2, tp=1)
    costs = msgspec.structs.replace(COSTS, measured_on=where, profile=record)
    return msgspec.structs.replace(costs, profile=msgspec.structs.replace(record, digest=digest_of(costs)))


def test_what_a_file_says_about_itself(tmp_path):
    """The line of `evenload plan`; a change by hand shows after any number of readings, a run's choice of exchange is
    none, and another device is named."""
    write_coefficients(tmp_path / "cost.json", profiled(MODELS["llama-7b"]))
    costs = read_coefficients(tmp_path / "cost.json")
    line = measured_message(costs)
    for words in (
        "model llama-7b in bfloat16", "layout dp=1,cp=1,pp=2,tp=1", "on 2026-11-22 by evenload 1",
        "20 packs x 9 passes in 2.0 min", "3 of 400 timings far off", "3.0 % (median) 8.0 % (90 % of them) forward",
    ):  # fmt: skip
        assert words in line
    assert "CHANGED" not in line
    assert cost_file_warnings(costs, "cost.json", costs.device) == []
    assert not msgspec.structs.replace(costs, context_exchange="ring").is_changed
    assert not msgspec.structs.replace(costs, overlap=OverlapCost()).is_changed, "a run measured it"
    assert costs.profile is not None
    kept = msgspec.structs.replace(costs.profile, has_overlap=True)
    measured = msgspec.structs.replace(costs, profile=kept, overlap=OverlapCost(compute_slowdown=0.25))
    measured = msgspec.structs.replace(measured, profile=msgspec.structs.replace(kept, digest=digest_of(measured)))
    assert not measured.is_changed
    assert not msgspec.structs.replace(measured, overlap_reduction=False).is_changed, "a run reduces after its packs"
    assert msgspec.structs.replace(measured, overlap=OverlapCost(compute_slowdown=0.5)).is_changed
    copies = CopySpec(rank_bytes_per_s=2e9, machine_bytes_per_s=3e9, taken_bytes_per_s=1e9, fixed_s=1e-3)
    assert not msgspec.structs.replace(costs, copies=copies).is_changed, "a run measured them"
    assert costs.profile.held_bytes == 1.5 * costs.profile.counted_bytes

    changed = msgspec.structs.replace(costs, optimizer_s_per_parameter=1e-12)
    assert "CHANGED after it was measured" in measured_message(changed)
    (reported,) = cost_file_warnings(changed, "cost.json", costs.device)
    assert "was changed after evenload profile had measured it" in reported
    (reported,) = cost_file_warnings(costs, "cost.json", "a faster one")
    assert "this is a faster one: predicted seconds are of the former" in reported

    assert "cluster h100x8 has H100-80GB" in other_device_message(costs, cluster_from("h100x8"))
    of_gpu = msgspec.structs.replace(costs, device="NVIDIA H100 80GB HBM3")
    assert other_device_message(of_gpu, cluster_from("h100x8")) == ""
    of_run = measured_message(msgspec.structs.replace(costs, profile=None))
    assert "in seconds at the start of a run (evenload profile takes minutes" in of_run
