"""Attention and masks as transformers' own models ask for them: rules equal their masks, training equals theirs."""

import copy
import time

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from evenload.attention.backends import select_backend
from evenload.errors import UnsupportedModelError
from evenload.runtime.model import mask_rules
from evenload.runtime.model.around import ATTENTION_NAME
from evenload.runtime.model.mask_rules import MaskRule, mask_rule
from evenload.runtime.replay.context_attention import LocalAttention, rows_of
from evenload.runtime.replay.replayable import attention
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.replay.store import ActivationStore, ForwardStore
from evenload.types.document import Range
from reference_training import make_tokens, relative_error
from single_stage import pack_tokens, sliced_packs

_COMMON = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "initializer_range": 0.3, "use_cache": False,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1}
_BY_TURNS = ["sliding_attention", "full_attention"] * 2
_OWN: dict[str, dict] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 20},
    "gemma3_text": {"sliding_window": 9, "layer_types": _BY_TURNS},
    "gpt_oss": {"sliding_window": 9, "layer_types": _BY_TURNS, **_EXPERTS},
    "llama4_text": {
        "attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"] * 2, "moe_layers": [1],
        "no_rope_layers": [1, 0, 1, 0], "attn_temperature_tuning": False, "intermediate_size_mlp": 48, **_EXPERTS,
    },
    "mimo_v2_flash": {"sliding_window": 9, "layer_types": _BY_TURNS, "v_head_dim": 6, "swa_v_head_dim": 6, **_ROUTED},
    "deepseek_v3": {**_LATENT, **_ROUTED, "num_key_value_heads": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "longcat_flash": {
        **_LATENT, "num_layers": 2, "num_key_value_heads": 4, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24,
        "n_routed_experts": 4, "zero_expert_num": 1, "moe_topk": 2,
    },
}  # fmt: skip


def tiny_model(kind, **changes):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**_COMMON, **_OWN[kind], **changes})
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).double()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # sinks, biases and norms, which begin as zeros and ones
            nn.init.normal_(parameter, std=0.5)
        elif not parameter.isfinite().all() or not parameter.std() > 0:
            nn.init.normal_(parameter, std=0.3)
    return model


def layers_of(model):
    return model.model.layers


def masks_of(model, positions, implementation, **options):
    """What each layer gets for a mask; layers themselves do not run."""
    model.config._attn_implementation = implementation
    given, before = [], [layer.forward for layer in layers_of(model)]

    def note(hidden, *args, attention_mask=None, **_):
        given.append(attention_mask)
        return hidden

    for layer in layers_of(model):
        layer.forward = note
    try:
        with torch.no_grad():
            model(torch.zeros_like(positions), position_ids=positions, **options)
    finally:
        for layer, forward in zip(layers_of(model), before, strict=True):
            layer.forward = forward
    return given


WINDOWED, FULL = MaskRule(window=9), MaskRule()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", [FULL] * 4),
        ("mistral", [WINDOWED] * 4),
        ("gemma3_text", [WINDOWED, FULL] * 2),
        ("gpt_oss", [WINDOWED, FULL] * 2),
        ("llama4_text", [MaskRule(chunk=8), FULL] * 2),
        ("mimo_v2_flash", [WINDOWED, FULL] * 2),
        ("deepseek_v3", [FULL] * 4),
    ],
)
def test_rules_equal_the_masks_that_models_make(kind, expected):
    model = tiny_model(kind)
    alone = torch.arange(31)[None]
    rules = masks_of(model, alone, ATTENTION_NAME)
    assert rules == expected
    for rule, mask in zip(rules, masks_of(model, alone, "eager"), strict=True):
        assert torch.equal(rule.shows(alone.T, alone), mask[0, 0] == 0)
    # A pack's documents, in slices, change nothing.
    packed = torch.cat([torch.arange(20, 33), torch.arange(4), torch.arange(4, 9), torch.arange(1)])[None]
    assert masks_of(model, packed, ATTENTION_NAME, attention_mask=torch.ones_like(packed)) == expected


def train(model, tokens, forward, backward):
    """Gradients by name, of attention that is recorded in forward packs and read in backward packs."""
    model.config._attn_implementation = ATTENTION_NAME
    state = ReplayState(select_backend("auto", "cpu"))
    for module in model.modules():
        module.replay = state
    hooks = [
        layer.register_forward_pre_hook(lambda *_, index=index: state.enter_layer(index))
        for index, layer in enumerate(layers_of(model))
    ]
    state.store = ActivationStore({doc: len(ids) for doc, ids in tokens.items()}, [tuple(pack) for pack in backward])

    def logits(direction, ranges):
        pack = pack_tokens(ranges, tokens)
        state.direction, state.ranges = direction, pack.ranges
        state.attention = LocalAttention(tuple(rows_of(pack.ranges)))
        ids, positions = pack.token_ids[None], pack.positions[None]
        return model(ids, attention_mask=torch.ones_like(ids), position_ids=positions).logits[0], pack

    with torch.no_grad():
        for ranges in forward:
            state.store.open_pack(pack_tokens(ranges, tokens).ranges)
            logits("forward", ranges)
    for ranges in backward:
        rows, pack = logits("backward", ranges)
        nn.functional.cross_entropy(rows, pack.targets, reduction="sum").backward()
        state.store.close_backward(pack.ranges)
    state.store.check_empty()
    for hook in hooks:
        hook.remove()
    return taken_gradients(model)


def taken_gradients(model):
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def plain(model, tokens):
    model.config._attn_implementation = "eager"
    for ids in tokens.values():
        rows = model(ids[None]).logits[0, :-1]
        nn.functional.cross_entropy(rows, ids[1:], reduction="sum").backward()
    return taken_gradients(model)


LENGTHS = [61, 30, 2, 19]


@pytest.mark.parametrize("kind", list(_OWN))
def test_models_with_this_attention_train_as_with_their_own(kind):
    """Documents are cut differently in forward and backward: sinks, chunks, windows, capped scores, narrow values, two
    calls of attention in a layer."""
    model = tiny_model(kind)
    tokens = make_tokens(LENGTHS, 97)
    expected = plain(model, tokens)
    gradients = train(model, tokens, *sliced_packs(LENGTHS))
    assert set(gradients) == set(expected)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert relative_error(gradients[name], gradient) <= 1e-10, name


# ---- rules -----------------------------------------------------------------------------------------------------------


LLAMA = AutoConfig.for_model("llama")


def rule_of(function, *, rows=40, keys=None, **given):
    return mask_rule(mask_function=function, q_length=rows, kv_length=keys or rows, config=LLAMA, **given)


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 1000, 4096, 131_072])
def test_any_window_and_any_chunk_is_found(size):
    window = masking_utils.sliding_window_causal_mask_function(size)
    assert rule_of(window) == MaskRule(window=size)
    chunk = masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))
    assert rule_of(chunk) == (MaskRule(window=1) if size == 1 else MaskRule(chunk=size))


def strided(batch, head, row, key):
    return (key <= row) & ((row - key) % 2 == 0)


def first_tokens_too(batch, head, row, key):
    return (key <= row) & ((key > row - 9) | (key < 2))


def window_of_even_rows(batch, head, row, key):
    return (key <= row) & ((key > row - 9) | (row % 2 == 0))


def strict(batch, head, row, key):
    return key < row


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (masking_utils.bidirectional_mask_function, "row 0 sees 1010 of keys 0 to 1009"),
        (masking_utils.sliding_window_bidirectional_mask_function(5), "row 0 sees 6 of keys 0 to 5"),
        (strided, "row 2 sees 2 of keys 0 to 2"),
        (first_tokens_too, "row 63 sees 11 of keys 0 to 63"),
        (window_of_even_rows, "row 63 sees 9 of keys 55 to 63"),
        (strict, "row 0 sees no key"),
    ],
)
def test_masks_of_another_kind_are_refused_where_a_layer_reads_them(function, seen):
    rule = rule_of(function)
    assert f"llama makes an attention mask in which {seen}" in rule.refusal
    with pytest.raises(UnsupportedModelError, match="only causal attention"):
        Layer().call(rule)


def test_masks_that_depend_on_tokens_are_refused():
    images = torch.zeros(1, 40, dtype=torch.int64)
    blocks = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(images))
    assert "depends on tensor block_sequence_ids (1, 40)" in rule_of(blocks).refusal
    assert "40 rows and 50 keys" in rule_of(masking_utils.causal_mask_function, keys=50).refusal
    both_ways = tiny_model("gemma3_text", use_bidirectional_attention=True)
    for rule in masks_of(both_ways, torch.arange(9)[None], ATTENTION_NAME):
        assert "gemma3_text makes an attention mask in which row 0 sees" in rule.refusal


def test_a_rule_is_read_once_however_often_models_ask_for_it(monkeypatch):
    """Models make a new function a pack; windows that differ are different rules."""
    mask_rules._KNOWN.clear()
    for size in (3, 4, 3, 4):
        assert rule_of(masking_utils.sliding_window_causal_mask_function(size)) == MaskRule(window=size)
    assert len(mask_rules._KNOWN) == 2
    made = masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64))
    rule_of(made)
    begin = time.perf_counter()
    for _ in range(100):
        rule_of(made)
    assert (time.perf_counter() - begin) / 100 < 1e-3, "some 10 µs; reading the rule takes milliseconds"


def test_a_rule_survives_what_models_do_with_masks():
    rule = MaskRule(chunk=5)
    handled = [rule[:, :, :, :9], rule.to("cpu"), rule.to(dtype=torch.bool), rule.clone(), copy.copy(rule)]
    assert handled == [rule] * 5
    assert copy.deepcopy({"full": rule}) == {"full": rule}


# ---- one call --------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer's attention of one document of 20 tokens."""

    def __init__(self):
        super().__init__()
        self.replay = ReplayState(select_backend("auto", "cpu"))
        self.replay.ranges = (Range(0, 0, 20),)
        self.replay.attention = LocalAttention(tuple(rows_of(self.replay.ranges)))
        self.replay.store = ActivationStore({0: 20}, [])
        self.replay.store.open_pack(self.replay.ranges)
        self.replay.enter_layer(0)

    def call(self, mask, *, rows=20, heads=4, **options):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, n, rows, 8, generator=generator, dtype=torch.float64) for n in (heads, 2, 2))
        return attention(self, q, k, v, mask, **options)[0]


def test_the_mask_decides_where_the_module_names_another_window():
    expected = Layer().call(MaskRule(window=4))
    assert torch.equal(Layer().call(MaskRule(window=4), sliding_window=3), expected)
    assert torch.equal(Layer().call(MaskRule(window=4), is_causal=False), expected)
    assert torch.equal(Layer().call(None, sliding_window=4), expected), "without a mask the module's window is all"
    assert torch.equal(Layer().call(MaskRule()), Layer().call(None))
    assert not torch.equal(Layer().call(MaskRule()), expected)
    assert torch.equal(Layer().call(None, scaling=None), Layer().call(None, scaling=8**-0.5))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"is_causal": False}, "Layer sees all tokens"),
        ({"position_bias": torch.zeros(4, 20)}, r"Layer passes position_bias to its attention"),
    ],
)
def test_calls_that_would_be_wrong_are_refused_by_name(options, named):
    with pytest.raises(UnsupportedModelError, match=named):
        Layer().call(None, **options)


def test_own_masks_and_modules_that_are_not_causal_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"gets a mask \(1, 1, 20, 20\) that its model made itself"):
        Layer().call(torch.zeros(1, 1, 20, 20))
    layer = Layer()
    layer.is_causal = False
    with pytest.raises(UnsupportedModelError, match="is_causal is false"):
        layer.call(None)
    layer.call(None, is_causal=True)


def test_calls_of_a_layer_are_numbered_and_freed_with_it():
    """Longcat's layers call attention twice, and layers that mix tokens in another way never."""
    layer = Layer()
    for index, count in ((0, 0), (1, 2), (2, 1)):
        layer.replay.enter_layer(index)
        for _ in range(count):
            layer.call(MaskRule())
    assert set(layer.replay.store.document_keys(0).layers) == {1, (1, 1), 2}
    forward = ForwardStore({0: 20}, ())
    layer.replay.store = forward
    forward.open_pack(layer.replay.ranges)
    layer.replay.enter_layer(1)
    for _ in range(2):
        layer.call(MaskRule())
    assert set(forward.document_keys(0).layers) == {1, (1, 1)}
    forward.end_documents([0])
    assert forward.held.held_by_kind["keys_and_values"] == 0
