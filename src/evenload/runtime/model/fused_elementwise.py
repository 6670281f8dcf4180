"""Rotary embedding and the gated activation (SwiGLU) as one kernel each, forward and backward.

transformers writes both as chains of small operations (a rotation is five kernels forward and about ten backward, twice
a layer), each a pass over the pack: two thirds of a layer's launches. Here they are four operators, `evenload::rotate`,
`rotate_back`, `gated` and `gated_back`. On a GPU each is compiled once by torch with shapes left open, so that packs of
any size share a kernel; elsewhere they are the same operations as transformers', without its copies.

Equal but for rounding: a kernel rounds a result once where a chain rounds after each step. Without a compiler results
of float32 and float64 are the same. On by default where it pays, on GPUs (`train.fused_elementwise`).

Modules stay transformers' own: a feed-forward block gets another `forward`, an attention its own with another function
under the name `apply_rotary_pos_emb`. The backward reads the given tensors, which are the activation store's, and
writes none of them (Liger's SwiGLU does). Blocks of experts and Gemma's GELU stay as they are.

Price: compiling takes some seconds at the first pack of a process, in calibration where there is one.
"""

import functools
import types
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from evenload.errors import ConfigError
from evenload.types.architectures.architecture import Architecture

_ROTARY = "apply_rotary_pos_emb"
_SILU = ("SiLU", "SiLUActivation")


def _halves_swapped(rows: Tensor) -> Tensor:
    """[a, b] -> [-b, a] of the halves of every row. As indices, which a compiler puts into the kernel around it."""
    halves = rows.unflatten(-1, (2, -1)).flip(-2)
    signs = torch.arange(-1, 2, 2, dtype=rows.dtype, device=rows.device)
    return (halves * signs[:, None]).flatten(-2)


def rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., D] -> the same, each row's two halves turned by its angles; cos and sin [..., D], of any precision."""
    return (rows * cos + _halves_swapped(rows) * sin).to(rows.dtype)


def rotate_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the rows, from that of `rotate`."""
    return (grad * cos - _halves_swapped(grad * sin)).to(grad.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, [..., n] each."""
    return nn.functional.silu(gate).mul_(up)


def gated_back(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, from that of `gated`."""
    return torch.ops.aten.silu_backward(grad * up, gate), nn.functional.silu(gate).mul_(grad)


_PLAIN: dict[str, tuple[str, Callable[..., Any]]] = {
    "rotate": ("(Tensor rows, Tensor cos, Tensor sin) -> Tensor", rotate),
    "rotate_back": ("(Tensor grad, Tensor cos, Tensor sin) -> Tensor", rotate_back),
    "gated": ("(Tensor gate, Tensor up) -> Tensor", gated),
    "gated_back": ("(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)", gated_back),
}


@functools.cache
def compiled(name: str) -> Callable[..., Any]:
    """The operator of a name as torch compiles it, for any shape."""
    return torch.compile(_PLAIN[name][1], dynamic=True, fullgraph=True)


def _shaped(name: str) -> Callable[..., Any]:
    """On the meta device: tensors shaped as those that the kernel writes."""
    if name == "gated_back":
        return lambda grad, gate, up: (torch.empty_like(gate), torch.empty_like(up))
    return lambda rows, *_: torch.empty_like(rows)


def _register() -> None:
    for name, (schema, plain) in _PLAIN.items():
        torch.library.define(f"evenload::{name}", schema)
        torch.library.impl(f"evenload::{name}", "CPU")(plain)
        torch.library.impl(f"evenload::{name}", "CUDA")(lambda *args, name=name: compiled(name)(*args))
        torch.library.impl(f"evenload::{name}", "Meta")(_shaped(name))


_register()


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.ops.evenload.rotate(rows, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return torch.ops.evenload.rotate_back(grad, *ctx.saved_tensors), None, None


class _Gating(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.ops.evenload.gated(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return torch.ops.evenload.gated_back(grad, *ctx.saved_tensors)


def _rotated_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """In the place of transformers' function: q [1, H, T, D], k [1, G, T, D], cos and sin [1, T, D]."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)  # type: ignore[return-value]


class FusedGating(nn.Module):
    """Mixed into transformers' feed-forward block by changing the class of the model's own module."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, rows: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(_Gating.apply(self.gate_proj(rows), self.up_proj(rows)))


def require_compiler(device: torch.device) -> None:
    """Refuse a GPU without what torch compiles its kernels with (`ConfigError`), at start and not at the first pack:
    the package triton, and a C compiler, which it calls."""
    if device.type != "cuda":
        return
    if find_spec("triton") is None:
        raise ConfigError(
            "train.fused_elementwise compiles kernels for this GPU, as is the default on GPUs, and needs the package "
            "triton, which is not installed; install it, or set train.fused_elementwise = false"
        )
    rows = torch.zeros(4, 8, device=device)
    try:
        for name in _PLAIN:
            compiled(name)(rows, rows, rows) if name != "gated" else compiled(name)(rows, rows)
    except Exception as error:  # of whatever kind a compiler's are
        raise ConfigError(
            f"train.fused_elementwise compiles kernels for this GPU, as is the default on GPUs, and that fails "
            f"({' '.join(str(error).split())[:300]}); triton needs a C compiler, such as gcc; install it, or set "
            "train.fused_elementwise = false"
        ) from error


def fuse_elementwise(modules: Iterable[nn.Module | None], architecture: Architecture) -> int:
    """Fuse the rotations and gated activations inside of modules, in place; how many attentions and feed-forward blocks
    were not yet."""
    count = 0
    for module in (inner for outer in modules if outer is not None for inner in outer.modules()):
        own = type(module)
        if own.__name__ == f"{architecture.classes}MLP" and type(getattr(module, "act_fn", None)).__name__ in _SILU:
            mixed = (FusedGating, own)
            forward: dict[str, Any] = {}
        elif own.__name__ == f"{architecture.classes}Attention" and _ROTARY in own.forward.__code__.co_names:
            mixed = (own,)
            forward = {"forward": _with_global(own.forward, _ROTARY, _rotated_pair)}
        else:
            continue
        module.__class__ = type(f"Fused{own.__name__}", mixed, forward)
        count += 1
    return count


def _with_global(function: Any, name: str, value: object) -> types.FunctionType:
    """The same function with another value under one name of its module, which stays as it is for everybody else."""
    copied = types.FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
