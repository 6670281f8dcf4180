"""`evenload.train`: the run of the command, told to callbacks on rank 0."""

import os
import tomllib

import pytest
import torch.distributed as dist

import evenload
from callback_cases import Notes
from evenload.errors import CallbackError, ConfigError
from evenload.report.run_files import METRIC_KEYS
from rank_server import rank_context
from small_run import write_small_costs

SETTINGS = """
max_document_tokens = 1024
batch_documents = 6
[optimizer]
learning_rate = 1e-2
[train]
steps = 3
threads_per_process = 1
cost_file = "cost.json"
"""


@pytest.fixture
def project(small_project):
    return small_project(SETTINGS)


def test_a_run_of_one_process_is_trained_here_and_a_failing_callback_stops_it(project, capfd):
    """Callbacks may be anything; the environment and torch.distributed are as before, also after an error."""
    reported, before = [], dict(os.environ)

    class Watch(evenload.Callback):
        def on_step(self, report):
            reported.append((report.row["step"], report.measured.step_time_s > 0))
            if len(reported) == 2:
                raise KeyError("loss is odd")

        def on_end(self, end):
            reported.append((end.steps_done, end.reason))
            raise RuntimeError("and it cannot be closed")

    with pytest.raises(CallbackError) as stopped:
        evenload.train("config.toml", callbacks=[Watch()], overrides=["train.checkpoint_every_steps=1"])
    words = str(stopped.value)
    assert "callback Watch.on_step raised KeyError: 'loss is odd'" in words
    assert "test_train_call.py, line " in words
    assert isinstance(stopped.value.__cause__, KeyError)
    assert reported == [(0, True), (1, True), (2, "failed")]
    assert "Watch.on_end raised RuntimeError: and it cannot be closed" in capfd.readouterr().err
    assert (dict(os.environ), dist.is_initialized()) == (before, False)

    notes = Notes(project / "notes")
    notes.unsendable = lambda: None  # it goes nowhere
    run = evenload.train(tomllib.loads((project / "config.toml").read_text()), callbacks=[notes])
    assert (run.steps_done, run.stopped_by, run.checkpoint) == (3, None, run.output_dir / "checkpoints/step-00000003")
    assert [row["step"] for row in run.rows] == [0, 1, 2]
    assert set(run.rows[0]) == set(METRIC_KEYS)
    tokens = [int(row["tokens"]) for row in run.rows]
    assert [row["total_tokens"] for row in run.rows] == [sum(tokens[: at + 1]) for at in range(3)]
    seconds = [float(row["elapsed_s"]) for row in run.rows]
    assert seconds == sorted(seconds)
    assert seconds[-1] >= sum(float(row["step_time_s"]) for row in run.rows[-1:])
    start, *_, checkpoint, end = (project / "notes").read_text().splitlines()
    assert start.startswith("start single 1 ")
    assert (checkpoint, end) == ("checkpoint step-00000003 True", "end 3 finished")
    assert (dict(os.environ), dist.is_initialized()) == (before, False)


def test_steps_of_a_busy_machine_are_not_held_against_the_interval(project, capfd, monkeypatch):
    """Costs are of a quiet one; the run itself stood without a core."""
    for share, is_busy in ((0.4, True), (0.0, False)):
        monkeypatch.setattr("evenload.calibrate.fit.CoreWaits.share", lambda self, share=share: share)
        evenload.train("config.toml", overrides=[f"train.output_dir=run{share}"])
        shown = capfd.readouterr().err
        assert [int(line.split()[1]) for line in shown.splitlines() if line.startswith("step ")] == [0, 1, 2]
        (line,) = (line for line in shown.splitlines() if line.startswith("steps after the first"))
        assert ("on a busy machine: other programs held cores that this run needed for 40%" in line) == is_busy
        assert ("of 2 lie in the 90 % interval" in line) != is_busy


@pytest.mark.long
def test_a_run_of_several_processes_tells_callbacks_on_rank_0(project):
    rank_context()
    write_small_costs(project, pp=2)
    held_out = ["validation.sources=['corpus/01.txt']", "validation.every_steps=2", "validation.at_end=false"]
    where = ["parallel.pp=2", *held_out]
    run = evenload.train("config.toml", callbacks=[Notes(project / "notes")], overrides=where)
    tokens = [row["total_tokens"] for row in run.rows]
    assert (project / "notes").read_text().splitlines() == [
        "start pp=2 2 0 run 4",
        *(f"step {step} {step} {tokens[step]}" for step in range(2)),
        "validation 1 4 True",  # loss and perplexity, of all and of the one class of lengths
        f"step 2 2 {tokens[2]}",
        "checkpoint step-00000003 True",
        "end 3 finished",
    ]
    with pytest.raises(CallbackError, match=r"callback Notes.on_step raised ValueError: no such luck .*after 4 steps"):
        evenload.train(
            "config.toml", callbacks=[Notes(project / "more", fails_at=3)], overrides=[*where, "train.steps=5"]
        )
    assert (project / "more").read_text().splitlines() == ["start pp=2 2 3 run 4", "end 4 failed"]


def test_what_cannot_be_told_is_refused_before_anything_starts(project):
    with pytest.raises(ConfigError, match=r"is no evenload\.Callback"):
        evenload.train("config.toml", callbacks=[Notes])  # the class, not an object
    notes = Notes(project / "notes")
    notes.unsendable = lambda: None
    with pytest.raises(ConfigError, match="callback Notes cannot be sent to the process of rank 0"):
        evenload.train("config.toml", callbacks=[notes], overrides=["parallel.pp=2"])
    with pytest.raises(ConfigError, match=r"unknown configuration key 'train\.setps'; did you mean"):
        evenload.train({"train": {"setps": 1}})
    assert not (project / "run").exists()
