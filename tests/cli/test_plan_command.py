import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import evenload
from commands import refused, run
from evenload.planning.strategies.registry import STRATEGIES
from evenload.stepplan.plan_file import decode_plan_file
from evenload.stepplan.validate import validate_plan
from evenload.types.text import format_seconds

SHOWN = [one.name for one in STRATEGIES.values() if not (one.needs_solver or one.needs_one_stage)]
"""What 'all' means."""


def run_plan(*arguments: str) -> int:
    return run("plan", *arguments)


def case(table: str, *more: str) -> list[str]:
    return [table, "--model", "llama-7b", "--cluster", "h100x8", "--documents", "40", *more]


def inputs(table: str, *more: str) -> list[str]:
    return case(table, "--layout", "dp=2,pp=4", *more)


def test_plan_writes_table_json_plan_page_and_trace(table, tmp_path, capsys) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html", "trace", "emit-plan")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    assert run_plan(*inputs(table, "--steps", "2", *options)) == 0
    shown = capsys.readouterr().out
    facts = shown.splitlines()[-2]
    for text in ("llama-7b (6.74B parameters)", "h100x8", "dp=2 pp=4", "40 documents", "2 steps", "seed 0", "truncate"):
        assert text in facts
    result = json.loads(files["json"].read_text())
    assert set(result) >= {"version", "inputs", "strategies", "best"}
    assert [row["name"] for row in result["strategies"]] == SHOWN
    assert all(len(row["step_time_s"]) == 2 for row in result["strategies"])
    fastest = min(result["strategies"], key=lambda row: row["mean_step_time_s"] if row["feasible"] else np.inf)
    assert result["best"] == fastest["name"]
    assert (result["inputs"]["parameters"], result["inputs"]["active_parameters"]) == (6_738_415_616, 6_738_415_616)
    assert "slimpack" in shown
    plans = decode_plan_file(files["emit-plan"].read_bytes())
    assert [(plan.strategy, plan.step) for plan in plans] == [(name, step) for name in SHOWN for step in (0, 1)]
    for plan in plans:
        validate_plan(plan, max_pack_tokens=result["inputs"]["context"])
    assert "<html" in files["html"].read_text()[:200].lower()
    assert json.loads(files["trace"].read_text())["traceEvents"]


def test_headline_names_the_best_its_factor_and_why(table, tmp_path, capsys) -> None:
    """First on the screen, in the JSON, and on the page."""
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    assert run_plan(*inputs(table, "--strategy", "best_fit,auto", "--context", "128k", *options)) == 0
    shown, content = capsys.readouterr().out.splitlines(), json.loads(files["json"].read_text())
    output, baseline = content["headline"], content["baseline"]
    assert shown[0] == output
    best_fit, auto = content["strategies"]
    factor = auto["speedup_over_baseline"]
    assert output.startswith(f"Fastest with dp=2,pp=4: auto, about {format_seconds(auto['mean_step_time_s'])} a step (")
    assert factor == pytest.approx(baseline["mean_step_time_s"] / auto["mean_step_time_s"])
    # 40 documents of 2,500 tokens are one window of 128K: one replica and three stages wait.
    assert baseline["window_tokens"] < 131_072
    assert f"{factor:.2f}× best-fit packing" in output
    window = baseline["name"].removeprefix("best_fit ")
    assert any(line.split()[:2] == ["best_fit", window] and "1.00×" in line for line in shown)
    assert output in html.unescape(files["html"].read_text())
    for row in (best_fit, auto):
        assert row["physical_bound_s"] < row["lower_bound_s"] <= row["layout_bound_s"] < row["mean_step_time_s"]
        assert row["mfu"] == pytest.approx(row["physical_bound_s"] / row["mean_step_time_s"])
    for column in (">of layout<br>bound</th>", ">MFU</th>"):
        assert column in files["html"].read_text()


@pytest.mark.parametrize(
    ("strategies", "output"),
    [("auto", "Fastest with dp=2,pp=4: auto, about "), ("best_fit", "Fastest with dp=2,pp=4: best_fit, about ")],
)
def test_one_strategy_alone_has_no_factor(table, capsys, strategies, output) -> None:
    assert run_plan(*inputs(table, "--strategy", strategies)) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(output)
    assert "best-fit packing" not in first


def test_a_cluster_that_says_no_host_memory_is_told_of(table, tmp_path, capsys) -> None:
    text = (Path(__file__).parents[2] / "examples" / "clusters" / "two_nodes.toml").read_text()
    without = tmp_path / "without.toml"
    without.write_text(re.sub(r"(?m)^host_memory_bytes .*$", "", text))
    reported = "says no host_memory_bytes, so activations are offloaded as if its nodes had room for all"
    for cluster, policy, is_told in (
        (without, "choose", True),
        (without, "recompute", False),
        ("examples/clusters/two_nodes.toml", "choose", False),
    ):
        request = [table, "--model", "qwen2.5-0.5b", "--cluster", str(cluster), "--documents", "8", "--policy", policy]
        assert run_plan(*request, "--strategy", "balanced") == 0
        assert (reported in capsys.readouterr().out) == is_told, (cluster, policy)


def test_every_strategy_is_judged_in_its_own_layout(table, tmp_path, capsys) -> None:
    path = tmp_path / "out.json"
    arguments = ["--model", "qwen2.5-0.5b", "--cluster", "h100x4", "--json", str(path), "--documents", "16"]
    assert run_plan(table, *arguments, "--strategy", "padded,best_fit,skrull,auto", "--search-layout") == 0
    content, shown = json.loads(path.read_text()), capsys.readouterr().out
    assert content["layouts"][0]["layout"] == content["inputs"]["layout"]
    second = content["layouts"][1]
    option = ",".join(f"{axis}={size}" for axis, size in second["layout"].items() if size > 1 or axis == "dp")
    assert f"next fastest under {content['best']}: --layout {option} (" in shown
    for row in content["strategies"]:
        result = content["search"]["strategies"][row["name"]]
        assert row["layout"].items() <= result["layouts"][0]["layout"].items()
        assert row["mean_step_time_s"] == pytest.approx(result["layouts"][0]["mean_step_time_s"])
        assert result["not_looked_at"] == 0
        assert result["planned"] + result["too_large"] + result["ruled_out"] == len(result["layouts"])
    assert content["baseline"]["mean_step_time_s"] <= content["strategies"][1]["mean_step_time_s"]
    assert "layout of each strategy: padded dp=" in shown
    assert "layouts planned: " in shown
    assert "not looked at" not in shown


def test_a_search_that_had_too_little_time_says_what_it_did_not_look_at(table, tmp_path, capsys) -> None:
    """A cluster of 1,024 devices, of which a part is judged, and no time: one layout that fits."""
    path = tmp_path / "out.json"
    arguments = ["--model", "qwen2.5-0.5b", "--cluster", "h100x1024", "--documents", "2000", "--strategy", "balanced"]
    assert run_plan(table, *arguments, "--search-layout", "--search-seconds", "0.001", "--json", str(path)) == 0
    content, shown = json.loads(path.read_text()), capsys.readouterr().out
    result = content["search"]["strategies"]["balanced"]
    assert content["search"]["limit_s"] == 0.001
    assert result["not_looked_at"] > 20
    assert (
        f"not looked at, because the 0.001 s of --search-seconds were up: balanced {result['not_looked_at']} of"
        in shown
    )
    stride = result["layouts"][0]["stride"]
    assert stride > 1
    assert "estimates: more than 512 devices are judged on a part" in shown
    assert f"every so many-th replica and document (balanced {stride})" in shown
    assert content["strategies"][0]["layout"].items() <= result["layouts"][0]["layout"].items()


def test_layers_of_stages_that_are_not_even_are_shown_and_written(table, tmp_path, capsys) -> None:
    """The head of qwen2.5-0.5b costs as much as 9 of its 24 layers: the last of four stages gets fewer than six."""
    files = {name: tmp_path / f"out.{name}" for name in ("json", "emit-plan")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    arguments = ["--model", "qwen2.5-0.5b", "--cluster", "h100x4", "--documents", "16", "--strategy", "slimpack"]
    assert run_plan(table, *arguments, "--layout", "pp=4", *options) == 0
    counts = json.loads(files["json"].read_text())["inputs"]["stage_layers"]
    assert counts[-1] < min(counts[:-1])
    assert sum(counts) == 24
    assert f"layout pp=4 layers={'+'.join(map(str, counts))}" in capsys.readouterr().out.splitlines()[-2]
    (plan,) = decode_plan_file(files["emit-plan"].read_bytes())
    assert plan.layout.stage_counts == tuple(counts)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--search-layout", "--layout", "pp=8"], "--search-layout looks for the layout, --layout"),
        (["--tokens", "5"], "exclude each other"),
        (["--strategy", ","], "names no strategy"),
        (["--layout", "dp=1,pp=1,tp=5"], "do not divide over tp=5"),
        (["--layout", "stages=4"], "is not one of dp cp pp tp"),
        (["--layout", "dp=2,dp=2"], "given twice"),
        (["--layout", "pp=3"], "does not divide 8"),
        (["--model", "llama-8b"], "did you mean 'llama3-8b'"),
        (["--cluster", "h100x9"], "do not fill nodes"),
        (["--context", "100", "--overlong", "error"], "--overlong"),
        (["--steps", "0"], "steps is 0"),
        (["--cost", "nowhere.json"], "nowhere.json"),
        (["--search-seconds", "5"], "--search-seconds limits --search-layout, which is not given"),
        (["--search-layout", "--search-seconds", "0"], "--search-seconds is 0, must be above 0"),
        (
            ["--search-layout", "--cluster", "h100x1024", "--worst", "2"],
            "--worst, --emit-plan and --trace are of whole",
        ),
        (["--search-layout", "--cluster", "h100x1024", "--trace", "/dev/null"], "--worst, --emit-plan and --trace are"),
        (
            ["--search-layout", "--cluster", "h100x1024", "--strategy", "auto,flexpipe"],
            "--strategy flexpipe with --search-layout: it changes the layout of whole clusters",
        ),
        (("--engine", "megatron", "--layout", "dp=2,pp=4", "--strategy", "slimpack"), "strategy slimpack cuts"),
        (("--engine", "fsdp2", "--layout", "dp=2,pp=4"), "fully_shard alone has no pipeline"),
        (("--engine", "megatrn"), "did you mean 'megatron'"),
        (("--engine", "megatron", "--search-layout"), "ranks layouts for Evenload's own runtime"),
    ],
)
def test_user_errors_are_one_line_and_exit_2(table, capsys, more, message) -> None:
    assert message in refused(capsys, "plan", *case(table, *more))


def test_beyond_memory_exits_3_and_says_how_far(table, tmp_path, capsys) -> None:
    path = tmp_path / "out.json"
    assert run_plan(*case(table, "--model", "llama-70b", "--layout", "pp=8", "--json", str(path))) == 3
    assert "no strategy fits" in capsys.readouterr().err
    result = json.loads(path.read_text())
    assert result["best"] is None
    assert all("GiB" in row["why"] and not row["feasible"] for row in result["strategies"])


@pytest.mark.parametrize("strategy", ["auto", "flexpipe"])
def test_planning_needs_nothing_that_only_linux_has(table, monkeypatch, strategy) -> None:
    """macOS has no `os.sched_getaffinity`, and no cgroup or /proc files."""
    monkeypatch.delattr(os, "sched_getaffinity")
    real_open = open

    def open_elsewhere(file, *arguments, **named):
        if str(file).startswith(("/sys/", "/proc/")):
            raise FileNotFoundError(file)
        return real_open(file, *arguments, **named)

    monkeypatch.setattr("builtins.open", open_elsewhere)
    assert run_plan(*inputs(table, "--strategy", strategy)) == 0


def test_flexpipe_says_what_it_decided_before_every_step(table, tmp_path, capsys) -> None:
    file, page = tmp_path / "out.json", tmp_path / "out.html"
    request = ["--strategy", "balanced,flexpipe", "--steps", "3", "--known-steps", "2", "--set", "flexpipe.margin=0"]
    assert run_plan(*inputs(table, *request, "--json", str(file), "--html", str(page), "--details")) == 0
    shown = capsys.readouterr().out
    assert "flexpipe: layout of every step, predicted" in shown
    for text in ("A B C D", "T(keep)", "T(save)", "T(new)", "T(switch)", "why"):
        assert text in shown
    result = json.loads(file.read_text())
    rows = {row["name"]: row for row in result["strategies"]}
    assert rows["balanced"]["layout_decisions"] == []
    decisions = rows["flexpipe"]["layout_decisions"]
    assert [one["step"] for one in decisions] == [0, 1, 2]
    assert [one["known_steps"] for one in decisions] == [2, 2, 1]
    assert all(one["why"] in " ".join(shown.split()) for one in decisions if one["case"] != 1)
    assert result["inputs"]["known_steps"] == 2
    assert result["inputs"]["strategy_options"]["flexpipe"]["margin"] == 0
    assert "Layouts over time" in page.read_text()


def test_lengths_from_which_outliers_wait_are_shown_where_they_are_tuned(tmp_path, capsys) -> None:
    """In the JSON, on the screen and on the page: those that the planner's state holds after the last step."""
    file, page, table = (tmp_path / name for name in ("out.json", "out.html", "lengths.npy"))
    drawn = np.random.default_rng(0).lognormal(np.log(1200), 1.4, 2000)
    np.save(table, np.clip(drawn, 32, 32_768).astype(np.uint32))
    request = ["--strategy", "wlb,balanced", "--steps", "3", "--documents", "100", "--json", str(file)]
    published = ["--set", "wlb.as_published=true"]
    assert run_plan(*inputs(str(table), *request, *published, "--html", str(page), "--details")) == 0
    shown, rows = capsys.readouterr().out, json.loads(file.read_text())["strategies"]
    planned = evenload.plan(
        str(table), model="llama-7b", cluster="h100x8", layout="dp=2,pp=4", documents=100, steps=3, strategy="wlb",
        set_options=published[1:],
    )  # fmt: skip
    state = planned.evaluation.proposals["wlb"][-1].state
    assert state
    assert state.outlier_lengths
    note = f"outliers wait from {' and '.join(f'{length:,}' for length in state.outlier_lengths)} tokens on"
    assert [one["name"] for one in rows if note in one["note"]] == ["wlb"]
    assert note in " ".join(shown.split())
    assert note in html.unescape(page.read_text())
    assert run_plan(*inputs(str(table), *request)) == 0
    assert "outliers wait" not in file.read_text(), "the balanced release tunes no lengths"


def test_planning_never_imports_torch() -> None:
    """`evenload plan` must run on a laptop without torch."""
    code = "import sys, evenload.cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_worst_finds_the_batch_that_does_not_fit_where_a_sampled_one_does(table, tmp_path, capsys) -> None:
    """Packs of 128K tokens: the forty longest documents exceed memory whatever is offloaded. Packs of 8K always fit."""
    file = tmp_path / "out.json"
    request = inputs(table, "--strategy", "best_fit", "--worst", "6", "--json", str(file))
    assert run_plan(*request, "--context", "128k") == 3
    printed, written = capsys.readouterr(), json.loads(file.read_text())
    assert (written["strategies"][0]["feasible"], written["worst"][0]["fits"]) == (True, False)
    assert written["worst"][0]["longest"][0] == np.load(table).max()
    assert "best_fit: the worst of 6 global batches searched (the longest together" in printed.out
    assert "the lengths hold global batches that exceed memory under best_fit" in printed.err
    assert run_plan(*request, "--context", "8k") == 0
    (result,) = json.loads(file.read_text())["worst"]
    assert (result["strategy"], result["searched"], result["documents"], result["fits"]) == ("best_fit", 6, 40, True)
    capsys.readouterr()
    assert run_plan(*inputs(table, "--strategy", "wlb,best_fit", "--worst", "1", "--context", "8k")) == 0
    wlb, best_fit = (line for line in capsys.readouterr().out.splitlines() if "the worst of 1 global batch " in line)
    assert wlb.endswith("Documents that wlb has put off in earlier steps may come on top; they are not counted")
    assert "put off" not in best_fit


def test_an_engine_is_compared_beside_the_own_runtime(table, tmp_path, capsys) -> None:
    names = "best_fit,balanced,wlb"
    pipeline = ("--layout", "dp=2,pp=4", "--steps", "2", "--strategy", names, "--json")
    assert run_plan(*case(table, *pipeline, str(tmp_path / "own.json"))) == 0
    capsys.readouterr()
    page = tmp_path / "page.html"
    engine = ("--engine", "megatron", "--html", str(page))
    assert run_plan(*case(table, *pipeline, str(tmp_path / "engine.json"), *engine)) == 0
    shown = capsys.readouterr().out
    assert "on megatron (Megatron-Core 0.16.1), predicted" in shown
    assert "not measured on GPUs" in shown
    own, result = (json.loads((tmp_path / name).read_text()) for name in ("own.json", "engine.json"))
    for row in (*own["strategies"], *result["strategies"]):
        del row["plan_time_s"]
    assert result["strategies"] == own["strategies"]
    rows = {row["name"]: row for row in result["engine"]["strategies"]}
    assert list(rows) == names.split(",")
    assert result["engine"]["best"] == min(rows, key=lambda name: rows[name]["mean_step_time_s"])
    for row in rows.values():
        assert len(row["step_time_s"]) == 2
        assert row["mean_step_time_s"] > row["own_step_time_s"]  # sends that block, a gather that nothing hides
    assert "on engine megatron" in page.read_text()


def test_auto_of_an_engine_is_the_fastest_that_it_runs(table, tmp_path) -> None:
    file = tmp_path / "found.json"
    options = ("--strategy", "best_fit,balanced,fixed_greedy,auto", "--set", "auto.max_candidates=1")
    assert run_plan(*case(table, "--engine", "trainer", "--steps", "2", *options, "--json", str(file))) == 0
    result = json.loads(file.read_text())
    assert result["inputs"]["layout"] == {"dp": 8, "cp": 1, "pp": 1, "tp": 1, "virtual": 1}
    rows = {row["name"]: row for row in result["engine"]["strategies"]}
    assert rows["auto"]["mean_step_time_s"] <= min(row["mean_step_time_s"] for row in rows.values()) * (1 + 1e-9)
    assert rows["auto"]["planned_by"] in ("padded", "best_fit", "balanced", "fixed_greedy", "wlb", "skrull")
    for row in rows.values():
        # gradient_accumulation_steps: the same on every rank in every step.
        assert row["micro_batches"] == 8 * row["micro_batches_per_rank"]
