"""`evenload train` with train.device = "cuda"; what needs two GPUs has run on none yet."""

import pytest
import torch

from gpu_runs import train, write_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch.cuda.is_available() is false"),
    # Told, and no failure: what CUDA's libraries warn of on a machine that nobody here has seen.
    pytest.mark.filterwarnings("default::UserWarning"),
]
NEEDS_TWO = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 GPUs; torch sees {torch.cuda.device_count()}"
)
LENGTHS = [3000, 120, 40, 700, 64, 2000, 333, 90] * 4
# bf16 losses of the same batches by other kernels and orders of summation.
TOLERANCE = 5e-3


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A configuration, and the losses of its steps on the CPU."""
    directory = tmp_path_factory.mktemp("small")
    config = write_run(directory, LENGTHS, layers=2, vocab_size=512, batch_documents=8, steps=4)
    return config, [row["loss"] for row in train(config, "train.device=cpu")]


@pytest.mark.parametrize("policy", ["replay", "recompute", "offload"])
def test_losses_equal_the_cpu_run(small_run, policy):
    """Device, streams, copies to the host: none of it may change what is trained."""
    config, losses = small_run
    gpu = train(config, f"plan.options.policy={policy}")
    assert [row["loss"] for row in gpu] == pytest.approx(losses, rel=TOLERANCE)


def test_state_in_host_memory_trains_the_same(small_run):
    """Page-locked memory, copies on a stream of their own; updates of elements are the same to the bit."""
    config, _ = small_run
    device, host = (train(config, "train.deterministic=true", *more) for more in ([], ["optimizer.offload_stages=[0]"]))
    assert [(row["loss"], row["grad_norm"]) for row in host] == [(row["loss"], row["grad_norm"]) for row in device]


def test_a_deterministic_run_goes_on_to_the_bit(tmp_path):
    """Kernels that add by atomics give other last bits every time, and a resumed run other weights."""
    config = write_run(tmp_path, LENGTHS, layers=2, vocab_size=512, batch_documents=8, steps=4)
    whole = train(config, "train.deterministic=true")
    parts = tmp_path / "parts"
    train(config, "train.deterministic=true", "train.steps=2", output=parts)
    resumed = train(config, "train.deterministic=true", output=parts)
    for row, expected in zip(resumed, whole, strict=True):
        assert (row["loss"], row["grad_norm"]) == (expected["loss"], expected["grad_norm"])


@NEEDS_TWO
@pytest.mark.parametrize(
    "layout", ["pp=2", "dp=2", "cp=2", "tp=2", "pp=2 virtual=2 channels=directed", "pp=2 virtual=2 channels=fifo"]
)
def test_two_gpus_train_the_same(tmp_path, layout):
    """NCCL groups, their first transfers, receives on a stream of their own; with virtual stages the same two ranks are
    neighbours three times, in both directions."""
    config = write_run(tmp_path, LENGTHS, layers=4, vocab_size=512, batch_documents=8, steps=4)
    one, two = train(config), train(config, *(f"parallel.{setting}" for setting in layout.split()))
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=TOLERANCE)


@pytest.mark.parametrize("policy", ["replay", "recompute"])
def test_peak_memory_is_predicted_within_2_percent(tmp_path, policy):
    """After the first step, in which libraries make their workspaces."""
    config = write_run(tmp_path, [8192, 4096, 512, 512, 256, 2048] * 4, layers=24, batch_documents=6, steps=4)
    for row in train(config, f"plan.options.policy={policy}")[1:]:
        assert row["predicted_peak_memory_bytes"] == pytest.approx(row["peak_memory_bytes"], rel=0.02)


@pytest.mark.slow
def test_a_document_of_256k_tokens_trains_on_one_gpu(tmp_path):
    """Slices, prefixes and offloading instead of an activation memory that grows with the document."""
    length = 256 * 1024
    config = write_run(tmp_path, [length, 64, 64], layers=24, batch_documents=3, steps=2)
    rows = train(config, "plan.options.policy=offload", f"plan.options.max_pack_tokens={length}")
    assert [row["tokens"] for row in rows] == [length + 128] * 2
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in rows)
