"""`ReplayLinear`: a linear layer whose output is recorded in forward and stands in for the product in backward."""

import functools

from torch import Tensor, nn

from evenload.runtime.replay.known_output import known_output
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.replay.weight_products import WeightProducts, add_now_or_later, add_weight_gradient


class ReplayLinear(nn.Linear):
    """An `nn.Linear` whose output is recorded and read back. Instances are made by changing the class of
    the model's own modules, so parameters, names and hooks stay untouched."""

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
                state.store.record(self.site, output, is_product=True, is_own_rows=self.has_own_rows)
            return output[None]
        if self.output_unused:
            # Nothing in the layer's backward reads this value, only its shape.
            output = input.new_zeros(()).expand(self.num_rows(input), self.out_features)
        else:
            output = self.read_or_remake(input[0].detach())
        return self.known(input, output[None])

    def num_rows(self, input: Tensor) -> int:
        """Rows of the output."""
        return input.shape[1]

    def product(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return nn.functional.linear(rows, self.weight, self.bias)

    def read_or_remake(self, rows: Tensor) -> Tensor:
        """The product of a backward pack's rows."""
        return self.replay.read_or_remake(self.site, self.product, rows)

    def known(self, input: Tensor, output: Tensor) -> Tensor:
        """The output of a backward pack, for autograd."""
        return linear_with_known_output(input, self.weight, self.bias, output, self.replay.products)


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
