"""Find the functions of transformers' layers that carry a state along a document, and call them range by range.

Scans (Gated DeltaNet, KDA, Mamba) and causal convolutions have no interface as attention has, but every family calls
them by one of a few names of its own module (`_BINDERS`). There `WholeModel` puts a function that hands the call to
whoever runs the model (`carrying`), as a `StateCall`; while nobody has asked for calls it is transformers' own, which
calls the kernels of fla, mamba_ssm or causal_conv1d where they are installed.

A call over ranges of documents takes the state before each and gives the state behind it:

    convolution    the last inputs before a range, K - 1 of them; all ranges are one call, each behind its own
    delta rule     a matrix a head, [1, H, Dk, Dv]; fla's kernel takes all ranges in one call
    Mamba-2        a matrix a head, [1, H, P, N]
    Mamba-1        [1, D, N]. Its function takes none, so the state's part is added outside: the recurrence is linear in
                   the state, y_t += C_t · (exp(A · Σ_{s<=t} dt_s) ⊙ h), and the end likewise
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from evenload.errors import UnsupportedModelError

Overs = tuple[Tensor, list[Tensor]]
"""What a function gives for rows of some ranges, and the state behind each range."""


@dataclass(frozen=True, eq=False)
class StateCall:
    """Holds a layer's call of a function that carries a state.

    Args:
        function: its name.
        rows: what it reads of every token, and the dimension of the tokens in each.
        out_dim: that of its output.
        run: computes ranges of these sizes, one behind the other in `rows`, from the states before them; None = a
            document begins.
    """

    function: str
    rows: tuple[tuple[Tensor, int], ...]
    out_dim: int
    run: Callable[[Sequence[Tensor], Sequence[int], Sequence[Tensor | None]], Overs]

    @property
    def num_rows(self) -> int:
        """Tokens."""
        tensor, dim = self.rows[0]
        return tensor.shape[dim]

    def over(self, sizes: Sequence[int], starts: Sequence[Tensor | None]) -> Overs:
        """Compute all rows, which are of ranges of these sizes."""
        return self.run([tensor for tensor, _ in self.rows], sizes, starts)

    def over_some(self, spans: Sequence[tuple[int, int]], starts: Sequence[Tensor | None]) -> Overs:
        """Compute the rows `[first, stop)` of some ranges; rows of the output are in this order."""
        picked = [_join([one.narrow(dim, a, b - a) for a, b in spans], dim) for one, dim in self.rows]
        return self.run(picked, [b - a for a, b in spans], starts)


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
        found = _BINDERS[name](name, original, args, kwargs)
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
) -> Callable[[Sequence[Tensor], Sequence[int], Sequence[Tensor | None]], Overs]:
    """Return a function that computes ranges by one call each."""

    def over(rows: Sequence[Tensor], sizes: Sequence[int], starts: Sequence[Tensor | None]) -> Overs:
        outputs, ends, first = [], [], 0
        for size, start in zip(sizes, starts, strict=True):
            own = [one.narrow(dim, first, size) for one, dim in zip(rows, dims, strict=True)]
            output, end = run(own, start)
            outputs.append(output)
            ends.append(end)
            first += size
        return _join(outputs, out_dim), ends

    return over


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

    def over(rows: Sequence[Tensor], sizes: Sequence[int], starts: Sequence[Tensor | None]) -> Overs:
        (x,) = rows  # [1, C, T]
        nothing = x.new_zeros(*x.shape[:2], halo)
        # A range shorter than the state hands on what is left of the older one.
        seen = [
            torch.cat([nothing if start is None else start, part], -1)
            for part, start in zip(x.split(list(sizes), -1), starts, strict=True)
        ]
        out = original(_join(seen, -1), weight, bias, activation=given.get("activation"))
        parts = out.split([halo + size for size in sizes], -1)
        return _join([part[..., halo:] for part in parts], -1), [one[..., one.shape[-1] - halo :] for one in seen]

    return StateCall(name, ((given["hidden_states"], 2),), 2, over)


_DELTA = ("query", "key", "value", "g", "beta")


def _delta_rule(name: str, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> StateCall:
    given = _named(name, _DELTA, args, {key: one for key, one in kwargs.items() if key != "cu_seqlens"})
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": given.get("use_qk_l2norm_in_kernel", False)}

    def run(rows: Sequence[Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = rows
        return original(q, k, v, g=g, beta=beta, initial_state=start, **options)

    def at_once(rows: Sequence[Tensor], sizes: Sequence[int], starts: Sequence[Tensor | None]) -> Overs:
        q, k, v, g, beta = rows
        edges = torch.tensor([0, *sizes]).cumsum(0).to(q.device, torch.int32)
        nothing = q.new_zeros(1, v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
        given = torch.cat([nothing if start is None else start for start in starts])
        out, ends = original(q, k, v, g=g, beta=beta, initial_state=given, cu_seqlens=edges, **options)
        return out, list(ends.split(1))

    rows = tuple((given[key], 1) for key in _DELTA)
    has_kernel = rows[0][0].is_cuda and _has_fla()
    return StateCall(name, rows, 1, at_once if has_kernel else _one_by_one(run, [1] * 5, 1))


@cache
def _has_fla() -> bool:
    return find_spec("fla") is not None


def _mamba2(name: str, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> StateCall:
    names = ("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "z")
    given = _named(name, names, args, kwargs)
    if given.get("z") is not None:
        raise UnsupportedModelError(f"{name} is called with z")
    options = {key: given[key] for key in ("chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit") if key in given}

    def run(rows: Sequence[Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        x, dt, b, c = rows
        return original(x, dt, given["A"], b, c, initial_states=start, return_final_states=True, **options)

    rows = tuple((given[key], 1) for key in ("hidden_states", "dt", "B", "C"))
    return StateCall(name, rows, 1, _one_by_one(run, [1] * 4, 1))


def _mamba1(name: str, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> StateCall:
    names = ("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias")
    given = _named(name, names, args, kwargs)
    decay, bias, gate = given["A"], given.get("delta_bias"), given.get("z")
    kept = ("D", "delta_bias", "delta_softplus", "use_mambapy", "use_associative_scan")
    options = {key: given[key] for key in kept if key in given} | {"return_last_state": True}

    def run(rows: Sequence[Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        x, dt, b, c = rows[:4]  # [1, D, T] twice, [1, N, T] twice
        out, end = original(x, dt, decay, b, c, **options)
        if start is not None:
            step = dt if bias is None else dt + bias.to(dt.dtype)[:, None]
            step = nn.functional.softplus(step) if given.get("delta_softplus") else step
            carried = torch.exp(decay[None, :, None, :] * step.cumsum(-1)[..., None]) * start[:, :, None, :]
            out = out + torch.einsum("bdtn,bnt->bdt", carried, c.to(carried.dtype)).to(out.dtype)
            end = end + carried[:, :, -1]
        return (out if gate is None else out * nn.functional.silu(rows[4])), end

    rows = tuple((given[key], 2) for key in ("hidden_states", "dt", "B", "C"))
    rows = rows if gate is None else (*rows, (gate, 2))
    return StateCall(name, rows, 2, _one_by_one(run, [2] * len(rows), 2))


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
