"""A dead or stopped rank of a context-parallel group: the others say within the timeout what they waited for."""

import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from lost_rank_cases import run_rank
from rank_server import rank_context
from small_run import write_small_run
from sweeps import sweep

TIMEOUT_S = 15.0  # far more than a step takes on a loaded machine; only who is stopped is waited for so long


@pytest.mark.long
@pytest.mark.parametrize(("how", "exchange"), sweep([(signal.SIGKILL, "ring"), (signal.SIGSTOP, "all_gather")], 1))
def test_the_other_rank_names_transfer_pack_and_rank(tmp_path: Path, how, exchange):
    run = """
        max_document_tokens = 256
        batch_documents = 8
        [plan.options]
        cp_sharding = "per_document"
        [train]
        steps = 1000
    """
    config_file = write_small_run(tmp_path, (f"document {i} " * (1 + (i * 7) % 5) for i in range(20)), run)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    settings = ["parallel.cp=2", f"parallel.cp_exchange={exchange}"]
    arguments = (store.port, str(tmp_path), str(config_file), settings, TIMEOUT_S, 1, "transfer", int(how))
    context = rank_context()
    processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + 300
    try:
        while not (tmp_path / "error-0.txt").is_file():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.join()
    message = (tmp_path / "error-0.txt").read_text()
    assert message.startswith("RankLostError: rank 0 (dp 0, cp 0, stage 0) waited for ")
    assert "the keys and values of forward pack" in message
    assert "from rank 1" in message
    assert ("nothing for 15 s" if how == signal.SIGSTOP else "the connection broke") in message
