"""Stages in bf16 with a GPU's attention calls on the meta device: every shape and dtype, no value and no GPU.

The meta device computes shapes, strides and dtypes alone, by the meta kernels that torch keeps beside the GPU's, those
of `aten::_flash_attention_forward` included. Whatever looks at a value (`.item()`, a mask as an index) raises there: on
a GPU the host would have to wait for it.
"""

from collections import Counter

import pytest
import torch

from evenload.attention.varlen_cuda import VarlenCudaAttention
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from evenload.runtime.replay.weight_products import WeightProducts
from reference_training import make_tokens, tiny_config
from single_stage import pack_tokens, packs_of
from sweeps import sweep
from wide_sums import wide_sums

LENGTHS = [61, 30, 1, 7, 2, 19]
STAGES = ((0, 1), (1, 3), (3, 4))
META = torch.device("meta")
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def sums_wider():
    with wide_sums("Meta"):
        yield


class CheckedVarlen(VarlenCudaAttention):
    """Looks at what goes in and comes out of every call; counts calls by kind of what they see."""

    def __init__(self, config) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.groups = getattr(config, "num_key_value_heads", self.heads)
        self.calls = Counter()

    def check(self, q, ranges, scoring):
        dim = q.shape[-1]
        assert (q.dtype, q.device, q.shape[1:]) == (BF16, META, (self.heads, dim))
        for r in ranges:
            keys = r.keys.shape[0]
            assert keys >= r.rows.stop - r.rows.start
            for kept in (r.keys, r.values):
                assert (kept.dtype, kept.device, kept.shape) == (BF16, META, (keys, self.groups, dim))
            self.calls["prefix"] += keys > r.rows.stop - r.rows.start
        self.calls["window"] += scoring.window > 0
        self.calls["several"] += len(ranges) > 1
        self.calls["grouped"] += self.heads != self.groups

    def forward(self, q, ranges, scoring):
        self.check(q, ranges, scoring)
        out, lse = super().forward(q, ranges, scoring)
        assert (out.dtype, out.device, out.shape) == (BF16, META, q.shape)
        assert (lse.dtype, lse.shape) == (torch.float32, q.shape[:2])
        self.calls["forward"] += 1
        return out, lse

    def backward(self, grad, q, ranges, out, lse, scoring):
        self.check(q, ranges, scoring)
        assert (grad.dtype, grad.shape) == (out.dtype, out.shape) == (BF16, q.shape)
        assert (lse.dtype, lse.shape) == (torch.float32, q.shape[:2])
        self.calls["backward"] += 1
        parts = super().backward(grad, q, ranges, out, lse, scoring)
        for r, (dq, dk, dv) in zip(ranges, parts, strict=True):
            assert (dq.dtype, dq.shape) == (BF16, q[r.rows].shape)
            assert (dk.dtype, dk.shape) == (dv.dtype, dv.shape) == (BF16, r.keys.shape)
        return parts


@pytest.mark.parametrize(
    ("packs", "split", "policy"),
    sweep([("cut", True, "recompute"), ("whole", False, "replay")], 1),
    ids=sweep(["all at once", "plain"], 1),
)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma", "gemma3", "olmo2"])
def test_every_stage_keeps_shapes_and_precisions(kind, packs, split, policy):
    """Hidden states and their gradients in bf16, sums of gradients in fp32, the loss in fp64, on every stage."""
    config = tiny_config(kind, **({"sliding_window": 16} if kind == "mistral" else {}))
    tokens = make_tokens(LENGTHS, config.vocab_size)
    forward = packs_of(LENGTHS, [] if packs == "whole" else [0.3, 0.75], 64, last_first=False)
    backward = forward if packs == "whole" else packs_of(LENGTHS, [0.5], 50, last_first=True)
    attention = CheckedVarlen(config)
    stages = [on_meta(config, layers, attention) for layers in STAGES]
    policies = {doc: policy for doc in range(len(LENGTHS)) if doc % 2 == 0} if policy != "replay" else {}
    stores = [
        ActivationStore(dict(enumerate(LENGTHS)), [tuple(pack) for pack in backward], policies=policies) for _ in stages
    ]
    for pack in forward:
        given, hidden = pack_tokens(pack, tokens, META), None
        for stage, store in zip(stages, stores, strict=True):
            hidden = stage.forward(given, hidden, store)
            assert (hidden.dtype, hidden.device) == (BF16, META)
            assert hidden.shape == (len(given.token_ids), config.hidden_size)
    for pack in backward:
        given, grad = pack_tokens(pack, tokens, META), None
        for stage, store in zip(reversed(stages), reversed(stores), strict=True):
            products = WeightProducts(store.held) if split else None
            grad, loss = stage.backward(given, grad, store, 100, products)
            if products is not None:
                products.add_all()
            assert (loss.dtype, loss.shape) == (torch.float64, ())
            if stage is stages[0]:
                assert grad is None
                continue
            assert (grad.dtype, grad.device) == (BF16, META)
            assert grad.shape == (len(given.token_ids), config.hidden_size)
    for stage, store in zip(stages, stores, strict=True):
        store.check_empty()
        for name, parameter in named(stage):
            assert parameter.dtype == BF16, name
            assert (parameter.main_grad.dtype, parameter.main_grad.shape) == (torch.float32, parameter.shape), name
    made = attention.calls
    assert made["forward"] >= len(forward) * config.num_hidden_layers
    assert made["backward"] == len(backward) * config.num_hidden_layers
    assert made["several"]
    assert bool(made["prefix"]) == (packs == "cut")
    assert bool(made["window"]) == (kind in ("mistral", "gemma3"))
    assert bool(made["grouped"]) == (kind != "gpt2")


def named(stage):
    return [pair for unit in stage.model.unit_parameters() for pair in unit]


def on_meta(config, layers, attention):
    model = build_stage_model(config, layers=layers, dtype=BF16, device=META, weights=None, seed=3)
    flatten_units(model, dp=1)
    return PipelineStage(model, attention)
