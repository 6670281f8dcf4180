"""`evenload train` as a user runs it: real processes, real files, real kills."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

import commands
from commands import refused, start_train, wait_for_rows
from dist_training import COSTS
from evenload.cost.coefficients import write_coefficients
from evenload.report.run_files import METRIC_KEYS, read_metrics
from evenload.types.text import counted
from process_tree import ranks_of
from rank_server import rank_context

SETTINGS = """
max_document_tokens = 1024
batch_documents = 6
[parallel]
pp = 2
[optimizer]
learning_rate = 1e-2
[train]
steps = 5
cost_file = "cost.json"
"""


@pytest.fixture
def project(small_project) -> Path:
    """Two pipeline stages, with costs and without processes that read, which would take longer than these tests."""
    return small_project(SETTINGS, pp=2)


@pytest.fixture
def run_here(project: Path, capsys: pytest.CaptureFixture[str]):
    """Trains from this process, whose ranks start with everything imported; gives what the launcher itself says after
    its first line."""

    def run(*arguments: str) -> tuple[int, str]:
        rank_context()
        code = commands.run("train", "config.toml", *arguments)
        first, _, more = capsys.readouterr().err.partition("\n")
        assert first.startswith("evenload ")
        assert "train config.toml -> " in first
        return code, more

    return run


def steps_in_page(directory: Path) -> list[int]:
    """What can be looked at, each with its plan and both timelines."""
    page = (directory / "report.html").read_text()
    result = re.search('id="step-view-data">(.*?)</script>', page, re.DOTALL)
    assert result is not None
    (section,) = json.loads(result[1])["sections"]
    assert all(list(one["views"]) == ["predicted", "measured"] and one["plan"] for one in section["steps"])
    return [one["step"] for one in section["steps"]]


@pytest.mark.long
def test_a_run_leaves_what_the_design_promises_and_resumes_after_a_kill_bit_equal(project, run_here):
    """SIGKILL of everything in the middle of a run; the rerun continues and its losses are those of a whole run."""
    assert run_here("train.output_dir=whole") == (0, "")
    whole = project / "whole"
    for name in ("metrics.jsonl", "report.html", "trace.json", "plan.json", "cost.json", "config.json"):
        assert (whole / name).stat().st_size > 0, name
    assert steps_in_page(whole) == [0, 1, 2, 3, 4]
    rows = read_metrics(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert set(rows[0]) == set(METRIC_KEYS)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (whole / "model" / "model.safetensors.index.json").is_file()
    assert json.loads((whole / "trace.json").read_text())["traceEvents"]

    assert (whole / "cost.json").read_bytes() == (project / "cost.json").read_bytes()

    process = start_train(project, "train.checkpoint_every_steps=1", "data.workers=1")
    wait_for_rows(project / "run", 2, process)
    os.kill(process.pid, signal.SIGSTOP)  # so that the launcher does not report while its ranks are killed
    for pid in ranks_of(process.pid):
        os.kill(pid, signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    for name in ("report.html", "trace.json", "run.json", "plan.json", "measured.npz"):
        assert (project / "run" / name).stat().st_size > 0, "a killed run has its report"
    assert run_here() == (0, "")
    account = json.loads((project / "run" / "run.json").read_text())["ledger"]
    assert any(re.match(r"trained +30 documents", entry) for entry in account), account
    trained = read_metrics(project / "run" / "metrics.jsonl")
    assert [row["step"] for row in trained].count(0) == 1, "it went on, it did not begin anew"
    assert steps_in_page(project / "run") == [0, 1, 2, 3, 4]
    latest = {row["step"]: row["loss"] for row in trained}
    assert latest == {row["step"]: row["loss"] for row in rows}


@pytest.mark.long
def test_a_dead_rank_stops_the_run_with_its_error_in_seconds(project):
    process = start_train(project, "train.steps=100000")
    wait_for_rows(project / "run", 1, process)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    killed_s = time.monotonic()
    output, _ = process.communicate(timeout=200)
    assert time.monotonic() - killed_s < 60
    assert process.returncode == 2
    assert "evenload: error: rank 1 was killed by SIGKILL" in output


@pytest.mark.long
def test_ctrl_c_saves_and_says_how_to_go_on_and_what_is_left_is_done_then(project):
    """Ctrl-C as a terminal sends it, to all processes at once. A later start of the run finds nothing left to train
    and writes what was not, also under another strategy, about which it says what it did."""
    process = start_train(project, "train.steps=100000")
    wait_for_rows(project / "run", 1, process)
    ranks = ranks_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "a second signal ends the run at once" in output
    # Costs of another device are used, and it is said.
    assert "evenload: warning: costs measured on" in output
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    steps = int(re.search(r"stopped by Ctrl-C after (\d+) steps?; nothing is lost. Go on with:", output)[1])  # type: ignore[index]
    assert output.splitlines()[-1].endswith("-m evenload.cli.main train config.toml train.steps=100000")
    assert [path.name for path in (project / "run" / "checkpoints").iterdir()] == [f"step-{steps:08d}"]
    assert len(read_metrics(project / "run" / "metrics.jsonl")) == steps
    assert not (project / "run" / "model").exists()

    config = (project / "run" / "config.json").read_bytes()
    process = start_train(project, f"train.steps={steps}", "plan.strategy=best_fit")
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    words = " ".join(output.split())
    assert f"resumed from {project}/run/checkpoints/step-{steps:08d} after {counted(steps, 'step')}" in words
    assert "plan.strategy changes from auto to best_fit: this goes on with the same run" in words
    assert f"nothing left to train: {project}/run holds a finished run of {steps} steps under auto" in words
    assert f"plan.strategy=best_fit train.output_dir={project}/run-best_fit" in words
    assert "ended before everything was written; that is done now" in words
    assert (project / "run" / "model" / "model.safetensors.index.json").is_file()
    assert (project / "run" / "config.json").read_bytes() == config, "the facts of the run are those of its steps"


@pytest.mark.long
def test_a_short_run_shows_every_step_and_how_busy_the_machine_was_while_calibrating(project, monkeypatch):
    """No bar in a log; costs of a calibration that the limit cut short are kept, say so, and give no interval."""
    config = project / "config.toml"
    config.write_text(config.read_text().replace('cost_file = "cost.json"', "calibration_max_s = 1e-6"))
    monkeypatch.setenv("PYTHONPATH", str(Path(commands.__file__).parent))
    quick = ("-c", "import quick_commands; quick_commands.main()")
    process = start_train(project, "train.threads_per_process=1", command=quick)
    output = process.communicate(timeout=500)[0]
    assert process.returncode == 0, output
    lines = output.splitlines()
    assert [int(line.split()[1]) for line in lines if line.startswith("step ")] == [0, 1, 2, 3, 4]
    assert not {"\r", "\x1b"} & set(output)
    (begun,) = (line for line in lines if line.startswith("calibrating"))
    assert "at most about 1e-06 s, train.calibration_max_s" in begun
    (found,) = (line for line in lines if line.startswith(("machine busy", "machine quiet")))
    assert re.search(r"ranks waited \d+% of the time for a core, repeats spread \d+%", found)
    assert "cut short" in found
    kept = list((project / "cache").rglob("calibration/*.json"))
    assert len(kept) == (0 if found.startswith("machine busy") else 1)
    for file in (*kept, project / "run" / "cost.json"):
        assert json.loads(file.read_text())["measured_on"]["is_cut_short"]
    (plan,) = (line for line in lines if line.startswith("first step"))
    assert "no 90 % interval of step times: measuring costs was cut short" in plan
    assert "lie in the 90 %" not in output


def test_an_error_in_one_rank_is_shown_as_one_line(project, run_here):
    """Found only while reading: the document's name, length, limit and choices, and no traceback."""
    (project / "corpus" / "huge.txt").write_text("x" * 5000)
    code, output = run_here()
    assert code == 2
    assert len(output.splitlines()) == 1
    assert "huge.txt" in output
    assert "1,024" in output or "1024" in output
    assert all(choice in output for choice in ("split", "truncate", "drop"))


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("train", ["parallel.pp=9"], "4 layers cannot fill 9 stages"),
        ("train", ["--nproc", "3"], "--nproc is 3, but layout pp=2 needs 2 processes"),
        ("train", ["plan.strategy=flexpipe", "parallel.pp=1"], "and there is one process alone"),
        ("train", ["model.path=nowhere"], "no config.json there"),
        ("train", ["parallel.tp=3"], "parallel.tp is 3, but num_attention_heads of the model is 4"),
        ("train", ["optimizer.decay=cosine", "data.epochs=1", "train.steps=0"], "train.steps is 0"),
        ("train", ["train.attention=flash"], "unknown attention backend 'flash'"),
        ("train", ["data.sources=['nowhere']"], "nowhere"),
        ("train", ["data.sources=['corpus']", "data.include=['*.py']"], "'corpus' has no files with a name like *.py"),
        ("train", ["data.record=messages"], "records hold messages, and plain bytes have no chat template"),
        ("train", ["data.record=prompt_completion"], 'holds records of kind "text"'),
        ("train", ["train.output_dir=config.toml/run"], "train.output_dir is config.toml/run, but"),
        ("train", ["train.output_dir=/proc/run"], "nothing can be written to /proc"),
        ("train", ["train.stop_grace_s=0"], "train.stop_grace_s is 0"),
        ("train", ["train.recalibrate=true"], "train.recalibrate is true, but train.cost_file = 'cost.json'"),
        ("bench", ["--strategy", "slimpak"], "slimpack"),
        ("bench", ["--strategy", "best_fit,flexpipe"], "changes the layout between steps"),
        ("bench", ["--json", "nowhere/result.json"], "its folder does not exist"),
        ("bench", ["--html", "nowhere/page.html"], "its folder does not exist"),
        ("check", ["train.cost_file=of_nothing.json"], "does not say on which model and layout it was measured"),
        ("check", ["parallel.pp=9"], "4 layers cannot fill 9 stages"),
    ],
)
@pytest.mark.usefixtures("no_ranks")
def test_mistakes_are_refused_before_ranks_start(project, capsys, command, arguments, expected):
    write_coefficients(project / "of_nothing.json", COSTS)
    assert expected in refused(capsys, command, "config.toml", *arguments)


def test_a_plan_that_cannot_fit_is_refused_with_its_numbers_and_exit_code(run_here):
    code, output = run_here("plan.memory_bytes=300000")
    assert code == 3, output
    assert len(output.splitlines()) == 1
    assert "the device offers" in output


def test_checkpoints_that_do_not_fit_the_disk_are_refused_before_anything_is_measured_or_read(project, run_here):
    """One line with values, limit and fix; costs would be measured, and a document is too long."""
    config = project / "config.toml"
    config.write_text(config.read_text().replace('cost_file = "cost.json"', ""))
    (project / "corpus" / "huge.txt").write_text("x" * 5000)
    often = ("train.keep_checkpoints=1000000000000", "train.steps=1000000000000")
    code, output = run_here(*often)
    assert code == 2, output
    (line,) = output.splitlines()
    assert f"train.output_dir is {project}/run, where" in line
    assert "train.keep_checkpoints = 1000000000000" in line
    assert "Keep fewer, save less often" in line
    assert not (project / "run").exists()


@pytest.mark.usefixtures("no_ranks")
def test_resume_off_refuses_to_mix_with_an_earlier_run(project, capsys):
    """Before ranks start, too."""
    checkpoint = project / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").touch()
    assert f"train.resume is off, but {checkpoint}" in refused(capsys, "train", "config.toml", "train.resume=false")


@pytest.mark.long
def test_torchrun_starts_the_same_run_and_stops_it_with_a_checkpoint(project):
    process = start_train(
        project,
        "train.steps=100000",
        command=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "evenload.cli.main"),
    )
    wait_for_rows(project / "run", 2, process)
    process.terminate()
    output, _ = process.communicate(timeout=120)
    steps = int(re.search(r"stopped by SIGTERM after (\d+) steps?; nothing is lost", output)[1])  # type: ignore[index]
    assert [row["step"] for row in read_metrics(project / "run" / "metrics.jsonl")] == list(range(steps))
    assert [path.name for path in (project / "run" / "checkpoints").iterdir()] == [f"step-{steps:08d}"]
