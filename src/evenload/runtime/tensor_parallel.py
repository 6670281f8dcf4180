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
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from evenload.runtime.replay import ReplayLinear, ReplayState
from evenload.runtime.row_shard import Range
from evenload.runtime.store import ActivationStore
from evenload.runtime.tensor_group import RowExchange, TensorGroup, exchange_ranges, gather_rows, sum_scatter_rows
from evenload.runtime.tensor_weights import COLUMN_LINEARS, ROW_LINEARS, feeds_row_adapter, linear_kind
from evenload.runtime.weight_products import WeightProducts, add_weight_gradient, is_frozen

_BLOCKS = ("self_attn", "mlp")


@dataclass(eq=False)
class PackRows:
    """Rows of the running pack on a tensor-parallel group.

    Args:
        block_input: own rows of the running block's input; block_key names them.
        again: gathers rows in W.
    """

    rows: RowExchange
    ranges: tuple[Range, ...]
    block_input: Tensor | None = None
    block_key: object = None
    again: "_GatherOnce" = field(init=False)
    _remade: tuple[RowExchange, Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        self.again = _GatherOnce(self.rows)

    def remade(self, store: ActivationStore) -> tuple[RowExchange, Tensor, Tensor]:
        """Rows of documents whose products are made again: their exchange, and which of own rows are (not) theirs."""
        if self._remade is None:
            again = [store.policy(doc_id) == "recompute" for doc_id, _, _ in self.ranges]
            chosen = np.repeat(np.array(again, bool), [stop - start for _, start, stop in self.ranges])
            self._remade = self.rows.divide(chosen)
        return self._remade


def rows_of_pack(group: TensorGroup, ranges: tuple[Range, ...], device: torch.device, what: str) -> PackRows:
    """For the pass of one pack."""
    return PackRows(exchange_ranges(group, ranges, device, what), ranges)


class _GatherOnce:
    """Gathers own rows; products that share them (q, k and v; gate and up) follow each other and share the result."""

    def __init__(self, rows: RowExchange) -> None:
        self._rows = rows
        self._last: tuple[object, Tensor] | None = None

    def __call__(self, own: Tensor, key: object) -> Tensor:
        """`key` names the rows. The tensor cannot: where a rank has no rows, all its tensors are alike, and it would
        leave out transfers that the others make."""
        if self._last is None or self._last[0] is not key:
            self._last = key, self._rows.gather(own)
        return self._last[1]


def make_tensor_parallel(layer: nn.Module, state: ReplayState) -> None:
    """Turn a replayable layer's linears into those of a part of their weights, in place.

    Every linear's name is known: `tensor_weights.require_tensor_parallel` has refused other models.
    """
    for name, module in layer.named_modules():
        if isinstance(module, ReplayLinear):
            kind = linear_kind(name)
            assert kind in (*COLUMN_LINEARS, *ROW_LINEARS), f"{name} is cut in no known way"
            module.__class__ = ColumnLinear if kind in COLUMN_LINEARS else RowLinear
        elif feeds_row_adapter(name):
            module.register_forward_hook(functools.partial(_scatter_output, state))
    for name in _BLOCKS:
        block: nn.Module = getattr(layer, name)
        block.register_forward_pre_hook(functools.partial(_gather_input, state), with_kwargs=True)


def _gather_input(state: ReplayState, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A block gets all rows of its input [1, n, hidden] -> [1, T, hidden]."""
    pack = state.tensor_rows
    assert pack is not None
    own: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    pack.block_input, pack.block_key = own.detach()[0], object()
    gathered = gather_rows(own[0], pack.rows)[None]
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": gathered}
    return (gathered, *args[1:]), kwargs


def _scatter_output(state: ReplayState, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """An adapter's thin product [1, T, rank], partial sums, -> own rows [1, n, rank], as those of its linear."""
    assert state.tensor_rows is not None
    return sum_scatter_rows(output[0], state.tensor_rows.rows)[None]


class ColumnLinear(ReplayLinear):
    """All rows times own columns of the output: as any recorded linear, but for what waits for W."""

    def forward(self, input: Tensor) -> Tensor:
        """[1, T, in] -> [1, T, out / tp]."""
        state, pack = self.replay, self.replay.tensor_rows
        if state.mode == "record" or state.products is None:
            return super().forward(input)
        assert pack is not None
        output = state.read_or_remake(self.site, self._product, input[0].detach())[None]
        late = _Late(self.weight, self.bias, state.products, pack.rows, pack.again, pack.block_key)
        return _LateColumn.apply(input, (late, pack.block_input), output)  # type: ignore[return-value]

    def _product(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self.weight, self.bias)


class RowLinear(ReplayLinear):
    """Own inputs of all rows; products are summed over the group, every rank keeps its rows."""

    def forward(self, input: Tensor) -> Tensor:
        """[1, T, in / tp] -> [1, n, out]."""
        state, pack = self.replay, self.replay.tensor_rows
        assert state.store is not None
        assert pack is not None
        if state.mode == "record":
            output = self._product(input[0], pack.rows)
            if not self.output_unused:
                state.store.record(self.site, output, is_product=True, is_own_rows=True)
            return output[None]
        if self.output_unused:
            # Nothing in the layer's backward reads this value, only its shape.
            output = input.new_zeros(()).expand(pack.rows.num_own, self.out_features)
        elif state.remade is None:
            output = state.store.read(self.site, state.ranges)
        else:
            output = self._remake(input[0].detach(), state.remade, pack)
        late = _Late(self.weight, self.bias, state.products, pack.rows, pack.again, object())
        return _KnownRow.apply(input, late, output[None])  # type: ignore[return-value]

    def _product(self, rows: Tensor, exchange: RowExchange) -> Tensor:
        output = exchange.sum_scatter(nn.functional.linear(rows, self.weight))
        # Once a row, behind the sum.
        return output if self.bias is None else output + self.bias

    @torch.no_grad()
    def _remake(self, input: Tensor, remade: Tensor, pack: PackRows) -> Tensor:
        state = self.replay
        assert state.store is not None
        if state.kept is None:
            return self._product(input, pack.rows)
        exchange, own_remade, own_kept = pack.remade(state.store)
        made = self._product(input[remade], exchange)
        output = made.new_empty(pack.rows.num_own, made.shape[1])
        output[own_remade], output[own_kept] = made, state.store.read(self.site, state.kept_ranges)
        return output


@dataclass(frozen=True, eq=False)
class _Late:
    """Parameters of a linear, and where its weight gradient goes.

    Args:
        products: it waits there; None = it is added at once.
        again: gathers, in W, what waited; key names it.
    """

    weight: Tensor
    bias: Tensor | None
    products: WeightProducts | None
    rows: RowExchange
    again: _GatherOnce
    key: object


class _LateColumn(torch.autograd.Function):
    """A known output; the weight gradient waits with own rows of the block's input."""

    @staticmethod
    def forward(ctx, input: Tensor, parameters: tuple[_Late, Tensor], output: Tensor) -> Tensor:
        ctx.late, ctx.own = parameters
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        late: _Late = ctx.late
        assert late.products is not None
        if not is_frozen(late.weight):
            late.products.put_off(_add_column(late), ctx.own, grad.flatten(0, -2))
        return grad @ late.weight, None, None


class _KnownRow(torch.autograd.Function):
    """A known output [1, n, out] of own rows, as if computed from [1, T, in / tp]."""

    @staticmethod
    def forward(ctx, input: Tensor, late: _Late, output: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        ctx.late = late
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (input,) = ctx.saved_tensors
        late: _Late = ctx.late
        own = grad[0]
        everyone = late.rows.gather(own)
        if not is_frozen(late.weight):
            if late.bias is not None:
                late.bias.main_grad += own.sum(0, dtype=late.bias.main_grad.dtype)  # type: ignore[attr-defined]
            if late.products is None:
                add_weight_gradient(late.weight, None, input[0], everyone)
            else:
                late.products.put_off(_add_row(late), input[0], own)
        return (everyone @ late.weight)[None], None, None


def _add_column(late: _Late) -> Callable[[Tensor, Tensor], None]:
    def add(own_input: Tensor, grad_rows: Tensor) -> None:
        add_weight_gradient(late.weight, late.bias, late.again(own_input, late.key), grad_rows)

    return add


def _add_row(late: _Late) -> Callable[[Tensor, Tensor], None]:
    def add(input_rows: Tensor, own_grad: Tensor) -> None:
        add_weight_gradient(late.weight, None, input_rows, late.again(own_grad, late.key))

    return add
