"""Run blocks of experts under replay, on one rank or spread over a tensor-parallel group.

Backward gives the recorded logits to transformers' own router: among other rows a matrix product may differ in its last
bit, and a token near a tie would go back through experts that it never came from. With g the gradient of the block's
output and a = act(gate)·up of one of the token's k experts,

    d weight_k = <Wdownᵀ g, a>    d a = weight_k · Wdownᵀ g    dWdown += (weight_k g) aᵀ

so no matrix product is repeated. Tokens are sorted by expert, with one product for each expert that has tokens.

**Over a group** rank r of n has experts [r·E/n, (r + 1)·E/n) whole, and own rows of tokens, which travel:

    forward    hidden states ─► ranks of the experts; their outputs ─► back, to be weighted and summed
    backward   hidden states, routing weights, gradients of outputs ─► ranks of the experts, which multiply again;
               gradients of hidden states and routing weights ─► back

A rank stores nothing of other ranks' tokens. Price: 2 transfers forward and 3 backward of k·rows·hidden elements, some
of a number a row, and one product again.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from evenload.attention.range_attention import work_dtype
from evenload.runtime.comm.collectives import Transfer
from evenload.runtime.comm.tensor_group import TensorGroup
from evenload.runtime.replay.state import ReplayState, count_values
from evenload.runtime.replay.weight_products import add_now_or_later, add_product, known_output


def mix_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run a block of experts under replay, as transformers' interface of experts: [T, hidden], indices and weights
    [T, k] -> [T, hidden]."""
    state: ReplayState = module.replay  # type: ignore[assignment]
    layer, name = module.site  # type: ignore[misc]
    key = layer, f"{name}.output"
    call = _LocalCall(module, state, top_k_index) if state.tensor is None else _SpreadCall(module, state, top_k_index)
    if state.direction == "forward":
        output = call.forward(hidden_states, top_k_weights)
        if not module.output_unused:
            state.store.record(key, output, is_own_rows=True)
        return output
    # Or a value that is never read.
    known = _unread(hidden_states) if module.output_unused else state.store.read(key, state.ranges)
    return call.backward(hidden_states, top_k_weights, known)


def _unread(like: Tensor) -> Tensor:
    return like.detach().new_zeros(()).expand_as(like)


class _LocalCall:
    """One call of a block of experts that this rank has all of."""

    def __init__(self, module: Any, state: ReplayState, index: Tensor) -> None:
        self.state, self.index, self.site = state, index, module.site
        self.experts = _Experts(module, state, index)

    def forward(self, hidden: Tensor, weights: Tensor) -> Tensor:
        order = self.experts.order
        up, product = self.experts.products(hidden)
        self.state.store.record_product(self.site, order.by_token(up))
        return order.sum_by_token(product * weights.flatten()[order.entry, None]).to(hidden.dtype)

    def backward(self, hidden: Tensor, weights: Tensor, known: Tensor) -> Tensor:
        experts, every_row = self.experts, torch.arange(self.index.shape[0], device=self.index.device)

        def make(rows: Tensor) -> Tensor:
            part = experts if rows is every_row else _Experts(experts.module, self.state, self.index[rows])
            return part.order.by_token(part.up_products(hidden.detach()[rows]))

        recorded = self.state.read_or_recompute(self.site, make, every_row)
        return experts.again(hidden, weights, recorded.reshape(self.index.numel(), -1)[experts.order.entry], known)


class _SpreadCall:
    """One call of a block of experts that are spread over a group, for this rank's tokens. Collective.

    Attributes:
        own: of this rank's (token, expert) pairs; sorted by expert, those of a rank follow each other.
        experts: this rank's, for the rows that come from all ranks, in the order of these.
    """

    def __init__(self, module: Any, state: ReplayState, index: Tensor) -> None:
        assert state.tensor is not None
        self._group: TensorGroup = state.tensor
        self._what = f"rows of experts (layer {module.site[0]})"
        size, num_own = self._group.size, module.down_proj.shape[0]
        counts = count_values(index.flatten(), size * num_own)
        counts = self._group.all_gather(counts, self._what).wait().view(size, size, num_own)
        # The one place where the host waits for a GPU inside a step.
        on_host = counts.tolist()
        self._sent = [sum(of_rank) for of_rank in on_host[self._group.rank]]
        come = [of_source[self._group.rank] for of_source in on_host]
        self._received = [sum(of_source) for of_source in come]
        self.own = _Order(index)
        every_expert = torch.arange(num_own, device=index.device).repeat(size)
        of_rows = every_expert.repeat_interleave(counts[:, self._group.rank].flatten(), output_size=sum(self._received))
        self.experts = _Experts(module, state, of_rows[:, None], [sum(column) for column in zip(*come, strict=True)])

    def forward(self, hidden: Tensor, weights: Tensor) -> Tensor:
        own, experts = self.own, self.experts
        _, product = experts.products(self._send(hidden[own.token]).wait())
        product = self._return(experts.order.by_token(product)).wait()
        return own.sum_by_token(product * weights.flatten()[own.entry, None]).to(hidden.dtype)

    def backward(self, hidden: Tensor, weights: Tensor, known: Tensor) -> Tensor:
        own, experts, rows, shares = self.own, self.experts, hidden.detach(), weights.detach().flatten()

        def backward(grad: Tensor) -> tuple[Tensor, Tensor]:
            sent = [self._send(one) for one in (rows[own.token], shares[own.entry], grad[own.token])]
            there, weights_there = (one.wait().requires_grad_() for one in sent[:2])
            up = experts.up_products(there.detach())
            with torch.enable_grad():
                output = experts.again(there, weights_there[:, None], up, _unread(there))
            output.backward(sent[2].wait())
            back = [self._return(one.grad) for one in (there, weights_there)]
            of_hidden = own.sum_by_token(back[0].wait()).to(rows.dtype)
            return of_hidden, own.by_token(back[1].wait()[:, None])

        return known_output(known, backward, hidden, weights)

    def _send(self, rows: Tensor) -> Transfer:
        """Start to send sorted rows of own pairs to their experts."""
        return self._group.all_to_all(rows, self._sent, self._received, self._what)

    def _return(self, rows: Tensor | None) -> Transfer:
        """Start to send rows back, in the order in which they came."""
        assert rows is not None
        return self._group.all_to_all(rows, self._received, self._sent, self._what)


class _Experts:
    """The experts of a module, for tokens' rows of which `index` [T, k] names those of each."""

    def __init__(self, module: Any, state: ReplayState, index: Tensor, counts: Sequence[int] | None = None) -> None:
        self.module, self._products = module, state.products
        name = "gate_up_proj" if module.has_gate else "up_proj"
        self.up: nn.Parameter = getattr(module, name)
        self.up_bias: Tensor | None = getattr(module, f"{name}_bias", None)
        self.down_bias: Tensor | None = getattr(module, "down_proj_bias", None)
        if counts is None:
            # As in `_SpreadCall`, the one place where the host waits for a GPU.
            counts = count_values(index.flatten(), self.up.shape[0]).tolist()
        self.order = _Order(index, counts, is_transposed=module.is_transposed)

    def up_products(self, hidden: Tensor) -> Tensor:
        """Return sorted products [T·k, 2·ffn] of tokens' rows [T, hidden]."""
        with torch.no_grad():
            return self.order.products(hidden[self.order.token], self.up, self.up_bias)

    def products(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return sorted products [T·k, 2·ffn] and outputs [T·k, hidden], not yet weighted."""
        up = self.up_products(hidden)
        return up, self.order.products(self._activated(up), self.module.down_proj, self.down_bias)

    def again(self, hidden: Tensor, weights: Tensor, up: Tensor, known: Tensor) -> Tensor:
        """Return the weighted sums `known` [T, hidden] as if computed from hidden states, routing weights [T, k] and
        sorted products [T·k, 2·ffn], for autograd."""
        gated = self._activated(self._known_up(hidden, up))
        return self._down(gated, weights.flatten()[self.order.entry], known)

    def _activated(self, up: Tensor) -> Tensor:
        return self.module._apply_gate(up) if self.module.has_gate else self.module.act_fn(up)

    def _known_up(self, hidden: Tensor, output: Tensor) -> Tensor:
        weights, products, order, rows = self.up, self._products, self.order, hidden.detach()

        def backward(grad: Tensor) -> Tensor:
            # Rows by token: their k copies are made where they are used.
            add = functools.partial(order.add_weight_gradients, weights, self.up_bias, by_token=True)
            add_now_or_later(products, weights, add, rows, grad)
            return order.sum_by_token(order.products_back(grad, weights)).to(rows.dtype)

        return known_output(output, backward, hidden)

    def _down(self, gated: Tensor, routing: Tensor, known: Tensor) -> Tensor:
        weights, bias, products, order = self.module.down_proj, self.down_bias, self._products, self.order
        rows, share = gated.detach(), routing.detach()

        def backward(grad: Tensor) -> tuple[Tensor, Tensor]:
            grad_rows = grad[order.token]
            weighted = (grad_rows * share[:, None]).to(rows.dtype)
            add = functools.partial(order.add_weight_gradients, weights, bias, by_token=False)
            add_now_or_later(products, weights, add, rows, weighted)
            back = order.products_back(grad_rows, weights)
            of_share = (back * rows).sum(-1, dtype=share.dtype)
            if bias is not None:
                of_share = of_share + (grad_rows * order.rows_of(bias)).sum(-1, dtype=share.dtype)
            return (back * share[:, None]).to(rows.dtype), of_share

        return known_output(known, backward, gated, routing)


class _Order:
    """Sorts the T·k (token, expert) pairs by expert: their places in the unsorted [T, k], their tokens and experts,
    int64[T·k] each, and (expert, rows of the sorted pairs) of every expert that has any by `counts`."""

    def __init__(self, index: Tensor, counts: Sequence[int] = (), *, is_transposed: bool = False) -> None:
        self.num_tokens, self.num_chosen = index.shape
        self.is_transposed = is_transposed
        flat = index.flatten()
        self.entry = torch.argsort(flat, stable=True)
        self.token, self.expert = self.entry // self.num_chosen, flat[self.entry]
        stops = list(accumulate(counts))
        self.parts = [(e, slice(stop - n, stop)) for e, (n, stop) in enumerate(zip(counts, stops, strict=True)) if n]

    def products(self, rows: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply sorted rows [T·k, in] by their expert's weight of [E, out, in] ([E, in, out] where transposed), and
        add its bias of [E, out] -> [T·k, out]."""
        output = self._multiplied(rows, weights if self.is_transposed else weights.transpose(1, 2))
        return output if bias is None else output + self.rows_of(bias)

    def products_back(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Multiply sorted rows [T·k, out] back by their expert's weight -> [T·k, in]."""
        return self._multiplied(rows, weights.transpose(1, 2) if self.is_transposed else weights)

    def _multiplied(self, rows: Tensor, weights: Tensor) -> Tensor:
        out = rows.new_empty(rows.shape[0], weights.shape[2])
        for expert, part in self.parts:
            out[part] = rows[part] @ weights[expert]
        return out

    def rows_of(self, bias: Tensor) -> Tensor:
        """Return the bias [E, n] of every sorted pair's expert, [T·k, n]."""
        return bias.detach()[self.expert]

    def add_weight_gradients(
        self, weights: Tensor, bias: Tensor | None, input_rows: Tensor, grad_rows: Tensor, *, by_token: bool
    ) -> None:
        """Add to `main_grad` from input rows, [T·k, in] sorted or [T, in] by token, and sorted gradients [T·k, out]."""
        if by_token:
            input_rows = input_rows[self.token]
        total: Tensor = weights.main_grad  # type: ignore[attr-defined]
        for expert, part in self.parts:
            left, right = grad_rows[part], input_rows[part]
            add_product(total[expert], *((right, left) if self.is_transposed else (left, right)))
            if bias is not None:
                bias.main_grad[expert] += left.sum(0, dtype=bias.main_grad.dtype)  # type: ignore[attr-defined]

    def by_token(self, rows: Tensor) -> Tensor:
        """Return sorted rows [T·k, n] as [T, k·n], the pairs of a token side by side."""
        out = torch.empty_like(rows)
        out[self.entry] = rows
        return out.view(self.num_tokens, self.num_chosen * rows.shape[1])

    def sum_by_token(self, rows: Tensor) -> Tensor:
        """Sum sorted rows [T·k, n] over the pairs of every token -> [T, n], in at least fp32."""
        out = rows.new_zeros(self.num_tokens, rows.shape[1], dtype=work_dtype(rows))
        return out.index_add_(0, self.token, rows.to(out.dtype))
