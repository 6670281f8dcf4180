"""`ReplayLinear`: a linear layer whose output is recorded in forward and stands in for the product in backward.

`ReplayConv1D` is the same for GPT-2's matrices, which are stored [in, out].
"""

import functools

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from evenload.runtime.replay.known_output import known_output
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.replay.weight_products import (
    WeightProducts,
    add_now_or_later,
    add_transposed_gradient,
    add_weight_gradient,
)


class _RecordedLinear:
    """A linear whose output is recorded and read back. Instances are made by changing the class of the model's own
    modules, so parameters, names and hooks stay untouched."""

    replay: ReplayState
    site: tuple[int, str]
    output_unused: bool
    has_own_rows = False

    def forward(self, input: Tensor) -> Tensor:
        """[1, T, in] -> [1, T, out]."""
        state = self.replay
        assert state.store is not None
        if state.mode == "record":
            output = self.product(input[0])
            if not self.output_unused:
                state.store.record_product(self.site, output, is_own_rows=self.has_own_rows)
            return output[None]
        if self.output_unused:
            # Nothing in the layer's backward reads this value, only its shape.
            output = input.new_zeros(()).expand(self.num_rows(input), self.num_columns)
        else:
            output = self.read_or_remake(input[0].detach())
        return self.known(input, output[None])

    def num_rows(self, input: Tensor) -> int:
        """Rows of the output."""
        return input.shape[1]

    @property
    def num_columns(self) -> int:
        """Columns of the output."""
        raise NotImplementedError

    def product(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        raise NotImplementedError

    def read_or_remake(self, rows: Tensor) -> Tensor:
        """The product of a backward pack's rows."""
        return self.replay.read_or_remake(self.site, self.product, rows)

    def known(self, input: Tensor, output: Tensor) -> Tensor:
        """The output of a backward pack, for autograd."""
        raise NotImplementedError


class ReplayLinear(_RecordedLinear, nn.Linear):
    """An `nn.Linear` under replay."""

    @property
    def num_columns(self) -> int:
        return self.out_features

    def product(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self.weight, self.bias)

    def known(self, input: Tensor, output: Tensor) -> Tensor:
        return linear_with_known_output(input, self.weight, self.bias, output, self.replay.products)


class ReplayConv1D(_RecordedLinear, Conv1D):  # type: ignore[inconsistent-inheritance]
    """transformers' `Conv1D`, a linear whose weight is [in, out], under replay."""

    @property
    def num_columns(self) -> int:
        return self.nf

    def product(self, rows: Tensor) -> Tensor:
        return torch.addmm(self.bias, rows, self.weight)

    def known(self, input: Tensor, output: Tensor) -> Tensor:
        weight, bias, products, rows = self.weight, self.bias, self.replay.products, input.detach()

        def backward(grad: Tensor) -> Tensor:
            add = functools.partial(add_transposed_gradient, weight, bias)
            add_now_or_later(products, weight, add, rows.flatten(0, -2), grad.flatten(0, -2))
            return grad @ weight.t()

        return known_output(output, backward, input)


def linear_with_known_output(
    input: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, products: WeightProducts | None = None
) -> Tensor:
    """`output` as if it were computed from `input`, for autograd; weight gradients go to `main_grad`, or wait for W in
    `products`."""
    rows = input.detach()

    def backward(grad: Tensor) -> Tensor:
        add = functools.partial(add_weight_gradient, weight, bias)
        add_now_or_later(products, weight, add, rows.flatten(0, -2), grad.flatten(0, -2))
        return grad @ weight

    return known_output(output, backward, input)
