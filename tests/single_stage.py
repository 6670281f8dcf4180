"""One stage that holds the whole model, run pack by pack without executor or processes."""

import itertools

import torch

from evenload.attention.range_attention import select_backend
from evenload.runtime.hf_model import build_stage_model
from evenload.runtime.parameter_units import flatten_units
from evenload.runtime.recipes import attention_soft_cap
from evenload.runtime.stage import PackTokens, PipelineStage
from evenload.runtime.store import ActivationStore
from reference_training import balance_factor, plain_loss_and_gradients, relative_error


def pack_tokens(ranges, tokens):
    """Collate by hand: the slow, obvious way. Tokens beyond a document's end are padding."""
    ids, targets, positions = [], [], []
    for doc, start, stop in ranges:
        for t in range(start, stop):
            ids.append(tokens[doc][t].item() if t < len(tokens[doc]) else 0)
            targets.append(tokens[doc][t + 1].item() if t + 1 < len(tokens[doc]) else -100)
            positions.append(t)
    return PackTokens(tuple(ranges), *(torch.tensor(x) for x in (ids, targets, positions)))


def cut_documents(lengths, cuts):
    """Slices of every document at the given fractions; ascending."""
    slices = {}
    for doc, n in enumerate(lengths):
        edges = sorted({0, n, *(round(c * n) for c in cuts)})
        slices[doc] = list(itertools.pairwise(edges))
    return slices


def packs_of(lengths, cuts, budget, *, last_first):
    """Greedy packs of at most `budget` tokens (or one slice), at most one slice of a document each."""
    packs, current, size = [], [], 0
    for doc, pieces in cut_documents(lengths, cuts).items():
        for start, stop in reversed(pieces) if last_first else pieces:
            if current and (size + stop - start > budget or current[-1][0] == doc):
                packs.append(current)
                current, size = [], 0
            current.append((doc, start, stop))
            size += stop - start
    return [*packs, current]


def run_single_stage(config, dtype, tokens, forward, backward):
    """Loss, gradients and the store after all forwards, then all backwards."""
    model = build_stage_model(
        config,
        layers=(0, config.num_hidden_layers),
        dtype=dtype,
        device=torch.device("cpu"),
        weights=None,
        seed=3,
        router_aux_loss_coef=balance_factor(config),
    )
    buffers = flatten_units(model, dp=1)
    weights = {n: p.detach().clone() for b in buffers for n, p in zip(b.names, b.parameters, strict=True)}
    backend = select_backend("auto", "cpu", attention_soft_cap(config))
    stage = PipelineStage(model, backend)
    stage.begin_step({d: len(t) for d, t in tokens.items()})
    stored = {d: max(stop for pack in forward for doc, _, stop in pack if doc == d) for d in tokens}
    store = ActivationStore(stored, [tuple(p) for p in backward])
    labels = sum(len(t) - 1 for t in tokens.values())
    for pack in forward:
        stage.forward(pack_tokens(pack, tokens), None, store)
    loss = sum(stage.backward(pack_tokens(pack, tokens), None, store, labels)[1].item() for pack in backward)
    store.check_empty()
    gradients = {n: p.main_grad.clone() for b in buffers for n, p in zip(b.names, b.parameters, strict=True)}
    return loss, gradients, weights, store


def assert_equals_plain(config, dtype, tokens, forward, backward, tolerance):
    loss, gradients, weights, _ = run_single_stage(config, dtype, tokens, forward, backward)
    plain_loss, plain = plain_loss_and_gradients(config, weights, tokens, dtype)
    assert abs(loss - plain_loss) <= tolerance * abs(plain_loss)
    assert set(gradients) == set(plain)
    for name, gradient in gradients.items():
        assert relative_error(gradient, plain[name]) <= tolerance, name
