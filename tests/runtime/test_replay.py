"""Replay on one stage: loss and gradients equal plain training, whatever the forward and backward cuts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.attention.cpu_flash import CpuFlashAttention
from evenload.errors import UnsupportedModelError
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.model.supported import check_supported
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from reference_training import make_tokens, plain_loss_and_gradients, relative_error, tiny_config
from single_stage import assert_equals_plain, pack_tokens, packs_of, run_single_stage

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


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bf16_error_is_at_most_twice_that_of_plain_bf16_training(kind):
    """Cuts, replayed outputs and fp32 accumulation must not cost more precision than bf16 does anyway."""
    config = tiny_config(kind)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    forward = packs_of(LENGTHS, [0.1, 0.3, 0.5, 0.75], 20, last_first=False)
    backward = packs_of(LENGTHS, [0.2, 0.5, 0.9], 15, last_first=True)
    loss, ours, weights, _ = run_single_stage(config, torch.bfloat16, tokens, forward, backward)
    exact_loss, exact = plain_loss_and_gradients(
        config, {n: w.double() for n, w in weights.items()}, tokens, torch.float64
    )
    plain_loss, plain = plain_loss_and_gradients(config, weights, tokens, torch.bfloat16)

    def error(gradients):
        return sum((gradients[name].double() - exact[name]).square().sum().item() for name in exact) ** 0.5

    assert error(plain) > 0
    assert error(ours) <= 2 * error(plain)
    assert abs(loss - exact_loss) <= 2 * max(abs(plain_loss - exact_loss), 1e-3)


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


def test_hidden_states_of_a_document_do_not_depend_on_its_neighbours():
    """Perturbation: other documents' tokens must not change a document's outputs by one bit of meaning."""
    config = tiny_config("llama")
    model = build_stage_model(
        config, layers=(0, 4), dtype=torch.float64, device=torch.device("cpu"), weights=None, seed=3
    )
    flatten_units(model, dp=1)
    stage = PipelineStage(model, CpuFlashAttention())
    tokens = make_tokens(LENGTHS, config.vocab_size)
    perturbed = make_tokens(LENGTHS, config.vocab_size, seed=5) | {1: tokens[1]}
    outputs = []
    for batch in (tokens, perturbed):
        store = ActivationStore(dict(enumerate(LENGTHS)), [])
        pieces = []
        for pack in packs_of(LENGTHS, [0.3, 0.75], 40, last_first=False):
            hidden = stage.forward(pack_tokens(pack, batch), None, store)
            row = 0
            for doc, start, stop in pack:
                if doc == 1:
                    pieces.append(hidden[row : row + stop - start].clone())
                row += stop - start
        outputs.append(torch.cat(pieces))
    assert outputs[0].shape[0] == LENGTHS[1]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-12)


def test_symmetric_packs_are_kept_without_copies():
    """A pack that comes back whole is one block: its recorded tensors are returned, not gathered."""
    store = ActivationStore({0: 4, 1: 3}, [((0, 0, 4), (1, 0, 3))])
    rows = torch.randn(7, 2)
    store.open_pack(((0, 0, 4), (1, 0, 3)))
    store.record("x", rows)
    assert store.read("x", ((0, 0, 4), (1, 0, 3))) is rows
    assert store.held.held_bytes == rows.nbytes


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


def test_unknown_architecture_is_refused_by_name():
    from transformers import GPTNeoXConfig

    with pytest.raises(UnsupportedModelError, match="GPTNeoXForCausalLM"):
        check_supported(GPTNeoXConfig(num_hidden_layers=1))
