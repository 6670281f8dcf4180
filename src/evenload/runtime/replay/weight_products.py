"""Add weight gradients of linear layers, at once or in a later action (zero bubble: I and W; Qi et al. 2023, §2).

`WeightProducts` keeps the operands of weight gradients for a whole backward pack: the linear's input, once for linears
that share it (q, k and v; gate and up), and the gradient of its output. `known_output` is the one function that replay
gives to autograd.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evenload.runtime.replay.held_bytes import HeldBytes, own_memory

_WIDE_SUM = "aten::addmm.dtype_out"


def known_output(output: Tensor, backward: Callable[[Tensor], Any], *inputs: Tensor) -> Tensor:
    """Return `output` as if it were computed from `inputs`, for autograd. `backward` maps its gradient to those of the
    inputs (one, or a sequence), runs once, must hold the inputs detached, and adds gradients of weights itself."""
    return _KnownOutput.apply(output, backward, *inputs)  # type: ignore[return-value]


class _KnownOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output: Tensor, backward: Callable[[Tensor], Any], *inputs: Tensor) -> Tensor:
        ctx.backward_once = backward
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        backward, ctx.backward_once = ctx.backward_once, None
        grads = backward(grad)
        return None, None, *(grads if isinstance(grads, Sequence) else (grads,))


AddRows = Callable[[Tensor, Tensor], None]
"""Adds a weight gradient from (input rows, rows of the output's gradient)."""


def add_weight_gradient(
    weight: Tensor, bias: Tensor | None, input_rows: Tensor, grad_rows: Tensor, *, is_transposed: bool = False
) -> None:
    """Add to `main_grad` of weight [out, in] ([in, out] where transposed) and bias [out], from input [T, in] and the
    output's gradient [T, out]."""
    left, right = (input_rows, grad_rows) if is_transposed else (grad_rows, input_rows)
    add_product(weight.main_grad, left, right)  # type: ignore[attr-defined]
    if bias is not None:
        bias.main_grad += grad_rows.sum(0, dtype=bias.main_grad.dtype)  # type: ignore[attr-defined]


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left`ᵀ · `right` to `total`, which may be wider (fp32 sums of bf16 products). A GPU sums in the width of
    `total` and rounds nothing in between; elsewhere the product of a pack is rounded first, and takes memory."""
    if total.dtype == right.dtype:
        total.addmm_(left.t(), right)
    elif _sums_wider(total.device.type):
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)  # type: ignore[no-matching-overload]
    else:
        total += left.t() @ right


def _sums_wider(device_type: str) -> bool:
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(_WIDE_SUM, key)


def is_frozen(weight: Tensor) -> bool:
    """Say whether a weight is not trained (the model's own under LoRA): it has no `main_grad`."""
    return getattr(weight, "main_grad", None) is None


class WeightProducts:
    """Keeps the products that one backward pack has deferred."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._products: list[tuple[AddRows, Tensor, Tensor]] = []
        self._num_bytes = 0
        self._kept: dict[tuple, Tensor] = {}

    def defer(self, add: AddRows, input_rows: Tensor, grad_rows: Tensor) -> None:
        """Call `add(input_rows, grad_rows)` later; rows must not change, and `add` must hold no activations itself."""
        self._products.append((add, self._keep(input_rows), self._keep(grad_rows)))

    @torch.no_grad()
    def add_all(self) -> None:
        for add, input_rows, grad_rows in self._products:
            add(input_rows, grad_rows)
        self._products.clear()
        self._kept.clear()
        self._held.count("weight_gradient_inputs", -self._num_bytes)
        self._num_bytes = 0

    def _keep(self, rows: Tensor) -> Tensor:
        rows = own_memory(rows)
        # Alive tensors have addresses of their own, so an equal address is the same tensor.
        key = (rows.data_ptr(), rows.shape, rows.stride())
        if key in self._kept:
            return self._kept[key]
        self._kept[key] = rows
        self._num_bytes += rows.nbytes
        self._held.count("weight_gradient_inputs", rows.nbytes)
        return rows


def add_now_or_later(
    products: WeightProducts | None, weight: Tensor, add: AddRows, input_rows: Tensor, grad_rows: Tensor
) -> None:
    """Add a weight's gradient, or defer it where products are kept for W; a frozen weight has none."""
    if is_frozen(weight):
        return
    if products is None:
        add(input_rows, grad_rows)
    else:
        products.defer(add, input_rows, grad_rows)
