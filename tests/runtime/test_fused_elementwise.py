"""Rotations and gated activations as one kernel each: which are, that they compute the same, what compiling makes."""

import importlib
from importlib.util import find_spec

import msgspec
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from evenload.config.sections import RunConfig
from evenload.errors import ConfigError
from evenload.runtime.model import fused_elementwise
from evenload.runtime.model.fused_elementwise import (
    FusedGating,
    compiled,
    fuse_elementwise,
    gated,
    require_compiler,
    rotate,
)
from evenload.runtime.model.fused_modules import fuse_modules
from evenload.runtime.model.hf_model import build_stage_model
from reference_training import KINDS, make_tokens, relative_error, tiny_config
from single_stage import assert_bf16_as_good_as_plain, packs_of, run_single_stage
from sweeps import thorough

LENGTHS = [61, 30, 1, 7, 2, 19]
ROTATED = tuple(kind for kind in KINDS if kind != "gpt2")
# Experts gate in a block of their own, Gemma by another function.
GATED = ("llama", "qwen2", "qwen3", "mistral", "olmo2")


def model_of(kind):
    config = tiny_config(kind)
    layers, cpu = (0, config.num_hidden_layers), torch.device("cpu")
    return build_stage_model(config, layers=layers, dtype=torch.float32, device=cpu, weights=None, seed=3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rotation_and_every_gate_is_fused_once(kind):
    model = model_of(kind)
    a_layer = (kind in ROTATED) + (kind in GATED)
    names = [name for layer in model.layers.values() for name, _ in layer.named_parameters()]
    assert fuse_elementwise(model.layers.values(), model.architecture) == a_layer * len(model.layers)
    assert fuse_elementwise(model.layers.values(), model.architecture) == 0
    assert names == [name for layer in model.layers.values() for name, _ in layer.named_parameters()]
    gates = [m for layer in model.layers.values() for m in layer.modules() if isinstance(m, FusedGating)]
    assert len(gates) == (kind in GATED) * len(model.layers)


@pytest.mark.parametrize("kind", ROTATED)
def test_every_architecture_turns_its_rows_like_this(kind):
    """The function in whose place ours stands, with halves of cosines and sines that differ."""
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, heads, 7, 8, generator=generator).requires_grad_() for heads in (4, 2))
    cos, sin = (torch.randn(1, 7, 8, generator=generator) for _ in range(2))
    results = []
    for function in (module.apply_rotary_pos_emb, fused_elementwise._rotated_pair):
        turned = function(q, k, cos, sin)
        results.append((*turned, *torch.autograd.grad([one.square().sum() for one in turned], (q, k))))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo2", "gemma3", "mixtral"])
def test_training_is_the_same_without_a_compiler(kind, dtype):
    """Asymmetric packs."""
    config = tiny_config(kind)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    forward = packs_of(LENGTHS, [0.3, 0.75], 40, last_first=False)
    backward = packs_of(LENGTHS, [0.5], 33, last_first=True)
    loss, gradients, *_ = run_single_stage(config, dtype, tokens, forward, backward)
    fused_loss, fused, *_ = run_single_stage(config, dtype, tokens, forward, backward, fused_elementwise=True)
    assert fused_loss == loss
    for name, gradient in gradients.items():
        # Norms of queries and keys sum gradients in the order in which they lie in memory, in float32.
        limit = 1e-6 if kind in ("qwen3", "gemma3") else 0.0
        assert relative_error(fused[name], gradient) <= limit, name


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_in_bf16_they_err_no_more_than_plain_training(kind):
    assert_bf16_as_good_as_plain(kind, None, fused_elementwise=True)


def test_nobody_elses_model_changes():
    """Functions of transformers' modules are for all models of a process."""
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    before = (module.apply_rotary_pos_emb, module.LlamaAttention.forward, module.LlamaMLP.forward)
    model = model_of("llama")
    fuse_elementwise(model.layers.values(), model.architecture)
    assert (module.apply_rotary_pos_emb, module.LlamaAttention.forward, module.LlamaMLP.forward) == before


def sizes():
    generator = torch.Generator().manual_seed(2)
    for tokens, heads in ((96, 4), (33, 2), (1024, 4)):
        rows = torch.randn(1, tokens, heads, 16, generator=generator).transpose(1, 2)
        yield rows, *(torch.randn(1, 1, tokens, 16, generator=generator) for _ in range(2))


def test_one_compilation_serves_packs_and_heads_of_any_number():
    counter = CompileCounter()
    function = torch.compile(rotate, dynamic=True, fullgraph=True, backend=counter)
    for arguments in sizes():
        assert torch.equal(function(*arguments), rotate(*arguments))
    gates = CompileCounter()
    function = torch.compile(gated, dynamic=True, fullgraph=True, backend=gates)
    for tokens in (40, 700, 3):
        gate, up = torch.randn(2, tokens, 24)
        assert torch.equal(function(gate, up), gated(gate, up))
    assert (counter.frame_count, gates.frame_count) == (1, 1)


@thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_is_compiled_into_one_kernel_that_errs_no_more(dtype):
    """By torch's compiler for CPUs, which fuses as that for GPUs does."""
    from torch._inductor import metrics

    rows, cos, sin = (tensor.to(dtype) for tensor in next(sizes()))
    gate, up, grad = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(3)).to(dtype)
    calls = {"rotate": (rows, cos, sin), "rotate_back": (rows, cos, sin), "gated": (gate, up)}
    calls["gated_back"] = (grad, gate, up)
    for name, arguments in calls.items():
        metrics.reset()
        found = compiled(name)(*arguments)
        assert metrics.generated_kernel_count == 1, name
        plain = fused_elementwise._PLAIN[name][1]
        exact, unfused = (plain(*(one.to(to) for one in arguments)) for to in (torch.float64, dtype))
        columns = ([one] if isinstance(one, torch.Tensor) else list(one) for one in (found, exact, unfused))
        for mine, true, other in zip(*columns, strict=True):
            error, limit = (relative_error(one.double(), true) for one in (mine, other))
            assert error <= 1.01 * limit + 1e-7, name
            assert (mine.dtype, mine.stride()) == (other.dtype, other.stride())


def test_gpus_have_them_and_anyone_can_say_otherwise():
    run = RunConfig(output_dir="run", steps=1)
    assert not run.fuses_elementwise
    assert msgspec.structs.replace(run, fused_elementwise=True).fuses_elementwise
    assert msgspec.structs.replace(run, device="cuda").fuses_elementwise
    assert not msgspec.structs.replace(run, device="cuda", fused_elementwise=False).fuses_elementwise


@pytest.mark.skipif(find_spec("triton") is not None, reason="triton is installed")
def test_a_gpu_without_a_compiler_is_refused_at_start():
    model, cuda = model_of("llama"), torch.device("cuda")
    run = RunConfig(output_dir="run", steps=1, device="cuda")
    with pytest.raises(ConfigError, match=r"triton.*fused_elementwise = false"):
        fuse_modules([*model.layers.values()], model.architecture, run, cuda)
    require_compiler(torch.device("cpu"))
    fuse_modules(
        [*model.layers.values()], model.architecture, msgspec.structs.replace(run, fused_elementwise=False), cuda
    )
