"""Replay on one stage: loss and gradients equal plain training, for every architecture, whatever the cuts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.model.model_config import require_trainable, router_aux_loss_coef
from reference_training import make_tokens, plain_loss_and_gradients, relative_error, stage_model, tiny_config
from single_stage import assert_equals_plain, packs_of, run_single_stage, sliced_packs
from sweeps import sweep

LENGTHS = [61, 30, 1, 7, 2, 1, 19]
SMALL = ["llama", "qwen2", "qwen3", "mistral"]
OTHERS = ["gpt2", "gemma", "gemma2", "gemma3", "olmo2", "mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3",
          "minimax_m2", "gemma4", "ministral3", "olmo3", "smollm3", "granite"]  # fmt: skip
CUTS = {
    "many": (packs_of(LENGTHS, [0.1, 0.2, 0.6], 9, last_first=False), packs_of(LENGTHS, [0.9], 11, last_first=True)),
    "sliced": sliced_packs(LENGTHS),
    "whole": (packs_of(LENGTHS, [], 70, last_first=False), packs_of(LENGTHS, [], 70, last_first=True)),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("kind", "cuts", "dtype", "tolerance"),
    [(kind, cuts, torch.float64, 1e-11) for kind in OTHERS for cuts in sweep(list(CUTS), 1)]
    + [(kind, "sliced", *how) for kind in SMALL for how in ((torch.float64, 1e-11), (torch.float32, None))],
)
def test_gradients_equal_plain_training(kind, cuts, dtype, tolerance, tied):
    config = tiny_config(kind, tied=tied)
    assert_equals_plain(config, dtype, make_tokens(LENGTHS, config.vocab_size), *CUTS[cuts], tolerance)


@pytest.mark.rounded_casts("what users run: all other comparisons in float64 leave these roundings out")
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, None), (torch.float64, 1e-6)])
def test_gradients_equal_unchanged_transformers(kind, dtype, tolerance):
    """With transformers' own roundings to float32, to their precision."""
    config = tiny_config(kind)
    assert_equals_plain(config, dtype, make_tokens(LENGTHS, config.vocab_size), *CUTS["sliced"], tolerance=tolerance)


@pytest.mark.parametrize("window", [1, 9, 500])
def test_sliding_window_equals_plain_training(window):
    config = tiny_config("mistral", sliding_window=window)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    assert_equals_plain(config, torch.float64, tokens, *CUTS["sliced"], 1e-10)


@pytest.mark.parametrize("seed", [0, 3, 12])
def test_nothing_is_left_but_float64_rounding(seed):
    """With transformers' roundings to float32 two exact computations of the tokens of seed 12 differ by 1e-8."""
    config = tiny_config("llama")
    tokens = make_tokens(LENGTHS, config.vocab_size, seed)
    assert_equals_plain(config, torch.float64, tokens, *CUTS["sliced"], 1e-13)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    forward_cuts=st.lists(st.floats(0, 1), max_size=4),
    backward_cuts=st.lists(st.floats(0, 1), max_size=4),
    forward_budget=st.integers(1, 80),
    backward_budget=st.integers(1, 80),
)
def test_any_cuts_equal_plain_training(lengths, forward_cuts, backward_cuts, forward_budget, backward_budget):
    config = tiny_config("llama", num_hidden_layers=2)
    tokens = make_tokens(lengths, config.vocab_size)
    forward = packs_of(lengths, forward_cuts, forward_budget, last_first=False)
    backward = packs_of(lengths, backward_cuts, backward_budget, last_first=True)
    assert_equals_plain(config, torch.float64, tokens, forward, backward, 1e-10)


def test_changing_one_document_leaves_the_others_gradient_share_unchanged():
    """Isolation: the gradient is a sum over documents, so replacing one document's tokens changes exactly its term."""
    config = tiny_config("llama")
    tokens = make_tokens(LENGTHS, config.vocab_size)
    other = tokens | {1: make_tokens(LENGTHS, config.vocab_size, seed=9)[1]}
    labels = sum(n - 1 for n in LENGTHS)
    _, before, weights, _ = run_single_stage(config, torch.float64, tokens, *CUTS["sliced"])
    _, after, _, _ = run_single_stage(config, torch.float64, other, *CUTS["sliced"])
    _, alone_before = plain_loss_and_gradients(config, weights, {1: tokens[1]}, torch.float64, labels)
    _, alone_after = plain_loss_and_gradients(config, weights, {1: other[1]}, torch.float64, labels)
    for name in before:
        expected = before[name] + alone_after[name] - alone_before[name]
        assert relative_error(after[name], expected) <= 1e-10, name


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("cuts", sweep(list(CUTS), 1))
def test_load_balancing_loss_equals_its_definition(kind, cuts):
    """Counts are of whole documents and probabilities add up over slices, so no cut may show in loss or gradient."""
    config = tiny_config(kind, output_router_logits=True, router_aux_loss_coef=0.3)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    assert_equals_plain(config, torch.float64, tokens, *CUTS[cuts], tolerance=1e-11)
    both = config, tiny_config(kind)
    with_loss, without = (run_single_stage(one, torch.float64, tokens, *CUTS[cuts])[0] for one in both)
    assert with_loss - without > 0.3, "the loss is really added"


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("chosen", [1, 6])
def test_one_expert_a_token_and_all_experts(chosen, norm_topk_prob):
    """The ends of the range: as many rows of experts as tokens, in another order; and no choice at all."""
    config = tiny_config("qwen3_moe", num_experts_per_tok=chosen, norm_topk_prob=norm_topk_prob)
    assert_equals_plain(config, torch.float64, make_tokens(LENGTHS, config.vocab_size), *CUTS["many"], tolerance=1e-11)


@pytest.mark.parametrize("change", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_some_layers_have_experts_and_others_do_not(change):
    for balance in ({}, {"output_router_logits": True, "router_aux_loss_coef": 0.3}):
        config = tiny_config("qwen3_moe", **change, **balance)
        tokens = make_tokens(LENGTHS, config.vocab_size)
        assert_equals_plain(config, torch.float64, tokens, *CUTS["sliced"], tolerance=1e-11)


def test_padding_takes_no_part_in_the_load_balancing_loss():
    """The baseline that pads must train what all others train."""
    config = tiny_config("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.3)
    tokens = make_tokens([40, 11], config.vocab_size)
    unpadded, padded = [[(0, 0, 40), (1, 0, 11)]], [[(0, 0, 40), (1, 0, 40)]]
    loss, gradients, *_ = run_single_stage(config, torch.float64, tokens, unpadded, unpadded)
    padded_loss, padded_gradients, *_ = run_single_stage(config, torch.float64, tokens, padded, padded)
    assert padded_loss == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        assert relative_error(padded_gradients[name], gradient) <= 1e-11, name


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            "attention mask in which row 0 sees .* only causal attention",
        ),
        (
            "mixtral",
            {"router_jitter_noise": 0.1},
            r"\(MixtralSparseMoeBlock\) draws random numbers .* set it to 0 in config.json",
        ),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
        ("gpt2", {"attn_pdrop": 0.1}, "attn_pdrop is 0.1, .*: a dropout mask .* set it to 0 in config.json"),
        ("gpt2", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
        ("gpt2", {"embd_pdrop": 0.1}, "embd_pdrop is 0.1"),
    ],
)
def test_options_that_would_run_wrong_are_refused_by_name(kind, change, named):
    with pytest.raises(UnsupportedModelError, match=named):
        stage_model(tiny_config(kind, **change))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("llama", {"rope_parameters": DYNAMIC}, "rope_type 'dynamic'"),
        ("gemma3", {"rope_parameters": {"full_attention": DYNAMIC}}, "rope_type 'dynamic'"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is set"),
    ],
)
def test_options_that_would_run_wrong_are_refused_before_a_model_is_made(kind, change, named):
    with pytest.raises(UnsupportedModelError, match=named):
        require_trainable(tiny_config(kind, **change))


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_encoders_are_refused(kind):
    config = AutoConfig.for_model(kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match=f"{kind} makes an attention mask in which row 0 sees 1010 of keys"):
        stage_model(config)


def test_whether_to_balance_experts_is_never_decided_silently():
    """transformers trains without the loss unless config.json asks for router logits."""
    config = tiny_config("mixtral", router_aux_loss_coef=0.02)
    with pytest.raises(ConfigError, match=r"model\.router_aux_loss_coef = 0\.02 .* trains one, 0 trains none"):
        router_aux_loss_coef(config, None)
    assert router_aux_loss_coef(config, 0.0) == 0.0
    assert router_aux_loss_coef(config, 0.5) == 0.5
    config.output_router_logits = True
    assert router_aux_loss_coef(config, None) == 0.02
    assert router_aux_loss_coef(tiny_config("llama"), None) == 0.0
    with pytest.raises(ConfigError, match="no load-balancing loss for Llama"):
        router_aux_loss_coef(tiny_config("llama"), 0.1)
