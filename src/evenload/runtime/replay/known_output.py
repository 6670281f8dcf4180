"""`known_output`: the one function that replay gives to autograd."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def known_output(output: Tensor, backward: Callable[[Tensor], Any], *inputs: Tensor) -> Tensor:
    """`output` as if it were computed from `inputs`, for autograd.

    Args:
        backward: gradient of the output -> those of the inputs (one, or a sequence of as many). Runs once, and what it
            holds is freed when it has run. It must hold the inputs detached. Gradients of weights, of which autograd
            sees nothing, are its own to add.
    """
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
