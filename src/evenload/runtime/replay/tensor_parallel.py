"""Tensor parallelism of unmodified decoder layers: linears on a rank's part of their weights, under replay.

    norm, residual     own rows (sequence parallel)
    q k v, gate up     all-gather the block's input ─► all rows, own columns (weights cut by output)
    attention          all rows, own heads
    o, down            all rows, own inputs (weights cut by input) ─► reduce-scatter ─► own rows

Forward moves a layer's hidden states 4 times; backward 6 times, because a block's input is gathered again for the
weight gradients instead of being kept (Korthikanti et al. 2022, §4.2). Transfers overlap with compute:

    forward    all-gather a block's input in chunks  the first product (q, gate) of the chunk before
               reduce-scatter in chunks              the product (o, down) of the next chunk
    backward   all-gather o's and down's gradients   as in forward, in chunks
               all-gather a block's input            all that comes before its weight gradients
               reduce-scatter the input's gradient   the block's weight gradients (q k v, gate up)

Chunks are runs of a pack's rows, so no row's product changes. Layers stay transformers' own: the blocks of a layer (its
attention and MLPs) get a hook that gathers, and the linears recorded by replay become `ColumnLinear` or `RowLinear` by
their names.
Linears that are not cut, and routers, work on own rows between blocks; so do experts, which send them (`experts.py`).
Gradients of what every rank holds whole (norms, routers, biases behind a sum) are partial; `data_parallel` sums them.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evenload.runtime.comm.tensor_group import RowExchange
from evenload.runtime.model.lora import is_adapter
from evenload.runtime.model.structure import Structure, block_of, linear_kind
from evenload.runtime.model.tensor_weights import adapter_of
from evenload.runtime.replay.replayable import ReplayLinear
from evenload.runtime.replay.state import BlockInput, ReplayState
from evenload.runtime.replay.weight_products import add_weight_gradient, is_frozen, known_output


def make_tensor_parallel(layer: nn.Module, layer_index: int, state: ReplayState, structure: Structure) -> None:
    """Make a replayable layer's linears compute with a part of their weights, in place. Those that are not cut are
    between blocks: `tensor_weights.require_tensor_parallel` has refused other models."""
    blocks: dict[str, list[ColumnLinear]] = {}
    for name, module in layer.named_modules():
        if isinstance(module, ReplayLinear):
            if linear_kind(name) in structure.cut.rows:
                module.__class__ = RowLinear
            elif linear_kind(name) in structure.cut.columns:
                module.__class__ = ColumnLinear
                blocks.setdefault(block_of(name), []).append(module)  # type: ignore[arg-type]
            module.has_own_rows = not isinstance(module, ColumnLinear)
        elif adapter_of(name, "lora_A", structure.cut.rows):
            module.register_forward_hook(functools.partial(_scatter_output, state))
        cut = structure.cut.packed.get(f"{structure.layer_path(layer_index)}.{name}")
        if cut is not None and cut.summed:
            module.get_submodule(cut.summed).register_forward_hook(functools.partial(_gather_output, state))
    for name, readers in blocks.items():
        block = layer.get_submodule(name)
        has_adapters = any(is_adapter(inner) for inner, _ in block.named_modules())
        hook = functools.partial(_gather_input, state, (layer_index, name), readers, has_adapters=has_adapters)
        block.register_forward_pre_hook(hook, with_kwargs=True)


def _gather_input(
    state: ReplayState,
    site: tuple[int, str],
    readers: Sequence["ColumnLinear"],
    module: nn.Module,
    args: tuple,
    kwargs: dict,
    *,
    has_adapters: bool,
) -> tuple[tuple, dict]:
    """Give a block all rows of its input [..., n, hidden] -> [..., T, hidden]. In forward the first of `readers` waits
    for them; in backward their weight gradients do. Adapters and recomputed products need them at once."""
    pack = state.tensor_rows
    own: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    block = pack.block = BlockInput(own.detach().flatten(0, -2), pack.rows)
    is_read_later = state.direction == "forward" or (
        state.products is None and not state.recomputes(site) and not all(is_frozen(one.weight) for one in readers)
    )
    if has_adapters or not is_read_later:
        block.whole()

    rows = pack.rows

    def backward(grad: Tensor) -> Tensor:
        finish = rows.start_sum_scatter(grad)
        for add in block.weight_gradients:
            add()
        block.weight_gradients.clear()
        return finish()

    gathered = known_output(block.rows, backward, own.flatten(0, -2)).view(*own.shape[:-2], *block.rows.shape)
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": gathered}
    return (gathered, *args[1:]), kwargs


def _scatter_output(state: ReplayState, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """Sum an adapter's partial products [..., T, rank] -> own rows [..., n, rank], as those of its linear."""
    partial, rows = output.flatten(0, -2), state.tensor_rows.rows
    own = known_output(rows.sum_scatter(partial.detach()), rows.gather, partial)
    return own.view(*output.shape[:-2], *own.shape)


def _gather_output(state: ReplayState, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """Give every rank all rows of a sum over ranks, [..., n, out] -> [..., T, out]; their gradients add up."""
    rows = gather_rows(output.flatten(0, -2), state.tensor_rows.rows)
    return rows.view(*output.shape[:-2], *rows.shape)


class ColumnLinear(ReplayLinear):
    """Computes own columns of the output, of all rows."""

    def product(self, rows: Tensor) -> Tensor:
        block = self.replay.tensor_rows.block
        if block.is_complete:
            return super().product(rows)
        output = rows.new_empty(rows.shape[0], self.weight.shape[0])
        for chunk in block.arrive():
            torch.mm(block.rows[chunk], self.weight.t(), out=output[chunk])
        return output if self.bias is None else output.add_(self.bias)

    def known(self, input: Tensor, output: Tensor) -> Tensor:
        pack, weight, bias, products = self.replay.tensor_rows, self.weight, self.bias, self.replay.products
        block, again, key = pack.block, pack.again, pack.block.key

        def add_later(own_rows: Tensor, grad_rows: Tensor) -> None:
            add_weight_gradient(weight, bias, again(own_rows, key), grad_rows)

        def backward(grad: Tensor) -> Tensor:
            if is_frozen(weight):
                pass
            elif products is not None:
                products.defer(add_later, block.own, grad.flatten(0, -2))
            else:
                block.weight_gradients.append(
                    lambda: add_weight_gradient(weight, bias, block.whole(), grad.flatten(0, -2))
                )
            return grad @ weight

        return known_output(output, backward, input)


class RowLinear(ReplayLinear):
    """Multiplies own inputs of all rows [..., T, in / tp] -> [..., n, out]: sums over the group, and keeps own rows."""

    def num_rows(self, input: Tensor) -> int:
        return self.replay.tensor_rows.rows.num_own

    def product(self, rows: Tensor) -> Tensor:
        return self._sum_product(rows, self.replay.tensor_rows.rows)

    @torch.no_grad()
    def read_or_recompute(self, rows: Tensor) -> Tensor:
        state, pack = self.replay, self.replay.tensor_rows
        if state.recomputed is None or state.kept is None:
            return super().read_or_recompute(rows)
        exchange, own_recomputed, own_kept = pack.recomputed(state.store)
        made = self._sum_product(rows[state.recomputed], exchange)
        output = made.new_empty(pack.rows.num_own, made.shape[1])
        output[own_recomputed], output[own_kept] = made, state.store.read(self.site, state.kept_ranges)
        return output

    def known(self, input: Tensor, output: Tensor) -> Tensor:
        weight, bias, products, pack = self.weight, self.bias, self.replay.products, self.replay.tensor_rows
        rows, exchange, again, key = input.detach().flatten(0, -2), pack.rows, pack.again, object()

        def add_later(input_rows: Tensor, own_grad: Tensor) -> None:
            add_weight_gradient(weight, None, input_rows, again(own_grad, key))

        def backward(grad: Tensor) -> Tensor:
            own = grad.flatten(0, -2)
            everyone = own.new_empty(exchange.num_rows, own.shape[1])
            input_grad = own.new_empty(exchange.num_rows, weight.shape[1])
            under_way = [chunk.exchange.start_gather(own[chunk.own]) for chunk in exchange.chunks]
            for chunk, fill in zip(exchange.chunks, under_way, strict=True):
                fill(everyone[chunk.rows])
                torch.mm(everyone[chunk.rows], weight, out=input_grad[chunk.rows])
            if not is_frozen(weight):
                if bias is not None:
                    bias.main_grad += own.sum(0, dtype=bias.main_grad.dtype)  # type: ignore[attr-defined]
                if products is None:
                    add_weight_gradient(weight, None, rows, everyone)
                else:
                    products.defer(add_later, rows, own)
            return self._shaped(input, input_grad)

        return known_output(output, backward, input)

    def _sum_product(self, rows: Tensor, exchange: RowExchange) -> Tensor:
        transfers = [
            chunk.exchange.start_sum_scatter(nn.functional.linear(rows[chunk.rows], self.weight))
            for chunk in exchange.chunks
        ]
        parts = [finish() for finish in transfers]
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        # Once a row, after the sum.
        return output if self.bias is None else output + self.bias


def gather_rows(own: Tensor, rows: RowExchange) -> Tensor:
    """Gather own rows -> all rows, for autograd: ranks use all rows for their own columns, so gradients add up."""
    return known_output(rows.gather(own.detach()), rows.sum_scatter, own)
