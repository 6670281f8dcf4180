"""Cables between machines that are cut, and ranks that are lost under torchrun: who waits gives up in time, and the run
goes on where it can.

The runs start eight processes or more each, and most of their time is that of imports and of waiting: they are for
`make test-thorough`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cut_runs import NEW_STORES, TIMEOUT_S, CutCase, run_cut
from dist_training import train_steps
from evenload.cli.start_record import read_starts
from evenload.report.run_files import latest_per_step, read_metrics
from link_cases import LIMIT_S, ask_the_store, wait_for_the_other
from network_hosts import network_hosts, why_not
from process_tree import family_of
from rank_server import rank_context
from small_run import write_small_costs, write_small_run
from sweeps import sweep

NEEDS_HOSTS = pytest.mark.skipif(bool(why := why_not()), reason=why or "there are network namespaces")
DOCUMENTS = 12
SAME = ["model.dtype=float64", "train.threads_per_process=1", "train.export_hf=false"]


@NEEDS_HOSTS
@pytest.mark.long
def test_whoever_waits_across_a_silent_cut_gives_up(tmp_path: Path) -> None:
    """Both ranks, also the one that cannot reach the store which its diagnosis asks; and who asks the store only."""
    with network_hosts() as hosts:
        start, address = rank_context().Process, hosts.addresses[0]
        processes = [
            start(target=wait_for_the_other, args=(rank, *there, address, str(tmp_path)))
            for rank, there in enumerate(zip(hosts.names, hosts.interfaces, strict=True))
        ]
        processes.append(start(target=ask_the_store, args=(hosts.names[1], address, str(tmp_path))))
        try:
            for process in processes:
                process.start()
            wait_for(tmp_path, "met-0", "met-1", "met-asks")
            hosts.cut("silent")
            wait_for(tmp_path, "said-0", "said-1", "said-asks")
        finally:
            for process in processes:
                process.kill()
                process.join()
    here, cut_off, asks = ((tmp_path / f"said-{who}").read_text() for who in ("0", "1", "asks"))
    waited = r"rank {} waited for the loss of step 7 from the other rank: nothing for \d+ s\. {}"
    assert re.match(waited.format(0, "No sign of life from rank 1"), here), here
    assert re.match(waited.format(1, "The store through which ranks met does not answer either"), cut_off), cut_off
    assert re.match(r"the job's store has not answered for \d+ s", asks), asks


def wait_for(directory: Path, *names: str) -> None:
    deadline_s = time.monotonic() + 60 + 10 * LIMIT_S
    while missing := [name for name in names if not (directory / name).exists()]:
        assert time.monotonic() < deadline_s, missing
        time.sleep(0.05)


CUTS = [
    CutCase(seed=seed, how=("silent", "down")[seed % 2], returns=seed % 5 < 2, leads=seed // 2 % 2)
    for seed in range(10)
]


@NEEDS_HOSTS
@pytest.mark.long
@pytest.mark.timeout(1800)  # minutes on a machine that does nothing else
@pytest.mark.parametrize("case", sweep(CUTS, 0), ids=lambda case: f"{case.seed}-{case.how}{'-returns' * case.returns}")
def test_a_run_goes_on_after_a_cut_and_trains_every_step_once(gloo_pool, tmp_path, case) -> None:
    """Under torchrun on two hosts of two processes: the side with the rendezvous goes on, the other one ends."""
    steps = 90 if case.returns else 40  # who comes back finds the run still there
    file, arguments = small_run(tmp_path, steps, pp=2, dp=2)
    expected = gloo_pool.run(1, train_steps, str(file), [*SAME, f"train.output_dir={tmp_path / 'one'}"], steps)[0]
    with network_hosts(is_swapped=case.leads == 1) as hosts:
        outcome = run_cut(hosts, case, tmp_path, arguments, steps)
    told = f"went on after {outcome.went_on_s:.1f} s, other side ended after {outcome.ended_s:.1f} s"
    print(f"cut {case.seed}, {case.how}: {told}, {outcome.took_s:.0f} s in all")  # pytest -rP shows it
    assert outcome.codes[0] == 0, outcome.logs[0]
    assert outcome.codes[1] != 0, outcome.logs[1]
    check(tmp_path / "run", expected, "\n----\n".join(outcome.logs))
    if case.returns:
        assert read_starts(tmp_path / "run")[-1].ranks == 4, outcome.logs[0]


LOST = (signal.SIGKILL, signal.SIGSTOP)


@pytest.mark.long
@pytest.mark.parametrize("number", sweep(LOST, 0), ids=str)
def test_torchrun_starts_all_processes_again_where_one_is_lost(gloo_pool, tmp_path, number) -> None:
    """Killed, or stopped for ever, which the other one notices after its time limit."""
    steps = 30
    file, arguments = small_run(tmp_path, steps, dp=2)
    expected = gloo_pool.run(1, train_steps, str(file), [*SAME, f"train.output_dir={tmp_path / 'one'}"], steps)[0]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"),
        *("-m", "evenload.cli.main", "train", "config.toml", *arguments),
    ]
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen(command, cwd=tmp_path, env=os.environ | NEW_STORES, stdout=log, stderr=subprocess.STDOUT)
    try:
        metrics, deadline_s = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
        while not metrics.is_file() or metrics.read_bytes().count(b"\n") < 7:
            assert time.monotonic() < deadline_s, (tmp_path / "log").read_text()
            time.sleep(0.05)
        os.kill(next(pid for pid in family_of(run.pid) if b"evenload" in command_line(pid)), number)
        assert run.wait(300) == 0, (tmp_path / "log").read_text()
    finally:
        for pid in [*family_of(run.pid), run.pid] if run.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
    check(tmp_path / "run", expected, (tmp_path / "log").read_text())
    assert [(start.ranks, start.layout) for start in read_starts(tmp_path / "run")] == [(2, "dp=2")] * 2


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def small_run(directory: Path, steps: int, **layout: int) -> tuple[Path, list[str]]:
    """Its config.toml, and arguments of `evenload train` in this layout."""
    file = write_small_run(
        directory,
        (f"document {i} " * (1 + (i * 7) % 9) for i in range(60)),
        f"max_document_tokens = 256\nbatch_documents = {DOCUMENTS}\n[train]\nsteps = {steps}",
    )
    write_small_costs(directory, bytes_per_element=8, **layout)
    arguments = [
        *(*SAME, *(f"parallel.{axis}={size}" for axis, size in layout.items()), "train.cost_file=cost.json"),
        *("train.on_lost_rank=shrink", "train.checkpoint_every_steps=5", f"train.timeout_s={TIMEOUT_S}"),
    ]
    return file, arguments


def check(run: Path, expected: list[float], text: str) -> None:
    """Of a run that is over: everything was trained, once, and what was trained again is accounted for."""
    steps = len(expected)
    rows, starts = read_metrics(run / "metrics.jsonl"), read_starts(run)
    latest = latest_per_step(rows)
    assert [row["step"] for row in latest] == list(range(steps)), text
    # Sums in another order, grown over the steps; one that is lost or doubled shows in the second digit.
    assert [row["loss"] for row in latest] == pytest.approx(expected, rel=1e-6)
    # Where there was no checkpoint yet the rows began anew with the run.
    last = max((i for i, start in enumerate(starts) if not start.steps_done), default=0)
    assert len(rows) == steps + sum(start.steps_repeated for start in starts[last + 1 :]), text
    account = json.loads((run / "run.json").read_text())["ledger"]
    assert any(re.match(rf"trained +{DOCUMENTS * steps:,} documents", entry) for entry in account), account
