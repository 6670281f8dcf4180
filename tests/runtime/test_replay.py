"""Replay on one stage: loss and gradients equal plain training, whatever the forward and backward cuts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.errors import UnsupportedModelError
from evenload.runtime.model.supported import check_supported
from reference_training import make_tokens, plain_loss_and_gradients, relative_error, tiny_config
from single_stage import assert_equals_plain, packs_of, run_single_stage

LENGTHS = [61, 30, 1, 7, 2, 1, 19]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, None)])
def test_gradients_equal_plain_training(kind, tied, dtype, tolerance):
    config = tiny_config(kind, tied=tied)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    forward = packs_of(LENGTHS, [0.3, 0.75], 40, last_first=False)
    backward = packs_of(LENGTHS, [0.5], 33, last_first=True)
    assert_equals_plain(config, dtype, tokens, forward, backward, tolerance)


@pytest.mark.parametrize("window", [1, 9, 500])
def test_sliding_window_equals_plain_training(window):
    config = tiny_config("mistral", sliding_window=window)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    forward = packs_of(LENGTHS, [0.3, 0.75], 40, last_first=False)
    backward = packs_of(LENGTHS, [0.5], 33, last_first=True)
    assert_equals_plain(config, torch.float64, tokens, forward, backward, 1e-10)


def test_nothing_is_left_but_float64_rounding():
    """With transformers' roundings to float32 two exact computations of the tokens of seed 12 differ by 1e-8."""
    config = tiny_config("llama")
    forward = packs_of(LENGTHS, [0.3, 0.75], 40, last_first=False)
    backward = packs_of(LENGTHS, [0.5], 33, last_first=True)
    for seed in (0, 3, 12):
        tokens = make_tokens(LENGTHS, config.vocab_size, seed)
        assert_equals_plain(config, torch.float64, tokens, forward, backward, 1e-13)


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
    forward = packs_of(LENGTHS, [0.3, 0.75], 40, last_first=False)
    backward = packs_of(LENGTHS, [0.5], 33, last_first=True)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    other = tokens | {1: make_tokens(LENGTHS, config.vocab_size, seed=9)[1]}
    labels = sum(n - 1 for n in LENGTHS)
    _, before, weights, _ = run_single_stage(config, torch.float64, tokens, forward, backward)
    _, after, _, _ = run_single_stage(config, torch.float64, other, forward, backward)
    _, alone_before = plain_loss_and_gradients(config, weights, {1: tokens[1]}, torch.float64, labels)
    _, alone_after = plain_loss_and_gradients(config, weights, {1: other[1]}, torch.float64, labels)
    for name in before:
        expected = before[name] + alone_after[name] - alone_before[name]
        assert relative_error(after[name], expected) <= 1e-10, name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_options_that_replay_would_run_wrong_are_refused(change, named):
    with pytest.raises(UnsupportedModelError, match=named):
        check_supported(tiny_config("llama", **change))
