"""Replay: run an unmodified Hugging Face decoder layer forward once, and backward over *other* token ranges.

In the forward pack every `nn.Linear` and the attention of a layer record their outputs per token. A
backward pack runs the same layer again on its own ranges with the recorded outputs in place of matrix
products and attention, so only norms, rotary embedding and activations are recomputed; autograd then
walks this cheap graph. Weight gradients go straight into the fp32 (fp64) buffer `weight.main_grad`, or
are put off to a later action (`weight_products.py`).

Documents under the policy `recompute` have no recorded products of linears: the backward pack makes
these again, for the rows of such documents only. Attention is recorded under every policy.
Cost: measured against plain autograd in benchmarks/replay.py.

Source: our own; the closest published relative is SlimPack's regrouping of slices in backward (§4.2),
which does not say how activations are shared between the two cuts.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from evenload.attention.range_attention import RangeAttention, first_visible_key
from evenload.attention.range_batch import KeyRange, attend_ranges, attend_ranges_backward
from evenload.runtime.context_attention import AttentionCall, PackAttention
from evenload.runtime.device import to_device
from evenload.runtime.experts import ReplayExperts, ReplayRouter, RouterBalance
from evenload.runtime.lora import is_adapter
from evenload.runtime.recipes import ReplayRecipe
from evenload.runtime.store import ActivationStore, Range, num_rows
from evenload.runtime.weight_products import WeightProducts, add_weight_gradient, is_frozen

if TYPE_CHECKING:
    from evenload.runtime.tensor_parallel import PackRows

ATTENTION_NAME = "evenload_range"
"""Name under which the attention function is registered with transformers."""


@dataclass(eq=False)
class ReplayState:
    """What the running pass is; shared by the replaced modules of one stage.

    Args:
        mode: "record" in forward packs, "replay" in backward packs.
        ranges: of the running pack, in row order; rows: where each is in the pack.
        remade: int64[n], rows of the running backward pack whose products are made again; None = no rows. `kept` are
            the other rows, of `kept_ranges`.
        products: where weight gradients of the running backward pack wait; None = they are added at once.
        balance: the load-balancing loss of routers; None = none is trained.
        shared: attention of the running pack where other ranks have rows of it too; None = this rank has them all.
        tensor_rows: rows of the running pack on a tensor-parallel group; None = there is none.
    """

    backend: RangeAttention
    mode: Literal["record", "replay"] = "record"
    ranges: tuple[Range, ...] = ()
    rows: tuple[slice, ...] = ()
    store: ActivationStore | None = None
    remade: Tensor | None = None
    kept: Tensor | None = None
    kept_ranges: tuple[Range, ...] = ()
    products: WeightProducts | None = None
    balance: RouterBalance | None = None
    shared: PackAttention | None = None
    tensor_rows: "PackRows | None" = None

    def divide_rows(self, device: torch.device) -> None:
        """Find the rows of the running pack whose products are not stored."""
        assert self.store is not None
        self.remade, self.kept, self.kept_ranges = None, None, ()
        again = [self.store.policy(r[0]) == "recompute" for r in self.ranges]
        if self.mode == "record" or not any(again):
            return
        rows = torch.arange(num_rows(self.ranges))
        is_again = torch.repeat_interleave(torch.tensor(again), torch.tensor([b - a for _, a, b in self.ranges]))
        self.remade = to_device(rows[is_again], device)
        if not all(again):
            self.kept = to_device(rows[~is_again], device)
            self.kept_ranges = tuple(r for r, remade in zip(self.ranges, again, strict=True) if not remade)

    def read_or_remake(self, site: tuple[int, str], make: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        """The product [T, out] of `input` [T, in] at a site of the running backward pack.

        Args:
            make: input rows -> product rows.
        """
        assert self.store is not None
        if self.remade is None:
            return self.store.read(site, self.ranges)
        with torch.no_grad():
            if self.kept is None:
                return make(input)
            made, stored = make(input[self.remade]), self.store.read(site, self.kept_ranges)
            output = made.new_empty(input.shape[0], *made.shape[1:])
            output[self.remade], output[self.kept] = made, stored
            return output


class ReplayLinear(nn.Linear):
    """An `nn.Linear` whose output is recorded and read back. Instances are made by changing the class of
    the model's own modules, so parameters, names and hooks stay untouched."""

    replay: ReplayState
    site: tuple[int, str]
    output_unused: bool

    def forward(self, input: Tensor) -> Tensor:
        """[1, T, in] -> [1, T, out]."""
        state = self.replay
        assert state.store is not None
        if state.mode == "record":
            output = nn.functional.linear(input, self.weight, self.bias)
            if not self.output_unused:
                state.store.record(self.site, output[0], is_product=True)
            return output
        if self.output_unused:
            # Nothing in the layer's backward reads this value, only its shape.
            output = input.new_zeros(()).expand(1, input.shape[1], self.out_features)
        else:
            output = state.read_or_remake(
                self.site, lambda rows: nn.functional.linear(rows, self.weight, self.bias), input[0].detach()
            )[None]
        return linear_with_known_output(input, self.weight, self.bias, output, state.products)


def linear_with_known_output(
    input: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, products: WeightProducts | None = None
) -> Tensor:
    """`output` as if it were computed from `input`, for autograd; weight gradients go to `main_grad`.

    Args:
        products: where weight gradients are put off to; None = they are added at once.
    """
    # In a tuple, autograd does not see the weights, so it makes no gradients of its own for them.
    return _KnownLinear.apply(input, (weight, bias, products), output)  # type: ignore[return-value]


class _KnownLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, input: Tensor, parameters: tuple[Tensor, Tensor | None, WeightProducts | None], output: Tensor
    ) -> Tensor:
        ctx.save_for_backward(input)
        ctx.weight, ctx.bias, ctx.products = parameters
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (input,) = ctx.saved_tensors
        if not is_frozen(ctx.weight):
            add = functools.partial(add_weight_gradient, ctx.weight, ctx.bias)
            later = add if ctx.products is None else functools.partial(ctx.products.put_off, add)
            later(input.flatten(0, -2), grad.flatten(0, -2))
        return grad @ ctx.weight, None, None


class _RangeAttentionFunction(torch.autograd.Function):
    """q [T, H, D], k and v [T, G, D] of all ranges of a pack -> output [T, H, D]."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, state: ReplayState, layer: int, scale: float, window: int):
        store = state.store
        assert store is not None
        ctx.call = (store, state.backend, state.ranges, state.rows, layer, scale, window)
        ctx.shared = state.shared
        if state.mode == "replay":
            out = store.read((layer, "attention"), state.ranges)
            ctx.save_for_backward(q, out, store.read((layer, "lse"), state.ranges))
            return out.view_as(out)
        if state.shared is not None:
            out, lse = state.shared.forward(AttentionCall(state.backend, store, layer, scale, window), q, k, v)
            store.record((layer, "attention"), out)
            store.record((layer, "lse"), lse)
            return out
        store.record_pack_keys(layer, k, v)
        seen = _key_ranges(store, state.ranges, state.rows, layer, window)
        out, lse = attend_ranges(state.backend, q, seen, scale=scale, window=window)
        store.record((layer, "attention"), out)
        store.record((layer, "lse"), lse)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        store, backend, ranges, rows, layer, scale, window = ctx.call
        q, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        if ctx.shared is not None:
            call = AttentionCall(backend, store, layer, scale, window)
            return *ctx.shared.backward(call, grad, q, out, lse), None, None, None, None
        dqs, dks, dvs = [], [], []
        seen = _key_ranges(store, ranges, rows, layer, window)
        parts = attend_ranges_backward(backend, grad, q, seen, out, lse, scale=scale, window=window)
        for (doc_id, start, stop), (dq, dk, dv) in zip(ranges, parts, strict=True):
            dk, dv = store.add_key_grads(doc_id, layer, first_visible_key(start, window), dk, dv, start, stop)
            dqs.append(dq)
            dks.append(dk)
            dvs.append(dv)
        return *(torch.cat(parts).to(q.dtype) for parts in (dqs, dks, dvs)), None, None, None, None


def _key_ranges(
    store: ActivationStore, ranges: tuple[Range, ...], rows: tuple[slice, ...], layer: int, window: int
) -> list[KeyRange]:
    return [
        KeyRange(own, *store.keys_and_values(doc_id, layer, first_visible_key(start, window), stop))
        for own, (doc_id, start, stop) in zip(rows, ranges, strict=True)
    ]


def _hf_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, D]."""
    state: ReplayState = module.replay  # type: ignore[assignment]
    assert attention_mask is None, "document boundaries come from the plan, never from a mask"
    assert dropout == 0.0, "refused when the model was loaded"
    assert (softcap or 0.0) == state.backend.soft_cap, "a backend is selected with the model's soft cap"
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = _RangeAttentionFunction.apply(q, k, v, state, layer, scaling, sliding_window or 0)
    return out[None], None  # type: ignore[index]


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _hf_attention)


def make_replayable(layer: nn.Module, layer_index: int, state: ReplayState, recipe: ReplayRecipe) -> None:
    """Turn a decoder layer's linears, experts and attention into recording ones, in place."""
    mixed_in: dict[str | None, type[nn.Module]] = {recipe.router: ReplayRouter, recipe.experts: ReplayExperts}
    for name, module in layer.named_modules():
        if is_adapter(name):
            continue  # thin products, computed again under autograd in backward
        if type(module) is nn.Linear:
            module.__class__ = ReplayLinear
            module.replay, module.site = state, (layer_index, name)  # type: ignore[assignment]
            module.output_unused = name.removesuffix(".base_layer") in recipe.unused_outputs  # type: ignore[assignment]
        elif type(module).__name__ in mixed_in:
            own = type(module)
            module.__class__ = type(f"Replay{own.__name__}", (mixed_in[own.__name__], own), {})
            module.replay, module.site = state, (layer_index, name)  # type: ignore[assignment]
        elif hasattr(module, "layer_idx"):
            module.replay = state  # type: ignore[assignment]
