"""`evenload plan --lengths-per-step`: what it prints, writes and refuses."""

import gzip
import json

import numpy as np
import pytest

import evenload
from commands import refused, run

STEPS = (
    {"lengths": [6000, 1000, 2000, 5000, 4000], "micro_batches": [[[0], [3]], [[1, 2], [4]]]},
    {"lengths": [3000, 3000, 3000, 3000], "micro_batches": [[[0], [1]], [[2], [3]]]},
)


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Writes steps into the working directory, and returns the file's name."""
    monkeypatch.chdir(tmp_path)

    def write(*lines, name="steps.jsonl"):
        content = "".join(f"{json.dumps(line)}\n" for line in lines or STEPS).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return name

    return write


def judged(*options, model="llama-7b"):
    return run("plan", "--lengths-per-step", "steps.jsonl", "--model", model, *options, "--json", "out.json")


def test_the_first_line_answers_and_the_last_is_the_call_for_ones_own_trainer(steps, tmp_path, capsys):
    steps()
    assert judged() == 0
    first, facts, *remarks, last = capsys.readouterr().out.splitlines()
    content = json.loads((tmp_path / "out.json").read_text())
    mean, in_file = content["mean"], list(content["steps"].values())
    assert first == content["headline"]
    factor = mean["recorded_step_s"] / mean["step_s"]
    waiting = 100 * mean["recorded_waiting_s"] / mean["recorded_step_s"]
    for part in ("Predicted: ", " a step instead of ", f"{factor:.2f} times as fast: ranks wait {waiting:.1f} % of a"):
        assert part in first
    assert facts == (
        "lengths per step steps.jsonl, steps 2, documents 9, tokens 30,000, model llama-7b, cluster h100x2, costs "
        "analytic, layout dp=2, ranks wait at every micro-batch (no --engine named), max tokens 6,000, max tokens from "
        "the largest micro-batch"
    )
    assert remarks[0].startswith("ranks wait longest in step 1: ")
    assert "longer" not in " ".join(remarks[1:])

    assert set(content) == {*("version", "headline", "inputs", "call", "mean", "steps_beyond_limit", "steps")}
    assert content["inputs"]["max_tokens"] == 6_000
    for key in mean:
        assert mean[key] == pytest.approx(np.mean([step[key] for step in in_file]))
    assert list(content["steps"]) == ["1", "2"]
    assert [(one["documents"], one["tokens"]) for one in in_file] == [(5, 18_000), (4, 12_000)]
    assert all(one["bound_s"] <= one["step_s"] <= one["recorded_step_s"] for one in in_file)
    # By hand: 6,000 and 5,000 tokens are the longest of their index, in ours 6,000 and 4,000.
    at_6, at_5, at_4 = (evenload.micro_batches([n], 1, cost="llama-7b").step_s for n in (6000, 5000, 4000))
    assert in_file[0]["recorded_step_s"] == pytest.approx(at_6 + at_5, rel=1e-3)
    assert in_file[0]["step_s"] == pytest.approx(at_6 + at_4, rel=1e-3)

    assert last == f"ours: {content['call']}"
    lengths = STEPS[0]["lengths"]
    made = eval(content["call"], {"evenload": evenload, "lengths": lengths})  # what a reader pastes
    assert made.step_s == pytest.approx(in_file[0]["step_s"], rel=0.01)
    tokens = [[sum(lengths[one] for one in part) for part in rank] for rank in made.ranks]
    assert sorted(max(of_index) for of_index in zip(*tokens, strict=True)) == [4000, 6000]


def test_the_engine_decides_where_ranks_wait(steps, tmp_path, capsys):
    steps()
    seconds = {}
    for engine in ("fsdp2", "deepspeed-zero3", "deepspeed"):
        assert judged("--engine", engine) == 0
        content = json.loads((tmp_path / "out.json").read_text())
        seconds[engine] = content["mean"]["recorded_step_s"], content["mean"]["step_s"]
        at = "once a step" if engine == "deepspeed" else "at every micro-batch"
        assert f"ranks wait {at} (engine {engine})" in capsys.readouterr().out
        assert ("waits='step'" in content["call"]) == (engine == "deepspeed")
    assert seconds["fsdp2"] == seconds["deepspeed-zero3"]
    assert seconds["deepspeed"][1] < seconds["fsdp2"][1]


def test_without_a_partition_ours_alone_is_predicted(steps, tmp_path, capsys):
    steps(*({"lengths": step["lengths"]} for step in STEPS))
    assert judged("--layout", "dp=2", "--context", "6000") == 0
    first, facts, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("Predicted: ")
    assert " a step, of which ranks wait " in first
    assert "max tokens 6,000, max tokens from --context" in facts
    assert "this partition" not in " ".join(rest)
    alone = json.loads((tmp_path / "out.json").read_text())
    assert alone["mean"]["recorded_step_s"] is None
    steps()
    assert judged() == 0
    assert json.loads((tmp_path / "out.json").read_text())["mean"]["step_s"] == alone["mean"]["step_s"]


def test_where_ours_is_worse_or_keeps_a_limit_that_the_run_broke_it_says_so(steps, capsys):
    """The best of all divisions of these documents is 1.7 % shorter than ours."""
    best = {"lengths": [5000, 2000, 2000, 5000, 3000, 8000], "micro_batches": [[[0, 3], [1]], [[2, 5], [4]]]}
    steps(best, *STEPS)
    assert judged("--context", "12000") == 0
    shown = capsys.readouterr().out
    assert "ours takes longer than this partition in 1 step" in shown
    assert "breaks" not in shown
    assert judged("--context", "9000") == 0
    assert "this partition breaks --context in 1 step, ours in none" in capsys.readouterr().out


def test_compressed_files_layouts_and_costs_of_other_devices(steps, tmp_path, capsys):
    name = steps(name="steps.jsonl.gz")
    for more in ((), ("--layout", "tp=2"), ("--cluster", "b200x8"), ("--layout", "dp=2,cp=2", "--cluster", "a100x8")):
        assert run("plan", "--lengths-per-step", name, "--model", "llama3-8b", *more, "--json", "out.json") == 0
        inputs = json.loads((tmp_path / "out.json").read_text())["inputs"]
        assert inputs["cluster"] == (more[-1] if "--cluster" in more else "h100x4" if more else "h100x2")
        assert inputs["layout"].startswith("dp=2")


def test_measured_costs_are_taken_and_told_of(small_project, tmp_path, capsys):
    """A cost file of a small model on a CPU, whose seconds both divisions then have."""
    small_project("", pp=1)
    (tmp_path / "steps.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in STEPS))
    assert judged("--cost", "cost.json", model="model") == 0
    measured, shown = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert "\ncost: measured on " in shown
    assert judged(model="model") == 0
    assert json.loads((tmp_path / "out.json").read_text())["call"] != measured["call"]
    assert "\ncost: " not in capsys.readouterr().out


ALONE = ({"lengths": [5, 3]},)


@pytest.mark.parametrize(
    ("lines", "more", "message"),
    [
        (STEPS, ["lengths.npy"], "LENGTHS lengths.npy and --lengths-per-step exclude each other"),
        (STEPS, ["--documents", "8"], "judges steps as they are: leave out --documents"),
        (STEPS, ["--strategy", "wlb", "--set", "window=2"], "leave out --strategy, --set"),
        (STEPS, ["--trace", "out.trace", "--search-layout"], "leave out --search-layout, --trace"),
        (
            STEPS,
            ["--layout", "dp=4"],
            "--layout dp=4 must have dp=2, as many ranks as micro_batches of steps.jsonl has",
        ),
        (STEPS, ["--layout", "dp=2,pp=2"], "and no pipeline"),
        (STEPS, ["--layout", "dp=2,tp=3"], "do not divide over tp=3"),
        (STEPS, ["--cluster", "h100x1"], "needs 2 devices"),
        (STEPS, ["--context", "5999"], "steps.jsonl:1: document 0 has 6,000 tokens"),
        (STEPS, ["--engine", "fsdp3"], "did you mean 'fsdp2'"),
        (STEPS, ["--engine", "trainer"], "engine trainer runs equally many micro-batches in all steps"),
        (STEPS, ["--engine", "fsdp2", "--layout", "dp=2,cp=2"], "engine fsdp2: layout dp=2"),
        (STEPS, ["--html", "out.html"], "leave out --html"),
        (ALONE, ["--context", "8"], "--layout dp=N is missing"),
        (
            ALONE,
            ["--context", "8", "--layout", "tp=2"],
            "--layout tp=2 must have a number of ranks dp, and no pipeline",
        ),
        (ALONE, ["--layout", "dp=2"], "--context is missing"),
        ([{"lengths": [5], "micro_batches": [[[1]]]}], [], "steps.jsonl:1: document 1 is 1 times in micro_batches"),
    ],
)
def test_user_errors_are_one_line_and_exit_2(steps, capsys, lines, more, message):
    assert message in refused(capsys, "plan", "--lengths-per-step", steps(*lines), "--model", "llama-7b", *more)


def test_a_model_and_lengths_are_needed(steps, capsys):
    assert "--model is missing" in refused(capsys, "plan", "--lengths-per-step", steps())
    assert "LENGTHS is missing" in refused(capsys, "plan", "--model", "llama-7b", "--cluster", "h100x8")
