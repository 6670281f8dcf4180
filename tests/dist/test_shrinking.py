"""`train.on_lost_rank = "shrink"`: killed processes, and a run that trains the same steps with those that are left."""

import json
import math
import re
from pathlib import Path

import pytest

from dist_training import train_steps
from evenload.cli.launch_survivors import run_surviving
from evenload.cli.train import train_command
from evenload.errors import ConfigError, EvenloadError
from evenload.report.metrics_file import latest_per_step, read_metrics
from evenload.runtime.config.train_config import load_train_config
from evenload.stepplan.plan_file import decode_plan_file
from shrink_cases import die, leave_out, refuse, train_and_die
from small_run import write_small_costs, write_small_run

STEPS = 6
COMMON = ["train.on_lost_rank=shrink", "train.checkpoint_every_steps=2", "train.export_hf=false", "train.timeout_s=300"]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    settings = f"""
        max_document_tokens = 256
        batch_documents = 6
        [train]
        steps = {STEPS}
    """
    return write_small_run(tmp_path, (f"document {i} " * (1 + (i * 7) % 5) for i in range(40)), settings)


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


def test_what_cannot_shrink_is_refused_at_start(config_file, monkeypatch):
    with pytest.raises(ConfigError, match=r"on_lost_rank is 'shrink' and train\.device 'cuda'"):
        load_train_config(config_file, ["train.on_lost_rank=shrink", "train.device=cuda"])
    with pytest.raises(ConfigError, match=r"plan\.layouts is .* and train.on_lost_rank 'shrink'"):
        load_train_config(config_file, ["train.on_lost_rank=shrink", "plan.layouts=['pp=2']"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "somebody else's")
    with pytest.raises(
        ConfigError, match=r"torchrun ends all processes when one is lost; .* give torchrun --max-restarts"
    ):
        train_command(config_file, ["train.on_lost_rank=shrink"], None)
