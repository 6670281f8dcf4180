"""One stage that holds the whole model, run pack by pack without executor or processes."""

import torch

from evenload.attention.backends import select_backend
from evenload.runtime.optim.data_parallel import flatten_units
from evenload.runtime.replay.rank_packs import PackTokens
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from evenload.types.document import Range
from plan_building import greedy_packs
from reference_training import (
    balance_factor,
    plain_error,
    plain_loss_and_gradients,
    relative_error,
    stage_model,
    structure,
    tiny_config,
)


def head_dim(config):
    return max((one.head_dim for sites in structure(config).sites for one in sites.attention), default=0)


def pack_tokens(ranges, tokens, device="cpu"):
    """Collate by hand: the slow, obvious way. Tokens beyond a document's end are padding."""
    ids, targets, positions = [], [], []
    for doc, start, stop in ranges:
        for t in range(start, stop):
            ids.append(tokens[doc][t].item() if t < len(tokens[doc]) else 0)
            targets.append(tokens[doc][t + 1].item() if t + 1 < len(tokens[doc]) else -100)
            positions.append(t)
    columns = (torch.tensor(column, device=device) for column in (ids, targets, positions))
    return PackTokens(tuple(Range(*r) for r in ranges), *columns)


def packs_of(lengths, cuts, budget, *, last_first):
    """Greedy packs of documents 0, 1, ... of these lengths."""
    return greedy_packs(dict(enumerate(lengths)), cuts, budget, last_first=last_first)


def sliced_packs(lengths):
    """Forward and backward packs of documents that both cut elsewhere."""
    return packs_of(lengths, [0.3, 0.75], 40, last_first=False), packs_of(lengths, [0.5], 33, last_first=True)


def trained(buffers):
    """Parameters by name."""
    return {name: p for buffer in buffers for name, p in zip(buffer.names, buffer.parameters, strict=True)}


def stage_of(config, dtype=torch.float64, *, device="cpu", backend=None, liger=False, **options):
    """A stage (options: `stage_model`) and its buffers; `backend` of attention: default: what `auto` takes; `liger`:
    with its kernels."""
    model = stage_model(config, dtype, device=device, **options)
    if liger:
        model.use_liger(tp=1)
    buffers = flatten_units(model, dp=1)
    if backend is None:
        backend = select_backend("auto", device, dtype=dtype, head_dim=head_dim(config))
    return PipelineStage(model, backend), buffers


def run_single_stage(
    config, dtype, tokens, forward, backward, *, device="cpu", backend=None, directory=None, liger=False
):
    """Loss, gradients and the store after all forwards, then all backwards; arguments as `stage_of`."""
    factor = balance_factor(config)
    stage, buffers = stage_of(
        config, dtype, device=device, weights=directory, backend=backend, router_aux_loss_coef=factor, liger=liger
    )
    weights = {name: p.detach().clone() for name, p in trained(buffers).items()}
    stage.begin_step({d: len(t) for d, t in tokens.items()})
    stored = {d: max(stop for pack in forward for doc, _, stop in pack if doc == d) for d in tokens}
    store = ActivationStore(stored, [tuple(p) for p in backward])
    labels = sum(len(t) - 1 for t in tokens.values())
    for pack in forward:
        stage.forward(pack_tokens(pack, tokens, device), None, store)
    loss = sum(stage.backward(pack_tokens(pack, tokens, device), None, store, labels)[1].item() for pack in backward)
    store.check_empty()
    gradients = {name: p.main_grad.clone() for name, p in trained(buffers).items()}
    return loss, gradients, weights, store


def assert_equals_plain(config, dtype, tokens, forward, backward, tolerance=None, *, liger=False):
    """To a tolerance; None = to the precision, as `plain_error` says."""
    loss, gradients, weights, _ = run_single_stage(config, dtype, tokens, forward, backward, liger=liger)
    tolerance = tolerance or 2 * plain_error(config, weights, tokens, dtype)
    plain_loss, plain = plain_loss_and_gradients(config, weights, tokens, dtype)
    assert abs(loss - plain_loss) <= tolerance * abs(plain_loss)
    assert set(gradients) == set(plain)
    for name, gradient in gradients.items():
        assert relative_error(gradient, plain[name]) <= tolerance, name


def assert_bf16_as_good_as_plain(kind, backend, device="cpu", *, lengths=(150, 37, 90, 1, 64), liger=False):
    """Loss and gradients of asymmetric packs in bf16 err at most twice as much as plain bf16 autograd does."""
    window = {"sliding_window": 40} if kind == "mistral" else {}
    config = tiny_config(kind, hidden_size=64, **window)
    generator = torch.Generator().manual_seed(5)
    tokens = {d: torch.randint(0, 97, (n,), generator=generator) for d, n in enumerate(lengths)}
    forward = packs_of(lengths, [0.3, 0.6], 90, last_first=False)
    backward = packs_of(lengths, [0.5], 110, last_first=True)
    loss, gradients, weights, _ = run_single_stage(
        *(config, torch.bfloat16, tokens, forward, backward), device=device, backend=backend, liger=liger
    )
    weights = {name: value.cpu() for name, value in weights.items()}
    doubles = {name: value.double() for name, value in weights.items()}
    exact_loss, exact = plain_loss_and_gradients(config, doubles, tokens, torch.float64)
    plain_loss, plain = plain_loss_and_gradients(config, weights, tokens, torch.bfloat16)

    def error(result):
        off = sum(float((result[n].cpu().double() - exact[n].double()).square().sum()) for n in exact)
        return (off / sum(float(exact[n].double().square().sum()) for n in exact)) ** 0.5

    assert error(gradients) <= 2 * error(plain)
    assert abs(loss - exact_loss) <= max(2 * abs(plain_loss - exact_loss), 2e-3 * abs(exact_loss))
