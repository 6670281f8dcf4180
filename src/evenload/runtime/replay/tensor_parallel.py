"""Tensor parallelism of unmodified decoder layers: linears on a rank's part of their weights, under replay.

    norm, residual     own rows (sequence parallel)
    q k v, gate up     gather the block's input ─► all rows, own columns (weights cut by output)
    attention          all rows, own heads
    o, down            all rows, own inputs (weights cut by input) ─► sum and scatter ─► own rows

Forward moves a layer's hidden states 4 times; backward 6 times, because a block's input is gathered again for the
weight gradients instead of being kept (Korthikanti et al. 2022, §4.2). What is recorded is what one rank has: own rows
of the layer's input and of what o (and down) return, own columns of the rest, so all of it falls by tp.

A backward split into I and W keeps own rows too, of inputs and of gradients, and gathers them again in W.

Layers stay transformers' own: the two blocks of a layer get a hook that gathers, and the linears recorded by replay
become `ColumnLinear` or `RowLinear` by their names. Gradients of what every rank holds whole (norms, biases behind a
sum) are partial, of own rows or own heads; `data_parallel` sums them over the group. Why not DTensor: docs/decisions/
0020. Every rank of the group runs the same actions on the same packs, so all its transfers are in one order.
"""

import functools

import torch
from torch import Tensor, nn

from evenload.runtime.comm.tensor_group import RowExchange
from evenload.runtime.model.tensor_weights import adapter_of, linear_kind
from evenload.runtime.replay.known_output import known_output
from evenload.runtime.replay.linear import ReplayLinear
from evenload.runtime.replay.state import ReplayState, TensorRows
from evenload.runtime.replay.weight_products import add_now_or_later, add_weight_gradient, is_frozen
from evenload.types.architectures.architecture import Architecture


def make_tensor_parallel(layer: nn.Module, layer_index: int, state: ReplayState, architecture: Architecture) -> None:
    """Turn a replayable layer's linears into those of a part of their weights, in place. Every linear's name is known:
    `tensor_weights.require_tensor_parallel` has refused other models."""
    for name, module in layer.named_modules():
        if isinstance(module, ReplayLinear):
            is_row = linear_kind(name) in architecture.row_linears
            assert is_row or linear_kind(name) in architecture.column_linears, f"{name} is cut in no known way"
            module.__class__ = RowLinear if is_row else ColumnLinear
        elif adapter_of(name, "lora_A", architecture.row_linears):
            module.register_forward_hook(functools.partial(_scatter_output, state))
    for name in architecture.blocks:
        block: nn.Module = getattr(layer, name)
        block.register_forward_pre_hook(functools.partial(_gather_input, state), with_kwargs=True)


def _gather_input(state: ReplayState, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A block gets all rows of its input [1, n, hidden] -> [1, T, hidden]."""
    pack = state.tensor_rows
    assert pack is not None
    own: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    pack.block_input, pack.block_key = own.detach()[0], object()
    gathered = gather_rows(own.squeeze(0), pack.rows)[None]
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": gathered}
    return (gathered, *args[1:]), kwargs


def _scatter_output(state: ReplayState, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """An adapter's thin product [1, T, rank], partial sums, -> own rows [1, n, rank], as those of its linear."""
    assert state.tensor_rows is not None
    partial, rows = output.squeeze(0), state.tensor_rows.rows
    return known_output(rows.sum_scatter(partial.detach()), rows.gather, partial)[None]


class ColumnLinear(ReplayLinear):
    """All rows times own columns of the output: as any recorded linear, but for what waits for W."""

    def known(self, input: Tensor, output: Tensor) -> Tensor:
        state, pack = self.replay, self.replay.tensor_rows
        assert pack is not None
        if state.products is None:
            return super().known(input, output)
        weight, bias, products, own_input = self.weight, self.bias, state.products, pack.block_input
        assert own_input is not None
        again, key = pack.again, pack.block_key

        def add(own_rows: Tensor, grad_rows: Tensor) -> None:
            add_weight_gradient(weight, bias, again(own_rows, key), grad_rows)

        def backward(grad: Tensor) -> Tensor:
            add_now_or_later(products, weight, add, own_input, grad.flatten(0, -2))
            return grad @ weight

        return known_output(output, backward, input)


class RowLinear(ReplayLinear):
    """Own inputs of all rows [1, T, in / tp] -> [1, n, out]: summed over the group, every rank keeps its rows."""

    has_own_rows = True

    def num_rows(self, input: Tensor) -> int:
        return self._pack.rows.num_own

    def product(self, rows: Tensor) -> Tensor:
        return self._sum_product(rows, self._pack.rows)

    @torch.no_grad()
    def read_or_remake(self, rows: Tensor) -> Tensor:
        state, pack = self.replay, self._pack
        assert state.store is not None
        if state.remade is None or state.kept is None:
            return super().read_or_remake(rows)
        exchange, own_remade, own_kept = pack.remade(state.store)
        made = self._sum_product(rows[state.remade], exchange)
        output = made.new_empty(pack.rows.num_own, made.shape[1])
        output[own_remade], output[own_kept] = made, state.store.read(self.site, state.kept_ranges)
        return output

    def known(self, input: Tensor, output: Tensor) -> Tensor:
        weight, bias, products = self.weight, self.bias, self.replay.products
        rows, exchange, again, key = input.detach()[0], self._pack.rows, self._pack.again, object()

        def add_later(input_rows: Tensor, own_grad: Tensor) -> None:
            add_weight_gradient(weight, None, input_rows, again(own_grad, key))

        def backward(grad: Tensor) -> Tensor:
            own = grad[0]
            everyone = exchange.gather(own)
            if not is_frozen(weight):
                if bias is not None:
                    bias.main_grad += own.sum(0, dtype=bias.main_grad.dtype)  # type: ignore[attr-defined]
                if products is None:
                    add_weight_gradient(weight, None, rows, everyone)
                else:
                    products.defer(add_later, rows, own)
            return (everyone @ weight)[None]

        return known_output(output, backward, input)

    def _sum_product(self, rows: Tensor, exchange: RowExchange) -> Tensor:
        output = exchange.sum_scatter(nn.functional.linear(rows, self.weight))
        # Once a row, behind the sum.
        return output if self.bias is None else output + self.bias

    @property
    def _pack(self) -> TensorRows:
        assert self.replay.tensor_rows is not None
        return self.replay.tensor_rows


def gather_rows(own: Tensor, rows: RowExchange) -> Tensor:
    """Own rows -> all rows, for autograd: each rank uses all rows for its own columns, so gradients of a row add up."""
    return known_output(rows.gather(own.detach()), rows.sum_scatter, own)
