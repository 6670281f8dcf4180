"""Recurrent layers on a GPU by the kernels of fla, mamba_ssm and causal_conv1d: cut into slices, they train as
transformers with the same kernels trains document by document."""

import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import evenload
from evenload.runtime.model import state_calls
from reference_training import make_tokens, plain_loss_and_gradients, relative_error, tiny_config
from single_stage import packs_of, run_single_stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch.cuda.is_available() is false"),
]

LENGTHS = [610, 300, 1, 70, 2, 190]
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_chunk_size": 64}
_WIDE = {"hidden_size": 128, "initializer_range": 0.1}
# The function of transformers, its kernel, the package; sizes that kernels take. No experts: roundings change them.
CASES = {
    "qwen3_5_text": ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "fla", _DELTA),
    "kimi_linear": (
        "chunk_kimi_delta_attention", "chunk_kda", "fla", {"linear_num_heads": 2, "linear_head_dim": 64},
    ),
    "bamba": ("mamba2_chunk_scan", "mamba_chunk_scan_combined", "mamba_ssm", _MAMBA),
    "jamba": (
        "mamba_selective_scan", "selective_scan_fn", "mamba_ssm",
        {"num_experts": 1, "mamba_d_state": 16, "use_mamba_kernels": True},
    ),
    "lfm2": ("causal_conv1d_fn", "causal_conv1d_fn", "causal_conv1d", {}),
}  # fmt: skip
PACKS = {
    "sliced": (
        packs_of(LENGTHS, [0.3, 0.75], 400, last_first=False),
        packs_of(LENGTHS, [0.5, 0.9], 330, last_first=True),
    ),
    "whole": (packs_of(LENGTHS, [], 1200, last_first=False), packs_of(LENGTHS, [], 1200, last_first=True)),
}


def config_of(kind):
    """Of a small model; skips where the kernels that it takes on a GPU are not installed."""
    needed = {CASES[kind][2], "causal_conv1d"}
    if missing := sorted(name for name in needed if find_spec(name) is None):
        pytest.skip(f"needs {', '.join(missing)}")
    return tiny_config(kind, use_cache=False, **_WIDE, **CASES[kind][3])


def on_gpu(config, weights, tokens, dtype):
    """Loss and gradients of transformers' own model on the GPU, document by document."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").cuda()
    model.load_state_dict({name: one.cuda() for name, one in weights.items()}, strict=False)
    labels, total = sum(len(one) - 1 for one in tokens.values()), 0.0
    for document in tokens.values():
        ids = document.cuda()
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        loss = nn.functional.cross_entropy(logits.float(), ids[1:], reduction="sum") / labels
        loss.backward()
        total += loss.item()
    return total, {name: one.grad.cpu() for name, one in model.named_parameters()}


def exact_loss_and_gradients(*given):
    """Plain, by the functions in torch: transformers would call kernels on tensors of the CPU."""

    def whole(call):
        return call.over(state_calls.Spans([call.num_rows], [None], [False]))[0]

    with state_calls.carrying(whole):
        return plain_loss_and_gradients(*given)


def calls_of_kernels(monkeypatch, kind):
    """Where names of the kernels that are called will appear."""
    called = set()
    right = state_calls._dispatcher

    def noted(name, original):
        def call(*args, **kwargs):
            called.add(name)
            return original(*args, **kwargs)

        return right(name, call)

    module = sys.modules[f"transformers.models.{kind.removesuffix('_text')}.modeling_{kind.removesuffix('_text')}"]
    for name in (CASES[kind][0], "causal_conv1d_fn"):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, noted(name, getattr(own, "__wrapped__", own)))
    return called


@pytest.mark.parametrize("cuts", PACKS)
@pytest.mark.parametrize("kind", CASES)
def test_slices_err_as_little_as_documents_by_the_same_kernels(kind, cuts):
    """In float32, in which kernels multiply in less: a state or a gradient that is lost would be 1 to 100 %."""
    config = config_of(kind)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    loss, gradients, weights, _ = run_single_stage(config, torch.float32, tokens, *PACKS[cuts], device="cuda")
    weights = {name: one.cpu() for name, one in weights.items()}
    exact_loss, exact = exact_loss_and_gradients(
        config, {name: one.double() for name, one in weights.items()}, tokens, torch.float64
    )
    plain_loss, plain = on_gpu(config, weights, tokens, torch.float32)
    assert abs(loss - exact_loss) <= max(2 * abs(plain_loss - exact_loss), 1e-5 * exact_loss)
    errors = {n: (relative_error(gradients[n].cpu(), exact[n]), relative_error(plain[n], exact[n])) for n in exact}
    worst = max(errors, key=lambda name: errors[name][0])
    print(kind, cuts, f"worst {worst} {errors[worst][0]:.1e} plain {errors[worst][1]:.1e}")
    for name, (ours, theirs) in errors.items():
        assert ours <= 2 * theirs + 1e-3, name
    assert max(theirs for _, theirs in errors.values()) < 0.02


@pytest.mark.parametrize("kind", CASES)
def test_bf16_is_as_good_as_plain_bf16_by_the_same_kernels(kind):
    config = config_of(kind)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    loss, gradients, weights, _ = run_single_stage(config, torch.bfloat16, tokens, *PACKS["sliced"], device="cuda")
    weights = {name: one.cpu() for name, one in weights.items()}
    exact_loss, exact = exact_loss_and_gradients(
        config, {name: one.double() for name, one in weights.items()}, tokens, torch.float64
    )
    plain_loss, plain = on_gpu(config, weights, tokens, torch.bfloat16)

    def error(found):
        off = sum(float((found[n].cpu().double() - exact[n]).square().sum()) for n in exact)
        return (off / sum(float(exact[n].square().sum()) for n in exact)) ** 0.5

    print(kind, f"bf16 {error(gradients):.2e} plain {error(plain):.2e}")
    assert error(gradients) <= 2 * error(plain)
    assert abs(loss - exact_loss) <= max(2 * abs(plain_loss - exact_loss), 2e-3 * exact_loss)


@pytest.mark.parametrize("kind", CASES)
def test_kernels_are_called(monkeypatch, kind):
    config = config_of(kind)
    called = calls_of_kernels(monkeypatch, kind)
    run_single_stage(config, torch.float32, make_tokens([90], config.vocab_size), [[(0, 0, 90)]], [[(0, 0, 90)]],
                     device="cuda")  # fmt: skip
    assert called == {CASES[kind][0], "causal_conv1d_fn"}


PACKED = {"qwen3_5_text": True, "bamba": True, "lfm2": True, "jamba": False}
"""Whose kernels read where documents begin; Mamba-1's do not."""


@pytest.mark.parametrize("kind", PACKED)
def test_packed_rows_are_isolated_where_kernels_read_boundaries(kind):
    config = config_of(kind)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").cuda()
    lengths = torch.tensor([110, 200, 70])
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    batch = {
        "input_ids": (torch.arange(1, 381) * 7 % 97)[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": 200,
        "max_length_k": 200,
        "seq_idx": torch.repeat_interleave(torch.arange(3), lengths).int()[None],
        "use_cache": False,
    }
    batch = {key: one.cuda() if isinstance(one, torch.Tensor) else one for key, one in batch.items()}
    found = evenload.check_isolation(model, batch)
    print(kind, found)
    assert bool(found) == PACKED[kind]
