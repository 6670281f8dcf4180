"""Liger's kernels in place of modules: what they may replace, and that loss and gradients stay plain training's.

Without a GPU the kernels run in Triton's interpreter, which Triton takes when it is first imported: the tests marked
`interpreted` run in a process of their own, which the last test starts. TRITON_INTERPRET=1 runs them in this one. The
interpreter is slow: every run has each way in which kernels compute, `make test-liger PROFILE=explore` all cases.
"""

import itertools
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

import interpreted_liger
from adapter_cases import LORA, adapter_loss_and_gradients, all_tensors, make_adapters_matter
from dist_equality import assert_plans_equal_plain
from evenload.data.hub import model_from_config
from evenload.runtime.model import liger
from evenload.runtime.replay.store import ActivationStore
from evenload.types.layout import even_layout
from reference_training import KINDS, make_tokens, relative_error, tiny_config
from single_stage import assert_bf16_as_good_as_plain, assert_equals_plain, pack_tokens, packs_of, stage_of, trained
from stored_bytes import assert_bytes_match_the_memory_model
from sweeps import thorough
from varied_plans import varied_plan

# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_LIGER = find_spec("liger_kernel") is not None
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the process of test_in_tritons_interpreter")
LENGTHS = [23, 9, 1, 12]
CUTS = packs_of(LENGTHS, [0.3, 0.75], 16, last_first=False), packs_of(LENGTHS, [0.5], 14, last_first=True)


def others_thorough(cases, *every_run):
    """Parameters of all cases, of which every run has some."""
    return [
        pytest.param(*((case,) if isinstance(case, str) else case), marks=() if case in every_run else thorough)
        for case in cases
    ]


@pytest.fixture(scope="module", autouse=True)
def _interpreter():
    if IS_INTERPRETED:
        interpreted_liger.prepare()


@pytest.mark.skipif(not HAS_LIGER, reason="make test-liger installs liger-kernel and triton, and runs it")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_liger_kernels.py runs the kernels themselves")
@pytest.mark.skipif(IS_INTERPRETED, reason="starts the others")
@pytest.mark.long
def test_in_tritons_interpreter():
    profile = f"--hypothesis-profile={settings.get_current_profile_name()}"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", profile, __file__]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-5_000:]


# ---- what is replaced ---------------------------------------------------------------------------

NORM, ROTARY, GATE, LOSS = "RMSNorm", "rotary embedding", "gated activation", "cross-entropy"
COMPUTED = {kind: {NORM, ROTARY, GATE, LOSS} for kind in KINDS} | {
    "gpt2": {LOSS},
    "mixtral": {NORM, ROTARY, LOSS},  # experts are replay's own
    "qwen3_moe": {NORM, ROTARY, LOSS},
    "minimax_m2": {NORM, ROTARY, LOSS},
    # Rotary embeddings of their own.
    "gpt_oss": {NORM, LOSS},
    "deepseek_v3": {NORM, GATE, LOSS},
    "gemma4": {NORM, GATE, LOSS},
}


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_what_liger_computes_of_every_architecture(kind, dtype):
    stage, _ = stage_of(tiny_config(kind, num_hidden_layers=2), dtype, liger=True)
    assert set(stage.model.liger) == COMPUTED[kind]
    # Of values Gemma 4's norm has no weight, and no kernel; one before its layers is transformers' own.
    before = {module for one in stage.model.prologue.values() for module in one.modules()}
    inside = {module for part in stage.model.modules for module in part.modules()} - before
    norms = [m for m in inside if type(m).__name__.endswith("RMSNorm") and "weight" in m._parameters]
    assert norms or kind == "gpt2"
    assert all("forward" in vars(norm) for norm in norms), "every norm, of queries and keys and of the head, too"


class _Norm(nn.Module):
    """Like Llama's, but for one thing."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), eps


class _MeanFree(_Norm):
    def forward(self, x):
        wide = x.float() - x.float().mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class _NarrowNorm(_Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class _EpsOutside(_Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide / (wide.square().mean(-1, keepdim=True).sqrt() + self.eps)).to(x.dtype)


class _TwiceEps(_Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 2 * self.eps)).to(x.dtype)


class _GatedNorm(_Norm):
    """Mamba's: the same, if it gets no gate."""

    def forward(self, x, gate=None):
        return LlamaRMSNorm.forward(SimpleNamespace(weight=self.weight, variance_epsilon=self.eps), x)


@pytest.mark.parametrize("norm", [_MeanFree, _NarrowNorm, _EpsOutside, _TwiceEps, _GatedNorm, lambda: nn.LayerNorm(64)])
def test_a_norm_that_computes_something_else_is_left_alone(norm):
    assert liger.use_liger({}, [norm()], {}) == ()


def test_a_norm_wider_than_a_kernels_rows_is_left_alone():
    assert liger.use_liger({}, [LlamaRMSNorm(2**16 + 1)], {}) == ()


class _ScaledBlock(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 1.0625)


class _SwappedBlock(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


@pytest.mark.parametrize(
    ("block", "act"),
    [(_ScaledBlock, "silu"), (_SwappedBlock, "silu"), (LlamaMLP, "gelu"), (LlamaMLP, "relu"), (LlamaMLP, "gelu_new")],
)
def test_a_block_that_computes_something_else_is_left_alone(block, act):
    """`gelu_new` is the same function, rounded in another way."""
    module = block(tiny_config("llama", hidden_act=act))
    assert type(module.act_fn) is type(ACT2FN[act])
    assert liger.use_liger({0: module}, [], {}) == ()


def attention_with(rotate):
    """An attention whose code reads another function by the name that transformers gives it."""
    names = {"apply_rotary_pos_emb": rotate}
    exec("def forward(self, q, k, cos, sin):\n    return apply_rotary_pos_emb(q, k, cos, sin)", names)
    kind = type("Attention", (nn.Module,), {"forward": names["forward"]})
    module = kind()
    module.head_dim, module.weight = 16, nn.Parameter(torch.ones(1, 1))
    return module


ANGLES = torch.arange(24.0).reshape(1, 3, 8)
DOUBLED = tuple(torch.cat([f(ANGLES)] * 2, dim=-1) for f in (torch.cos, torch.sin))


@pytest.mark.parametrize(
    ("rotate", "angles"),
    [
        (interleaved, DOUBLED),
        (lambda q, k, cos, sin: apply_rotary_pos_emb(q, k, cos, -sin), DOUBLED),
        (lambda q, k, cos, sin: tuple(t.double() for t in apply_rotary_pos_emb(q, k, cos, sin)), DOUBLED),
        (apply_rotary_pos_emb, tuple(f(torch.arange(48.0).reshape(1, 3, 16)) for f in (torch.cos, torch.sin))),
    ],
    ids=["interleaved", "other way round", "other dtype", "two different halves"],
)
def test_a_rotary_embedding_that_computes_something_else_is_left_alone(rotate, angles):
    assert liger.use_liger({0: attention_with(rotate)}, [], {0: angles}) == ()


# ---- the same training --------------------------------------------------------------------------


@interpreted
@pytest.mark.rounded_casts("kernels round where transformers does")
@pytest.mark.parametrize("kind", others_thorough(KINDS, "llama", "qwen3", "gemma", "gpt2"))
def test_gradients_equal_plain_training(kind):
    """Both directions cut elsewhere; transformers' own modules run beside ours, and have no kernels."""
    config = tiny_config(kind, num_hidden_layers=2)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    assert_equals_plain(config, torch.float32, tokens, *CUTS, liger=True)


@interpreted
@pytest.mark.parametrize("kind", others_thorough(["llama", "gemma2", "olmo2"], "llama", "gemma2"))
def test_bf16_errs_at_most_twice_as_much_as_plain_bf16(kind):
    """The three ways in which norms round."""
    assert_bf16_as_good_as_plain(kind, None, lengths=(13, 1, 9), liger=True)


@interpreted
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"pp": 1, "policies": "mixed", "schedule": "list_split"}),
        pytest.param("qwen3", {"pp": 2, "policies": "mixed", "schedule": "zb_h1"}, marks=thorough),
        ("gemma2", {"pp": 1, "policies": "kept", "schedule": "list"}),
        ("llama", {"pp": 1, "tp": 2, "policies": "mixed", "schedule": "list_split"}),
        pytest.param("gemma3", {"pp": 1, "tp": 2, "policies": "replay", "schedule": "list"}, marks=thorough),
        ("qwen2", {"pp": 2, "policies": "replay", "schedule": "static", "before": {"dp": 2}}),
    ],
)
def test_plans_equal_plain_training(gloo_pool, kind, options):
    """Recomputed and offloaded documents, I and W, tensor parallelism, a change of the layout, by the executor; bytes
    stay as predicted."""
    before = even_layout(2, **options["before"]) if "before" in options else None
    given = {"num_layers": 2, "max_tokens": 20, "num_documents": 4, **options}
    given.pop("before", None)
    plans = [varied_plan(seed, **given) for seed in (1, 2)]
    measured = assert_plans_equal_plain(
        gloo_pool,
        plans,
        kind=kind,
        changes={"num_hidden_layers": 2},
        dtype=torch.float32,
        kernels="liger",
        before=before,
    )
    model = model_from_config(tiny_config(kind, num_hidden_layers=2).to_dict(), kind, 4)
    for plan, ranks in zip(plans, measured, strict=True):
        if options.get("tp", 1) == 1:
            assert_bytes_match_the_memory_model(plan, model, ranks)


@interpreted
def test_adapters_equal_peft(tmp_path):
    config = tiny_config("llama", num_hidden_layers=2)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    stage, buffers = stage_of(config, torch.float32, lora=LORA, liger=True)
    make_adapters_matter(stage.model)
    tensors = all_tensors(stage.model)
    store = ActivationStore(dict(enumerate(LENGTHS)), [tuple(pack) for pack in CUTS[1]])
    labels = sum(n - 1 for n in LENGTHS)
    for pack in CUTS[0]:
        stage.forward(pack_tokens(pack, tokens), None, store)
    loss = sum(stage.backward(pack_tokens(pack, tokens), None, store, labels)[1].item() for pack in CUTS[1])
    plain_loss, gradients = adapter_loss_and_gradients(config, tensors, tmp_path, tokens, torch.float32)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    for name, parameter in trained(buffers).items():
        assert relative_error(parameter.main_grad, gradients[name]) <= 1e-4, name


# ---- what kernels write into --------------------------------------------------------------------


def recorded(store, ranges):
    """Copies of everything that the rows of ranges have left, and of all keys and values, by key."""
    if not ranges:
        return {}
    keys = {key for places in store._index._places.values() for place in places for key in place.block.tensors}
    left = {key: store.read(key, ranges).clone() for key in keys}
    for doc_id, kept in store._keys.items():
        for layer in kept.layers:
            key, value = kept.of(layer)
            left |= {(doc_id, layer, "keys"): key.clone(), (doc_id, layer, "values"): value.clone()}
    return left


@interpreted
@pytest.mark.parametrize(
    ("kind", "splits"),
    others_thorough(
        itertools.product(["llama", "qwen3", "gemma3", "olmo2"], [False, True]), ("llama", True), ("gemma3", False)
    ),
)
def test_what_is_recorded_stays_until_its_own_backward(kind, splits):
    """Forward records what plain torch records; a backward changes nothing that a later one reads, nor keys."""
    config = tiny_config(kind, num_hidden_layers=2)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    forward, backward = CUTS
    stores = []
    for is_liger in (True, False):
        stage, _ = stage_of(config, torch.float32, liger=is_liger)
        store = ActivationStore(dict(enumerate(LENGTHS)), [tuple(pack) for pack in backward])
        for pack in forward:
            stage.forward(pack_tokens(pack, tokens), None, store)
        stores.append((stage, store))
    (stage, store), (_, plain) = stores
    labels = sum(n - 1 for n in LENGTHS)
    everything = tuple(pack_tokens([r for pack in backward for r in pack], tokens).ranges)
    mine, theirs = recorded(store, everything), recorded(plain, everything)
    assert mine.keys() == theirs.keys()
    for key, rows in mine.items():
        assert relative_error(rows, theirs[key]) <= 1e-5, key
    for index, pack in enumerate(backward):
        later = tuple(pack_tokens([r for other in backward[index + 1 :] for r in other], tokens).ranges)
        before = recorded(store, later)
        products = store.defer_weights(index) if splits else None
        stage.backward(pack_tokens(pack, tokens), None, store, labels, products)
        for key, rows in recorded(store, later).items():
            assert torch.equal(rows, before[key]), key
        if splits:
            store.add_deferred_weights(index)
    store.check_empty()


# ---- cross-entropy ------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unlabelled", [0.0, 0.4, 1.0])
def test_losses_and_gradient_equal_torchs(dtype, unlabelled):
    torch.manual_seed(1)
    logits = (5 * torch.randn(13, 300)).to(dtype)
    targets = torch.randint(0, 300, (13,)).masked_fill(torch.rand(13) < unlabelled, -100)
    exact = logits.double().requires_grad_()
    expected = nn.functional.cross_entropy(exact, targets, reduction="none") / 7
    expected.sum().backward()
    untrained = liger.cross_entropy(logits.clone(), targets, 7.0, trains=False)
    place = logits.data_ptr()
    losses = liger.cross_entropy(logits, targets, 7.0, trains=True)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, untrained)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=0, atol=1e-3 if dtype == torch.bfloat16 else 1e-7)
    assert logits.data_ptr() == place, "no other memory"
