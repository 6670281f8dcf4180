"""Let fused kernels compute norms, rotary embedding, gated activation and cross-entropy (`train.kernels`): Liger's, and
torch's own RMSNorm, an operator that is launched without Python (docs/decisions/14-gpu-path.md).

A module is known by what it computes, not by its name: on a few rows in bfloat16 on the CPU its own code has to give,
to the bit, what a formula here gives for which Liger has a kernel. All others stay plain torch, and so do experts and
routers, which replay runs itself. What the kernels write into (Liger 0.8):

    RMSNorm           nothing: a residual sum may have given its gradient to others, too
    rotary embedding  copies of queries and keys, as the products themselves are recorded; in backward their gradients,
                      which attention has made and nobody else reads
    gated activation  in backward gate and up, which become their gradients: `ActivationStore.read` allows it
    cross-entropy     logits, which become their gradient

None adds by atomics, so each gives the same bits again (`train.deterministic`). Liger is imported by its first use, in
the process that computes: the import asks CUDA for its devices, after which no process may be forked.
"""

import copy
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, rms_norm, silu

_WIDEST = 1 << 16  # columns: a kernel holds a whole row
_ROTARY = "apply_rotary_pos_emb"  # the function in the modules of transformers' attentions


def use_liger(layers: Mapping[int, nn.Module], last: Sequence[nn.Module], rotary: Mapping[int, Any]) -> tuple[str, ...]:
    """Let Liger's kernels run those modules that they can, in place; return what these compute.

    Args:
        layers: decoder layers by index, as transformers made them; last: modules before the head.
        rotary: of every layer cosines and sines of a few positions, [1, n, R] each; empty = the model has none.
    """
    found: dict[str, None] = {}
    for index, part in [*layers.items(), *((-1, one) for one in last)]:
        for module in part.modules():
            for name, forward in (
                ("RMSNorm", _norm_forward(module)),
                ("gated activation", _gated_forward(module)),
                ("rotary embedding", _rotating_forward(module, *rotary[index]) if index in rotary else None),
            ):
                if forward is not None:
                    module.forward, found[name] = types.MethodType(forward, module), None
    return tuple(found)


def _gives(module: nn.Module, rows: Tensor, expected: Tensor, **parts: dict[str, Any]) -> bool:
    """Try a module's own code, with other parameters or modules in it; the module itself stays as it is."""
    twin = copy.copy(module)
    twin.__dict__.update(parts)
    return _is_same(type(module).forward(twin, rows), expected)


def _is_same(result: Tensor, expected: Tensor) -> bool:
    return result.dtype == expected.dtype and torch.equal(result, expected)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.bfloat16)


def _norm_forward(module: nn.Module) -> Callable[..., Tensor] | None:
    weight, parts = module._parameters.get("weight"), (*module._parameters, *module._modules, *module._buffers)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    takes_rows_alone = len(inspect.signature(type(module).forward).parameters) == 2
    is_fitting = weight is not None and weight.ndim == 1 and weight.shape[0] <= _WIDEST
    if parts != ("weight",) or not is_fitting or eps is None or not takes_rows_alone:
        return None
    # Of some rows eps is a large part.
    rows, values = torch.logspace(-3, 0, 8)[:, None].bfloat16() * _random(8, 64), _random(64)
    normed = rows.float() * torch.rsqrt(rows.float().square().mean(-1, keepdim=True) + eps)
    # What is added to the weight, and whether rows are rounded before ("llama") or after they are multiplied with it.
    for offset, casting in ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma")):
        x, w = (normed.bfloat16(), values) if casting == "llama" else (normed, values.float())
        if _gives(module, rows, ((offset + w) * x).bfloat16(), _parameters={"weight": values}):
            if not offset:
                return lambda self, rows: rms_norm(rows, self.weight.shape, self.weight, eps)
            # torch's would take 1 + weight in the rows' precision.
            function = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
            return lambda self, rows: function.apply(rows, self.weight, eps, offset, casting, False)  # not in place
    return None


def _gated_forward(module: nn.Module) -> Callable[..., Tensor] | None:
    linears, act = {"gate_proj": nn.Identity(), "up_proj": nn.Tanh(), "down_proj": nn.Sigmoid()}, "act_fn"
    if module._modules.keys() != {*linears, act} or module.gate_proj.weight.shape[0] > _WIDEST:  # type: ignore[union-attr]
        return None
    rows = 3 * _random(8, 64)
    for activation, file, name in (
        (silu, "swiglu", "LigerSiLUMulFunction"),
        (partial(gelu, approximate="tanh"), "geglu", "LigerGELUMulFunction"),
    ):
        expected = (activation(rows) * rows.tanh()).sigmoid()
        if _gives(module, rows, expected, _modules=linears | {act: module._modules[act]}):
            function = getattr(import_module(f"liger_kernel.ops.{file}"), name)
            return lambda self, rows: self.down_proj(function.apply(self.gate_proj(rows), self.up_proj(rows)))
    return None


def _rotating_forward(module: nn.Module, cos: Tensor, sin: Tensor) -> Callable[..., Any] | None:
    """Return an attention's own code, which finds Liger's rotary embedding in place of transformers'."""
    forward, dim = type(module).forward, getattr(module, "head_dim", None)
    if not inspect.isfunction(forward) or _ROTARY not in forward.__code__.co_names or dim is None:
        return None
    if [*inspect.signature(forward.__globals__[_ROTARY]).parameters][:4] != ["q", "k", "cos", "sin"]:
        return None
    # Liger reads the first halves, and leaves the rest of a head as it is.
    cos, sin, width = cos.cpu(), sin.cpu(), cos.shape[-1]
    if width > dim or not all(torch.equal(*t.chunk(2, dim=-1)) for t in (cos, sin)):
        return None
    heads = [_random(1, count, cos.shape[1], dim).to(next(module.parameters()).dtype) for count in (2, 1)]
    for given, result in zip(heads, forward.__globals__[_ROTARY](*heads, cos, sin), strict=True):
        first, second = given[..., :width].chunk(2, dim=-1)
        turned = given[..., :width] * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
        if not _is_same(result, torch.cat((turned.to(given.dtype), given[..., width:]), dim=-1)):
            return None
    names = forward.__globals__ | {_ROTARY: _rotate}
    changed = types.FunctionType(forward.__code__, names, None, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    # Copied once, into the order of memory that the kernel needs.
    copies = (t.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) for t in (q, k))
    return import_module("liger_kernel.ops.rope").LigerRopeFunction.apply(*copies, cos, sin)


def cross_entropy(logits: Tensor, targets: Tensor, denominator: float, *, trains: bool) -> Tensor:
    """Return every row's loss over `denominator`, fp32[R], 0 where a target (int64[R]) is -100. The kernel overwrites
    `logits` [R, V], where it `trains` by the gradient of the losses' sum."""
    liger = import_module("liger_kernel.ops.cross_entropy")
    losses = torch.zeros(logits.shape[0], dtype=torch.float32, device=logits.device)
    # Liger's function around it waits for the GPU to count targets, and rounds losses to the logits' precision.
    liger.liger_cross_entropy_kernel[(logits.shape[0],)](
        X_ptr=logits, X_stride=logits.stride(0), Y_ptr=targets, Y_stride=targets.stride(0), n_cols=logits.shape[1],
        loss_ptr=losses, loss_stride=1, n_non_ignore=denominator, reduction="mean", ignore_index=-100,
        HAS_GRADIENTS=trains,
        BLOCK_SIZE=min(liger.MAX_FUSED_SIZE, 1 << (logits.shape[1] - 1).bit_length()), num_warps=32,
        # A cap, weights of token ids, other losses and accuracy: not used.
        softcap=None, HAS_SOFTCAPPING=False,
        weight_ptr=None, HAS_WEIGHT=False, weight_sum=0.0, sum_non_ignore_weight=denominator, lse_square_scale=0.0,
        label_smoothing=0.0, z_loss_ptr=None, RETURN_Z_LOSS=False, token_accuracy_ptr=None, token_accuracy_stride=0,
        RETURN_TOKEN_ACCURACY=False, predicted_tokens_ptr=None, predicted_tokens_stride=0,
        RETURN_PREDICTED_TOKENS=False,
    )  # fmt: skip
    return losses
