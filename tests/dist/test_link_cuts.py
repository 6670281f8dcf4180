"""Cables between machines that are cut: who waits gives up in time, and a run under torchrun goes on where it can.

The runs start eight processes or more each, and most of their time is that of imports and of waiting: they are for
`make test-thorough`.
"""

import json
import re
import time
from pathlib import Path

import pytest

from cut_runs import TIMEOUT_S, CutCase, CutOutcome, run_cut
from dist_training import train_steps
from evenload.cli.start_record import read_starts
from evenload.report.metrics_file import latest_per_step, read_metrics
from link_cases import LIMIT_S, ask_the_store, wait_for_the_other
from network_hosts import network_hosts, why_not
from rank_server import rank_context
from small_run import write_small_costs, write_small_run
from sweeps import sweep

NEEDS_HOSTS = pytest.mark.skipif(bool(why := why_not()), reason=why or "there are network namespaces")
DOCUMENTS = 12


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
@pytest.mark.parametrize("case", sweep(CUTS, 0), ids=lambda case: f"{case.seed}-{case.how}{'-returns' * case.returns}")
def test_a_run_goes_on_after_a_cut_and_trains_every_step_once(gloo_pool, tmp_path, case) -> None:
    """Under torchrun on two hosts of two processes: the side with the rendezvous goes on, the other one ends."""
    steps = 90 if case.returns else 40  # who comes back finds the run still there
    file = write_small_run(
        tmp_path,
        (f"document {i} " * (1 + (i * 7) % 9) for i in range(60)),
        f"""
        max_document_tokens = 256
        batch_documents = {DOCUMENTS}
        [train]
        steps = {steps}
        """,
    )
    same = ["model.dtype=float64", "train.threads_per_process=1", "train.export_hf=false"]
    expected = gloo_pool.run(1, train_steps, str(file), [*same, f"train.output_dir={tmp_path / 'one'}"], steps)[0]
    write_small_costs(tmp_path, bytes_per_element=8, pp=2, dp=2)
    arguments = [
        *(*same, "parallel.pp=2", "parallel.dp=2", "train.cost_file=cost.json", "train.on_lost_rank=shrink"),
        *("train.checkpoint_every_steps=5", f"train.timeout_s={TIMEOUT_S}"),
    ]
    with network_hosts(is_swapped=case.leads == 1) as hosts:
        outcome = run_cut(hosts, case, tmp_path, arguments, steps)
    told = f"went on after {outcome.went_on_s:.1f} s, other side ended after {outcome.ended_s:.1f} s"
    print(f"cut {case.seed}, {case.how}: {told}, {outcome.took_s:.0f} s in all")  # pytest -rP shows it
    check(tmp_path / "run", expected, outcome)
    if case.returns:
        assert read_starts(tmp_path / "run")[-1].ranks == 4, outcome.logs[0]


def check(run: Path, expected: list[float], outcome: CutOutcome) -> None:
    """Of a run that is over: everything was trained, once, and what was trained again is accounted for."""
    text, steps = "\n----\n".join(outcome.logs), len(expected)
    assert outcome.codes[0] == 0, text
    assert outcome.codes[1] != 0, text
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
