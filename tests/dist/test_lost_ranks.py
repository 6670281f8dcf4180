"""A dead or stopped rank: every other rank says within the timeout who waited for what, and who is gone."""

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

# Far more than a step takes on a loaded machine, with sixteen processes; only who is stopped is waited for so long.
TIMEOUT_S = 15.0
FOUR = ("parallel.pp=2", "parallel.dp=2")
TWO = ("parallel.cp=2", "plan.options.cp_sharding=per_document")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    settings = """
        max_document_tokens = 256
        batch_documents = 8
        [train]
        steps = 1000
    """
    return write_small_run(tmp_path, (f"document {i} " * (1 + (i * 7) % 5) for i in range(40)), settings)


SUMS = "the (sum of gradients|keys and values)"
CONTEXT = "the keys and values of forward pack .* from rank 1"


class Case(NamedTuple):
    """A rank that is lost, and what the others name as what they waited for."""

    settings: tuple[str, ...]
    num_ranks: int
    place: str
    lost: int
    how: int
    waits: dict[int, str]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.lost]


CASES = (
    # Its neighbour may be some actions behind, in a backward pack.
    Case(FOUR, 4, "transfer", 0, signal.SIGKILL, {2: "the (hidden states of forward|gradient of backward) pack"}),
    Case(FOUR, 4, "transfer", 3, signal.SIGSTOP, {1: "the gradient of backward pack", 2: SUMS}),
    Case(FOUR, 4, "planning", 0, STUCK, dict.fromkeys((1, 2, 3), "the plan of step")),
    Case((*TWO, "parallel.cp_exchange=ring"), 2, "transfer", 1, signal.SIGKILL, {0: CONTEXT}),
    Case((*TWO, "parallel.cp_exchange=all_gather"), 2, "transfer", 1, signal.SIGSTOP, {0: CONTEXT}),
)


@pytest.mark.long
def test_every_rank_that_is_left_names_what_it_waited_for_and_who_is_gone(config_file, tmp_path):
    """All cases at once: most of their time is waiting."""
    processes, stores = [], []
    for number, case in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        stores.append(dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        run = (stores[-1].port, str(folder), str(config_file), list(case.settings), TIMEOUT_S)
        arguments = (*run, case.lost, case.place, case.how)
        start = rank_context().Process
        processes += [start(target=run_rank, args=(rank, *arguments)) for rank in range(case.num_ranks)]
    for process in processes:
        process.start()
    lefts = [(number, rank) for number, case in enumerate(CASES) for rank in case.others]
    expected = [tmp_path / str(number) / f"error-{rank}.txt" for number, rank in lefts]
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
    """Of all ranks that are left."""
    for rank, message in messages.items():
        place = f"dp {rank % 2}, stage {rank // 2}" if case.num_ranks == 4 else f"dp 0, cp {rank}, stage 0"
        assert message.startswith(f"RankLostError: rank {rank} ({place}) waited for "), message
        assert re.search(r"of step \d+ from (rank \d|all ranks|the ranks)", message), message
        assert f"nothing for {TIMEOUT_S:.0f} s" in message or "the connection broke" in message, message
    for rank, what in case.waits.items():
        assert re.search(what, messages[rank]), messages[rank]
        assert f"nothing for {TIMEOUT_S:.0f} s" in messages[rank] or case.how == signal.SIGKILL, messages[rank]
    # The first to give up sees who is silent; those after it may name whoever gave up before them.
    cause = f"{'and not waiting is' if case.how == STUCK else 'no sign of life from'} rank {case.lost} ("
    assert any(cause in message.lower() for message in messages.values()), "\n".join(messages.values())
