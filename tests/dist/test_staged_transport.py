"""The transport of tests on one GPU (tests/gpu/test_ranks_on_one_gpu.py), here on a CPU: every kind of transfer."""

import pytest

from dist_equality import assert_plans_equal_plain
from small_run import write_small_run
from staged_cases import CASES
from sweeps import sweep
from switch_cases import changed_by_moving, on_device, through_host


@pytest.mark.parametrize("case", sweep(tuple(CASES), 2))
def test_ranks_on_one_device_equal_plain_training(gloo_pool, case):
    plans, settings = CASES[case]()
    assert_plans_equal_plain(gloo_pool, plans, staged_on="cpu", **settings)


def test_switches_on_one_device_keep_every_bit(gloo_pool, tmp_path):
    """What tests/gpu/test_switching_on_one_gpu.py runs, on the CPU: what is sent, and what goes through host memory."""
    lines = "max_document_tokens = 128\nbatch_documents = 4\n[optimizer]\nlearning_rate = 1e-3\n[train]\nsteps = 9"
    file = str(
        write_small_run(tmp_path, (f"document {i} " * (1 + i % 4) for i in range(12)), lines, "llama", tied=True)
    )
    for limit in ("plan.twin_bytes=0", "plan.twin_bytes=120_000"):
        chosen = ["plan.strategy=balanced", "parallel.pp=2", 'plan.layouts=["dp=2"]', "model.dtype=bfloat16", limit]
        case = on_device, "cpu", through_host, changed_by_moving, file, chosen, [1, 0, 1], 2
        assert gloo_pool.run(2, *case) == [[]] * 2
