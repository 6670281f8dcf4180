"""Replay: run an unmodified Hugging Face decoder layer forward once, and backward over *other* token ranges.

In the forward pack every linear (`nn.Linear`, GPT-2's `Conv1D`) and the attention of a layer record their outputs per
token. A backward pack runs the same layer again on its own ranges with the recorded outputs in place of matrix products
and attention, so only norms, rotary embedding and activations are recomputed; autograd then walks this cheap graph.
Weight gradients go into the fp32 (fp64) buffer `weight.main_grad`, or wait for a later action (`weight_products.py`).
For documents under the policy `recompute` the backward pack repeats the products of linears; attention is recorded
under every policy.

**Sinks** of attention (gpt-oss) are keys of score s and value 0, one a head. With lse and out of the other keys,

    lse' = logaddexp(lse, s)    out' = out · exp(lse - lse')    ds = -Σ exp(s - lse') · <g, out'> over rows

and with lse' and out' the backward of any backend gives the right gradients of q, k and v. Of a pack that ranks share
each adds the part of its rows to ds.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers import PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from evenload.attention.range_attention import Scoring
from evenload.errors import UnsupportedModelError
from evenload.runtime.model.around import ATTENTION_NAME, using
from evenload.runtime.model.lora import is_adapter
from evenload.runtime.model.mask_rules import TRAINED_MASKS, MaskRule, is_causal, mask_rule, unknown_tensors
from evenload.runtime.model.state_calls import carrying
from evenload.runtime.model.structure import LayerSites
from evenload.runtime.replay.context_attention import AttentionCall
from evenload.runtime.replay.experts import mix_experts
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.replay.weight_products import WeightProducts, add_now_or_later, add_weight_gradient, known_output


class _RecordedLinear:
    """Records the output of a linear and reads it back. Made by changing the class of the model's own module, so that
    parameters, names and hooks stay untouched."""

    replay: ReplayState
    site: tuple[int, str]
    weight: nn.Parameter
    bias: Any
    output_unused: bool
    is_changed = False
    """Whether the layer changes the output."""
    has_own_rows = False
    is_transposed = False
    """Whether `weight` is [in, out], not [out, in]."""

    def forward(self, input: Tensor) -> Tensor:
        """[1, T, in] -> [1, T, out], or [T, in] -> [T, out]."""
        state = self.replay
        if state.direction == "forward":
            output = self.product(input.flatten(0, -2))
            if not self.output_unused:
                state.store.record_product(self.site, output, is_own_rows=self.has_own_rows)
            return self._shaped(input, output.clone() if self.is_changed else output)
        if self.output_unused:
            # Nothing in the layer's backward reads this value, only its shape.
            output = input.new_zeros(()).expand(self.num_rows(input), self.weight.shape[1 if self.is_transposed else 0])
        else:
            output = self.read_or_recompute(input.detach().flatten(0, -2))
        known = self.known(input, self._shaped(input, output))
        return known.clone() if self.is_changed else known

    def _shaped(self, input: Tensor, output: Tensor) -> Tensor:
        return output.view(*input.shape[:-2], *output.shape)

    def num_rows(self, input: Tensor) -> int:
        return input.shape[-2]

    def product(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return nn.functional.linear(rows, self.weight.t() if self.is_transposed else self.weight, self.bias)

    def read_or_recompute(self, rows: Tensor) -> Tensor:
        return self.replay.read_or_recompute(self.site, self.product, rows, is_own_rows=self.has_own_rows)

    def known(self, input: Tensor, output: Tensor) -> Tensor:
        """Return the output of a backward pack, for autograd."""
        products, is_transposed = self.replay.products, self.is_transposed
        return linear_with_known_output(input, self.weight, self.bias, output, products, is_transposed=is_transposed)


class ReplayLinear(_RecordedLinear, nn.Linear):  # type: ignore[inconsistent-inheritance]
    """Runs an `nn.Linear` under replay."""


class ReplayConv1D(_RecordedLinear, Conv1D):  # type: ignore[inconsistent-inheritance]
    """Runs transformers' `Conv1D` under replay."""

    is_transposed = True


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


class ReplayChoices(nn.Module):
    """Runs a module that chooses the largest of some numbers a token (a router) under replay; mixed in by changing the
    class of the model's own module."""

    replay: ReplayState
    site: tuple[int, str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Choices(self):
            return super().forward(*args, **kwargs)


class _Choices(TorchFunctionMode):
    """Records products with the module's own weights and what it chooses, and reads both back."""

    def __init__(self, module: ReplayChoices) -> None:
        super().__init__()
        self._state, self._site = module.replay, module.site
        self._names = {id(weight): name for name, weight in module._parameters.items()}
        self._count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and id(args[1]) in self._names:
            return self._product(*args, **kwargs)
        if getattr(func, "__name__", "") == "topk" and kwargs.get("dim", args[2] if len(args) > 2 else -1) in (
            -1,
            args[0].ndim - 1,
        ):
            return self._chosen(func, args, kwargs)
        return func(*args, **kwargs)

    def _product(self, input: Tensor, weight: nn.Parameter, bias: Tensor | None = None) -> Tensor:
        state, rows = self._state, input.reshape(-1, input.shape[-1])
        site = (self._site[0], f"{self._site[1]}.{self._names[id(weight)]}")
        if state.direction == "forward":
            product = nn.functional.linear(rows, weight, bias)
            state.store.record(site, product, is_own_rows=True)
        else:
            recorded = state.store.read(site, state.ranges)
            product = linear_with_known_output(rows, weight, bias, recorded, state.products)
            if state.balance is not None:
                product = state.balance.add_to(self._site[0], state.ranges, product)
        return product.view(*input.shape[:-1], product.shape[-1])

    def _chosen(self, func: Any, args: Any, kwargs: Any) -> Any:
        state, values = self._state, args[0]
        site, self._count = (self._site[0], f"{self._site[1]}.chosen{self._count}"), self._count + 1
        if state.direction == "forward":
            found = func(*args, **kwargs)
            rows = found.indices.flatten(0, -2)  # one a token, or one a token and group
            count = state.num_own_rows
            groups = rows.shape[0] // count if count else math.prod(size for size in values.shape[:-1] if size)
            state.store.record(site, rows.view(count, groups * rows.shape[1]), is_own_rows=True)
            if state.balance is not None:
                state.balance.count(self._site[0], state.ranges, rows)
            return found
        # Among other rows a product may differ in its last bit, and a token near a tie would choose others.
        num_chosen = kwargs["k"] if "k" in kwargs else args[1]
        chosen = state.store.read(site, state.ranges).view(*values.shape[:-1], num_chosen)
        return torch.return_types.topk((values.gather(-1, chosen), chosen))


class ReplayMixer(nn.Module):
    """Runs a module that mixes rows in a way of its own (linear attention, state space, convolution) document by
    document under plain autograd, in forward and again in backward; mixed in by changing the class of the model's own
    module. Documents must be whole."""

    replay: ReplayState
    configs: Sequence[PretrainedConfig]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ranges, outputs, stop = self.replay.ranges, [], 0
        floating = (
            one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor) and one.is_floating_point()
        )
        like = next(floating)
        with using(self.configs, "eager"), carrying(None):
            for _, start, end in ranges:
                assert start == 0, "documents of models with such modules are not cut"
                start, stop = stop, stop + end
                pick = functools.partial(_rows_of, rows=slice(start, stop), count=self.replay.num_rows, like=like)
                own_args, own_kwargs = tree_map(pick, (args, kwargs))
                outputs.append(super().forward(*own_args, **own_kwargs))
        flat = [tree_flatten(one) for one in outputs]
        sizes = [end - start for _, start, end in ranges]
        joined = [_joined(parts, sizes) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]
        return tree_unflatten(joined, flat[0][1])


def _rows_of(given: Any, rows: slice, count: int, like: Tensor) -> Any:
    """Return a document's part of an argument: of a mask, and of a tensor with a row for each of `count` tokens."""
    if isinstance(given, MaskRule):
        return given.dense(rows.stop - rows.start, like)
    axis = _row_axis(given, count)
    return given if axis is None else given.narrow(axis, rows.start, rows.stop - rows.start)


def _row_axis(given: Any, count: int) -> int | None:
    """Return the dimension of the tokens: the first, the second behind a batch of one, or the only one."""
    if not isinstance(given, Tensor) or not given.ndim:
        return None
    if given.numel() == given.shape[-1] == count:
        return given.ndim - 1
    if given.ndim > 1 and given.shape[0] == 1 and given.shape[1] == count:
        return 1
    return 0 if given.shape[0] == count else None


def _joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    axes = [_row_axis(part, size) for part, size in zip(parts, sizes, strict=True)]
    if None in axes or len(parts) == 1:
        return parts[0]
    axis = axes[0]
    widths = {(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}  # type: ignore[operator]
    if len(widths) > 1:
        raise UnsupportedModelError(
            f"a module that mixes rows gives results whose sizes follow the document ({sorted(widths)} beside the "
            "tokens), as chosen keys that later layers share; replay does not join them"
        )
    return torch.cat(list(parts), axis)  # type: ignore[bad-argument-type]


_RECORDED: dict[type, type[nn.Module]] = {nn.Linear: ReplayLinear, Conv1D: ReplayConv1D}


def make_replayable(
    layer: nn.Module, layer_index: int, state: ReplayState, sites: LayerSites, configs: Sequence[PretrainedConfig] = ()
) -> None:
    """Turn a decoder layer's linears, experts and choices into recording ones, in place; `configs` are of the model."""
    for name, module in layer.named_modules():
        if name in sites.mixers:
            module.__class__ = type(f"Replay{type(module).__name__}", (ReplayMixer, type(module)), {})
            module.replay, module.configs = state, configs  # type: ignore[assignment]
        if is_adapter(name) or sites.is_mixed(name):
            continue  # computed again under autograd in backward
        own, site = type(module), name.replace(".base_layer", "")
        if own in _RECORDED and site in sites.linears:
            module.__class__ = _RECORDED[own]
            module.is_changed = site in sites.in_place  # type: ignore[assignment]
        elif name in sites.choosing:
            module.__class__ = type(f"Replay{own.__name__}", (ReplayChoices, own), {})
        module.output_unused = site in sites.unused  # type: ignore[assignment]
        module.replay, module.site = state, (layer_index, name)  # type: ignore[assignment]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention interface: query [1, H, T, Dk], key [1, G, T, Dk] and value [1, G, T, Dv] ->
    [1, T, H, Dv]. `UnsupportedModelError`: masks and arguments that are not known. Models are without dropout, and rows
    of queries and keys the same tokens', as their survey and probe have found."""
    state: ReplayState = module.replay  # type: ignore[assignment]
    rule = _rule(module, attention_mask, options)
    sinks: Tensor | None = options.pop("s_aux", None)
    if unknown := ", ".join(unknown_tensors(options)):
        raise UnsupportedModelError(f"{type(module).__name__} passes {unknown} to its attention, which cannot use it")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    scoring = Scoring(scale, rule.window, soft_cap=float(options.get("softcap") or 0.0), chunk=rule.chunk)
    # Not `t[0]`: in backward that fills a tensor with zeros and copies the gradient into it.
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    call = AttentionCall(state.backend, state.store, state.next_call(), scoring)
    attend = _attend if state.direction == "forward" else _attended
    return attend(state, call, q, k, v, sinks)[None], None


def _rule(module: nn.Module, mask: Any, options: dict[str, Any]) -> MaskRule:
    """Return a call's rule. Without a mask it is causal, in the window of the module if it names one; else the mask
    decides (MiMo's is a token wider than the window that the module names)."""
    if isinstance(mask, MaskRule):
        if mask.refusal:
            raise UnsupportedModelError(mask.refusal)
        return mask
    if mask is not None:
        made = f"{tuple(mask.shape)} " if isinstance(mask, Tensor) else ""
        raise UnsupportedModelError(
            f"{type(module).__name__} gets a mask {made}that its model made itself; {TRAINED_MASKS}"
        )
    if not is_causal(module, options):
        raise UnsupportedModelError(f"{type(module).__name__} sees all tokens (is_causal is false); {TRAINED_MASKS}")
    return MaskRule(options.get("sliding_window") or 0)


def _attend(state: ReplayState, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the output [T, H, Dv] of a forward pack; record it and what backward needs."""
    if state.shared is not None:
        out, lse = state.shared.forward(call, q, k, v)
    else:
        state.store.record_pack_keys(call.key, k, v)
        out, lse = state.attention.attend(call, q)
    if sinks is not None:
        with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
        out, lse = out.mul_((lse - with_sinks).exp_()[..., None]), with_sinks
    state.store.record((call.key, "attention"), out)
    state.store.record((call.key, "lse"), lse)
    return out


def _attended(state: ReplayState, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the recorded output [T, H, Dv] of a backward pack's rows, for autograd."""
    store, attend, shared = state.store, state.attention, state.shared
    out, lse = (store.read((call.key, name), state.ranges) for name in ("attention", "lse"))
    queries, scores = q.detach(), None if sinks is None else sinks.detach()

    def backward(grad: Tensor) -> tuple[Tensor, ...]:
        grad = grad.contiguous()
        if shared is not None:
            grads = shared.backward(call, grad, queries, out, lse)
        else:
            dq, dk, dv = attend.gradients(call, grad, queries, out, lse)
            grads = dq, dk.to(queries.dtype), dv.to(queries.dtype)
        if scores is None:
            return grads
        share = (scores.to(lse.dtype) - lse).exp_()
        return *grads, -(share * (grad * out).sum(-1, dtype=lse.dtype)).sum(0).to(scores.dtype)

    return known_output(out, backward, q, k, v, *(() if sinks is None else (sinks,)))


ALL_EXPERTS_FUNCTIONS.register(ATTENTION_NAME, mix_experts)
ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, mask_rule)
