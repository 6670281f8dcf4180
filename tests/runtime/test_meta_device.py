"""Stages in bf16 with a GPU's attention on the meta device: every shape, dtype and kernel, without a GPU.

The meta device computes shapes, strides and dtypes alone. Whatever reads a value (`.item()`, a mask as an index) raises
there: on a GPU the host would have to wait for it. And no kernel is of a single document: a host needs some
microseconds a kernel, so a pack of many short documents would wait for its host. Views launch nothing.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evenload.attention.varlen_cuda import VarlenCudaAttention
from evenload.runtime.replay.store import ActivationStore
from evenload.runtime.replay.weight_products import WeightProducts
from reference_training import make_tokens, tiny_config
from single_stage import pack_tokens, packs_of, stage_of
from sweeps import sweep
from wide_gradients import wide_gradients

LENGTHS = [61, 30, 1, 7, 2, 19]
STAGES = ((0, 1), (1, 3), (3, 4))
META = torch.device("meta")
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def sums_wider():
    with wide_gradients("Meta"):
        yield


class CheckedVarlen(VarlenCudaAttention):
    """Looks at what goes in and comes out of every call; counts calls by kind of what they see."""

    def __init__(self, config) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.groups = getattr(config, "num_key_value_heads", self.heads)
        self.calls = Counter()

    def check(self, q, seen, sizes, scoring):
        dim = q.shape[-1]
        assert (q.dtype, q.device, q.shape) == (BF16, META, (sum(sizes.rows), self.heads, dim))
        assert sum(keys.shape[0] for keys, _ in seen) == sizes.num_keys
        for keys, values in seen:
            for kept in (keys, values):
                assert (kept.dtype, kept.device, kept.shape) == (BF16, META, (len(keys), self.groups, dim))
        assert all(keys >= rows for rows, keys in zip(sizes.rows, sizes.keys, strict=True))
        self.calls["prefix"] += sizes.keys != sizes.rows
        self.calls["window"] += scoring.window > 0
        self.calls["several"] += len(sizes.rows) > 1
        self.calls["grouped"] += self.heads != self.groups

    def forward(self, q, seen, sizes, scoring):
        self.check(q, seen, sizes, scoring)
        out, lse = super().forward(q, seen, sizes, scoring)
        assert (out.dtype, out.device, out.shape) == (BF16, META, q.shape)
        assert (lse.dtype, lse.shape) == (torch.float32, q.shape[:2])
        self.calls["forward"] += 1
        return out, lse

    def backward(self, grad, q, seen, out, lse, sizes, scoring):
        self.check(q, seen, sizes, scoring)
        assert (grad.dtype, grad.shape) == (out.dtype, out.shape) == (BF16, q.shape)
        assert (lse.dtype, lse.shape) == (torch.float32, q.shape[:2])
        self.calls["backward"] += 1
        dq, dk, dv = super().backward(grad, q, seen, out, lse, sizes, scoring)
        assert (dq.dtype, dq.shape) == (BF16, q.shape)
        assert (dk.dtype, dk.shape) == (dv.dtype, dv.shape) == (BF16, (sizes.num_keys, self.groups, q.shape[-1]))
        return dq, dk, dv


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
    stages = [stage_of(config, BF16, layers=layers, device="meta", backend=attention)[0] for layers in STAGES]
    policies = {doc: policy for doc in range(len(LENGTHS)) if doc % 2 == 0} if policy != "replay" else {}
    lengths, of_packs = dict(enumerate(LENGTHS)), [tuple(pack) for pack in backward]
    stores = [ActivationStore(lengths, of_packs, policies=policies) for _ in stages]
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
        for name, parameter in (pair for unit in stage.model.unit_parameters() for pair in unit):
            assert parameter.dtype == BF16, name
            assert (parameter.main_grad.dtype, parameter.main_grad.shape) == (torch.float32, parameter.shape), name
    made = attention.calls
    assert made["forward"] >= len(forward) * config.num_hidden_layers
    assert made["backward"] == len(backward) * config.num_hidden_layers
    assert made["several"]
    assert bool(made["prefix"]) == (packs == "cut")
    assert bool(made["window"]) == (kind in ("mistral", "gemma3"))
    assert bool(made["grouped"]) == (kind != "gpt2")


TOKENS = 96
NO_KERNEL = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "_unsafe_view")


class Launches(TorchDispatchMode):
    """Operators by name, but for views and memory without values; and how many there were of all."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()
        self.num_operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operators += 1
        returned = func._schema.returns
        is_view = bool(returned) and all(one.alias_info and not one.alias_info.is_write for one in returned)
        name = func._schema.name.removeprefix("aten::").removeprefix("evenload::")
        if not is_view and name not in NO_KERNEL:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def launches(kind, num_documents, layers):
    """Operators of a forward and a backward pack of equal documents on a middle stage of so many layers."""
    config, length = tiny_config(kind, num_hidden_layers=layers + 2), TOKENS // num_documents
    stage, _ = stage_of(config, BF16, layers=(1, layers + 1), device="meta", backend=VarlenCudaAttention())
    tokens = make_tokens([length] * num_documents, config.vocab_size)
    ranges = [(doc, 0, length) for doc in range(num_documents)]
    pack = pack_tokens(ranges, tokens, META)
    store = ActivationStore(dict.fromkeys(range(num_documents), length), [pack.ranges])
    hidden = torch.zeros(TOKENS, config.hidden_size, dtype=BF16, device=META)
    counted = []
    for run in (lambda: stage.forward(pack, hidden, store), lambda: stage.backward(pack, hidden, store, 10)):
        with Launches() as mode:
            run()
        counted.append(mode.counts | {"all, views too": mode.num_operators})
    return counted


# Of those that torch names where its deterministic kernels are asked for; `_flash_attention_backward` and `index_add`
# have such kernels.
FAILS_IF_DETERMINISTIC = {
    *("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward", "bincount"),
    *("histc", "kthvalue", "median", "nll_loss2d_forward", "put_", "scatter_reduce", "_embedding_bag"),
}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "gpt2"])
def test_layers_run_where_kernels_have_to_be_deterministic(kind):
    """`train.deterministic`: torch refuses others on a GPU."""
    used = {name for counts in launches(kind, 2, 1) for name in counts}
    assert "_flash_attention_backward" in used
    assert not used & FAILS_IF_DETERMINISTIC


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "gpt2"])
def test_documents_add_no_kernels(kind):
    """Nor views: a host needs a microsecond for one, in every layer."""
    few, many = launches(kind, 2, 2), launches(kind, 32, 2)
    assert many == few
