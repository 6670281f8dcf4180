"""`train.cost_file`: a file that is not of this run is refused at once; one of another device is told."""

from pathlib import Path

import msgspec
import pytest

from commands import refused
from dist_training import COSTS
from evenload.cli.plan_inputs import cost_file_warnings, measured_message, other_device_message
from evenload.cost.coefficients import (
    CopySpec,
    FitError,
    MeasuredOn,
    OverlapCost,
    Profile,
    digest_of,
    read_coefficients,
    write_coefficients,
)
from evenload.data.hub import model_from
from evenload.types.cluster import cluster_from
from evenload.types.model import MODELS, ModelSpec
from small_run import write_small_run

SETTINGS = """
max_document_tokens = 512
batch_documents = 4
[parallel]
pp = 2
[train]
steps = 1
cost_file = "cost.json"
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_ranks: None) -> ModelSpec:
    """Of a run on two stages, whose ranks must not start; checks run in this process, which has imported it all."""
    write_small_run(tmp_path, ["a text " * 20] * 4, SETTINGS)
    monkeypatch.chdir(tmp_path)
    return msgspec.structs.replace(model_from("model"), bytes_per_element=4)


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
def test_costs_of_something_else_are_refused(model, capsys, changes, of_model, message):
    measured = MODELS["llama-7b"] if "intermediate" in of_model else msgspec.structs.replace(model, **of_model)
    where = MeasuredOn(model=measured, **{"dp": 1, "cp": 1, "pp": 2, "tp": 1, **changes})
    write_coefficients("cost.json", msgspec.structs.replace(COSTS, measured_on=where))
    assert message in refused(capsys, "train", "config.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b'{"source": "calibrated", ', "is not valid"),
        (b'{"source": "guessed"}', "is not valid"),
    ],
    ids=["none", "cut off", "another form"],
)
def test_a_file_that_is_no_cost_file_is_refused(model, capsys, content, message):
    if content is not None:
        Path("cost.json").write_bytes(content)
    error = refused(capsys, "train", "config.toml")
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
    assert costs.profile is not None
    assert costs.profile.held_bytes == 1.5 * costs.profile.counted_bytes

    changed = msgspec.structs.replace(costs, optimizer_s_per_parameter=1e-12)
    assert "CHANGED after it was measured" in measured_message(changed)
    (told,) = cost_file_warnings(changed, "cost.json", costs.device)
    assert "was changed after evenload profile had measured it" in told
    (told,) = cost_file_warnings(costs, "cost.json", "a faster one")
    assert "this is a faster one: predicted seconds are of the former" in told

    assert "cluster h100x8 has H100-80GB" in other_device_message(costs, cluster_from("h100x8"))
    of_gpu = msgspec.structs.replace(costs, device="NVIDIA H100 80GB HBM3")
    assert other_device_message(of_gpu, cluster_from("h100x8")) == ""
    of_run = measured_message(msgspec.structs.replace(costs, profile=None))
    assert "in seconds at the start of a run (evenload profile takes minutes" in of_run
