"""Every architecture replays exactly: loss and gradients equal plain training, whatever the cuts."""

import pytest
import torch

from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.model.supported import check_supported, router_aux_loss_coef
from reference_training import (
    make_tokens,
    relative_error,
    tiny_config,
)
from single_stage import assert_equals_plain, packs_of, run_single_stage
from sweeps import sweep

LENGTHS = [61, 30, 1, 7, 2, 1, 19]
NEW = ["gpt2", "gemma", "gemma2", "gemma3", "olmo2", "mixtral", "qwen3_moe"]
CUTS = {"many": ([0.1, 0.2, 0.6], 9, [0.9], 11), "sliced": ([0.3, 0.75], 40, [0.5], 33), "whole": ([], 70, [], 70)}


def packs(cuts):
    forward_cuts, forward_budget, backward_cuts, backward_budget = CUTS[cuts]
    forward = packs_of(LENGTHS, forward_cuts, forward_budget, last_first=False)
    return forward, packs_of(LENGTHS, backward_cuts, backward_budget, last_first=True)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("cuts", sweep(list(CUTS), 1))
@pytest.mark.parametrize("kind", NEW)
def test_gradients_equal_plain_training_in_float64(kind, cuts, tied):
    config = tiny_config(kind, tied=tied)
    assert_equals_plain(config, torch.float64, make_tokens(LENGTHS, config.vocab_size), *packs(cuts), tolerance=1e-11)


@pytest.mark.rounded_casts("what users run: all other comparisons in float64 leave these roundings out")
@pytest.mark.parametrize("kind", NEW)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, None), (torch.float64, 1e-6)])
def test_gradients_equal_unchanged_transformers(kind, dtype, tolerance):
    """With transformers' own roundings to float32, to their precision."""
    config = tiny_config(kind)
    assert_equals_plain(config, dtype, make_tokens(LENGTHS, config.vocab_size), *packs("sliced"), tolerance=tolerance)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("cuts", sweep(list(CUTS), 1))
def test_load_balancing_loss_equals_its_definition(kind, cuts):
    """Counts are of whole documents and probabilities add up over slices, so no cut may show in loss or gradient."""
    config = tiny_config(kind, output_router_logits=True, router_aux_loss_coef=0.3)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    assert_equals_plain(config, torch.float64, tokens, *packs(cuts), tolerance=1e-11)
    without = tiny_config(kind)
    assert run_loss(config, tokens, cuts) - run_loss(without, tokens, cuts) > 0.3, "the loss is really added"


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("chosen", [1, 6])
def test_one_expert_a_token_and_all_experts(chosen, norm_topk_prob):
    """The ends of the range: as many rows of experts as tokens, in another order; and no choice at all."""
    config = tiny_config("qwen3_moe", num_experts_per_tok=chosen, norm_topk_prob=norm_topk_prob)
    assert_equals_plain(config, torch.float64, make_tokens(LENGTHS, config.vocab_size), *packs("many"), tolerance=1e-11)


def run_loss(config, tokens, cuts):
    return run_single_stage(config, torch.float64, tokens, *packs(cuts))[0]


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
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("gemma2", {"attention_dropout": 0.1}, "attention_dropout"),
        ("gpt2", {"attn_pdrop": 0.1}, "attn_pdrop is 0.1: a dropout mask .* set it to 0 in config.json"),
        ("gpt2", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
        ("gpt2", {"embd_pdrop": 0.1}, "embd_pdrop is 0.1"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is set"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}},
            "rope_type 'dynamic'",
        ),
    ],
)
def test_options_that_would_run_wrong_are_refused_by_name(kind, change, named):
    with pytest.raises(UnsupportedModelError, match=named):
        check_supported(tiny_config(kind, **change))


def test_whether_to_balance_experts_is_never_decided_silently():
    """transformers trains without the loss unless config.json asks for router logits."""
    config = tiny_config("mixtral", router_aux_loss_coef=0.02)
    with pytest.raises(ConfigError, match=r"model\.router_aux_loss_coef = 0\.02 .* trains one, 0 trains none"):
        router_aux_loss_coef(config, None)
    assert router_aux_loss_coef(config, 0.0) == 0.0
    assert router_aux_loss_coef(config, 0.5) == 0.5
    assert (
        router_aux_loss_coef(tiny_config("mixtral", output_router_logits=True, router_aux_loss_coef=0.02), None) == 0.02
    )
    assert router_aux_loss_coef(tiny_config("llama"), None) == 0.0
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        router_aux_loss_coef(tiny_config("llama"), 0.1)
