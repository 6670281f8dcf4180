"""`train.on_lost_rank = "shrink"`: killed processes, and a run that trains the same steps with those that are left."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from dist_training import train_steps
from evenload.cli.launch_survivors import run_surviving
from evenload.cli.start_record import read_starts
from evenload.cli.train import train_command
from evenload.cli.worker_setup import memory_for_rank
from evenload.config.train_config import load_train_config
from evenload.errors import ConfigError, EvenloadError, RankLostError
from evenload.report.run_files import latest_per_step, read_metrics
from evenload.stepplan.plan_file import decode_plan_file
from evenload.types.layout import even_layout
from rank_server import run_as_torchrun
from shrink_cases import (
    die,
    fail_by_itself,
    leave_out,
    leave_while_a_thread_waits,
    lose_a_rank_in_a_save,
    refuse,
    train_and_come_late,
    train_and_die,
    train_and_stick,
)
from small_run import write_small_costs, write_steps
from sweeps import sweep, thorough

STEPS = 6
COMMON = ["train.on_lost_rank=shrink", "train.checkpoint_every_steps=2", "train.export_hf=false", "train.timeout_s=300"]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_steps(tmp_path, STEPS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "deaths"),
    [({"pp": 2, "dp": 2}, {0: ("update", 3)}), ({"dp": 3}, {1: ("save", 1), 2: ("recovery", 0)})],
    ids=["update of rank 0", "save, then recovery"],
)
def test_survivors_train_the_same_steps(gloo_pool, config_file, tmp_path, capfd, layout, deaths):
    """Losses of all steps and the account of documents are those of one process that nothing happened to."""
    same = ["model.dtype=float64", "train.threads_per_process=1"]
    alone = [*same, f"train.output_dir={tmp_path / 'one'}"]
    expected = gloo_pool.run(1, train_steps, str(config_file), alone, STEPS)[0]
    costs = write_small_costs(tmp_path, bytes_per_element=8, **layout)
    overrides = [*same, *COMMON, f"train.cost_file={costs}", *(f"parallel.{n}={size}" for n, size in layout.items())]
    world_size = math.prod(layout.values())
    run_surviving(train_and_die, (str(config_file), overrides, deaths), world_size, grace_s=60.0)
    said = capfd.readouterr().err
    for rank in deaths:
        assert f"rank {rank} was killed by SIGKILL" in said
    rows = latest_per_step(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-10)
    (plan,) = decode_plan_file((tmp_path / "run" / "plan.json").read_bytes())
    assert plan.layout.world_size == world_size - len(deaths)
    account = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]
    assert any(re.match(rf"trained +{6 * STEPS} documents", entry) for entry in account), account


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "named", "meanwhile"),
    sweep(
        [
            ({"dp": 2}, [], "single"),
            ({"dp": 2, "cp": 2}, [], "cp=2"),
            # The rule would take pp=3. The planner may take pp=2 later, too.
            ({"dp": 2, "pp": 2}, ["plan.strategy=auto", 'plan.layouts=["pp=2,dp=1"]'], "pp=2"),
            ({"pp": 2}, ["train.survivor_memory=shared"], "single"),
        ],
        1,
    ),
    ids=str,
)
def test_a_process_that_comes_for_a_killed_one_is_let_in_between_two_steps(
    gloo_pool, config_file, tmp_path, capfd, layout, named, meanwhile
):
    """The others go on without it first. Of `dp=2 cp=2` three are left, of which one has no place until it comes."""
    same = ["model.dtype=float64", "train.threads_per_process=1"]
    alone = [*same, f"train.output_dir={tmp_path / 'one'}"]
    expected = gloo_pool.run(1, train_steps, str(config_file), alone, STEPS)[0]
    costs, world_size = write_small_costs(tmp_path, bytes_per_element=8, **layout), math.prod(layout.values())
    sizes = (f"parallel.{n}={size}" for n, size in layout.items())
    overrides = [*same, *COMMON, f"train.cost_file={costs}", *sizes, *named, "train.replace_lost_ranks=1"]
    case = (str(config_file), overrides, {1: ("update", 1)})
    is_kept = "train.survivor_memory=shared" in named
    run_surviving(train_and_come_late, case, world_size, grace_s=60.0, num_replacements=1, keeps_state=is_kept)
    told = f"rank {world_size} is started in place of rank 1 (the 1. of 1, train.replace_lost_ranks)"
    assert told in capfd.readouterr().err
    full = even_layout(4, **layout).describe()
    starts = read_starts(tmp_path / "run")
    assert [start.layout for start in starts] == [full, meanwhile, full]
    # Step 0 was finished before the first checkpoint; nothing is repeated because others are let in.
    lost, let_in = ((1, 0), (2, 0)) if is_kept else ((0, 1), (1, 0))
    assert [(start.steps_done, start.steps_repeated) for start in starts] == [(0, 0), lost, let_in]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    # Of a run that begins anew the rows do, too.
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert rows[is_kept]["layout"] == meanwhile
    if "plan.strategy=auto" not in named:
        assert {row["layout"] for row in rows[is_kept + 1 :]} == {full}
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-10)
    account = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]
    assert any(re.match(rf"trained +{6 * STEPS} documents", entry) for entry in account), account


@thorough
@pytest.mark.long
def test_the_last_rank_goes_on_alone(config_file, tmp_path):
    """There was no checkpoint yet, so it begins anew."""
    costs = write_small_costs(tmp_path, dp=2)
    overrides = [*COMMON, f"train.cost_file={costs}", "parallel.dp=2", "train.steps=3"]
    run_surviving(train_and_die, (str(config_file), overrides, {1: ("update", 1)}), 2, grace_s=60.0)
    # What ranks print is not looked at: they are forked from a server that an earlier test may have started.
    rows = latest_per_step(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [row["layout"] for row in rows] == ["single"] * 3
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["memory_cap_bytes"] == memory_for_rank(torch.device("cpu"), 1), "the machine is its own"


@pytest.mark.long
def test_a_run_that_loses_nobody_and_comes_nowhere_ends(config_file, tmp_path):
    costs = write_small_costs(tmp_path, dp=2)
    overrides = [*COMMON, f"train.cost_file={costs}", "parallel.dp=2"]
    with pytest.raises(RankLostError, match=r"connections broke 2 times in a row though every rank lives"):
        run_surviving(train_and_stick, (str(config_file), overrides, 1), 2, grace_s=60.0)


def test_when_nobody_is_left_the_run_ends_with_an_error(capfd):
    with pytest.raises(EvenloadError, match=r"rank \d was killed by SIGKILL \(process \d+\), the last one .* goes on"):
        run_surviving(die, (), 2, grace_s=60.0)
    assert len(re.findall(r"rank \d was killed by SIGKILL .*; the others go on", capfd.readouterr().err)) == 1


def test_an_error_of_a_rank_is_the_runs_error():
    """Nothing shrinks because of what every rank would run into."""
    with pytest.raises(ConfigError, match=r"wrong on purpose \(rank 1\)"):
        run_surviving(refuse, (1,), 2, grace_s=60.0)


def test_whom_the_others_leave_out_is_killed(capfd):
    """It decides nothing by itself: it would sleep for minutes."""
    run_surviving(leave_out, (1,), 2, grace_s=60.0)
    assert "rank 1 gave no sign of life and is ended" in capfd.readouterr().err


def test_threads_of_ranks_that_leave_together_wait_no_longer():
    run_as_torchrun(2, leave_while_a_thread_waits)


def test_a_broken_transfer_is_a_loss_though_nobody_has_seen_a_process_end():
    """The launcher may learn of it later than those who waited; an error of a rank's own stays one."""
    run_as_torchrun(2, lose_a_rank_in_a_save)
    run_as_torchrun(1, fail_by_itself)


def test_what_cannot_shrink_is_refused_at_start(config_file, monkeypatch):
    with pytest.raises(ConfigError, match=r"on_lost_rank is 'shrink' and train\.device 'cuda'"):
        train_command(config_file, ["train.on_lost_rank=shrink", "train.device=cuda"], None)
    with pytest.raises(ConfigError, match=r"replace_lost_ranks is 1, but train.on_lost_rank is 'stop'"):
        load_train_config(config_file, ["train.replace_lost_ranks=1"])
    with pytest.raises(ConfigError, match=r"replace_lost_ranks is -1, must be 0"):
        load_train_config(config_file, ["train.replace_lost_ranks=-1"])


def test_what_torchrun_cannot_start_again_is_refused(config_file, monkeypatch):
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    for name, value in zip(names, ("its own", "True", "0", "0", "3"), strict=True):
        monkeypatch.setenv(name, value)
    shrink = ["train.on_lost_rank=shrink", "parallel.dp=2"]
    with pytest.raises(ConfigError, match=r"give torchrun TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"):
        train_command(config_file, shrink, None)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with pytest.raises(ConfigError, match=r"replace_lost_ranks is 2, but under torchrun its agents start processes"):
        train_command(config_file, [*shrink, "train.replace_lost_ranks=2"], None)
    with pytest.raises(ConfigError, match=r"train\.resume is off and train\.on_lost_rank 'shrink'"):
        train_command(config_file, [*shrink, "train.resume=false"], None)
    with pytest.raises(ConfigError, match=r"torchrun has started 3 ranks, layout dp=2 has 2"):
        train_command(config_file, shrink, None)
