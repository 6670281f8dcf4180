"""Replay of mixture-of-experts blocks, and a load-balancing loss that does not depend on how tokens are packed.

Router. Its logits are recorded and given back to transformers' own router in backward. They are never computed twice:
in other company a matrix product may differ in its last bit, and a token near a tie would go back through experts it
never came from, without a sign (in bf16 that is no rare case).

Experts. A token's k experts leave k rows of gate and up projections, recorded in the token's row, so that a slice is
cut out of them as out of any linear's output. Backward needs nothing else: with g the gradient of the block's output
and a = act(gate)·up of one of the k,

    d weight_k = <Wdownᵀ g, a>    d a = weight_k · Wdownᵀ g    dWdown += (weight_k g) aᵀ

so the output of the down projection is not stored, and no matrix product is repeated. Tokens are sorted by expert;
one product per expert that has tokens.

Balance. Switch Transformer's loss (Fedus et al. 2021, eq. 4-6), per layer and per document: see `RouterBalance`.

Price: that of the block's products; two index operations per pack beyond transformers' own grouped implementation.
On a GPU the host waits once a layer and pass for the experts' numbers of tokens; why not torch's grouped product, which
reads them on the device: docs/decisions/0022.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from evenload.runtime.cp_groups import ContextGroup
from evenload.runtime.store import Range
from evenload.runtime.weight_products import WeightProducts, is_frozen

if TYPE_CHECKING:
    from evenload.runtime.replay import ReplayState


class SharedPack(Protocol):
    """What ranks that share a pack know of it (`context_attention.PackAttention`)."""

    @property
    def group(self) -> ContextGroup:
        """The ranks."""
        ...

    @property
    def documents(self) -> tuple[int, ...]:
        """Those that are shared, in the same order on every rank of the group; one may come twice."""
        ...


@dataclass(eq=False)
class RouterBalance:
    """The load-balancing loss of one stage's layers.

    For document d of n_d tokens on layer l, f = share of its tokens that chose expert e (k chosen, so the shares add
    up to k), P = mean probability of e over its tokens, both over whole documents without padding:

        loss = coefficient · Σ_d (n_d / N) · mean over the model's layers l of  E · Σ_e f·P

    with N the tokens of the global batch. f is a count and has no gradient. A document's counts are complete before
    its first backward slice, whatever the packs are, so the gradient is exact under every plan
    (docs/decisions/0017). Ranks that share a document add its counts up after each of its forward packs, once for all
    layers of a stage. Of one document and one layer it is transformers' own loss.

    Args:
        coefficient: the loss is multiplied with it; 0 = none.
        num_layers: layers of the whole model.
        num_experts: of a layer.
        layers: indices of the stage's layers.
        num_tokens: of every document of the global batch, without padding.
    """

    coefficient: float
    num_layers: int
    num_experts: int
    layers: tuple[int, ...]
    num_tokens: Mapping[int, int] = field(default_factory=dict)
    _chosen: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _of_pack: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _loss: float | Tensor = 0.0

    def begin_step(self, num_tokens: Mapping[int, int]) -> None:
        """Forget the step before."""
        self.num_tokens = num_tokens
        self._chosen.clear()
        self._of_pack.clear()
        self._loss = 0.0

    def count(self, layer: int, ranges: Sequence[Range], chosen: Tensor) -> None:
        """Count the experts [T, k] that the running forward pack's tokens chose."""
        for (doc_id, _, _), rows in _real_rows(ranges, self.num_tokens):
            _add(self._of_pack, (layer, doc_id), _count(chosen[rows].flatten(), self.num_experts))

    def end_pack(self, shared: SharedPack | None, device: torch.device) -> None:
        """After a forward pack's last layer. Collective over the ranks that share it.

        Args:
            shared: the part of the pack that other ranks have rows of; None = this rank has them all.
        """
        documents = tuple(dict.fromkeys(shared.documents)) if shared is not None else ()
        if shared is not None and documents:
            nothing = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
            keys = [(layer, doc_id) for layer in self.layers for doc_id in documents]
            mine = torch.stack([self._of_pack.pop(key, nothing) for key in keys])
            everyone = shared.group.all_gather(mine, "counts of experts").wait()
            for key, counts in zip(keys, everyone.view(shared.group.size, *mine.shape).sum(0), strict=True):
                _add(self._chosen, key, counts)
        for key, counts in self._of_pack.items():
            _add(self._chosen, key, counts)
        self._of_pack.clear()

    def add_to(self, layer: int, ranges: Sequence[Range], logits: Tensor) -> Tensor:
        """The logits [T, E] of a backward pack, behind which the loss's gradient is added; counts their share of it."""
        work = torch.float64 if logits.dtype == torch.float64 else torch.float32
        weights = torch.zeros(logits.shape, dtype=work, device=logits.device)
        scale = self.coefficient * logits.shape[1] / (self.num_layers * sum(self.num_tokens.values()))
        for (doc_id, _, _), rows in _real_rows(ranges, self.num_tokens):
            weights[rows] = self._chosen[layer, doc_id].to(work) * (scale / self.num_tokens[doc_id])
        with torch.no_grad():
            probabilities = logits.to(work).softmax(-1)
            loss = (weights * probabilities).sum(-1, keepdim=True)
            # d/dlogit of Σ w·p, softmax differentiated by hand.
            grad = probabilities * (weights - loss)
            self._loss = self._loss + loss.sum().double()
        return _AddGradient.apply(logits, grad.to(logits.dtype))  # type: ignore[return-value]

    def take_loss(self) -> Tensor:
        """The loss of all packs since the last call; fp64 scalar on the device."""
        loss, self._loss = torch.as_tensor(self._loss, dtype=torch.float64), 0.0
        return loss


def _count(values: Tensor, size: int) -> Tensor:
    """How often each of 0..size-1 comes; int64[size]. As `bincount`, which lets the host wait for a GPU."""
    return values.new_zeros(size).scatter_add_(0, values, torch.ones_like(values))


def _add(totals: dict[tuple[int, int], Tensor], key: tuple[int, int], counts: Tensor) -> None:
    totals[key] = totals[key] + counts if key in totals else counts


def _real_rows(ranges: Sequence[Range], num_tokens: Mapping[int, int]):
    """Ranges with the rows of a pack that hold their tokens and no padding."""
    row = 0
    for doc_id, start, stop in ranges:
        yield (doc_id, start, stop), slice(row, row + max(0, min(stop, num_tokens[doc_id]) - start))
        row += stop - start


class _AddGradient(torch.autograd.Function):
    """Identity; adds a known gradient on the way back."""

    @staticmethod
    def forward(ctx, logits: Tensor, extra: Tensor) -> Tensor:
        ctx.save_for_backward(extra)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (extra,) = ctx.saved_tensors
        return grad + extra, None


class ReplayRouter(nn.Module):
    """Mixed into transformers' router by changing the class of the model's own module."""

    replay: "ReplayState"
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
    from evenload.runtime.replay import linear_with_known_output

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

    replay: "ReplayState"
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
            store.record(self.site, order.by_token(gate_up), is_product=True)
            product = order.products(self._gated(gate_up), self.down_proj)
            weighted = product * top_k_weights.flatten()[order.entry, None]
            return order.sum_by_token(weighted).to(hidden_states.dtype)

        every_row = torch.arange(top_k_index.shape[0], device=top_k_index.device)

        def make(rows: Tensor) -> Tensor:
            part = order if rows is every_row else _Order(top_k_index[rows], self.gate_up_proj.shape[0])
            return part.by_token(part.products(hidden_states[rows][part.token], self.gate_up_proj))

        recorded = state.read_or_remake(self.site, make, every_row)
        recorded = recorded.reshape(top_k_index.numel(), -1)[order.entry]
        # In tuples, autograd does not see the weights, so it makes no gradients of its own for them.
        gate_up = _KnownGateUp.apply(hidden_states, (self.gate_up_proj, order, state.products), recorded)
        weights = top_k_weights.flatten()[order.entry]
        expert = self.down_proj, order, state.products
        return _UnusedDown.apply(self._gated(gate_up), weights, expert)  # type: ignore[return-value]

    def _gated(self, gate_up: Any) -> Tensor:
        return self._apply_gate(gate_up)  # type: ignore[operator]


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
        stops = _count(flat, num_experts).cumsum(0).tolist()
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
        """Add to `main_grad` [E, out, in].

        Args:
            input_rows: sorted [T·k, in], or by token [T, in]; grad_rows: sorted [T·k, out].
        """
        if by_token:
            input_rows = input_rows[self.token]
        total: Tensor = weights.main_grad  # type: ignore[attr-defined]
        for expert, part in self.parts:
            grad, input = grad_rows[part], input_rows[part]
            if total.dtype == grad.dtype:
                total[expert].addmm_(grad.t(), input)
            else:
                total[expert] += grad.t() @ input

    def by_token(self, rows: Tensor) -> Tensor:
        """Sorted rows [T·k, n] as [T, k·n], the pairs of a token side by side."""
        out = torch.empty_like(rows)
        out[self.entry] = rows
        return out.view(self.num_tokens, -1)

    def sum_by_token(self, rows: Tensor) -> Tensor:
        """Sorted rows [T·k, n] summed over the pairs of every token -> [T, n], in at least fp32."""
        work = torch.float64 if rows.dtype == torch.float64 else torch.float32
        out = torch.zeros(self.num_tokens, rows.shape[1], dtype=work, device=rows.device)
        return out.index_add_(0, self.token, rows.to(work))


def _add_or_put_off(ctx: Any, input_rows: Tensor, grad_rows: Tensor, *, by_token: bool) -> None:
    """The weight gradient of an expert product now, or in W.

    Args:
        by_token: input rows are [T, in] (gate and up: their k copies are made where they are used), else sorted.
    """
    if is_frozen(ctx.weights):
        return
    add = functools.partial(ctx.order.add_weight_gradients, ctx.weights, by_token=by_token)
    later = add if ctx.products is None else functools.partial(ctx.products.put_off, add)
    later(input_rows, grad_rows)


class _KnownGateUp(torch.autograd.Function):
    """Sorted gate and up projections [T·k, 2·ffn] as if they were computed from the hidden states [T, hidden]."""

    @staticmethod
    def forward(ctx, hidden: Tensor, expert: tuple[Tensor, _Order, WeightProducts | None], output: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.weights, ctx.order, ctx.products = expert
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (hidden,) = ctx.saved_tensors
        order: _Order = ctx.order
        _add_or_put_off(ctx, hidden, grad, by_token=True)
        return order.sum_by_token(order.products_back(grad, ctx.weights)).to(hidden.dtype), None, None


class _UnusedDown(torch.autograd.Function):
    """The block's output [1 or more, hidden] from gated rows and routing weights; nobody reads its value."""

    @staticmethod
    def forward(ctx, gated: Tensor, routing: Tensor, expert: tuple[Tensor, _Order, WeightProducts | None]) -> Tensor:
        ctx.save_for_backward(gated, routing)
        ctx.weights, ctx.order, ctx.products = expert
        return gated.new_zeros(()).expand(ctx.order.num_tokens, ctx.weights.shape[1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        gated, routing = ctx.saved_tensors
        order: _Order = ctx.order
        grad_rows = grad[order.token]
        weighted = (grad_rows * routing[:, None]).to(gated.dtype)
        _add_or_put_off(ctx, gated, weighted, by_token=False)
        back = order.products_back(grad_rows, ctx.weights)
        return (back * routing[:, None]).to(gated.dtype), (back * gated).sum(-1, dtype=routing.dtype), None
