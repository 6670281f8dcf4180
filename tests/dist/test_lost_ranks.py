"""A dead or stopped rank: every survivor says within the timeout who waited for what, and who is gone."""

import re
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from lost_rank_cases import STUCK, run_rank
from rank_server import rank_context
from small_run import write_small_run

TIMEOUT_S = 15.0  # far more than a step takes on a loaded machine; only who is stopped is waited for so long
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "lost", "how", "waits"),
    [
        # Its neighbour may be some actions behind, in a backward pack.
        ("transfer", 0, signal.SIGKILL, {2: "the (hidden states of forward|gradient of backward) pack"}),
        (
            "transfer",
            3,
            signal.SIGSTOP,
            {1: "the gradient of backward pack", 2: "the (sum of gradients|keys and values)"},
        ),
        ("planning", 0, STUCK, dict.fromkeys((1, 2, 3), "the plan of step")),
    ],
)
def test_every_survivor_names_what_it_waited_for_and_who_is_gone(config_file, tmp_path, place, lost, how, waits):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, str(tmp_path), str(config_file), LAYOUT, TIMEOUT_S, lost, place, int(how))
    context = rank_context()
    processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(4)]
    for process in processes:
        process.start()
    survivors = [rank for rank in range(4) if rank != lost]
    deadline_s = time.monotonic() + 300
    try:
        while not all((tmp_path / f"error-{rank}.txt").is_file() for rank in survivors):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.join()
    messages = {rank: (tmp_path / f"error-{rank}.txt").read_text() for rank in survivors}
    for rank, message in messages.items():
        assert message.startswith(f"RankLostError: rank {rank} (dp {rank % 2}, stage {rank // 2}) waited for "), message
        assert re.search(r"of step \d+ from (rank \d|all ranks|the ranks)", message), message
        assert "nothing for 15 s" in message or "the connection broke" in message, message
    for rank, what in waits.items():
        assert re.search(what, messages[rank]), messages[rank]
        assert "nothing for 15 s" in messages[rank] or how == signal.SIGKILL, messages[rank]
    # The first to give up sees who is silent; those after it may name whoever gave up before them.
    cause = f"{'and not waiting is' if how == STUCK else 'no sign of life from'} rank {lost} ("
    assert any(cause in message.lower() for message in messages.values()), "\n".join(messages.values())
