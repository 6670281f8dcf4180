"""Replay: run an unmodified Hugging Face decoder layer forward once, and backward over *other* token ranges.

In the forward pack every linear (`nn.Linear`, GPT-2's `Conv1D`) and the attention of a layer record their outputs per
token. A backward pack runs the same layer again on its own ranges with the recorded outputs in place of matrix products
and attention, so only norms, rotary embedding and activations are recomputed; autograd then walks this cheap graph.
Weight gradients go into the fp32 (fp64) buffer `weight.main_grad`, or wait for a later action (`weight_products.py`).
For documents under the policy `recompute` the backward pack repeats the products of linears; attention is recorded
under every policy.

**Experts.** Backward gives the recorded logits to transformers' own router: among other rows a matrix product may
differ in its last bit, and a token near a tie would go back through experts that it never came from. With g the
gradient of the block's output and a = act(gate)·up of one of the token's k experts,

    d weight_k = <Wdownᵀ g, a>    d a = weight_k · Wdownᵀ g    dWdown += (weight_k g) aᵀ

so no matrix product is repeated. Tokens are sorted by expert, with one product for each expert that has tokens.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from evenload.attention.range_attention import work_dtype
from evenload.runtime.model.lora import is_adapter
from evenload.runtime.replay.state import ReplayState, count_values
from evenload.runtime.replay.weight_products import (
    WeightProducts,
    add_now_or_later,
    add_product,
    add_weight_gradient,
    known_output,
)
from evenload.types.architectures import Architecture


class _RecordedLinear:
    """Records the output of a linear and reads it back. Made by changing the class of the model's own module, so that
    parameters, names and hooks stay untouched."""

    replay: ReplayState
    site: tuple[int, str]
    weight: nn.Parameter
    bias: Any
    output_unused: bool
    has_own_rows = False
    is_transposed = False
    """Whether `weight` is [in, out], not [out, in]."""

    def forward(self, input: Tensor) -> Tensor:
        """[1, T, in] -> [1, T, out]."""
        state = self.replay
        if state.direction == "forward":
            output = self.product(input[0])
            if not self.output_unused:
                state.store.record_product(self.site, output, is_own_rows=self.has_own_rows)
            return output[None]
        if self.output_unused:
            # Nothing in the layer's backward reads this value, only its shape.
            output = input.new_zeros(()).expand(self.num_rows(input), self.weight.shape[1 if self.is_transposed else 0])
        else:
            output = self.read_or_recompute(input[0].detach())
        return self.known(input, output[None])

    def num_rows(self, input: Tensor) -> int:
        return input.shape[1]

    def product(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return nn.functional.linear(rows, self.weight, self.bias)

    def read_or_recompute(self, rows: Tensor) -> Tensor:
        return self.replay.read_or_recompute(self.site, self.product, rows)

    def known(self, input: Tensor, output: Tensor) -> Tensor:
        """Return the output of a backward pack, for autograd."""
        products, is_transposed = self.replay.products, self.is_transposed
        return linear_with_known_output(input, self.weight, self.bias, output, products, is_transposed=is_transposed)


class ReplayLinear(_RecordedLinear, nn.Linear):  # type: ignore[inconsistent-inheritance]
    """Runs an `nn.Linear` under replay."""


class ReplayConv1D(_RecordedLinear, Conv1D):  # type: ignore[inconsistent-inheritance]
    """Runs transformers' `Conv1D` under replay."""

    is_transposed = True

    def product(self, rows: Tensor) -> Tensor:
        assert self.bias is not None
        return torch.addmm(self.bias, rows, self.weight)


def linear_with_known_output(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output: Tensor,
    products: WeightProducts | None = None,
    *,
    is_transposed: bool = False,
) -> Tensor:
    """Return `output` as if computed from `input`, for autograd; weight gradients wait in `products`, if given."""
    rows = input.detach()

    def backward(grad: Tensor) -> Tensor:
        add = functools.partial(add_weight_gradient, weight, bias, is_transposed=is_transposed)
        add_now_or_later(products, weight, add, rows.flatten(0, -2), grad.flatten(0, -2))
        return grad @ (weight.t() if is_transposed else weight)

    return known_output(output, backward, input)


class ReplayRouter(nn.Module):
    """Runs transformers' router under replay; mixed in by changing the class of the model's own module."""

    replay: ReplayState
    site: tuple[int, str]
    weight: nn.Parameter

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden] -> logits [T, E], weights [T, k] and indices [T, k] of the chosen experts."""
        state = self.replay
        with _Logits(self):
            logits, weights, chosen = super().forward(hidden_states)
        if state.direction == "forward" and state.balance is not None:
            state.balance.count(self.site[0], state.ranges, chosen)
        return logits, weights, chosen


class _Logits(TorchFunctionMode):
    """Replaces the product with a router's weight by ours while transformers' router runs."""

    def __init__(self, router: ReplayRouter) -> None:
        super().__init__()
        self._router = router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        router, state = self._router, self._router.replay
        if func is not nn.functional.linear or args[1] is not router.weight:
            return func(*args, **(kwargs or {}))
        if state.direction == "forward":
            logits = nn.functional.linear(args[0], router.weight)
            state.store.record(router.site, logits)
            return logits
        recorded = state.store.read(router.site, state.ranges)
        logits = linear_with_known_output(args[0], router.weight, None, recorded, state.products)
        return logits if state.balance is None else state.balance.add_to(router.site[0], state.ranges, logits)


class ReplayExperts(nn.Module):
    """Runs transformers' experts under replay; mixed in by changing the class of the model's own module."""

    replay: ReplayState
    site: tuple[int, str]
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, hidden], indices [T, k], weights [T, k] -> [T, hidden]."""
        state, order = self.replay, _Order(top_k_index, self.gate_up_proj.shape[0])
        if state.direction == "forward":
            gate_up = order.products(hidden_states[order.token], self.gate_up_proj)
            state.store.record_product(self.site, order.by_token(gate_up))
            product = order.products(self._gated(gate_up), self.down_proj)
            weighted = product * top_k_weights.flatten()[order.entry, None]
            return order.sum_by_token(weighted).to(hidden_states.dtype)

        every_row = torch.arange(top_k_index.shape[0], device=top_k_index.device)

        def make(rows: Tensor) -> Tensor:
            part = order if rows is every_row else _Order(top_k_index[rows], self.gate_up_proj.shape[0])
            return part.by_token(part.products(hidden_states[rows][part.token], self.gate_up_proj))

        recorded = state.read_or_recompute(self.site, make, every_row)
        recorded = recorded.reshape(top_k_index.numel(), -1)[order.entry]
        gate_up = self._known_gate_up(hidden_states, order, recorded)
        return self._unused_down(self._gated(gate_up), top_k_weights.flatten()[order.entry], order)

    def _gated(self, gate_up: Any) -> Tensor:
        return self._apply_gate(gate_up)  # type: ignore[operator]

    def _known_gate_up(self, hidden: Tensor, order: "_Order", output: Tensor) -> Tensor:
        """Return sorted gate and up projections [T·k, 2·ffn] as if computed from the hidden states [T, hidden]."""
        weights, products, rows = self.gate_up_proj, self.replay.products, hidden.detach()

        def backward(grad: Tensor) -> Tensor:
            # Rows by token: their k copies are made where they are used.
            add = functools.partial(order.add_weight_gradients, weights, by_token=True)
            add_now_or_later(products, weights, add, rows, grad)
            return order.sum_by_token(order.products_back(grad, weights)).to(rows.dtype)

        return known_output(output, backward, hidden)

    def _unused_down(self, gated: Tensor, routing: Tensor, order: "_Order") -> Tensor:
        """Return the block's output [T, hidden], whose value is never read, from gated rows and routing weights."""
        weights, products = self.down_proj, self.replay.products
        rows, share = gated.detach(), routing.detach()

        def backward(grad: Tensor) -> tuple[Tensor, Tensor]:
            grad_rows = grad[order.token]
            weighted = (grad_rows * share[:, None]).to(rows.dtype)
            add = functools.partial(order.add_weight_gradients, weights, by_token=False)
            add_now_or_later(products, weights, add, rows, weighted)
            back = order.products_back(grad_rows, weights)
            return (back * share[:, None]).to(rows.dtype), (back * rows).sum(-1, dtype=share.dtype)

        output = gated.detach().new_zeros(()).expand(order.num_tokens, weights.shape[1])
        return known_output(output, backward, gated, routing)


class _Order:
    """Sorts the T·k (token, expert) pairs by expert: their places in the unsorted [T, k], their tokens, int64[T·k]
    each, and (expert, rows of the sorted pairs) of every expert that has any."""

    def __init__(self, top_k_index: Tensor, num_experts: int) -> None:
        self.num_tokens, k = top_k_index.shape
        flat = top_k_index.flatten()
        self.entry = torch.argsort(flat, stable=True)
        self.token = self.entry // k
        # The one place where the host waits for a GPU inside a step.
        stops = count_values(flat, num_experts).cumsum(0).tolist()
        starts = [0, *stops[:-1]]
        self.parts = [(e, slice(a, b)) for e, (a, b) in enumerate(zip(starts, stops, strict=True)) if b > a]

    def products(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Multiply sorted rows [T·k, in] by their expert's weight of [E, out, in] -> [T·k, out]."""
        return self.products_back(rows, weights.transpose(1, 2))

    def products_back(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Multiply sorted rows [T·k, out] by their expert's weight of [E, out, in] -> [T·k, in]."""
        out = rows.new_empty(rows.shape[0], weights.shape[2])
        for expert, part in self.parts:
            out[part] = rows[part] @ weights[expert]
        return out

    def add_weight_gradients(self, weights: Tensor, input_rows: Tensor, grad_rows: Tensor, *, by_token: bool) -> None:
        """Add to `main_grad` from input rows, [T·k, in] sorted or [T, in] by token, and sorted gradients [T·k, out]."""
        if by_token:
            input_rows = input_rows[self.token]
        total: Tensor = weights.main_grad  # type: ignore[attr-defined]
        for expert, part in self.parts:
            add_product(total[expert], grad_rows[part], input_rows[part])

    def by_token(self, rows: Tensor) -> Tensor:
        """Return sorted rows [T·k, n] as [T, k·n], the pairs of a token side by side."""
        out = torch.empty_like(rows)
        out[self.entry] = rows
        return out.view(self.num_tokens, -1)

    def sum_by_token(self, rows: Tensor) -> Tensor:
        """Sum sorted rows [T·k, n] over the pairs of every token -> [T, n], in at least fp32."""
        out = rows.new_zeros(self.num_tokens, rows.shape[1], dtype=work_dtype(rows))
        return out.index_add_(0, self.token, rows.to(out.dtype))


_RECORDED: dict[type, type[nn.Module]] = {nn.Linear: ReplayLinear, Conv1D: ReplayConv1D}


def make_replayable(layer: nn.Module, layer_index: int, state: ReplayState, architecture: Architecture) -> None:
    """Turn a decoder layer's linears, experts and attention into recording ones, in place."""
    classes = architecture.classes
    mixed_in = {f"{classes}TopKRouter": ReplayRouter, f"{classes}Experts": ReplayExperts}
    for name, module in layer.named_modules():
        if is_adapter(name):
            continue  # thin products, computed again under autograd in backward
        own = type(module)
        if own in _RECORDED:
            module.__class__ = _RECORDED[own]
            module.output_unused = name.removesuffix(".base_layer") in architecture.unused_outputs  # type: ignore[assignment]
        elif own.__name__ in mixed_in:
            module.__class__ = type(f"Replay{own.__name__}", (mixed_in[own.__name__], own), {})
        elif not hasattr(module, "layer_idx"):
            continue
        module.replay, module.site = state, (layer_index, name)  # type: ignore[assignment]
