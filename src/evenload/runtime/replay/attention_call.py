"""Attention of transformers' layers under replay.

**Sinks** (gpt-oss) are keys of score s and value 0, one a head. With lse and out of the other keys,

    lse' = logaddexp(lse, s)    out' = out · exp(lse - lse')    ds = -Σ exp(s - lse') · <g, out'> over rows

and with lse' and out' the backward of any backend gives the right gradients of q, k and v. Of a pack that ranks share
each adds the part of its rows to ds.
"""

from typing import Any

import torch
from torch import Tensor, nn

from evenload.attention.range_attention import Scoring
from evenload.errors import UnsupportedModelError
from evenload.runtime.model.mask_rules import TRAINED_MASKS, MaskRule, is_causal, unknown_tensors
from evenload.runtime.replay.context_attention import AttentionCall
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.replay.weight_products import known_output


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
