"""`train.survivor_memory = "shared"`: the others go on after the last finished step, and train none twice."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from evenload.cli.launch_survivors import run_surviving
from evenload.config.train_config import load_train_config
from evenload.errors import ConfigError
from evenload.report.run_files import read_metrics
from evenload.runtime.checkpoint.shared_directory import remove_left_over
from shrink_cases import train_and_die
from small_run import write_small_costs, write_steps

STEPS = 5
COMMON = [
    *("train.on_lost_rank=shrink", "model.dtype=float64", "train.threads_per_process=1", "train.timeout_s=300"),
    *("train.checkpoint_every_s=0", "optimizer.learning_rate=1e-3"),
]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_steps(tmp_path, STEPS, tied=True)


@pytest.mark.long
def test_survivors_go_on_after_the_last_finished_step(config_file, tmp_path, capfd):
    """One of four is killed in the middle of a step, another as it takes over what was kept; there is no checkpoint.
    Losses and weights are those of a process that nothing happened to, and every step is there once."""
    alone = [*COMMON, f"train.output_dir={tmp_path / 'alone'}", f"train.cost_file={write_small_costs(tmp_path, 8)}"]
    run_surviving(train_and_die, (str(config_file), alone, {}), 1, grace_s=60.0)

    costs = write_small_costs(tmp_path, 8, pp=2, dp=2)
    shared = ["train.survivor_memory=shared", "parallel.pp=2", "parallel.dp=2", f"train.cost_file={costs}"]
    deaths = {0: ("update", 3), 2: ("takeover", 0)}
    run_surviving(train_and_die, (str(config_file), [*COMMON, *shared], deaths), 4, grace_s=60.0, keeps_state=True)
    said = capfd.readouterr().err
    assert "rank 0 was killed by SIGKILL" in said
    assert "rank 2 was killed by SIGKILL" in said

    expected = read_metrics(tmp_path / "alone" / "metrics.jsonl")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS)), "once, in order"
    assert [row["layout"] for row in rows] == ["dp=2 pp=2"] * 3 + ["pp=2"] * 2
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-10)
    weights, wanted = (exported(tmp_path / name) for name in ("run", "alone"))
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.linalg.norm(weights[name] - tensor) <= 1e-10 * np.linalg.norm(tensor), name
    account = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]
    assert any(re.match(rf"trained +{6 * STEPS} documents", entry) for entry in account), account
    # Of the machine's shared memory only what nobody owns is looked at: other tests run beside this one.
    assert remove_left_over() == [], "nothing is left in shared memory"


def exported(directory: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in (directory / "model").glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_it_is_refused_where_nobody_goes_on(config_file):
    with pytest.raises(ConfigError, match=r"survivor_memory is 'shared' and train\.on_lost_rank 'stop'"):
        load_train_config(config_file, ["train.survivor_memory=shared"])
