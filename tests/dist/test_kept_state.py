"""What ranks keep of a step is all of it, to the bit, for any layout that takes over."""

from pathlib import Path

import numpy as np
import pytest

from evenload.runtime.checkpoint.shared_directory import shared_directory
from kept_cases import KeptRun, kept_run
from small_run import write_small_run

CASES = {
    "bf16 with fp32 masters, tied, fewer stages": (
        True,
        ["model.dtype=bfloat16"],
        (["parallel.pp=2", "parallel.dp=2"], 4),
        (["parallel.pp=3"], 3),
    ),
    "fp32, uneven shards, more stages than before": (
        False,
        ["model.dtype=float32"],
        (["parallel.dp=3"], 3),
        (["parallel.pp=2"], 2),
    ),
    "tensor-parallel parts": (
        True,
        ["model.dtype=float64", "parallel.tp=2"],
        (["parallel.pp=2"], 4),
        (["parallel.pp=1"], 2),
    ),
    "adapters": (
        False,
        ["model.dtype=float32", "model.lora.rank=2", "model.lora.alpha=4.0"],
        (["parallel.dp=2"], 2),
        (["parallel.dp=1"], 1),
    ),
    "a layout that changed": (
        True,
        ["model.dtype=float64"],
        (["parallel.pp=4", 'plan.layouts=["pp=2"]'], 4),
        (["parallel.dp=3"], 3),
    ),
}


def run_file(directory: Path, *, tied: bool) -> str:
    texts = (f"document {i} " * (1 + (i * 7) % 4) for i in range(12))
    lines = "max_document_tokens = 128\nbatch_documents = 4\n[train]\nsteps = 9"
    return str(write_small_run(directory, texts, lines, tied=tied))


@pytest.mark.parametrize("name", CASES)
def test_another_layout_takes_over_every_bit(gloo_pool, tmp_path, name):
    tied, common, (old, size), (new, smaller) = CASES[name]
    file = run_file(tmp_path, tied=tied)
    with shared_directory() as folder:
        first: list[KeptRun] = gloo_pool.run(size, kept_run, file, [*common, *old], str(folder), 0, 2)
        second: list[KeptRun] = gloo_pool.run(smaller, kept_run, file, [*common, *new], str(folder), 1, 3)
        assert [run.from_step for run in first] == [-1] * size
        assert [path.name for path in folder.iterdir()] == ["round-1"], "the others have begun"
    for run in second:
        assert (run.from_step, run.updates) == (2, 2)
    expected, found = first[0].after, second[0].before
    assert found.keys() == expected.keys()
    different = [key for key, tensor in expected.items() if not np.array_equal(found[key], tensor)]
    assert not different
    assert any(not np.array_equal(second[0].after[key], tensor) for key, tensor in found.items()), "it trains on"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_what_was_said(gloo_pool, tmp_path, dtype):
    """Whole pages of two slots, and their lists of pieces."""
    file = run_file(tmp_path, tied=False)
    with shared_directory() as folder:
        layout = [f"model.dtype={dtype}", "parallel.pp=2", "parallel.dp=2"]
        runs: list[KeptRun] = gloo_pool.run(4, kept_run, file, layout, str(folder), 0, 2)
    fullest = max(run.kept_bytes for run in runs)
    assert 0.9 * runs[0].predicted_bytes <= fullest <= 1.02 * runs[0].predicted_bytes + 100_000
