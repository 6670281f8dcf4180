"""Layers that carry a state along a document: cut anywhere, differently forward and backward, they train as plain
transformers does, document by document; and whatever is known to go wrong in packed recurrent training shows."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import kernel_twins
from evenload.cost.layer_counts import activation_bytes_per_token, kv_bytes_per_token, weight_bytes_per_token
from evenload.data.hub import model_from_config
from evenload.errors import ConfigError
from evenload.runtime.model import state_calls
from evenload.runtime.model.hf_model import empty_model
from evenload.runtime.model.model_config import require_one_precision
from evenload.runtime.model.probe import probe
from evenload.runtime.replay.document_states import DocumentStates
from evenload.runtime.replay.store import ActivationStore
from evenload.types.document import Range
from reference_training import RECURRENT_KINDS, make_tokens, plain_loss_and_gradients, relative_error, tiny_config
from single_stage import (
    assert_bf16_as_good_as_plain,
    assert_equals_plain,
    pack_tokens,
    packs_of,
    run_single_stage,
    sliced_packs,
    stage_of,
    trained,
)
from sweeps import sweep

LENGTHS = [61, 30, 1, 7, 2, 1, 19]
CUTS = {
    "sliced": sliced_packs(LENGTHS),
    "single tokens": (
        packs_of(LENGTHS, [0.1, 0.11, 0.13, 0.15, 0.2, 0.6], 9, last_first=False),
        packs_of(LENGTHS, [0.12, 0.5, 0.52, 0.54, 0.9], 11, last_first=True),
    ),
    "whole": (packs_of(LENGTHS, [], 70, last_first=False), packs_of(LENGTHS, [], 70, last_first=True)),
}
FEW = ("qwen3_next", "kimi_linear", "bamba", "jamba", "lfm2")
"""One of every function."""


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [(kind, "sliced") for kind in RECURRENT_KINDS] + [(k, c) for k in FEW for c in ("single tokens", "whole")],
)
def test_gradients_equal_plain_training(kind, cuts):
    config = tiny_config(kind)
    assert_equals_plain(config, torch.float64, make_tokens(LENGTHS, config.vocab_size), *CUTS[cuts], 1e-10)


@pytest.mark.parametrize("kind", FEW)
@settings(max_examples=5, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    forward_cuts=st.lists(st.floats(0, 1), max_size=5),
    backward_cuts=st.lists(st.floats(0, 1), max_size=5),
    forward_budget=st.integers(1, 80),
    backward_budget=st.integers(1, 80),
)
def test_any_cuts_equal_plain_training(kind, lengths, forward_cuts, backward_cuts, forward_budget, backward_budget):
    config = tiny_config(kind, num_hidden_layers=2)
    forward = packs_of(lengths, forward_cuts, forward_budget, last_first=False)
    backward = packs_of(lengths, backward_cuts, backward_budget, last_first=True)
    assert_equals_plain(config, torch.float64, make_tokens(lengths, config.vocab_size), forward, backward, 1e-9)


@pytest.mark.parametrize("kind", sweep(RECURRENT_KINDS, 4))
def test_bf16_is_as_good_as_plain_bf16(kind):
    assert_bf16_as_good_as_plain(kind, None)


@pytest.mark.parametrize("kind", RECURRENT_KINDS)
def test_the_probe_finds_nothing_for_which_documents_stay_whole(kind, tmp_path):
    assert probe(tiny_config(kind), tmp_path).whole_documents == ()


@pytest.mark.parametrize("kind", FEW)
def test_stages_without_an_attention_layer_and_every_policy(kind):
    """As a pipeline of a layer a stage would run them, in one process."""
    config = tiny_config(kind)
    lengths = dict(enumerate(LENGTHS))
    tokens = make_tokens(LENGTHS, config.vocab_size)
    forward, backward = CUTS["sliced"]
    stages = [stage_of(config, layers=(at, at + 1)) for at in range(4)]
    weights = {name: one.detach().clone() for _, buffers in stages for name, one in trained(buffers).items()}
    policies = {0: "recompute", 1: "offload", 3: "offload"}
    stores = [ActivationStore(lengths, [tuple(p) for p in backward], policies=policies) for _ in stages]
    for stage, _ in stages:
        stage.begin_step(lengths)
    for pack in forward:
        hidden = None
        for (stage, _), store in zip(stages, stores, strict=True):
            hidden = stage.forward(pack_tokens(pack, tokens), hidden, store)
    labels, loss = sum(n - 1 for n in LENGTHS), 0.0
    for pack in backward:
        grad = None
        for (stage, _), store in zip(reversed(stages), reversed(stores), strict=True):
            grad, share = stage.backward(pack_tokens(pack, tokens), grad, store, labels)
            loss += share.item()
    plain_loss, plain = plain_loss_and_gradients(config, weights, tokens, torch.float64)
    assert abs(loss - plain_loss) <= 1e-10 * plain_loss
    for (_, buffers), store in zip(stages, stores, strict=True):
        store.check_empty()
        assert not any(store.held.held_by_kind.values())
        for name, weight in trained(buffers).items():
            assert relative_error(weight.main_grad, plain[name]) <= 1e-10, name


KERNELS = {
    "qwen3_next": "chunk_gated_delta_rule",
    "kimi_linear": "chunk_gated_delta_rule",
    "bamba": "mamba_chunk_scan_combined",
    "jamba": "selective_scan_fn",
}


@pytest.mark.parametrize(("kind", "kernel"), KERNELS.items())
def test_kernels_are_called_as_they_ask(monkeypatch, kind, kernel):
    """All ranges in one call with a state each, whole documents with their numbers, no gradient of a last state."""
    config = tiny_config(kind)
    called = kernel_twins.install(monkeypatch, empty_model(config))
    for packs in CUTS.values():
        assert_equals_plain(config, torch.float64, make_tokens(LENGTHS, config.vocab_size), *packs, 1e-10)
    assert called == {kernel, "causal_conv1d_fn"}


def test_stages_of_bfloat16_do_not_send_residuals_of_float32():
    config = tiny_config("mamba2")
    with pytest.raises(ConfigError, match=r"parallel.pp is 2, and layers of Mamba2 hand on hidden states in float32"):
        require_one_precision(config, "bfloat16", 2)
    require_one_precision(config, "bfloat16", 1)
    require_one_precision(config, "float32", 2)
    require_one_precision(tiny_config("bamba"), "bfloat16", 2)


# Bytes


def _state_bytes(config):
    """Of a document on all layers, counted by hand."""
    if config.model_type == "lfm2":
        return 3 * config.hidden_size * 3 * 8  # three convolutions, of four inputs, three of which are kept
    assert config.model_type == "bamba"
    convolution = (config.mamba_d_head * config.mamba_n_heads + 2 * config.mamba_n_groups * config.mamba_d_state) * 3
    return 3 * 8 * (convolution + config.mamba_n_heads * config.mamba_d_head * config.mamba_d_state)


@pytest.mark.parametrize("kind", ["lfm2", "bamba"])
def test_states_are_held_from_cut_to_cut(kind):
    """A document of 40 tokens, forward in 3 slices, backward in 3 with a cut that both have, and one of a slice."""
    config = tiny_config(kind)
    one = _state_bytes(config)
    tokens = make_tokens([40, 9], config.vocab_size)
    forward = [[(0, 0, 10), (1, 0, 9)], [(0, 10, 25)], [(0, 25, 40)]]
    backward = [[(0, 30, 40)], [(1, 0, 9)], [(0, 10, 30)], [(0, 0, 10)]]
    stage, _ = stage_of(config)
    stage.begin_step({0: 40, 1: 9})
    store = ActivationStore({0: 40, 1: 9}, [tuple(Range(*r) for r in pack) for pack in backward])
    held = []
    for pack in forward:
        stage.forward(pack_tokens(pack, tokens), None, store)
        held.append(store.held.held_by_kind["states"])
    # Running at 10; saved at 10 and running at 25; saved at 10 and 30.
    assert held == [one, 2 * one, 2 * one]
    held.clear()
    for pack in backward:
        stage.backward(pack_tokens(pack, tokens), None, store, 47)
        held.append(store.held.held_by_kind["states"])
    # The gradient at 30 in the place of the state; that at 30 is taken, 10 changes into its gradient.
    assert held == [2 * one, 2 * one, one, 0]
    store.check_empty()


@pytest.mark.parametrize("kind", RECURRENT_KINDS)
def test_bytes_of_a_token_are_those_of_the_memory_model(kind):
    """What a forward keeps, and what waits for W, of all layers: also beside latent attention and shared experts."""
    config = tiny_config(kind)
    spec = model_from_config(config.to_dict(), kind, 8)
    layers = np.array(spec.kind_counts)
    tokens = make_tokens([40], config.vocab_size)
    stage, _ = stage_of(config)
    stage.begin_step({0: 40})
    store = ActivationStore({0: 40}, [(Range(0, 0, 40),)])
    stage.forward(pack_tokens([(0, 0, 40)], tokens), None, store)
    final = 40 * 8 * config.hidden_size
    held = store.held.held_by_kind
    assert held["activations_replay"] - final == 40 * layers @ activation_bytes_per_token(spec)
    assert held["keys_and_values"] == 40 * layers @ kv_bytes_per_token(spec)
    products = store.defer_weights(0)
    stage.backward(pack_tokens([(0, 0, 40)], tokens), None, store, 39, products)
    assert held["weight_gradient_inputs"] == 40 * layers @ weight_bytes_per_token(spec)


def test_what_is_left_of_a_document_is_named():
    config = tiny_config("lfm2")
    tokens = make_tokens([12], config.vocab_size)
    stage, _ = stage_of(config)
    store = ActivationStore({0: 12}, [(Range(0, 5, 12),), (Range(0, 0, 5),)])
    stage.begin_step({0: 12})
    stage.forward(pack_tokens([(0, 0, 7)], tokens), None, store)
    assert store.states.unfinished() == {0}


# What is known to go wrong: each as a mutant of the store or of a call. Gradients are off by 7e-3 and more: gates as
# models begin forget fast.


def _of_calls(which, method, instead):
    """A method whose result is another one for calls of convolutions (a layer's first) or of scans."""

    def call(self, place, *args):
        found = method(self, place, *args)
        return instead(place, found) if (place[0][1] == 0) == (which == "convolution") else found

    return call


def _zeros(place, found):
    return None if found is None else torch.zeros_like(found)


def _running_on(monkeypatch, which):
    """A state runs on into the next document."""
    last = {}
    leave = DocumentStates._leave

    def remember(self, place, end):
        last[place[0]] = end
        leave(self, place, end)

    monkeypatch.setattr(DocumentStates, "_leave", remember)
    monkeypatch.setattr(
        DocumentStates,
        "_enter",
        _of_calls(which, DocumentStates._enter, lambda place, found: found if place[2] else last.get(place[0])),
    )


def _reset(monkeypatch, which):
    """Every slice begins anew."""
    monkeypatch.setattr(DocumentStates, "_enter", _of_calls(which, DocumentStates._enter, _zeros))
    _blind(monkeypatch, which)


def _dropped(monkeypatch, which):
    """The gradient of a state ends at the cut."""
    monkeypatch.setattr(DocumentStates, "take_gradient", _of_calls(which, DocumentStates.take_gradient, _zeros))


def _blind(monkeypatch, which):
    """Backward begins from a zero state, after a right forward."""
    monkeypatch.setattr(DocumentStates, "_saved_state", _of_calls(which, DocumentStates._saved_state, _zeros))


def _short(monkeypatch, which):
    """A slice shorter than a convolution's state forgets what is left of the older one."""
    own = state_calls._BINDERS["causal_conv1d_fn"]

    def shortened(*args):
        call = own(*args)

        def forgetful(end, size):
            missing = max(0, end.shape[-1] - size)
            return nn.functional.pad(end[..., missing:], (missing, 0))

        def run(rows, spans):
            output, ends = call.run(rows, spans)
            at = zip(ends, spans.sizes, strict=True)
            return output, [None if end is None else forgetful(end, size) for end, size in at]

        return replace(call, run=run)

    monkeypatch.setitem(state_calls._BINDERS, "causal_conv1d_fn", shortened)


MISTAKES = [
    *itertools.product(
        ("qwen3_next", "bamba", "lfm2"), ["convolution"], (_running_on, _reset, _dropped, _blind, _short)
    ),
    *itertools.product(("qwen3_next", "bamba"), ["scan"], (_running_on, _reset, _dropped, _blind)),
]


@pytest.mark.parametrize(("kind", "which", "mutate"), MISTAKES)
def test_a_known_mistake_shows(monkeypatch, kind, which, mutate):
    config = tiny_config(kind)
    lengths = [70, 33, 6]
    tokens = make_tokens(lengths, config.vocab_size)
    forward = [[(0, 0, 30), (1, 0, 33)], [(0, 30, 31), (2, 0, 4)], [(0, 31, 70), (2, 4, 6)]]
    backward = [[(0, 50, 70), (2, 5, 6)], [(1, 9, 33), (0, 49, 50), (2, 0, 5)], [(0, 0, 49), (1, 0, 9)]]
    _, right, weights, _ = run_single_stage(config, torch.float64, tokens, forward, backward)
    mutate(monkeypatch, which)
    _, wrong, _, _ = run_single_stage(config, torch.float64, tokens, forward, backward)
    _, plain = plain_loss_and_gradients(config, weights, tokens, torch.float64)
    assert max(relative_error(right[name], plain[name]) for name in plain) <= 1e-10
    assert max(relative_error(wrong[name], plain[name]) for name in plain) >= 1e-3
