"""What a run of the command tells trackers and a log file, over a stop and a resume."""

import json
import signal
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from commands import refused, start_train, wait_for_rows
from evenload.report.run_files import read_metrics
from small_run import write_small_run

SETTINGS = """
max_document_tokens = 1024
batch_documents = 6
[parallel]
pp = 2
[optimizer]
learning_rate = 1e-2
[log]
to = ["wandb", "tensorboard"]
lines_every_s = 3600
[validation]
sources = ["corpus/01.txt", "corpus/02.txt"]
every_steps = 2
[train]
steps = 100000
threads_per_process = 1
cost_file = "cost.json"
"""


@pytest.mark.long
@pytest.mark.skipif(
    not (find_spec("wandb") and find_spec("tensorboard")), reason="wandb and tensorboard are not installed"
)
def test_trackers_and_log_of_a_run_that_is_stopped_and_goes_on(small_project, tmp_path, monkeypatch):
    """SIGTERM after some steps: a checkpoint, exit code 143; the same command goes on in the same run everywhere."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = small_project(SETTINGS, pp=2) / "run"

    process = start_train(tmp_path, command=("-m", "evenload"))
    wait_for_rows(run, 4, process)
    process.terminate()
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    first = output.splitlines()[0]
    assert first.startswith(f"evenload {version('evenload')} train config.toml -> {run} | ")
    assert not {"\r", "\x1b"} & set(output), "a log file has no lines that move"
    rows = read_metrics(run / "metrics.jsonl")
    stopped_at = len(rows)
    # The first step, the second, and the last one, however many there were.
    shown = [int(line.split()[1]) for line in output.splitlines() if line.startswith("step ")]
    assert shown == [0, 1, stopped_at - 1]
    assert all(len(line) <= 100 for line in output.splitlines() if line.startswith("step ") and "waited" not in line)

    process = start_train(tmp_path, f"train.steps={stopped_at + 2}")
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(stopped_at + 2))
    assert [row["total_tokens"] for row in rows] == [
        sum(int(row["tokens"]) for row in rows[: at + 1]) for at in range(len(rows))
    ]
    elapsed_s = [float(row["elapsed_s"]) for row in rows]
    assert elapsed_s == sorted(elapsed_s)

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name, key in (("train/loss", "loss"), ("train/learning_rate", "lr"), ("perf/tokens_per_s", "tokens_per_s"),
                      ("train/total_tokens", "total_tokens"), ("time/step_s", "step_time_s")):  # fmt: skip
        result = events.Scalars(name)
        assert [one.step for one in result] == list(range(stopped_at + 2)), name
        assert [one.value for one in result] == pytest.approx([row[key] for row in rows], rel=1e-6), name

    at = [step for step in range(stopped_at + 2) if step % 2 or step == stopped_at + 1]
    # A run that is stopped is not validated; the step may have been.
    assert [one.step for one in events.Scalars("validation/loss") if one.step != stopped_at - 1] == [
        step for step in at if step != stopped_at - 1
    ]

    identity = json.loads((run / "wandb.json").read_text())["id"]
    kept = sorted(run.glob(f"wandb/offline-run-*/run-{identity}.wandb"))
    assert len(kept) == 2 == len(list(run.glob("wandb/offline-run-*/run-*.wandb"))), "both starts are one run there"
    for file in kept:
        content = file.read_bytes()
        for name in (b"train/loss", b"train/global_step", b"perf/mfu", b"validation/perplexity"):
            assert name in content, (file, name)


def test_a_tracker_that_is_not_installed_is_refused_at_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("evenload.config.sections.find_spec", lambda name: None)
    settings = 'max_document_tokens = 9\nbatch_documents = 1\n[log]\nto = ["wandb"]\n[train]\nsteps = 2\n'
    file = write_small_run(tmp_path, ["a"], settings)
    assert "pip install 'evenload[wandb]', or leave it out of log.to" in refused(capsys, "train", str(file))
