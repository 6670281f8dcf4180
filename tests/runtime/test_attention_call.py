"""Attention and masks as transformers' own models ask for them: rules equal their masks, training equals theirs."""

import copy
import time

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from evenload.attention.backends import select_backend
from evenload.errors import UnsupportedModelError
from evenload.runtime.replay import attention_call
from evenload.runtime.replay.attention_call import ATTENTION_NAME, MaskRule, attention, mask_rule
from evenload.runtime.replay.context_attention import AttentionShape, LocalAttention, rows_of
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.replay.store import ActivationStore
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
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # sinks, biases and norms, which begin as zeros and ones
            nn.init.normal_(parameter, std=0.5)
        elif not parameter.isfinite().all() or not parameter.std() > 0:
            nn.init.normal_(parameter, std=0.3)
    return model


def layers_of(model):
    return model.model.layers


def masks_of(model, positions, implementation):
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
            model(torch.zeros_like(positions), position_ids=positions)
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
    assert masks_of(model, packed, ATTENTION_NAME) == expected


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
        state.direction, state.ranges, state.attention = (
            direction,
            pack.ranges,
            LocalAttention(tuple(rows_of(pack.ranges))),
        )
        return model(pack.token_ids[None], position_ids=pack.positions[None]).logits[0], pack

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
    return taken_gradients(model), state


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
    gradients, state = train(model, tokens, *sliced_packs(LENGTHS))
    assert set(gradients) == set(expected)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert relative_error(gradients[name], gradient) <= 1e-10, name
    calls = 2 if kind == "longcat_flash" else 1
    assert {layer: len(shapes) for layer, shapes in state.calls.items()} == dict.fromkeys(
        range(len(layers_of(model))), calls
    )
    assert any(shape.has_sinks for shapes in state.calls.values() for shape in shapes) == (
        "sinks" in str(set(expected))
    )
