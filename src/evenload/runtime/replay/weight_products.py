"""Weight gradients of linear layers, at once or deferred to a later action (zero bubble: I and W; Qi et al. 2023, §2).

A linear layer's backward is two products of the same size: the gradient of its input, which the layer below waits for,
and that of its weight, which nobody waits for before the optimizer. `WeightProducts` keeps the operands of the second
one for a whole backward pack: the linear's input and the gradient of its output, shared by layers with one input (q, k
and v; gate and up). `known_output` is the one function that replay gives to autograd.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evenload.runtime.replay.held_bytes import HeldBytes, own_memory

_WIDE_SUM = "aten::addmm.dtype_out"


def known_output(output: Tensor, backward: Callable[[Tensor], Any], *inputs: Tensor) -> Tensor:
    """`output` as if it were computed from `inputs`, for autograd. `backward` maps its gradient to those of the inputs
    (one, or a sequence), runs once, and must hold the inputs detached; gradients of weights are its own to add."""
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


def add_weight_gradient(weight: Tensor, bias: Tensor | None, input_rows: Tensor, grad_rows: Tensor) -> None:
    """Add to `main_grad` of weight [out, in] and bias [out], from input [T, in] and the output's gradient [T, out]."""
    add_product(weight.main_grad, grad_rows, input_rows)  # type: ignore[attr-defined]
    _add_bias_gradient(bias, grad_rows)


def add_transposed_gradient(weight: Tensor, bias: Tensor | None, input_rows: Tensor, grad_rows: Tensor) -> None:
    """As `add_weight_gradient`, of a weight [in, out]."""
    add_product(weight.main_grad, input_rows, grad_rows)  # type: ignore[attr-defined]
    _add_bias_gradient(bias, grad_rows)


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


def _add_bias_gradient(bias: Tensor | None, grad_rows: Tensor) -> None:
    if bias is not None:
        bias.main_grad += grad_rows.sum(0, dtype=bias.main_grad.dtype)  # type: ignore[attr-defined]


def is_frozen(weight: Tensor) -> bool:
    """Not trained (the model's own weights under LoRA): it has no `main_grad`."""
    return getattr(weight, "main_grad", None) is None


class WeightProducts:
    """The products one backward pack has deferred."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._products: list[tuple[AddRows, Tensor, Tensor]] = []
        self._num_bytes = 0
        self._kept: dict[tuple, Tensor] = {}

    def defer(self, add: AddRows, input_rows: Tensor, grad_rows: Tensor) -> None:
        """Call `add(input_rows, grad_rows)` later. The caller must not change the rows afterwards, and `add` holds no
        activations itself: they would not be counted."""
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
