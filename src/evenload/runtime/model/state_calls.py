"""Find the functions of transformers' layers that carry a state along a document, and call them range by range.

Scans (Gated DeltaNet, KDA, Mamba) and causal convolutions have no interface as attention has, but every family calls
them by one of a few names of its own module (`_BINDERS`). There `WholeModel` puts a function that hands the call to
whoever runs the model (`carrying`), as a `StateCall`; while nobody has asked for calls it is transformers' own, which
calls the kernels of fla, mamba_ssm or causal_conv1d where they are installed.

A call over ranges of documents takes the state before each and gives the state behind it:

    convolution    the last inputs before a range, K - 1 of them; all ranges are one call, each behind its own
    delta rule     a matrix a head, [1, H, Dk, Dv]; fla's kernel takes all ranges in one call
    Mamba-2        a matrix a head, [1, H, P, N]; mamba_ssm's kernel takes whole documents in one call
    Mamba-1        [1, D, N]. Its function takes none, so the state's part is added outside: the recurrence is linear in
                   the state, y_t += C_t · (exp(A · Σ_{s<=t} dt_s) ⊙ h). Its kernel drops the gradient of the state
                   behind a range, so the state is read by N more tokens, of no time and C = a unit vector each

All are affine in the state: behind a range it is M · start + U, where U is the state behind the range from a state of
zeros, and M (`StateForm`) depends on the range's rows alone:

    convolution    moves the inputs by the range's tokens; it is nowhere stored
    delta rule     a matrix a head, [1, H, Dk, Dk]: what the function itself makes of the identity, with values of zero
    Mamba-2        a factor a head, exp(A · Σ dt), [1, H, 1, 1]
    Mamba-1        factors exp(A · Σ dt), [1, D, N]
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from evenload.attention.range_attention import work_dtype
from evenload.errors import UnsupportedModelError

Overs = tuple[Tensor, list[Tensor | None]]
"""What a function gives for rows of some ranges, and the state behind each range; None where nobody wants it."""


@dataclass(frozen=True)
class Spans:
    """Describes ranges of documents that lie one behind the other in a call's rows.

    Args:
        sizes: tokens of each.
        starts: the state before each; None = a document begins.
        wanted: whether the state behind each is wanted, as its document goes on.
    """

    sizes: Sequence[int]
    starts: Sequence[Tensor | None]
    wanted: Sequence[bool]


Run = Callable[[Sequence[Tensor], Spans], Overs]


@dataclass(frozen=True)
class StateForm:
    """Says how large a state and a transition M are, and how M applies to a state: as a matrix a head, as factors of
    its elements, or as a shift by the tokens of the range."""

    state: tuple[int, ...]
    transition: tuple[int, ...]
    applies: Literal["matrix", "factors", "shift"]

    def share(self, tp: int) -> "StateForm":
        """Return the form on a tensor-parallel rank, which has its part of heads or channels."""
        state, transition = (
            (*one[:1], *(n // tp for n in one[1:2]), *one[2:]) for one in (self.state, self.transition)
        )
        return StateForm(state, transition, self.applies)

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of a transition and of a state."""
        return math.prod(self.transition), math.prod(self.state)

    def apply(self, transition: Tensor, state: Tensor, num_tokens: int) -> Tensor:
        """Return what is left of a state behind a range: M · state."""
        if self.applies == "shift":
            num_tokens = min(num_tokens, state.shape[-1])
            return pad(state[..., num_tokens:], (0, num_tokens))
        return transition @ state if self.applies == "matrix" else transition * state

    def adjoint(self, transition: Tensor, gradient: Tensor, num_tokens: int) -> Tensor:
        """Return what the gradient of the state behind a range adds to that of the state before it: Mᵀ · gradient."""
        if self.applies == "shift":
            num_tokens = min(num_tokens, gradient.shape[-1])
            return pad(gradient[..., : gradient.shape[-1] - num_tokens], (num_tokens, 0))
        return transition.mT @ gradient if self.applies == "matrix" else transition * gradient


@dataclass(frozen=True, eq=False)
class StateCall:
    """Holds a layer's call of a function that carries a state.

    Args:
        function: its name.
        rows: what it reads of every token, and the dimension of the tokens in each.
        out_dim: that of its output.
        run: computes spans of rows.
        form: of its state.
        transit: gives the transition of every span of these sizes.
    """

    function: str
    rows: tuple[tuple[Tensor, int], ...]
    out_dim: int
    run: Run
    form: StateForm
    transit: Callable[[Sequence[Tensor], Sequence[int]], list[Tensor]]

    @property
    def num_rows(self) -> int:
        """Tokens."""
        tensor, dim = self.rows[0]
        return tensor.shape[dim]

    def over(self, spans: Spans) -> Overs:
        """Compute all rows."""
        return self.run([tensor for tensor, _ in self.rows], spans)

    def over_some(self, firsts: Sequence[int], spans: Spans) -> Overs:
        """Compute the rows of spans that begin at these rows; rows of the output follow each other."""
        return self.run(self._picked(firsts, spans.sizes), spans)

    @torch.no_grad()
    def transitions(self, firsts: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
        """Return M of spans of these sizes that begin at these rows."""
        return self.transit(self._picked(firsts, sizes), sizes)

    def _picked(self, firsts: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
        at = list(zip(firsts, sizes, strict=True))
        return [_join([one.narrow(dim, *place) for place in at], dim) for one, dim in self.rows]


Handler = Callable[[StateCall], Tensor]
"""Answers a call with the output of all its rows."""
_HANDLER: ContextVar[Handler | None] = ContextVar("handler of calls that carry a state", default=None)


@contextmanager
def carrying(handler: Handler | None) -> Iterator[None]:
    """Hand the calls of this thread to a function; None = to nobody."""
    before = _HANDLER.set(handler)
    try:
        yield
    finally:
        _HANDLER.reset(before)


def install(model: nn.Module) -> None:
    """Make the functions of a model's modules callable through `carrying`, once a module of Python."""
    for name in {type(module).__module__ for module in model.modules()}:
        if not name.startswith("transformers.models."):
            continue
        module = sys.modules[name]
        for function in (*_BINDERS, *_FUSED):
            original = getattr(module, function, None)
            if original is not None and not hasattr(original, "carries_state"):
                setattr(module, function, _dispatcher(function, original))


def _dispatcher(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        handler = _HANDLER.get()
        if handler is None:
            return original(*args, **kwargs)
        if name in _FUSED:
            return None
        rows = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        # Where kernels are installed, transformers calls them on whatever it gets; they run on GPUs.
        found = _BINDERS[name](name, original if rows.is_cuda else inspect.unwrap(original), args, kwargs)
        # Inside, a function is transformers' own, whatever it calls.
        before = _HANDLER.set(None)
        try:
            output = handler(found)
        finally:
            _HANDLER.reset(before)
        return (output, None) if name in _WITH_STATE else output

    call.carries_state = True  # type: ignore[attr-defined]
    return call


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _one_by_one(
    run: Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]], dims: Sequence[int], out_dim: int
) -> Run:
    """Return a function that computes spans by one call each, of their rows and the state before them."""

    def over(rows: Sequence[Tensor], spans: Spans) -> Overs:
        outputs, ends, first = [], [], 0
        for size, start, is_wanted in zip(spans.sizes, spans.starts, spans.wanted, strict=True):
            own = [one.narrow(dim, first, size) for one, dim in zip(rows, dims, strict=True)]
            output, end = run(own, start)
            outputs.append(output)
            ends.append(end if is_wanted else None)
            first += size
        return _join(outputs, out_dim), ends

    return over


_find_spec = cache(find_spec)


def _has_kernel(package: str, rows: Tensor) -> bool:
    """Say whether transformers calls a package's kernel for these rows."""
    return rows.is_cuda and _find_spec(package) is not None


def _named(name: str, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name. `UnsupportedModelError`: tensors that the name is not known to take."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    others = [key for key, one in given.items() if isinstance(one, Tensor) and key not in names]
    if others or len(args) > len(names):
        raise UnsupportedModelError(f"{name} is called with {', '.join(others) or f'{len(args)} arguments'}")
    return given


def _convolution(name: str, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> StateCall:
    given = _named(name, ("hidden_states", "weight", "bias", "activation"), args, kwargs)
    weight, bias = given["weight"], given.get("bias")
    halo = weight.shape[-1] - 1

    def over(rows: Sequence[Tensor], spans: Spans) -> Overs:
        (x,) = rows  # [1, C, T]
        nothing = x.new_zeros(*x.shape[:2], halo)
        # A range shorter than the state hands on what is left of the older one.
        seen = [
            torch.cat([nothing if start is None else start, part], -1)
            for part, start in zip(x.split(list(spans.sizes), -1), spans.starts, strict=True)
        ]
        out = original(_join(seen, -1), weight, bias, activation=given.get("activation"))
        parts = out.split([halo + size for size in spans.sizes], -1)
        ends = [one[..., one.shape[-1] - halo :] if w else None for one, w in zip(seen, spans.wanted, strict=True)]
        return _join([part[..., halo:] for part in parts], -1), ends

    x = given["hidden_states"]
    form = StateForm((1, x.shape[1], halo), (0,), "shift")
    return StateCall(name, ((x, 2),), 2, over, form, lambda rows, sizes: [x.new_empty(0)] * len(sizes))


_DELTA = ("query", "key", "value", "g", "beta")


def _delta_rule(name: str, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> StateCall:
    given = _named(name, _DELTA, args, {key: one for key, one in kwargs.items() if key != "cu_seqlens"})
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": given.get("use_qk_l2norm_in_kernel", False)}

    def run(rows: Sequence[Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = rows
        return original(q, k, v, g=g, beta=beta, initial_state=start, **options)

    def at_once(rows: Sequence[Tensor], spans: Spans) -> Overs:
        q, k, v, g, beta = rows
        edges = torch.tensor([0, *spans.sizes]).cumsum(0)
        # Without those on the CPU a host would wait for a GPU.
        told = {"cu_seqlens": edges.to(q.device), "cu_seqlens_cpu": edges}
        nothing = q.new_zeros(1, v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
        start = torch.cat([nothing if one is None else one for one in spans.starts])
        out, ends = original(q, k, v, g=g, beta=beta, initial_state=start, **told, **options)
        return out, [one if w else None for one, w in zip(ends.split(1), spans.wanted, strict=True)]

    rows = tuple((given[key], 1) for key in _DELTA)
    over = at_once if _has_kernel("fla", given["query"]) else _one_by_one(run, [1] * 5, 1)
    (_, _, _, width), (_, _, heads, value_width) = given["key"].shape, given["value"].shape

    def transit(rows: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        q, k, v, g, beta = rows
        identity = torch.eye(width, dtype=work_dtype(k), device=k.device).expand(1, heads, width, width).contiguous()
        spans = Spans(sizes, [identity] * len(sizes), [True] * len(sizes))
        _, ends = over((q, k, v.new_zeros(*v.shape[:-1], width), g, beta), spans)
        return [end for end in ends if end is not None]

    form = StateForm((1, heads, width, value_width), (1, heads, width, width), "matrix")
    return StateCall(name, rows, 1, over, form, transit)


def _mamba2(name: str, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> StateCall:
    names = ("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "z")
    given = _named(name, names, args, kwargs)
    if given.get("z") is not None:
        raise UnsupportedModelError(f"{name} is called with z")
    options = {key: given[key] for key in ("chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit") if key in given}

    def run(rows: Sequence[Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        x, dt, b, c = rows
        return original(x, dt, given["A"], b, c, initial_states=start, return_final_states=True, **options)

    one_by_one = _one_by_one(run, [1] * 4, 1)

    def at_once(rows: Sequence[Tensor], spans: Spans) -> Overs:
        if any(spans.wanted) or any(start is not None for start in spans.starts):
            return one_by_one(rows, spans)  # the kernel's states are of rows of a batch, not of documents
        x, dt, b, c = rows
        numbers = torch.repeat_interleave(torch.tensor(spans.sizes)).to(x.device, torch.int32)[None]
        return original(x, dt, given["A"], b, c, seq_idx=numbers, **options), [None] * len(spans.sizes)

    def transit(rows: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        step = _steps(rows[1], given.get("dt_bias"), softplus=bool(given.get("dt_softplus")))
        step = step.clamp(*given.get("dt_limit", (0.0, float("inf"))))
        return [torch.exp(given["A"] * part.sum(1))[..., None, None] for part in step.split(list(sizes), 1)]

    rows = tuple((given[key], 1) for key in ("hidden_states", "dt", "B", "C"))
    (_, _, heads, width), num_states = given["hidden_states"].shape, given["B"].shape[-1]
    form = StateForm((1, heads, width, num_states), (1, heads, 1, 1), "factors")
    has_kernel = _has_kernel("mamba_ssm", given["hidden_states"])
    return StateCall(name, rows, 1, at_once if has_kernel else one_by_one, form, transit)


def _steps(dt: Tensor, bias: Tensor | None, *, softplus: bool) -> Tensor:
    """Return steps of time as the functions of Mamba make them of dt and a bias that is added to it."""
    step = dt if bias is None else dt + bias.to(dt.dtype)
    step = nn.functional.softplus(step) if softplus else step
    return step.to(work_dtype(step))


def _mamba1(name: str, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> StateCall:
    names = ("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias")
    given = _named(name, names, args, kwargs)
    decay, bias, gate = given["A"], given.get("delta_bias"), given.get("z")
    is_softplus = bool(given.get("delta_softplus"))
    kept = ("D", "delta_bias", "delta_softplus", "use_mambapy", "use_associative_scan")
    options = {key: given[key] for key in kept if key in given} | {"return_last_state": True}
    states, no_time = decay.shape[1], (-1e4 if is_softplus else 0.0)  # softplus(-1e4 + bias) is 0 in any precision

    def steps(dt: Tensor) -> Tensor:
        return _steps(dt, None if bias is None else bias[:, None], softplus=is_softplus)

    def run(rows: Sequence[Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        x, dt, b, c = rows[:4]  # [1, D, T] twice, [1, N, T] twice
        size = x.shape[-1]
        unit = torch.eye(states, dtype=c.dtype, device=c.device)[None]
        x, b, c = pad(x, (0, states)), pad(b, (0, states)), torch.cat([c, unit], -1)
        out, end = original(x, pad(dt, (0, states), value=no_time), decay, b, c, **options)
        read = out[..., size:]
        out = out[..., :size]
        # The value is as precise as the function's state, the gradient goes through the tokens that read it.
        end = end.detach() + (read - read.detach())
        if start is not None:
            passed = steps(dt).cumsum(-1)
            out = out + _carried(decay, passed, start, c[..., :size].to(start.dtype)).to(out.dtype)
            end = end + torch.exp(decay * passed[..., -1:]) * start
        return (out if gate is None else out * nn.functional.silu(rows[4])), end

    rows = tuple((given[key], 2) for key in ("hidden_states", "dt", "B", "C"))
    rows = rows if gate is None else (*rows, (gate, 2))

    def transit(rows: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        return [torch.exp(decay * part.sum(-1)[..., None]) for part in steps(rows[1]).split(list(sizes), -1)]

    state = (1, *decay.shape)
    over = _one_by_one(run, [2] * len(rows), 2)
    return StateCall(name, rows, 2, over, StateForm(state, state, "factors"), transit)


_CARRIED_TOKENS = 256
"""For which a state's part is computed at once: [1, D, tokens, N] is held."""


def _carried(decay: Tensor, passed: Tensor, start: Tensor, c: Tensor) -> Tensor:
    """Return the part [1, D, T] of a state [1, D, N] in outputs, after so much time [1, D, T] and with C [1, N, T]."""

    def part(decay: Tensor, passed: Tensor, start: Tensor, c: Tensor) -> Tensor:
        left = torch.exp(decay[:, None, :] * passed[..., None]) * start[:, :, None, :]
        return torch.einsum("bdtn,bnt->bdt", left, c)

    pieces = zip(passed.split(_CARRIED_TOKENS, -1), c.split(_CARRIED_TOKENS, -1), strict=True)
    return _join([checkpoint(part, decay, time, start, own, use_reentrant=False) for time, own in pieces], -1)


_BINDERS: dict[str, Callable[..., StateCall]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}
_WITH_STATE = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
"""Whose callers expect a state beside the output."""
_FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""Kernels of convolution, scan and products in one, which would pass by what is recorded; None = there is none."""
