"""Replay of mixture-of-experts blocks.

Router. Its logits are recorded and given back to transformers' own router in backward. They are never computed twice:
in other company a matrix product may differ in its last bit, and a token near a tie would go back through experts it
never came from, without a sign (in bf16 that is no rare case).

Experts. A token's k experts leave k rows of gate and up projections, recorded in the token's row, so that a slice is
cut out of them as out of any linear's output. Backward needs nothing else: with g the gradient of the block's output
and a = act(gate)·up of one of the k,

    d weight_k = <Wdownᵀ g, a>    d a = weight_k · Wdownᵀ g    dWdown += (weight_k g) aᵀ

so the output of the down projection is not stored, and no matrix product is repeated. Tokens are sorted by expert;
one product per expert that has tokens.

Price: that of the block's products; two index operations per pack beyond transformers' own grouped implementation.
On a GPU the host waits once a layer and pass for the experts' numbers of tokens; why not torch's grouped product, which
reads them on the device: docs/decisions/14-gpu-path.md.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from evenload.attention.range_attention import work_dtype
from evenload.runtime.replay.known_output import known_output
from evenload.runtime.replay.linear import linear_with_known_output
from evenload.runtime.replay.router_balance import count_values
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.replay.weight_products import add_now_or_later, add_product


class ReplayRouter(nn.Module):
    """Mixed into transformers' router by changing the class of the model's own module."""

    replay: ReplayState
    site: tuple[int, str]
    weight: nn.Parameter

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden] -> logits [T, E], weights [T, k] and indices [T, k] of the chosen experts."""
        state = self.replay
        with _Logits(self):
            logits, weights, chosen = super().forward(hidden_states)
        if state.mode == "record" and state.balance is not None:
            state.balance.count(self.site[0], state.ranges, chosen)
        return logits, weights, chosen


class _Logits(TorchFunctionMode):
    """While transformers' router runs, the product with its weight is ours; all else stays as it is."""

    def __init__(self, router: ReplayRouter) -> None:
        super().__init__()
        self._router = router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and args[1] is self._router.weight:
            return _router_logits(self._router, args[0])
        return func(*args, **(kwargs or {}))


def _router_logits(router: ReplayRouter, rows: Tensor) -> Tensor:
    state, store = router.replay, router.replay.store
    assert store is not None
    if state.mode == "record":
        logits = nn.functional.linear(rows, router.weight)
        store.record(router.site, logits)
        return logits
    recorded = store.read(router.site, state.ranges)
    logits = linear_with_known_output(rows, router.weight, None, recorded, state.products)
    return logits if state.balance is None else state.balance.add_to(router.site[0], state.ranges, logits)


class ReplayExperts(nn.Module):
    """Mixed into transformers' experts by changing the class of the model's own module."""

    replay: ReplayState
    site: tuple[int, str]
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, hidden], indices [T, k], weights [T, k] -> [T, hidden]."""
        state, store = self.replay, self.replay.store
        assert store is not None
        order = _Order(top_k_index, self.gate_up_proj.shape[0])
        if state.mode == "record":
            gate_up = order.products(hidden_states[order.token], self.gate_up_proj)
            store.record_product(self.site, order.by_token(gate_up))
            product = order.products(self._gated(gate_up), self.down_proj)
            weighted = product * top_k_weights.flatten()[order.entry, None]
            return order.sum_by_token(weighted).to(hidden_states.dtype)

        every_row = torch.arange(top_k_index.shape[0], device=top_k_index.device)

        def make(rows: Tensor) -> Tensor:
            part = order if rows is every_row else _Order(top_k_index[rows], self.gate_up_proj.shape[0])
            return part.by_token(part.products(hidden_states[rows][part.token], self.gate_up_proj))

        recorded = state.read_or_remake(self.site, make, every_row)
        recorded = recorded.reshape(top_k_index.numel(), -1)[order.entry]
        gate_up = self._known_gate_up(hidden_states, order, recorded)
        return self._unused_down(self._gated(gate_up), top_k_weights.flatten()[order.entry], order)

    def _gated(self, gate_up: Any) -> Tensor:
        return self._apply_gate(gate_up)  # type: ignore[operator]

    def _known_gate_up(self, hidden: Tensor, order: "_Order", output: Tensor) -> Tensor:
        """Sorted gate and up projections [T·k, 2·ffn] as if they were computed from the hidden states [T, hidden]."""
        weights, products, rows = self.gate_up_proj, self.replay.products, hidden.detach()

        def backward(grad: Tensor) -> Tensor:
            # Rows by token: their k copies are made where they are used.
            add = functools.partial(order.add_weight_gradients, weights, by_token=True)
            add_now_or_later(products, weights, add, rows, grad)
            return order.sum_by_token(order.products_back(grad, weights)).to(rows.dtype)

        return known_output(output, backward, hidden)

    def _unused_down(self, gated: Tensor, routing: Tensor, order: "_Order") -> Tensor:
        """The block's output [T, hidden] from gated rows and routing weights; nobody reads its value."""
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
    """The T·k (token, expert) pairs sorted by expert.

    Attributes:
        entry: int64[T·k], of the sorted pairs their place in the unsorted [T, k].
        token: int64[T·k], their token.
        parts: (expert, rows of the sorted pairs) of every expert that has any.
    """

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
        """Sorted rows [T·k, in] times their expert's weight of [E, out, in] -> [T·k, out]."""
        return self.products_back(rows, weights.transpose(1, 2))

    def products_back(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sorted rows [T·k, out] times their expert's weight of [E, out, in], from the other side -> [T·k, in]."""
        out = rows.new_empty(rows.shape[0], weights.shape[2])
        for expert, part in self.parts:
            out[part] = rows[part] @ weights[expert]
        return out

    def add_weight_gradients(self, weights: Tensor, input_rows: Tensor, grad_rows: Tensor, *, by_token: bool) -> None:
        """Add to `main_grad` [E, out, in] from input rows, sorted [T·k, in] or by token [T, in], and sorted gradients
        [T·k, out]."""
        if by_token:
            input_rows = input_rows[self.token]
        total: Tensor = weights.main_grad  # type: ignore[attr-defined]
        for expert, part in self.parts:
            grad, input = grad_rows[part], input_rows[part]
            add_product(total[expert], grad, input)

    def by_token(self, rows: Tensor) -> Tensor:
        """Sorted rows [T·k, n] as [T, k·n], the pairs of a token side by side."""
        out = torch.empty_like(rows)
        out[self.entry] = rows
        return out.view(self.num_tokens, -1)

    def sum_by_token(self, rows: Tensor) -> Tensor:
        """Sorted rows [T·k, n] summed over the pairs of every token -> [T, n], in at least fp32."""
        out = rows.new_zeros(self.num_tokens, rows.shape[1], dtype=work_dtype(rows))
        return out.index_add_(0, self.token, rows.to(out.dtype))
