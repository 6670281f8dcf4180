"""The cases of benchmarks/measured.py can be run: configurations, lengths, strategies; their times are not tested."""

import runpy
from pathlib import Path

import pytest

from evenload.cli.bench_worker import checked_bench
from evenload.config.train_config import load_train_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "measured.py"))


def test_every_layout_meets_every_table_and_size(script):
    assert len(script["CASES"]) == len(script["LAYOUTS"]) * len(script["TABLES"]) * len(script["SIZES"]) == 16


@pytest.mark.parametrize("layout", ["pp2", "dp2", "cp2", "pp2dp2"])
def test_a_case_is_a_run_of_its_strategies(script, layout, tmp_path):
    """What a layout cannot run is named with the reason; the others are accepted by the command."""
    config = script["write_run"](f"{layout}-dirs-small", tmp_path)
    names, left_out = script["strategies_of"](f"{layout}-dirs-small")
    assert {*names, *(name for name, _ in left_out)} == set(script["STRATEGIES"])
    assert [name for name, _ in left_out] == (["skrull"] if "pp2" in layout else [])
    plan, found = checked_bench(load_train_config(config, []), names, 2, 3)
    assert plan.strategies == names
    assert found.world_size == (4 if layout == "pp2dp2" else 2)


@pytest.mark.parametrize("table", ["dirs", "files"])
@pytest.mark.parametrize("size", ["small", "wide"])
def test_lengths_fill_the_batches_and_keep_their_tail(script, table, size):
    chosen = script["SIZES"][size]
    lengths = script["scaled_lengths"](table, chosen)
    assert lengths.sum() >= chosen.batch_tokens * (script["BATCHES"] + 1)
    assert lengths.max() <= chosen.context
    assert lengths.max() > 8 * sorted(lengths)[len(lengths) // 4]
