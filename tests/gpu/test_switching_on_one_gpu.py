"""Two ranks on one GPU change their layout between steps: streams, events and page-locked memory of `Arrival` and
`HostTwins`. NCCL refuses two ranks on a device, so what is sent goes through the host (`staged_group`)."""

import mmap
import time
from pathlib import Path

import pytest
import torch

from dist_training import assert_same_training
from evenload.runtime.replay.host_copies import PageLockedMemory, page_lock
from small_run import write_small_run
from switch_cases import changed_by_moving, on_device, scripted_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch.cuda.is_available() is false"),
    pytest.mark.filterwarnings("default::UserWarning"),
]
LAYOUTS = ["pp=2", "dp=2", "pp=2,layers=1+3"]
WAYS = {"page-locked": [], "a budget for some pieces": ["plan.twin_bytes=120_000"], "sent": ["plan.twin_bytes=0"]}
FIXED = ["plan.strategy=balanced", "train.attention=reference", "train.kernels=torch", "parallel.pp=2"]


def run_file(tmp_path: Path) -> str:
    texts = (f"document {i} " * (1 + (i * 7) % 4) for i in range(12))
    lines = "max_document_tokens = 128\nbatch_documents = 4\n[optimizer]\nlearning_rate = 1e-3\n[train]\nsteps = 9"
    return str(write_small_run(tmp_path, texts, lines, "llama", tied=True))


@pytest.mark.parametrize("way", WAYS)
def test_switches_train_what_one_rank_trains(gloo_pool, tmp_path, way):
    """Float64 on the GPU, with updates between switches."""
    file, base, script = run_file(tmp_path), [*FIXED, "model.dtype=float64"], [0, 1, 2, 1, 0, 1]
    live = [*base, f"plan.layouts={LAYOUTS}", f"train.output_dir={tmp_path}/moved", *WAYS[way]]
    moved = gloo_pool.run(2, on_device, "cuda:0", scripted_run, file, live, script, 6)[0]
    alone = [*base, "parallel.pp=1", f"train.output_dir={tmp_path}/alone"]
    expected = gloo_pool.run(1, on_device, "cuda:0", scripted_run, file, alone, [0], 6)[0]
    assert len(moved.switches) == 5
    assert all(switch.weight_bytes > 0 for switch in moved.switches if switch.after == "dp=2")
    assert_same_training(moved, expected, 1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_changes_on_the_way(gloo_pool, tmp_path, dtype):
    """Weights, moments and masters; one switch right behind another."""
    chosen = [*FIXED, f"plan.layouts={LAYOUTS}", f"model.dtype={dtype}"]
    arguments = run_file(tmp_path), chosen, [1, 0, 1, 2, 1, 0], 2
    assert gloo_pool.run(2, on_device, "cuda:0", changed_by_moving, *arguments) == [[]] * 2


def test_memory_is_page_locked_at_more_than_a_gigabyte_a_second():
    """CUDA alone takes and locks fresh pages at about one; copies from and to what is locked do not wait."""
    num_bytes = 4 * 2**30
    memory = PageLockedMemory()
    memory.new_segment(2**20)  # CUDA is awake
    from_s = time.perf_counter()
    segment = memory.new_segment(num_bytes)
    took_s = time.perf_counter() - from_s
    print(f"page-locked {num_bytes / took_s / 1e9:.2f} GB/s by threads")
    assert segment.is_pinned()
    assert num_bytes / took_s > 2**30
    memory.close()
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    plain = torch.frombuffer(pages, dtype=torch.uint8)
    from_s = time.perf_counter()
    assert not page_lock(plain)
    print(f"page-locked {num_bytes / (time.perf_counter() - from_s) / 1e9:.2f} GB/s without huge pages")
    assert not int(torch.cuda.cudart().cudaHostUnregister(plain.data_ptr()))
