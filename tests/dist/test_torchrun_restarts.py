"""Under torchrun a run outlives the loss of a node: the agents that are left start ranks again, in a layout that fits.

Real agents and ranks; most of the time is that of their imports.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dist_training import train_steps
from evenload.cli.train import train_command
from evenload.errors import ConfigError
from evenload.report.run_files import latest_per_step, read_metrics
from process_tree import family_of
from small_run import write_small_costs, write_steps

STEPS, SAVED_EVERY, ROWS_BEFORE = 35, 4, 7  # five times all of the 40 documents, of which the last batch has 4
SAME = ["model.dtype=float64", "train.threads_per_process=1"]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_steps(tmp_path, STEPS)


@pytest.mark.long
def test_a_run_that_loses_a_node_goes_on_from_its_last_checkpoint_with_the_ranks_that_are_left(
    gloo_pool, config_file, tmp_path
) -> None:
    """Losses of all steps and the account of documents are those of one process that nothing happened to."""
    alone = [*SAME, f"train.output_dir={tmp_path / 'one'}"]
    expected = gloo_pool.run(1, train_steps, str(config_file), alone, STEPS)[0]
    write_small_costs(tmp_path, bytes_per_element=8, dp=2)
    log, metrics = tmp_path / "log-0", tmp_path / "run" / "metrics.jsonl"
    agents = [start_agent(tmp_path, node) for node in (0, 1)]
    try:
        await_rows(metrics, ROWS_BEFORE, agents[0], log)
        kill_with_ranks(agents[1])
        assert agents[0].wait(300) == 0, log.read_text()
    finally:
        for agent in agents:
            kill_with_ranks(agent)
    text, rows = log.read_text(), read_metrics(metrics)
    assert "torchrun has started 1 rank, layout dp=2 of [parallel] has 2: they train in layout single" in text
    latest = latest_per_step(rows)
    assert [row["step"] for row in latest] == list(range(STEPS)), text
    assert [row["loss"] for row in latest] == pytest.approx(expected, rel=1e-6), (
        text
    )  # sums in another order, grown over the steps
    assert [latest[0]["layout"], latest[-1]["layout"]] == ["dp=2", "single"]
    assert len(rows) - STEPS == rows_before_the_loss(rows) - resumed_at(text) < 2 * SAVED_EVERY
    account = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]
    assert any(re.match(r"trained +200 documents", entry) for entry in account), account


def rows_before_the_loss(rows: list) -> int:
    return sum(row["layout"] == "dp=2" for row in rows)


def resumed_at(text: str) -> int:
    """Steps of the checkpoint that the run went on from."""
    (steps,) = re.findall(r"resumed from \S+ after (\d+) steps", text)
    return int(steps)


def start_agent(directory: Path, node: int) -> subprocess.Popen:
    """torchrun for one rank; that of node 0 holds the rendezvous. Ends as `kill_with_ranks` does."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port_of(directory)}", f"--rdzv-id={directory.name}"),
        f"--rdzv-conf=is_host={int(node == 0)},keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=8",
        *("--local-addr=127.0.0.1", "-m", "evenload.cli.main", "train", "config.toml", *SAME, "parallel.dp=2"),
        *("train.cost_file=cost.json", f"train.checkpoint_every_steps={SAVED_EVERY}", "train.export_hf=false"),
    ]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with open(directory / f"log-{node}", "w") as log:
        return subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=subprocess.STDOUT)


def port_of(directory: Path) -> int:
    """The same for both agents of a test, and another one for tests that run at the same time."""
    return 29500 + hash(str(directory)) % 1000


def await_rows(metrics: Path, count: int, agent: subprocess.Popen, log: Path) -> None:
    deadline_s = time.monotonic() + 300
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < count:
        assert agent.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.02)


def kill_with_ranks(agent: subprocess.Popen) -> None:
    """As the loss of its machine: nobody says goodbye."""
    for pid in [agent.pid, *family_of(agent.pid)] if agent.poll() is None else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def test_agents_that_keep_their_store_are_refused(config_file, monkeypatch) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    torchrun = {"TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in (place | torchrun).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"--max-restarts is 3, .* set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        train_command(config=config_file, overrides=["parallel.dp=2"], nproc=None)
