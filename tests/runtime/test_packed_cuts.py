"""Modules with packed weights on tensor ranks: what ranks make of their parts adds up to the whole output."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evenload.cost.memory import layer_parameters
from evenload.cost.units import unit_buffers
from evenload.data.hub import model_from_config
from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.checkpoint.pieces import pieces_of_range
from evenload.runtime.model import packed_cuts, structure
from evenload.runtime.model.hf_model import require_layout
from evenload.runtime.model.tensor_weights import TensorSplit
from evenload.runtime.optim.data_parallel import flatten_units
from evenload.types.layout import even_layout
from reference_training import stage_model, tiny_config
from transformers_version import of_newest

# Older ones norm all heads of Mamba-2 together, and call Jamba's router a linear as any other.
pytestmark = of_newest

MODULES = {
    "qwen3_next": "linear_attn",
    "qwen3_5_text": "linear_attn",
    "bamba": "mamba",
    "granitemoehybrid": "mamba",
    "nemotron_h": "mixer",
    "falcon_h1": "mamba",
    "lfm2": "conv",
    "mamba2": "mixer",
    "jamba": "mamba",
}
"""Which carry a state in the first layer."""
WITH_BIASES = {"bamba": {"mamba_proj_bias": True}, "lfm2": {"conv_bias": True}}


def _module(kind: str, path: str, **place: int) -> nn.Module:
    config = tiny_config(kind, num_hidden_layers=2, **WITH_BIASES.get(kind, {}))
    module = stage_model(config, **place).layers[0].get_submodule(path)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name == "out_proj.bias":
                weight.zero_()  # which is added once, behind the sum
    return module


def _error(kind: str, path: str) -> float:
    """Of the sum of two ranks' outputs, relative to the whole module's."""
    rows = torch.randn(1, 21, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module, parts = _module(kind, path), [_module(kind, path, tp=2, tp_rank=rank) for rank in range(2)]
    sums = []
    if kind == "jamba":  # of whose dt, B and C every rank needs the sum
        module.x_proj.register_forward_hook(lambda *call: sums.append(call[-1]))
        for part in parts:
            part.x_proj.register_forward_hook(lambda *call: sums.append(call[-1]) or sums[0])
    with torch.no_grad():
        whole, outputs = module(rows), [part(rows) for part in parts]
    if sums:
        assert (sums[1] + sums[2] - sums[0]).norm() <= 1e-12 * sums[0].norm()
    return float((sum(outputs) - whole).norm() / whole.norm())


@pytest.mark.parametrize(("kind", "path"), [*MODULES.items(), ("granitemoehybrid", "shared_mlp")])
def test_outputs_of_ranks_add_up_to_the_whole_modules(kind, path):
    assert _error(kind, path) <= 1e-12


MISTAKES = [
    *(("qwen3_next", "linear_attn", name) for name in ("conv1d", "A_log")),
    *(("qwen3_5_text", "linear_attn", name) for name in ("in_proj_qkv", "conv1d", "in_proj_b")),
    *(("falcon_h1", "mamba", name) for name in ("in_proj", "conv1d", "mup_vector", "A_log")),
    ("bamba", "mamba", "in_proj"),
    ("lfm2", "conv", "in_proj"),
    ("jamba", "mamba", "dt_proj"),
    ("granitemoehybrid", "shared_mlp", "input_linear"),
]


@pytest.mark.parametrize(("kind", "path", "name"), MISTAKES)
def test_a_wrong_cut_of_a_weight_shows(monkeypatch, kind, path, name):
    """Packed weights cut as if they were one section, others with their parts in the wrong order."""
    cut, take = packed_cuts.packed_cut, TensorSplit.take

    def mistaken(module):
        found = cut(module)
        if found is None or name not in found.sections:
            return found
        return replace(found, sections={**found.sections, name: Mistaken(found.sections[name])})

    def taken(split, whole):
        if not isinstance(split.sections, Mistaken):
            return take(split, whole)
        sizes = split.sections
        return take(TensorSplit(split.dim, split.ranks - 1 - split.rank, split.ranks, (sum(sizes),)), whole)

    monkeypatch.setattr(structure, "_KNOWN", {})
    monkeypatch.setattr(structure, "packed_cut", mistaken)
    monkeypatch.setattr(TensorSplit, "take", taken)
    assert _error(kind, path) >= 1e-3


class Mistaken(tuple):
    """Sections that are cut wrong."""


@given(
    sections=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    tp=st.integers(1, 3),
    other=st.integers(1, 3),
    dim=st.integers(0, 1),
    shards=st.integers(1, 4),
)
def test_pieces_of_all_ranks_are_the_whole_tensor_once(sections, tp, other, dim, shards):
    """Whatever elements of its part a rank of the data-parallel group has."""
    sizes = tuple(size * tp for size in sections)
    whole = torch.arange(1, 1 + sum(sizes) * other).view(sum(sizes), other)
    whole = whole if dim == 0 else whole.t().contiguous()
    joined = torch.zeros_like(whole)
    for rank in range(tp):
        split = TensorSplit(dim, rank, tp, sizes)
        local = split.take(whole)
        assert local.shape[dim] * tp == whole.shape[dim]
        share = -(-local.numel() // shards)
        for first in range(0, local.numel(), share):
            values = local.flatten()[first : first + share]
            pieces = pieces_of_range(values, first, local.shape, split)
            assert pieces.shape == tuple(whole.shape)
            for (row, column), piece in pieces.pieces.items():
                place = joined[row : row + piece.shape[0], column : column + piece.shape[1]]
                assert not place.any()
                place.copy_(piece)
    assert torch.equal(joined, whole)


def test_a_rank_has_its_heads_of_every_section():
    """[q | k | v] of two heads of keys of 8 and four of values of 6."""
    whole, part = (_module("qwen3_5_text", "linear_attn", **place) for place in ({}, {"tp": 2, "tp_rank": 1}))
    rows = [*range(8, 16), *range(24, 32), *range(44, 56)]
    assert torch.equal(part.in_proj_qkv.weight, whole.in_proj_qkv.weight[rows])
    assert torch.equal(part.conv1d.weight, whole.conv1d.weight[rows])
    assert (part.num_k_heads, part.num_v_heads, part.key_dim, part.conv_dim) == (1, 2, 8, 28)
    assert torch.equal(part.norm.weight, whole.norm.weight)


@pytest.mark.parametrize("kind", MODULES)
def test_a_rank_has_as_many_weights_and_buffers_as_the_cost_model_says(kind):
    config, layout = tiny_config(kind, **WITH_BIASES.get(kind, {})), even_layout(4, tp=2)
    spec = model_from_config(config.to_dict(), kind, 8)
    model = stage_model(config, tp=2)
    for at, count in enumerate(layer_parameters(spec, 2)[list(spec.layers)]):
        weights = dict(model.layers[at].named_parameters())
        gate = weights.get("mlp.shared_expert_gate.weight", torch.empty(0)).numel()  # whole, and counted as its half
        assert sum(weight.numel() for weight in weights.values()) - gate // 2 == count
    held = Counter(buffer.unit for buffer in flatten_units([model], dp=2))
    assert held == unit_buffers(spec, layout, 0)


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        ("qwen3_next", {"linear_num_key_heads": 1}, ConfigError, "linear_num_key_heads of the model is 1"),
        ("qwen3_5_text", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}, ConfigError, "key_heads .* is 3"),
        ("bamba", {"mamba_n_groups": 1}, UnsupportedModelError, "one group of heads in BambaMixer, .*n_groups is 1"),
        ("granitemoehybrid", {"shared_intermediate_size": 49}, ConfigError, "shared_intermediate_size .* is 49"),
        (
            "olmo_hybrid",
            {},
            UnsupportedModelError,
            "states along documents in OlmoHybridGatedDeltaNet, of which no cut",
        ),
        ("kimi_linear", {}, UnsupportedModelError, "carries states along documents in KimiLinearDeltaAttention"),
        ("falcon_h1", {"mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_head": 16}, ConfigError, "n_groups .* is 3"),
    ],
)
def test_what_cannot_be_divided_is_refused_at_start(kind, changes, error, message):
    config = tiny_config(kind, **changes)
    with pytest.raises(error, match=f"parallel.tp is 2.*{message}"):
        require_layout(config, even_layout(4, tp=2))
    require_layout(config, even_layout(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: setattr(module, "in_proj_z", nn.Linear(48, 25)), "in_proj_z.weight of 25 instead of 24"),
        (lambda module: setattr(module, "out_proj", nn.Linear(20, 48)), "out_proj.weight of 20 instead of 24"),
        (lambda module: setattr(module, "more", nn.Linear(48, 3)), "more.weight of 3 instead of 0"),
        (lambda module: setattr(module.norm, "weight", nn.Parameter(torch.ones(24))), "norm.weight of 24 instead of 6"),
        (lambda module: delattr(module, "key_dim"), "has no attribute 'key_dim'"),
    ],
)
def test_a_module_of_another_layout_is_not_cut(change, message):
    module = _module("qwen3_5_text", "linear_attn")
    change(module)
    assert message in packed_cuts.packed_cut(module).refusal


def test_a_norm_of_all_heads_is_not_cut():
    """As transformers' own were before they knew groups."""
    module = _module("bamba", "mamba")
    module.norm.group_size = 96
    assert packed_cuts.packed_cut(module).refusal == "has a norm of all heads of BambaMixer together"
