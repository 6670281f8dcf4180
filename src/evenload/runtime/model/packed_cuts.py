"""Say how modules with packed weights, which transformers' plans leave whole, are cut over tensor-parallel ranks.

A rank runs transformers' own module on its share of the heads: the module's sizes are its share, and of every section
of a packed weight, as they lie one behind the other, it has the part of its heads:

    gated delta rule     [q | k | v] of a projection and of the convolution; in Qwen3-Next's projection heads of keys
                         lie one behind the other, each with its q, k, v and gate: one section
    Mamba-2              [gate | x | B | C | dt] of the projection, [x | B | C] of the convolution, by heads and groups
    Mamba-1              [x | gate] of the projection, by channels; dt, B and C are summed over all channels
    short convolution    [B | C | x] by channels
    feed-forward         [gate | up] by columns

Layouts are known by the names of classes, and weights must have the sizes that a layout says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_USUAL = {**_ATTENTION, "gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
PLANS: Mapping[str, Mapping[str, str]] = {
    "bamba": _USUAL,
    "falcon_h1": _USUAL,
    "granitemoehybrid": _ATTENTION,
    "jamba": _USUAL,
    "lfm2": {**_ATTENTION, "out_proj": "rowwise", "w1": "colwise", "w3": "colwise", "w2": "rowwise"},
    "mamba2": {},
    "nemotron_h": _USUAL,
}
"""Styles of linears, by the last part of their names, in types of models for which transformers has no plan, or one for
experts alone; norms of their heads are of one head each."""


@dataclass(frozen=True)
class PackedCut:
    """Says how a module is cut.

    Args:
        counts: named sizes that must divide by the number of ranks.
        shares: attributes, of it or of modules in it, and their sizes, of which a rank has its share.
        sections: sizes of what lies in the first dimension of a weight, one behind the other, by the name of the
            module in it that has the weight, or of the weight; of a buffer in the last dimension.
        rows: linears in it that are cut by input.
        summed: one of them, of whose sum over ranks each needs all rows; "" = none.
        refusal: why it cannot be cut.
    """

    counts: Mapping[str, int]
    shares: Mapping[str, int]
    sections: Mapping[str, tuple[int, ...]]
    rows: tuple[str, ...]
    summed: str = ""
    refusal: str = ""

    def style(self, linear: str) -> str:
        """Return how a linear in it is cut, in the words of transformers' plans."""
        return "colwise" if linear in self.sections else "rowwise" if linear in self.rows else ""

    def has_part_of(self, weight: str) -> bool:
        """Say whether a weight, by its name in the module, is cut into sections."""
        return _owner_of(weight) in self.sections


def _owner_of(weight: str) -> str:
    return weight.removesuffix(".weight").removesuffix(".bias")


def packed_cut(module: nn.Module) -> PackedCut | None:
    """Return how a module is cut; None = no layout of its class is known."""
    layout = _LAYOUTS.get(type(module).__name__)
    try:
        return None if layout is None else layout(module)
    except AttributeError as error:  # of another transformers
        return PackedCut({}, {}, {}, (), refusal=_other_layout(module, [str(error)]))


def take_share(module: nn.Module, cut: PackedCut, tp: int) -> None:
    """Set a module's sizes to a rank's share of them."""
    for name, size in cut.shares.items():
        path, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(path), attribute, size // tp)


def _cut(
    module: nn.Module,
    counts: Mapping[str, int],
    shares: Mapping[str, int],
    sections: Mapping[str, tuple[int, ...]],
    inputs: Mapping[str, int],
    whole: Mapping[str, int] = {},
    summed: str = "",
) -> PackedCut:
    """Return a cut, with a refusal where the module has weights that the layout does not name, or of other sizes; what
    is `whole` is on every rank, with `inputs` are linears that are cut by them."""
    wrong = []
    for name, weight in module.named_parameters():
        owner = _owner_of(name)
        if owner in inputs:
            size, wanted = (weight.shape[1], inputs[owner]) if weight.ndim > 1 else (0, 0)
        else:
            size, wanted = weight.shape[0], sum(sections.get(owner, (whole.get(owner, 0),)))
        wrong += [f"{name} of {size} instead of {wanted}"] * (size != wanted)
    return PackedCut(counts, shares, sections, tuple(inputs), summed, _other_layout(module, wrong) if wrong else "")


def _other_layout(module: nn.Module, wrong: Sequence[str]) -> str:
    return f"has a {type(module).__name__} of another layout than is known ({', '.join(wrong)})"


def _delta_rule(module: Any) -> PackedCut:
    key, value, key_heads, heads = module.key_dim, module.value_dim, module.num_k_heads, module.num_v_heads
    widths = {"key_dim": key, "value_dim": value, "conv_dim": module.conv_dim}
    sections = {
        "in_proj_qkvz": (2 * key + 2 * value,),
        "in_proj_ba": (2 * heads,),
        "in_proj_z": (value,),
        **dict.fromkeys(("in_proj_qkv", "conv1d"), (key, key, value)),
        **dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), (heads,)),
    }
    counts = {"linear_num_key_heads": key_heads, "linear_num_value_heads": heads}
    shares = {"num_k_heads": key_heads, "num_v_heads": heads, **widths}
    return _cut(module, counts, shares, sections, {"out_proj": value}, {"norm": module.head_v_dim})


def _mamba2(module: Any) -> PackedCut:
    inner, groups, heads = module.intermediate_size, module.n_groups * module.ssm_state_size, module.num_heads
    counts, norm = {"num_heads": heads, "n_groups": module.n_groups}, getattr(module, "norm", None)
    shares = {**counts, "intermediate_size": inner, "conv_dim": module.conv_dim}
    if hasattr(norm, "n_groups"):  # others know how wide a group is
        shares["norm.n_groups"] = module.n_groups
    is_of_groups = getattr(norm, "group_size", 0) * module.n_groups == inner or "norm.n_groups" in shares
    sections = {
        **dict.fromkeys(("in_proj", "mup_vector"), (inner, inner, groups, groups, heads)),
        **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
        "conv1d": (inner, groups, groups),
        "norm": (inner,),
    }
    cut, name = _cut(module, counts, shares, sections, {"out_proj": inner}), type(module).__name__
    if module.n_groups == 1:
        return replace(cut, refusal=f"has one group of heads in {name}, which read the same B and C (n_groups is 1)")
    if norm is not None and [*norm.parameters()] and not is_of_groups:
        return replace(cut, refusal=f"has a norm of all heads of {name} together")
    return cut


def _mamba1(module: Any) -> PackedCut:
    inner, states = module.intermediate_size, module.ssm_state_size
    sections = {"in_proj": (inner, inner), **dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), (inner,))}
    whole = {"dt_layernorm": module.time_step_rank, "b_layernorm": states, "c_layernorm": states}
    counts, shares = {"channels of Mamba": inner}, {"intermediate_size": inner}
    return _cut(module, counts, shares, sections, {"out_proj": inner, "x_proj": inner}, whole, "x_proj")


def _short_convolution(module: Any) -> PackedCut:
    width = module.out_proj.in_features
    return _cut(module, {"hidden_size": width}, {}, {"in_proj": (width,) * 3, "conv": (width,)}, {"out_proj": width})


def _gated(module: Any) -> PackedCut:
    width, sections = module.hidden_size, {"input_linear": (module.hidden_size,) * 2}
    return _cut(module, {"shared_intermediate_size": width}, {}, sections, {"output_linear": width})


_LAYOUTS: Mapping[str, Callable[[Any], PackedCut]] = {
    "Qwen3NextGatedDeltaNet": _delta_rule,
    "Qwen3_5GatedDeltaNet": _delta_rule,
    "Qwen3_5MoeGatedDeltaNet": _delta_rule,
    "BambaMixer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "Mamba2Mixer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
    "JambaMambaMixer": _mamba1,
    "Lfm2ShortConv": _short_convolution,
    "GraniteMoeHybridMLP": _gated,
}
