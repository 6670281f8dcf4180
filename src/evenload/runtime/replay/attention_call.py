"""Attention and masks of transformers' layers under replay, as `replayable` registers them with transformers.

A model under this name makes no mask [T, T]: where it asks for one it gets a `MaskRule`, read once from the function
that says which keys a row sees, and passes it on to the attention of its layers. Where documents begin is known from
the plan, so what transformers adds to that function for packs is left out.

**Sinks** (gpt-oss) are keys of score s and value 0, one a head. With lse and out of the other keys,

    lse' = logaddexp(lse, s)    out' = out · exp(lse - lse')    ds = -Σ exp(s - lse') · <g, out'> over rows

and with lse' and out' the backward of any backend gives the right gradients of q, k and v. Of a pack that ranks share
each adds the part of its rows to ds.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PretrainedConfig

from evenload.attention.range_attention import Scoring
from evenload.errors import UnsupportedModelError
from evenload.runtime.replay.context_attention import AttentionCall, AttentionShape
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.replay.weight_products import known_output

# Tensors that models pass on to their attention and that change nothing there.
_UNREAD = frozenset(("position_ids", "cache_position"))

_LONGEST = 1 << 24  # tokens of a document; a longer window is none


@dataclass(frozen=True)
class MaskRule:
    """Stands for a mask: a row sees the keys up to its own, of the last `window` tokens, or of its own chunk of `chunk`
    tokens (0 = no limit). What models do with a mask on its way to a layer leaves it as it is."""

    window: int = 0
    chunk: int = 0

    def __getitem__(self, _: object) -> "MaskRule":
        return self

    def to(self, *_: object, **__: object) -> "MaskRule":
        return self

    def clone(self) -> "MaskRule":
        return self

    def shows(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return which keys rows see, of positions that can be broadcast against each other."""
        visible = keys <= rows
        if self.window:
            visible &= keys > rows - self.window
        if self.chunk:
            visible &= keys // self.chunk == rows // self.chunk
        return visible


# ---- masks -----------------------------------------------------------------------------------------------------------

_MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Says whether a row sees a key: (batch, head, row, key) -> bool, of tensors that can be broadcast."""


def mask_rule(
    *, mask_function: _MaskFunction, q_length: int, kv_length: int, config: PretrainedConfig, **_: object
) -> MaskRule:
    """Return the rule of a mask function; transformers calls this where it would make a mask. `UnsupportedModelError`:
    it is none, or there is more to the mask."""
    if q_length != kv_length:
        what = f"{q_length} rows and {kv_length} keys"
        raise UnsupportedModelError(f"{config.model_type} asks for an attention mask of {what}; {_TRAINED}")
    key, function = _of_cell("mask_function", _unpacked(mask_function))
    return _read_rule(_KeyedFunction(key, function, config.model_type))


_TRAINED = "only causal attention of a document's tokens to each other is trained, all, in a window or in chunks"


@dataclass(frozen=True)
class _KeyedFunction:
    """A mask function, equal to others with equal code and constants: models make a new one a pack."""

    key: Hashable
    function: _MaskFunction = field(compare=False)
    model_type: str = field(compare=False)


def _closure(function: FunctionType) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _unpacked(function: Any) -> Any:
    """Return a mask function without what transformers adds where position ids are of several sequences."""
    parts: tuple[Any, ...] = ()
    if isinstance(function, FunctionType):
        parts = _closure(function).get("mask_functions", ())
    made_by = [getattr(part, "__qualname__", "").partition(".")[0] for part in parts]
    if made_by == ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        return _closure(parts[1])["mask_function"]
    return function


def _of_cell(name: str, value: Any) -> tuple[Hashable, Any]:
    """Return what makes a mask function, or a value that it reads, equal to others, and the same without tensors."""
    if isinstance(value, FunctionType):
        cells = [_of_cell(*item) for item in _closure(value).items()]
        closure = tuple(CellType(one) for _, one in cells)
        own = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
        return (value.__code__, value.__defaults__, *(key for key, _ in cells)), own
    if isinstance(value, tuple):
        each = [_of_cell(name, one) for one in value]
        return tuple(key for key, _ in each), tuple(one for _, one in each)
    if isinstance(value, Tensor):
        if name != "left_padding":
            raise UnsupportedModelError(f"an attention mask depends on tensor {name} {tuple(value.shape)}; {_TRAINED}")
        return None, torch.zeros(value.shape, dtype=torch.int64, device="cpu")  # there is no padding mask
    return value, value


@functools.lru_cache(maxsize=64)
def _read_rule(mask: _KeyedFunction) -> MaskRule:
    """Find the first row that does not see key 0, then compare rows around it with a window and with chunks."""
    zero = torch.zeros((), dtype=torch.int64, device="cpu")

    def shows(rows: Tensor, keys: Tensor) -> Tensor:
        return mask.function(zero, zero, rows, keys).expand(torch.broadcast_shapes(rows.shape, keys.shape))

    far = 2 ** torch.arange(_LONGEST.bit_length(), device="cpu")
    unseen = (~shows(far, zero)).nonzero()
    size, rules = 0, [MaskRule()]
    if len(unseen):
        between = torch.arange(int(far[unseen[0]]) // 2, int(far[unseen[0]]) + 1, device="cpu")
        size = int(between[~shows(between, zero)][0])
        rules = [MaskRule(window=size), MaskRule(chunk=size)]
    rows = torch.tensor(
        [0, 1, 2, 63, 1000, *(n * size + i for n in (1, 2, 3) for i in (-1, 0, 1))], device="cpu"
    ).unique()
    rows = rows[rows >= 0][:, None]
    keys = torch.arange(int(rows.max()) + 10, device="cpu")
    visible = shows(rows, keys)
    wrong = {}
    for rule in rules:
        differs = (visible != rule.shows(rows, keys)).any(dim=1).nonzero()
        if not len(differs):
            return rule
        wrong[rule] = int(differs[0])
    first = max(wrong.values())
    seen = keys[visible[first]].tolist()
    said = f"{len(seen)} of keys {seen[0]} to {seen[-1]}" if seen else "no key"
    raise UnsupportedModelError(
        f"{mask.model_type} makes an attention mask in which row {int(rows[first])} sees {said}; {_TRAINED}"
    )


# ---- attention -------------------------------------------------------------------------------------------------------


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention interface: query [1, H, T, Dk], key [1, G, T, Dk] and value [1, G, T, Dv] ->
    [1, T, H, Dv]. `UnsupportedModelError`: the module asks for what is not computed."""
    state: ReplayState = module.replay  # type: ignore[assignment]
    rule = _rule(module, attention_mask, options)
    sinks: Tensor | None = options.pop("s_aux", None)
    if (why := _refusal(query, key, value, dropout, sinks, options)) is not None:
        raise UnsupportedModelError(f"{type(module).__name__} {why}")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    scoring = Scoring(scale, rule.window, soft_cap=float(options.get("softcap") or 0.0), chunk=rule.chunk)
    # Not `t[0]`: in backward that fills a tensor with zeros and copies the gradient into it.
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    shape = AttentionShape(q.shape[1], k.shape[1], k.shape[2], v.shape[2], scoring, sinks is not None)
    call = AttentionCall(state.backend, state.store, state.next_call(shape), scoring)
    attend = _attend if state.direction == "forward" else _attended
    return attend(state, call, q, k, v, sinks)[None], None


def _rule(module: nn.Module, mask: Any, options: dict[str, Any]) -> MaskRule:
    """Return a call's rule. Without a mask it is causal, in the window of the module if it names one; else the mask
    decides (MiMo's is a token wider than the window that the module names)."""
    is_causal, window = options.pop("is_causal", None), options.pop("sliding_window", None)
    if isinstance(mask, MaskRule):
        return mask
    if mask is not None:
        made = f"{tuple(mask.shape)} " if isinstance(mask, Tensor) else ""
        raise UnsupportedModelError(f"{type(module).__name__} gets a mask {made}that its model made itself; {_TRAINED}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModelError(f"{type(module).__name__} sees all tokens (is_causal is false); {_TRAINED}")
    return MaskRule(window or 0)


def _refusal(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, sinks: Tensor | None, options: dict[str, Any]
) -> str | None:
    """Say what of a call is not computed; None = all is."""
    rows = query.shape[2]
    if query.shape[0] != 1 or key.shape[2] != rows or value.shape[2] != rows:
        shapes = ", ".join(str(tuple(one.shape)) for one in (query, key, value))
        return f"attends with queries, keys and values {shapes}, which are not of the same tokens"
    if dropout:
        return f"drops attention at random (dropout {dropout}); set it to 0 in config.json"
    if sinks is not None and tuple(sinks.shape) != query.shape[1:2]:
        return f"has attention sinks {tuple(sinks.shape)}, not one for each of its {query.shape[1]} query heads"
    for name, given in options.items():
        if isinstance(given, Tensor) and name not in _UNREAD:
            return f"passes {name} {tuple(given.shape)} to its attention, which range attention does not know"
    return None


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
