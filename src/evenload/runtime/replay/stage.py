"""`PipelineStage` runs forward and backward of packs on one stage's layers.

Final norm, head and loss run inside the *backward* of the last stage, where the cost model charges them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from evenload.attention.range_attention import RangeAttention
from evenload.runtime.comm.tensor_group import RowExchange, TensorGroup, row_owners
from evenload.runtime.model.around import ATTENTION_NAME, LayerCall, using
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.model.state_calls import StateForm, carrying
from evenload.runtime.replay.context_attention import LocalAttention, rows_of
from evenload.runtime.replay.head import Around, head_gradient, row_losses
from evenload.runtime.replay.rank_packs import PackTokens
from evenload.runtime.replay.replayable import make_replayable
from evenload.runtime.replay.state import ReplayState, RouterBalance, TensorRows
from evenload.runtime.replay.store import ActivationStore, call_key, num_rows
from evenload.runtime.replay.tensor_parallel import make_tensor_parallel
from evenload.runtime.replay.tree_attention import TreeAttention
from evenload.runtime.replay.weight_products import WeightProducts
from evenload.types.document import Direction, Range


def make_layers_replayable(model: StageModel, state: ReplayState, tensor: TensorGroup | None) -> None:
    """Make decoder layers replayable, once, in place. One pass runs at a time, so a rank's layers may share a state."""
    for index, layer in model.layers.items():
        make_replayable(layer, index, state, model.structure.sites[index], model.whole.configs)
        if tensor is not None:
            make_tensor_parallel(layer, index, state, model.structure)


OnFinal = Callable[[int], None]
"""Receives the number of a unit (`StageModel.units`) whose gradients of the step are complete; takes no time."""


def ignore_unit(unit: int) -> None:
    """Do nothing: the unit's gradients are not complete yet, or none of its weights are being gathered."""


class PipelineStage:
    """Runs packs on a `StageModel` whose parameters have `main_grad` (see data_parallel.py).

    Args:
        tensor: group of the ranks that hold parts of the model's matrices; None = there is none. With it, hidden states
            between layers and stages and their gradients have this rank's rows of a pack only (`RowShard`).
        state: of layers that are replayable already; None = they become so here.
    """

    def __init__(
        self,
        model: StageModel,
        backend: RangeAttention,
        tensor: TensorGroup | None = None,
        state: ReplayState | None = None,
    ) -> None:
        self.model = model
        self._like = next(next(iter(model.layers.values())).parameters())
        self._tensor = tensor
        self.head_row_sums: Tensor | None = None
        """On a last stage, the sum over each row of the gradient of the last backward pack's head."""
        self._await_weights: Callable[[int], None] = ignore_unit
        self._balance: RouterBalance | None = None
        if model.router_aux_loss_coef:
            routed = [index for index, sites in enumerate(model.structure.sites) if sites.experts]
            self._balance = RouterBalance(
                model.router_aux_loss_coef,
                num_layers=len(routed),
                num_experts=model.config.num_experts,
                layers=tuple(index for index in routed if index in model.layers),
                tensor=tensor,
            )
        self._state = state or ReplayState(backend=backend)
        self.backend, self.hidden_size = self._state.backend, model.config.hidden_size
        self.row_shard = None if tensor is None else tensor.shard
        if state is None:
            make_layers_replayable(model, self._state, tensor)

    def with_layers(self, layers: Iterable[int]) -> "PipelineStage":
        """Return a stage of some of the layers, without what is before the first and behind the last."""
        kept = {index: self.model.layers[index] for index in layers}
        model = replace(self.model, layers=kept, prologue={}, epilogue={})
        return PipelineStage(model, self.backend, self._tensor, self._state)

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        return self._like.device

    def num_rows(self, ranges: Iterable[Range]) -> int:
        return num_rows(ranges) if self._tensor is None else self._tensor.shard.num_rows(ranges)

    def begin_step(self, num_tokens: dict[int, int], await_weights: Callable[[int], None] = ignore_unit) -> None:
        """Begin a step; `num_tokens` of every document of the global batch, without padding. Forwards call
        `await_weights` before they read a unit's weights; it returns when these are complete."""
        self._await_weights = await_weights
        if self._balance is not None:
            self._balance.begin_step(num_tokens)

    @torch.no_grad()
    def forward(self, pack: PackTokens, hidden: Tensor | None, store: ActivationStore) -> Tensor:
        """Run a forward pack on hidden states [T, hidden] of the stage before (None on the first); return those for the
        next stage (on the last: the input of the final norm)."""
        if hidden is None:
            self._await_weights(self.model.units[0])
        hidden = self.forward_layers(pack, hidden, store)
        if self.model.is_last:
            store.record("final", hidden, is_own_rows=True, stays_on_device=True)
        return hidden

    @torch.no_grad()
    def forward_layers(self, pack: PackTokens, hidden: Tensor | None, store: ActivationStore) -> Tensor:
        """Run the layers' part of `forward`: [T, hidden] (None = of the pack's tokens) -> [T, hidden]."""
        store.open_pack(pack.ranges)
        if pack.ranges:
            with self._pass("forward", pack, store):
                hidden, calls = self._calls(pack, hidden)
                for index, call in calls.items():
                    self._await_weights(1 + index)
                    store.record((index, "input"), hidden, is_own_rows=True)
                    hidden = self._run_layer(index, call.on(hidden[None]))
                    store.end_layer(index)
            store.close_pack()
        else:
            hidden = self._like.new_zeros(0, self.hidden_size) if hidden is None else hidden
            for index in self.model.layers:
                self._join_transfers("forward", pack, index, store, hidden)
        if self._balance is not None:
            self._balance.end_pack(pack.ranges, pack.shared, self.device)
        return hidden

    def _calls(self, pack: PackTokens, hidden: Tensor | None) -> tuple[Tensor, dict[int, LayerCall]]:
        """Return hidden states [T, hidden] of own rows, as the first layer gets them, and the calls of the layers."""
        like = hidden
        if like is None:
            like = self._like.new_zeros(()).expand(self.num_rows(pack.ranges), self.hidden_size)
        with Around(self.model, self._exchange(pack, "embeddings") if hidden is None else None):
            first, calls = self.model.calls(pack.positions, pack.token_ids if hidden is None else None, like)
        return first[0] if hidden is None else hidden, calls

    def _run_layer(self, index: int, call: LayerCall) -> Tensor:
        self._state.enter_layer(index)
        return call.run(self.model.layers[index])[0]

    def announce_backward(self, pack: PackTokens, store: ActivationStore) -> None:
        store.open_backward(pack.ranges, tuple(reversed(self.model.layers)))

    def backward(
        self,
        pack: PackTokens,
        grad: Tensor | None,
        store: ActivationStore,
        num_label_tokens: int,
        products: WeightProducts | None = None,
        on_final: OnFinal = ignore_unit,
    ) -> tuple[Tensor | None, Tensor]:
        """Run a backward pack and add to every parameter's `main_grad`.

        Args:
            grad: [T, hidden] from the stage after; None on the last.
            num_label_tokens: of the whole global batch, the loss's denominator.
            products: where weight gradients of the layers' linears wait (I; `add_all` is W); None = they are added now,
                as those of norms, embedding and head always are.
            on_final: called unit by unit from the head to the embedding.

        Returns:
            Gradient [T, hidden] for the stage before (None on the first), and this pack's share of the global mean loss
            (fp64 scalar; on stages before the last that of the load-balancing loss, if any).
        """
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.head_row_sums = None
        if self.model.is_last:
            if pack.ranges:
                grad, loss = self.head(pack, store.read("final", pack.ranges), num_label_tokens)
                self.head_row_sums = grad.sum(dim=-1)
            else:
                grad = torch.zeros(0, self.hidden_size, dtype=self.dtype, device=self.device)
            on_final(self.model.units[-1])
        assert grad is not None
        grad = self.backward_layers(pack, grad, store, products, on_final)
        if self._balance is not None:
            loss = loss + self._balance.take_loss()
        if self.model.is_first:
            on_final(self.model.units[0])
            return None, loss
        return grad, loss

    def backward_layers(
        self,
        pack: PackTokens,
        grad: Tensor,
        store: ActivationStore,
        products: WeightProducts | None = None,
        on_final: OnFinal = ignore_unit,
    ) -> Tensor:
        """Run the layers' part of `backward`: gradient [T, hidden] of their output -> of their input; on a first stage
        also the prologue's."""
        if not pack.ranges:
            # Layer by layer as where there are rows: transfers of the layers and sums of gradients have one order.
            for index in reversed(self.model.layers):
                self._join_transfers("backward", pack, index, store, grad)
                on_final(1 + index)
            store.close_backward(pack.ended)
            return grad
        self.announce_backward(pack, store)
        with self._pass("backward", pack, store, products):
            with torch.set_grad_enabled(self.model.is_first):
                first, calls = self._calls(pack, None if self.model.is_first else grad)
            made = _Made()
            for group in reversed(self.model.groups):
                grad = self._backward_group(group, calls, grad, pack, store, products, made)
                for index in reversed(group):
                    store.leave_layer(index)
                    on_final(1 + index)
            if self.model.is_first:
                made.backward(first, grad)
        store.close_backward(pack.ended)
        return grad

    def _backward_group(
        self,
        group: tuple[int, ...],
        calls: dict[int, LayerCall],
        grad: Tensor,
        pack: PackTokens,
        store: ActivationStore,
        products: WeightProducts | None,
        made: "_Made",
    ) -> Tensor:
        """Run layers again in one graph, and backward through it: gradient of their output -> of their input."""
        for index in reversed(group):
            store.enter_layer(index)
        # In memory of its own, where several linears may read it, it is kept once for all their products.
        first = store.read((group[0], "input"), pack.ranges)[None].detach()
        first = (first if products is None else first.clone()).requires_grad_()
        hidden = first
        with torch.enable_grad():
            for index in group:
                hidden = self._run_layer(index, made.detached(calls[index]).on(hidden))[None]
        hidden.backward(grad[None])
        store.states.end_backward()
        assert first.grad is not None
        return first.grad[0]

    def _join_transfers(
        self, direction: Direction, pack: PackTokens, layer: int, store: ActivationStore, like: Tensor
    ) -> None:
        """Take part in a layer's transfers of a shared pack of which this rank computes no rows. Backward they come
        last first, as autograd runs what was called last as soon as it can."""
        if pack.shared is None:
            return
        assert pack.states is not None
        tp = 1 if self._tensor is None else self._tensor.size
        calls = self.model.structure.sites[layer].calls
        numbered = [(call, sum(type(one) is type(call) for one in calls[:at])) for at, call in enumerate(calls)]
        for call, n in numbered if direction == "forward" else reversed(numbered):
            if isinstance(call, StateForm):
                pack.states.join(direction, store.states, (layer, n), call.share(tp), like)
            else:
                shape = msgspec.structs.replace(call, heads=call.heads // tp, kv_heads=call.kv_heads // tp)
                pack.shared.join(direction, self.backend, store, call_key(layer, n), shape, like)

    def losses(self, pack: PackTokens, hidden: Tensor) -> Tensor:
        """Return every row's loss of a forward pack, [T] in fp32 (fp64), from final hidden states. Last stage only."""
        if not pack.ranges:
            return hidden.new_zeros(0)
        return row_losses(self.model, hidden, pack.targets, pack.ranges, self._tensor, pack.edges)

    def head(self, pack: PackTokens, hidden: Tensor, num_label_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the gradient of final hidden states [T, hidden] and this rank's loss share. Last stage only."""
        of_pack = num_label_tokens, pack.ranges, self._tensor, pack.edges
        grad, loss = head_gradient(self.model, hidden, pack.targets, *of_pack)
        # All ranks of a group know the loss, and one reports it.
        is_reporter = self._tensor is None or self._tensor.shard.rank == 0
        return grad, loss if is_reporter else torch.zeros_like(loss)

    def _exchange(self, pack: PackTokens, what: str) -> RowExchange | None:
        if self._tensor is None:
            return None
        return RowExchange(self._tensor, row_owners(pack.ranges, self._tensor.size), self.device, what)

    @contextmanager
    def _pass(
        self, direction: Direction, pack: PackTokens, store: ActivationStore, products: WeightProducts | None = None
    ) -> Iterator[None]:
        state = self._state
        state.direction, state.ranges, state.store, state.products = direction, pack.ranges, store, products
        state.shared, state.shared_states = pack.shared, pack.states
        state.balance, state.tensor = self._balance, self._tensor
        rows = tuple(rows_of(pack.ranges))
        state.attention = TreeAttention(rows, pack.trees) if pack.trees else LocalAttention(rows)
        state.divide_rows(self.device)
        exchange = self._exchange(pack, f"hidden states of a {direction} pack")
        if exchange is not None:
            state.tensor_rows = TensorRows(exchange, pack.ranges)
        try:
            with using(self.model.whole.configs, ATTENTION_NAME), carrying(state.carry):
                yield
        finally:
            state.ranges, state.products, state.shared, state.shared_states = (), None, None, None
            del state.store
            if exchange is not None:
                del state.tensor_rows


class _Made:
    """Gathers the gradients of what a prologue has made for layers besides hidden states."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # of the prologue, and what a layer was given for it

    def detached(self, call: LayerCall) -> LayerCall:
        """Return the call with tensors that have gradients cut off from the prologue's graph."""
        flat, spec = tree_flatten(tuple(call))
        for at, one in enumerate(flat):
            if isinstance(one, Tensor) and one.requires_grad and one is not call.hidden:
                flat[at] = one.detach().requires_grad_()
                self._pairs.append((one, flat[at]))
        return LayerCall(*tree_unflatten(flat, spec))

    def backward(self, hidden: Tensor, grad: Tensor) -> None:
        """Run the prologue's backward, from the gradient [T, hidden] of its hidden states too."""
        pairs = [(one, given.grad) for one, given in self._pairs if given.grad is not None]
        if hidden.requires_grad:
            pairs.append((hidden, grad))
        if pairs:
            made, grads = zip(*pairs, strict=True)
            torch.autograd.backward(made, grads)
