"""`evenload plan --engine`: another table beside the usual one, which does not change."""

import json

import pytest

from plan_calls import run_plan, write_lengths


@pytest.fixture
def table(tmp_path):
    return write_lengths(tmp_path)


def inputs(table: str, *more: str) -> list[str]:
    return [table, "--model", "llama-7b", "--cluster", "h100x8", "--documents", "40", *more]


def test_an_engine_is_compared_beside_the_own_runtime(table, tmp_path, capsys) -> None:
    names = "best_fit,balanced,wlb"
    pipeline = ("--layout", "dp=2,pp=4", "--steps", "2", "--strategy", names, "--json")
    assert run_plan(*inputs(table, *pipeline, str(tmp_path / "own.json"))) == 0
    capsys.readouterr()
    page = tmp_path / "page.html"
    engine = ("--engine", "megatron", "--html", str(page))
    assert run_plan(*inputs(table, *pipeline, str(tmp_path / "engine.json"), *engine)) == 0
    shown = capsys.readouterr().out
    assert "on megatron (Megatron-Core 0.16.1), predicted" in shown
    assert "not measured on GPUs" in shown
    own, found = (json.loads((tmp_path / name).read_text()) for name in ("own.json", "engine.json"))
    for row in (*own["strategies"], *found["strategies"]):
        del row["plan_time_s"]
    assert found["strategies"] == own["strategies"]
    rows = {row["name"]: row for row in found["engine"]["strategies"]}
    assert list(rows) == names.split(",")
    assert found["engine"]["best"] == min(rows, key=lambda name: rows[name]["mean_step_time_s"])
    for row in rows.values():
        assert len(row["step_time_s"]) == 2
        assert row["mean_step_time_s"] > row["own_step_time_s"]  # sends that block, a gather that nothing hides
    assert "on engine megatron" in page.read_text()


def test_auto_of_an_engine_is_the_fastest_that_it_runs(table, tmp_path) -> None:
    file = tmp_path / "found.json"
    options = ("--strategy", "best_fit,balanced,fixed_greedy,auto", "--set", "auto.max_candidates=1")
    assert run_plan(*inputs(table, "--engine", "trainer", "--steps", "2", *options, "--json", str(file))) == 0
    found = json.loads(file.read_text())
    assert found["inputs"]["layout"] == {"dp": 8, "cp": 1, "pp": 1, "tp": 1, "virtual": 1}
    rows = {row["name"]: row for row in found["engine"]["strategies"]}
    assert rows["auto"]["mean_step_time_s"] <= min(row["mean_step_time_s"] for row in rows.values()) * (1 + 1e-9)
    assert rows["auto"]["planned_by"] in ("padded", "best_fit", "balanced", "fixed_greedy", "wlb", "skrull")
    for row in rows.values():
        # gradient_accumulation_steps: the same on every rank in every step.
        assert row["micro_batches"] == 8 * row["micro_batches_per_rank"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "megatron", "--layout", "dp=2,pp=4", "--strategy", "slimpack"), "strategy slimpack cuts"),
        (("--engine", "fsdp2", "--layout", "dp=2,pp=4"), "fully_shard alone has no pipeline"),
        (("--engine", "megatrn"), "did you mean 'megatron'"),
        (("--engine", "megatron", "--search-layout"), "ranks layouts for Evenload's own runtime"),
    ],
)
def test_what_an_engine_cannot_run_is_refused_at_start(table, capsys, options, message) -> None:
    assert run_plan(*inputs(table, *options)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
