"""`evenload plan config.toml` without a cluster: this machine, as far as anything says how fast it is."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from commands import MODEL, refused, run
from evenload.cli import plan_inputs
from evenload.config.planner import machine_memory_bytes
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import MeasuredOn, write_coefficients
from evenload.data.hub import model_from
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout

LAYOUT = even_layout(4, dp=2, pp=2)


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> Path:
    """Of a run of two by two processes on the CPU, over rows of tokens."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    rows = [json.dumps({"input_ids": [1] * n}) for n in np.random.default_rng(0).integers(5, 400, 60).tolist()]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    file = tmp_path / "run.toml"
    file.write_text(
        """
        [model]
        path = "config.json"
        random_init = true
        dtype = "float32"
        [data]
        sources = ["rows.jsonl"]
        record = "tokens"
        max_document_tokens = 512
        batch_documents = 16
        [parallel]
        dp = 2
        pp = 2
        [train]
        output_dir = "run"
        steps = 5
        """
    )
    monkeypatch.chdir(tmp_path)
    return file


def write_costs(file: Path, **changes) -> None:
    """As a calibration of the run on this machine leaves them."""
    model = msgspec.structs.replace(model_from("config.json"), bytes_per_element=4)
    found = analytic_coefficients(model, cluster_from("h100x4"), LAYOUT)
    measured = MeasuredOn(model=model, dp=2, cp=1, pp=2, tp=1)
    changes = {"source": "calibrated", "device": "slow CPU, 1 thread a process", "measured_on": measured} | changes
    file.parent.mkdir(exist_ok=True)
    write_coefficients(file, msgspec.structs.replace(found, **changes))


def test_a_run_that_was_started_once_is_planned_in_its_own_seconds(config, tmp_path, capsys) -> None:
    """Its cost.json says how fast the machine is; each of four processes has a quarter of the memory."""
    write_costs(tmp_path / "run" / "cost.json")
    assert run("plan", "run.toml", "--strategy", "best_fit,auto", "--json", "out.json") == 0, capsys.readouterr().err
    shown, found = capsys.readouterr().out, json.loads(Path("out.json").read_text())
    assert "cluster this machine, layout dp=2 pp=2, 16 documents a step" in shown.splitlines()[0]
    assert "cost: measured on slow CPU, 1 thread a process, model" in shown
    assert "and are taken as they are" not in shown, "it is the same device"
    inputs = found["inputs"]
    assert (inputs["cluster"], inputs["devices"], inputs["cost"]) == ("this machine", 4, str(Path("run") / "cost.json"))
    assert inputs["memory_cap_bytes"] == int(machine_memory_bytes() * 0.8 / 4)
    assert found["headline"]["best"] == found["best"]


def test_a_cost_file_of_the_run_wins_over_what_it_left_and_an_asked_one_over_both(config, tmp_path) -> None:
    write_costs(tmp_path / "run" / "cost.json")
    for name in ("mine.json", "asked.json"):
        write_costs(tmp_path / name)
    config.write_text(config.read_text() + 'cost_file = "mine.json"\n')
    for asked, expected in (((), "mine.json"), (("--cost", "asked.json"), "asked.json")):
        assert run("plan", "run.toml", "--strategy", "best_fit", *asked, "--json", "out.json") == 0
        assert json.loads(Path("out.json").read_text())["inputs"]["cost"] == expected


def test_gpus_are_those_that_the_driver_names(config, tmp_path, capsys, monkeypatch) -> None:
    config.write_text(config.read_text() + 'device = "cuda"\n')
    monkeypatch.setattr(plan_inputs, "_DRIVER", tmp_path / "gpus")
    asked = ("run.toml", "--strategy", "best_fit", "--json", "out.json")
    assert "the run computes on GPUs, and NVIDIA's driver tells of none here" in refused(capsys, "plan", *asked)
    for place in range(4):
        (tmp_path / "gpus" / f"0000:{place}").mkdir(parents=True)
        (tmp_path / "gpus" / f"0000:{place}" / "information").write_text("Model: \t NVIDIA H200\nIRQ: 3\n")
    assert run("plan", *asked) == 0, capsys.readouterr().err
    inputs = json.loads(Path("out.json").read_text())["inputs"]
    assert (inputs["devices"], inputs["cost"]) == (4, "analytic")
    assert inputs["memory_cap_bytes"] == cluster_from("h200x4").device.usable_bytes
    (tmp_path / "gpus" / "0000:3" / "information").write_text("Model: \t NVIDIA L4\n")
    error = refused(capsys, "plan", *asked)
    assert "this machine has NVIDIA H200, NVIDIA L4, of which not all are one of the built-in" in error


@pytest.mark.parametrize(
    ("asked", "changes", "message"),
    [
        (("rows.jsonl", "--model", "config.json"), None, "--cluster is missing; name one such as h100x8, or give the"),
        (("run.toml",), None, "how fast this one is was not measured; run evenload profile or the run itself"),
        (("run.toml",), {"tp": 2}, "tp=2"),
        (("run.toml",), {"links": None}, "knows no link, and the layout has 4 processes; measure it with evenload"),
    ],
)
def test_what_nothing_says_is_refused(config, tmp_path, capsys, asked, changes, message) -> None:
    if changes and "tp" in changes:
        model = msgspec.structs.replace(model_from("config.json"), bytes_per_element=4)
        write_costs(tmp_path / "run" / "cost.json", measured_on=MeasuredOn(model=model, dp=1, cp=1, pp=2, tp=2))
    elif changes:
        none = dict.fromkeys(("p2p_bandwidth_bytes_per_s", "reduce_bandwidth_bytes_per_s", "intra_node", "inter_node"))
        write_costs(tmp_path / "run" / "cost.json", **none)
    assert message in refused(capsys, "plan", *asked)
