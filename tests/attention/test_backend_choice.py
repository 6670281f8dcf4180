"""Which kernels `auto` takes on a GPU, and why not others: the rule and the check, without a GPU.

The CPU kernels of tests/support stand for those of every package, so the check runs whole, on the CPU.
"""

import pytest
import torch

from evenload.attention import backends, varlen_cuda
from evenload.attention.backends import CpuFlashAttention, backend_of_call, disagreement, refusal, select_backend
from evenload.attention.range_attention import Scoring
from evenload.attention.varlen_cuda import VarlenCudaAttention, varlen_refusal
from evenload.cli.train_worker import _attention_line
from evenload.errors import ConfigError
from flash_kernels import cpu_kernels
from reference_training import tiny_config
from single_stage import stage_of

BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with cpu_kernels():
        yield


@pytest.fixture
def gpu(monkeypatch):
    """Call it with a compute capability and the names of kernels whose package is installed."""

    def make(capability, installed=()):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

        def activate(name):
            torch_name = varlen_cuda.IMPLEMENTATIONS[name].torch_name
            if torch_name is not None and torch_name not in installed:
                raise ConfigError(f"attention backend {name} needs the kernels that torch calls {torch_name}")

        monkeypatch.setattr(varlen_cuda, "_activate", activate)
        monkeypatch.setattr(backends, "disagreement", lambda *given: disagreement(*given[:3], "cpu"))
        backends._failed_check.cache_clear()

    yield make
    backends._failed_check.cache_clear()


@pytest.mark.parametrize(
    ("capability", "installed", "head_dim", "expected", "reason"),
    [
        ((8, 0), ("FA3", "FA4"), 128, "varlen_cuda", ""),
        ((9, 0), ("FA3", "FA4"), 128, "varlen_cuda_fa3", ""),
        ((9, 0), (), 128, "varlen_cuda", "varlen_cuda_fa3 needs the kernels that torch calls FA3"),
        ((10, 0), ("FA3", "FA4"), 128, "varlen_cuda_fa4", ""),
        ((10, 0), ("FA4",), 192, "varlen_cuda", "on Blackwell, the model's is 192"),
        ((12, 0), ("FA4",), 128, "varlen_cuda", ""),
        ((9, 0), ("FA3",), 36, "reference", "varlen_cuda needs a head dimension"),
        ((7, 5), (), 128, "reference", "this one has 7.x"),
    ],
)
def test_auto_takes_the_fastest_that_runs_and_says_why_no_faster_one(
    gpu, capability, installed, head_dim, expected, reason
):
    gpu(capability, installed)
    backend = select_backend("auto", "cuda", dtype=BF16, head_dim=head_dim)
    assert backend.name == expected
    assert reason in backend.reason
    assert bool(backend.reason) == bool(reason)


def test_calls_with_a_soft_cap_run_on_reference_whatever_was_selected(gpu):
    gpu((9, 0), ("FA3",))
    for backend in (select_backend("auto", "cuda", dtype=BF16, head_dim=128), select_backend("cpu_flash", "cpu")):
        assert backend_of_call(backend, Scoring(1.0, window=3)) is backend
        assert refusal(backend, Scoring(1.0)) == ""
        assert backend_of_call(backend, Scoring(1.0, soft_cap=50.0)).name == "reference"
        assert "a soft cap, here 50.0" in refusal(backend, Scoring(1.0, soft_cap=50.0))
    named = select_backend("reference", "cpu")
    assert backend_of_call(named, Scoring(1.0, soft_cap=50.0)) is named
    assert refusal(named, Scoring(1.0, soft_cap=50.0)) == ""


def spoil_window(monkeypatch):
    mask = varlen_cuda._mask
    monkeypatch.setattr(
        varlen_cuda, "_mask", lambda scoring: (False, scoring.window, 0) if scoring.window else mask(scoring)
    )
    return r"differs from 'reference' under Scoring\(.*window=100.*output by"


def spoil_gradient(monkeypatch):
    call = varlen_cuda._backward_call

    def spoilt(*given):
        dq, dk, dv = call(*given)
        return dq, dk, torch.full_like(dv, torch.nan)

    monkeypatch.setattr(varlen_cuda, "_backward_call", spoilt)
    return "of values by nan%"


def spoil_call(monkeypatch):
    def unsupported(*_):
        raise TypeError("no argument 'softcap'")

    monkeypatch.setattr(varlen_cuda, "_forward_call", unsupported)
    return r"fails its check \(TypeError: no argument 'softcap'\)"


@pytest.mark.parametrize("spoil", [spoil_window, spoil_gradient, spoil_call])
def test_kernels_that_differ_are_left_out_by_auto_and_refused_by_name(monkeypatch, gpu, spoil):
    """A window that is one too wide, a gradient that is not a number, an argument that a package does not know."""
    gpu((9, 0), ("FA3",))
    why = spoil(monkeypatch)
    backend = select_backend("auto", "cuda", dtype=BF16, head_dim=64)
    assert backend.name == "varlen_cuda"
    with pytest.raises(ConfigError, match=why):
        raise ConfigError(backend.reason)
    with pytest.raises(ConfigError, match=rf"attention backend varlen_cuda_fa3 .*{why}"):
        select_backend("varlen_cuda_fa3", "cuda", dtype=BF16, head_dim=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 256])
def test_right_kernels_pass_the_check(dtype, head_dim):
    assert disagreement(VarlenCudaAttention(), dtype, head_dim, "cpu") == ""


def test_the_check_is_made_once_a_process(monkeypatch, gpu):
    gpu((9, 0), ("FA3",))
    made = []
    monkeypatch.setattr(backends, "disagreement", lambda *given: made.append(given) or "")
    for _ in range(3):  # an adapter selects a backend in every layer
        select_backend("auto", "cuda", dtype=BF16, head_dim=64)
    assert len(made) == 1


def test_kernels_of_other_packages_are_refused_with_deterministic_training(monkeypatch, gpu):
    gpu((9, 0), ("FA3",))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "train.deterministic" in varlen_refusal(BF16, 64, "varlen_cuda_fa3")
    assert select_backend("auto", "cuda", dtype=BF16, head_dim=64).name == "varlen_cuda"


@pytest.mark.parametrize("name", ["varlen_cuda_fa3", "varlen_cuda_fa4"])
def test_named_kernels_are_refused_on_other_cards(gpu, name):
    gpu((8, 0), ("FA3", "FA4"))
    with pytest.raises(ConfigError, match=rf"{name} needs a GPU of compute capability 9\.x.* this one has 8\.x"):
        select_backend(name, "cuda", dtype=BF16, head_dim=64)


def test_a_run_says_which_layers_run_on_another_backend():
    (stage, _), (capped, _) = (stage_of(tiny_config(kind), backend=CpuFlashAttention()) for kind in ("llama", "gemma2"))
    assert _attention_line(stage) == "attention cpu_flash"
    why = "'reference' where scores have a soft cap, here 3.0: no kernel has one"
    assert _attention_line(capped) == f"attention cpu_flash ({why})"
