"""A dead or stopped rank: every survivor says within the timeout who waited for what, and who is gone."""

import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from lost_rank_cases import STUCK, run_rank
from rank_server import rank_context
from small_run import write_small_run

# Far more than a step takes on a loaded machine, with twelve processes; only who is stopped is waited for so long.
TIMEOUT_S = 15.0
LAYOUT = ["parallel.pp=2", "parallel.dp=2"]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    settings = """
        max_document_tokens = 256
        batch_documents = 8
        [train]
        steps = 1000
    """
    return write_small_run(tmp_path, (f"document {i} " * (1 + (i * 7) % 5) for i in range(40)), settings)


class Case(NamedTuple):
    """A rank of four that is lost, and what survivors say that they waited for."""

    place: str
    lost: int
    how: int
    waits: dict[int, str]


CASES = (
    # Its neighbour may be some actions behind, in a backward pack.
    Case("transfer", 0, signal.SIGKILL, {2: "the (hidden states of forward|gradient of backward) pack"}),
    Case(
        "transfer",
        3,
        signal.SIGSTOP,
        {1: "the gradient of backward pack", 2: "the (sum of gradients|keys and values)"},
    ),
    Case("planning", 0, STUCK, dict.fromkeys((1, 2, 3), "the plan of step")),
)


@pytest.mark.long
def test_every_survivor_names_what_it_waited_for_and_who_is_gone(config_file, tmp_path):
    """All cases at once: most of their time is waiting."""
    processes, stores = [], []
    for number, case in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        stores.append(dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        arguments = (stores[-1].port, str(folder), str(config_file), LAYOUT, TIMEOUT_S, case.lost, case.place, case.how)
        processes += [rank_context().Process(target=run_rank, args=(rank, *arguments)) for rank in range(4)]
    for process in processes:
        process.start()
    expected = [
        tmp_path / str(number) / f"error-{rank}.txt"
        for number, case in enumerate(CASES)
        for rank in range(4)
        if rank != case.lost
    ]
    deadline_s = time.monotonic() + 300
    try:
        while missing := [file for file in expected if not file.is_file()]:
            assert time.monotonic() < deadline_s, missing
            time.sleep(0.05)
        time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.join()
    for number, case in enumerate(CASES):
        files = [file for file in expected if file.parent.name == str(number)]
        check(case, {int(file.stem.removeprefix("error-")): file.read_text() for file in files})


def check(case: Case, messages: dict[int, str]) -> None:
    """Of all survivors."""
    for rank, message in messages.items():
        assert message.startswith(f"RankLostError: rank {rank} (dp {rank % 2}, stage {rank // 2}) waited for "), message
        assert re.search(r"of step \d+ from (rank \d|all ranks|the ranks)", message), message
        assert f"nothing for {TIMEOUT_S:.0f} s" in message or "the connection broke" in message, message
    for rank, what in case.waits.items():
        assert re.search(what, messages[rank]), messages[rank]
        assert f"nothing for {TIMEOUT_S:.0f} s" in messages[rank] or case.how == signal.SIGKILL, messages[rank]
    # The first to give up sees who is silent; those after it may name whoever gave up before them.
    cause = f"{'and not waiting is' if case.how == STUCK else 'no sign of life from'} rank {case.lost} ("
    assert any(cause in message.lower() for message in messages.values()), "\n".join(messages.values())
