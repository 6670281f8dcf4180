"""The cases of benchmarks/measured.py can be run: configurations, lengths, strategies; their times are not tested."""

import runpy
from pathlib import Path

import pytest

from evenload.cli.measure import BenchRequest
from evenload.cli.measure_worker import bench_task

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "measured.py"))


@pytest.mark.parametrize("layout", ["pp2", "dp2", "cp2", "pp2dp2"])
def test_a_case_is_a_run_of_its_strategies(script, layout, tmp_path):
    """What a layout cannot run is named with the reason; the others are accepted by the command."""
    config = script["write_run"](f"{layout}-dirs-small", tmp_path)
    names, left_out = script["strategies_of"](f"{layout}-dirs-small")
    assert {*names, *(name for name, _ in left_out)} == set(script["STRATEGIES"])
    assert [name for name, _ in left_out] == (["skrull"] if "pp2" in layout else [])
    request = BenchRequest(config=config)
    (*_, strategies, _, _), num_ranks = bench_task(tmp_path / "answer.json", request, request.load(), names, tmp_path)
    assert strategies == names
    assert num_ranks == (4 if layout == "pp2dp2" else 2)
