"""Liger's kernels on a GPU: compiled, what tests/runtime/test_liger.py shows in Triton's interpreter; their memory."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from evenload.runtime.model import liger
from evenload.runtime.replay.head import head_gradient
from evenload.types.document import Range
from reference_training import make_tokens, tiny_config
from single_stage import assert_bf16_as_good_as_plain, packs_of, run_single_stage, stage_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch.cuda.is_available() is false"),
    pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger-kernel: pip install 'evenload[liger]'"),
    # Told, and no failure: what libraries warn of on a machine that nobody here has seen.
    pytest.mark.filterwarnings("default"),
]


def error(result, exact):
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def outcome(module, inputs, grad):
    """Output of a layer's module and the gradients of its inputs and weights."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    module.zero_grad(set_to_none=True)
    output = module(*leaves)
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("rows", [1, 4099, 40_000])  # the last: the kernel that takes blocks of rows
@pytest.mark.parametrize("width", [128, 4096])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm, Olmo2RMSNorm])
def test_norms_err_at_most_twice_as_much_as_plain_bf16(kind, width, rows):
    norm = kind(width).to(device="cuda", dtype=torch.bfloat16)
    nn.init.normal_(norm.weight)
    inputs, grad = (torch.randn(rows, width, device="cuda").bfloat16() for _ in range(2))
    plain = outcome(norm, [inputs], grad)
    assert liger.use_liger({}, [norm], {}) == ("RMSNorm",)
    given = grad.clone()
    ours, again = outcome(norm, [inputs], grad), outcome(norm, [inputs], grad)
    assert torch.equal(grad, given), "a residual sum may have given the same gradient to others"
    del norm.forward
    exact = outcome(norm.float(), [inputs.float()], grad.float())
    for mine, same, theirs, true in zip(ours, again, plain, exact, strict=True):
        assert torch.equal(mine, same), "one order of sums"
        assert error(mine, true) <= 2 * error(theirs, true) + 1e-3


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "olmo2", "gemma", "gemma2", "gemma3", "qwen3_moe"])
def test_whole_models_err_at_most_twice_as_much_as_plain_bf16(kind):
    """Loss and every gradient of asymmetric packs, the model on the GPU."""
    assert_bf16_as_good_as_plain(kind, None, device="cuda", liger=True)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_same_step_gives_the_same_bits(kind):
    lengths = [150, 37, 90, 1, 64]
    config = tiny_config(kind, hidden_size=64)
    tokens = make_tokens(lengths, config.vocab_size)
    packs = packs_of(lengths, [0.3], 90, last_first=False), packs_of(lengths, [0.5], 110, last_first=True)
    loss, gradients, _, _ = run_single_stage(config, torch.float32, tokens, *packs, device="cuda", liger=True)
    again, same, _, _ = run_single_stage(config, torch.float32, tokens, *packs, device="cuda", liger=True)
    assert loss == again
    assert all(torch.equal(gradients[name], same[name]) for name in gradients if "norm" in name or "lm_head" in name)


def test_cross_entropy_of_a_real_vocabulary():
    torch.manual_seed(1)
    logits = (3 * torch.randn(513, 151_936, device="cuda")).bfloat16()
    targets = torch.randint(0, 151_936, (513,), device="cuda").masked_fill(torch.rand(513, device="cuda") < 0.3, -100)
    exact = logits.float().requires_grad_()
    expected = nn.functional.cross_entropy(exact, targets, reduction="none") / 1000
    expected.sum().backward()
    losses = liger.cross_entropy(logits, targets, 1000.0, trains=True)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-4, atol=1e-7)
    assert error(logits, exact.grad) <= 4e-3


@pytest.mark.parametrize(("is_liger", "bytes_per_logit"), [(True, 2), (False, 10)])
def test_the_head_holds_what_the_memory_model_charges(is_liger, bytes_per_logit):
    config = tiny_config("llama", vocab_size=65_536, num_hidden_layers=1)
    stage, _ = stage_of(config, torch.bfloat16, device="cuda", liger=is_liger)
    hidden = torch.randn(2048, config.hidden_size, device="cuda").bfloat16()
    targets = torch.randint(0, 65_536, (2048,), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        head_gradient(stage.model, hidden, targets, 2048, (Range(0, 0, 2048),), None)
        peak = torch.cuda.max_memory_allocated() - before
    assert bytes_per_logit - 0.1 <= peak / (2048 * 65_536) <= bytes_per_logit + 0.4
