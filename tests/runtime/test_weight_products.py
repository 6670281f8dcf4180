"""I and W: W adds exactly what I left out, from nothing but what I kept, whenever it runs."""

import functools

import pytest
import torch

from evenload.runtime.replay.held_bytes import HeldBytes
from evenload.runtime.replay.store import ActivationStore
from evenload.runtime.replay.weight_products import WeightProducts, add_weight_gradient
from reference_training import make_tokens, plain_loss_and_gradients, relative_error, tiny_config
from single_stage import pack_tokens, sliced_packs, stage_of, trained
from wide_gradients import wide_gradients

LENGTHS = [61, 30, 1, 7, 2, 1, 19]


@pytest.fixture
def sums_wider():
    with wide_gradients("CPU"):
        yield


def error_of_summed_products() -> float:
    """Of the weight gradients of 16 packs in bf16."""
    generator = torch.Generator().manual_seed(4)
    weight, exact = torch.nn.Parameter(torch.zeros(3, 4)), torch.zeros(3, 4, dtype=torch.float64)
    weight.main_grad = torch.zeros(3, 4)  # type: ignore[attr-defined]
    for _ in range(16):
        rows, grad = (torch.randn(50, n, generator=generator).bfloat16() for n in (4, 3))
        add_weight_gradient(weight, None, rows, grad)
        exact += grad.double().t() @ rows.double()
    return relative_error(weight.main_grad, exact)  # type: ignore[attr-defined]


def test_no_pack_rounds_its_weight_gradient_where_the_device_can_sum_it(sums_wider):
    """In bf16 a pack's product would lose all but 8 bits before it is added to the fp32 sum."""
    assert error_of_summed_products() < 1e-6


def test_elsewhere_a_packs_product_is_rounded_once():
    assert 1e-4 < error_of_summed_products() < 2**-8


@pytest.mark.parametrize("policy", ["replay", "recompute", "offload"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_weights_come_later_from_what_was_kept(kind, policy):
    """All I first: every activation is freed, and other packs run in between; then all W, in another order."""
    config = tiny_config(kind)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    stage, buffers = stage_of(config)
    forward, backward = sliced_packs(LENGTHS)
    policies = dict.fromkeys(range(len(LENGTHS)), policy)
    store = ActivationStore(dict(enumerate(LENGTHS)), [tuple(p) for p in backward], policies=policies)
    for pack in forward:
        stage.forward(pack_tokens(pack, tokens), None, store)
    for index, pack in enumerate(backward):
        stage.backward(pack_tokens(pack, tokens), None, store, 1, store.defer_weights(index))
    held = store.held.held_by_kind["weight_gradient_inputs"]
    assert held == store.held.held_bytes, "nothing else is held"
    rows = sum(LENGTHS) * config.num_hidden_layers
    hidden, ffn, query, key_value = config.hidden_size, config.intermediate_size, 48, 24
    assert held == rows * 8 * (4 * hidden + 2 * query + 2 * key_value + 3 * ffn)
    parameters = trained(buffers)
    assert all(p.main_grad.any() == ("proj" not in name) for name, p in parameters.items()), "W has not run"
    with pytest.raises(AssertionError, match="weight gradients of packs"):
        store.check_empty()
    for index in reversed(range(len(backward))):
        store.add_deferred_weights(index)
    store.check_empty()
    assert store.held.held_bytes == 0
    weights = {name: p.detach() for name, p in parameters.items()}
    _, plain = plain_loss_and_gradients(config, weights, tokens, torch.float64, num_labels=1)
    for name, parameter in parameters.items():
        assert relative_error(parameter.main_grad, plain[name]) <= 1e-10, name


def test_what_is_counted_is_what_is_held():
    """Shared inputs once; a part of a larger tensor is copied, so that the larger one can go."""
    held = HeldBytes()
    products = WeightProducts(held)
    weights = [torch.nn.Parameter(torch.randn(5, 4)) for _ in range(2)]
    for weight in weights:
        weight.main_grad = torch.zeros(5, 4)  # type: ignore[attr-defined]
    large = torch.randn(100, 4)
    part, grads = large[10:13], [torch.randn(3, 5) for _ in range(2)]
    expected = [grad.t() @ part for grad in grads]
    own = part.clone()
    adds = [functools.partial(add_weight_gradient, weight, None) for weight in weights]
    products.defer(adds[0], own, grads[0])
    products.defer(adds[1], own, grads[1])
    assert held.held_bytes == own.nbytes + 2 * grads[0].nbytes
    products.defer(adds[1], part, grads[1])
    assert held.held_bytes == 2 * own.nbytes + 2 * grads[0].nbytes
    large.zero_()
    products.add_all()
    assert held.held_bytes == 0
    torch.testing.assert_close(weights[0].main_grad, expected[0])
    torch.testing.assert_close(weights[1].main_grad, 2 * expected[1])
