"""benchmarks/projected.py on a cost file as a calibration writes it."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.cost.coefficients import write_coefficients
from evenload.cost.measured_on import MeasuredOn
from evenload.errors import ConfigError
from evenload.explore.batches import BatchRule
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "projected.py"))


@pytest.fixture
def cost_file(tmp_path):
    """Of one device: no links."""
    measured = sample_coefficients(
        measured_on=MeasuredOn(model=sample_model(num_layers=2), dp=1, cp=1, pp=1, tp=1),
        **dict.fromkeys(("p2p_bandwidth_bytes_per_s", "reduce_bandwidth_bytes_per_s")),
    )
    write_coefficients(tmp_path / "cost.json", measured)
    return tmp_path / "cost.json"


def test_compute_is_the_files_and_communication_the_clusters(script, cost_file):
    compute = script["measured_compute"](cost_file, 8)
    assert compute.model.num_layers == 8
    cluster = cluster_from("h100x64")
    found = compute.of(even_layout(8, dp=16, pp=4), cluster)
    assert (found.forward, found.backward) == (compute.coefficients.forward, compute.coefficients.backward)
    assert found.p2p_bandwidth_bytes_per_s == cluster.inter_node.bandwidth_bytes_per_s
    assert found.reduce_bandwidth_bytes_per_s is not None


def test_every_strategy_gets_a_layout_of_every_cluster(script, cost_file):
    compute = script["measured_compute"](cost_file, 8)
    lengths = np.random.default_rng(0).integers(4, 200, 400)
    rule = BatchRule(num_documents=64, context=200, overlong="error")
    found = script["project"](compute, ["h100x8", "h100x16"], lengths, rule, ("best_fit", "slimpack"))
    assert [(one.cluster, one.strategy) for one in found] == [
        *(("h100x8", "best_fit"), ("h100x8", "slimpack")),
        *(("h100x16", "best_fit"), ("h100x16", "slimpack")),
    ]
    assert all(0 < one.fraction_of_bound <= 1 for one in found)
    rows = script["rows_of"](found, "compute measured, communication modelled")
    ratios = {row.case: row.value for row in rows if row.metric == "speed-up"}
    assert ratios["h100x8, best_fit, compute measured, communication modelled"] == 1
    assert ratios["h100x8, slimpack, compute measured, communication modelled"] == pytest.approx(
        found[0].step_time_s / found[1].step_time_s
    )


def test_a_file_that_was_not_measured_is_refused(script, tmp_path):
    write_coefficients(tmp_path / "made.json", sample_coefficients())
    with pytest.raises(ConfigError, match="it has no 'measured_on'"):
        script["measured_compute"](tmp_path / "made.json", None)
