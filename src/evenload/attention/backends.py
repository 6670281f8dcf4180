"""Select the attention backend by name, device and model. A GPU's kernels of other packages are compared with
`reference` on a few ranges before a run trusts them.

The CPU's flash kernel, of aten (`CpuFlashAttention`), is aligned top-left: its causal mask is right only for as many
queries as keys. So a slice with a prefix is two calls, prefix (no mask) and square (causal), merged through their
log-sum-exps; backward is two calls that both get the *merged* output and log-sum-exp. GQA needs no copy of K and V:
they are expanded with stride 0. Packs in which a sliding window hides keys are `reference`'s, which goes by blocks of
rows.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from evenload.attention import varlen_cuda
from evenload.attention.range_attention import (
    Gradients,
    KeyParts,
    RangeAttention,
    RangeSizes,
    Scoring,
    first_visible_key,
    keys_by_range,
    merge_into,
    work_dtype,
)
from evenload.attention.reference import ReferenceAttention
from evenload.errors import ConfigError
from evenload.types.model import AttentionKernels

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_REFERENCE = ReferenceAttention()
# (start, stop) of ranges: a whole document, behind a prefix, one token, and around a block of rows.
_RANGES = ((0, 200), (300, 413), (64, 65), (127, 257))
_SCORINGS = (Scoring(0.1), Scoring(0.1, window=100), Scoring(0.1, is_causal=False))
_GROUPS, _REPEAT = 2, 2
_MOST = 0.02  # Error of a tensor, of its norm; rounding to bf16 makes about 0.004.


def select_backend(
    name: str, device: str, *, dtype: torch.dtype | None = None, head_dim: int | None = None
) -> RangeAttention:
    """Return the backend of that name; `auto` takes the fastest one for the device and the model, and its `reason` says
    why none that would be faster.

    Args:
        dtype, head_dim: of the model (the widest of its queries, keys and values); needed for a GPU's kernels, which do
            not take all.

    Raises:
        ConfigError: unknown name, or a backend that does not run on this device, dtype or head dimension.
    """
    if name == "auto":
        return CpuFlashAttention() if device == "cpu" else _fastest(dtype, head_dim)
    if name == "reference":
        return ReferenceAttention()
    if name == "cpu_flash":
        if device != "cpu":
            raise ConfigError(f"attention backend cpu_flash runs on the CPU only, the device is {device}; use 'auto'")
        return CpuFlashAttention()
    kernels = next((one for one in varlen_cuda.IMPLEMENTATIONS if one == name), None)
    if kernels is None:
        known = ", ".join(("auto", "reference", "cpu_flash", *varlen_cuda.IMPLEMENTATIONS))
        raise ConfigError(f"unknown attention backend '{name}'; choose one of {known}")
    if device == "cpu":
        raise ConfigError(f"attention backend {name} runs on a GPU only, the device is {device}; use 'auto'")
    if why := _refusal(kernels, dtype, head_dim):
        raise ConfigError(f"attention backend {name} {why}")
    return varlen_cuda.VarlenCudaAttention(kernels)


def refusal(backend: RangeAttention, scoring: Scoring) -> str:
    """Why a backend does not compute calls with this scoring, so that `reference` does; "" = it computes them."""
    if scoring.soft_cap and not isinstance(backend, ReferenceAttention):
        return f"'{_REFERENCE.name}' where scores have a soft cap, here {scoring.soft_cap}: no kernel has one"
    return ""


def backend_of_call(backend: RangeAttention, scoring: Scoring) -> RangeAttention:
    """Return what computes a call with this scoring where `backend` was selected."""
    return _REFERENCE if refusal(backend, scoring) else backend


def _fastest(dtype: torch.dtype | None, head_dim: int | None) -> RangeAttention:
    reasons: list[str] = []
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    fastest = (name for name, one in varlen_cuda.IMPLEMENTATIONS.items() if major in one.fastest_on)
    for kernels in (*fastest, "varlen_cuda"):
        why = _refusal(kernels, dtype, head_dim)
        if not why:
            return varlen_cuda.VarlenCudaAttention(kernels, "; ".join(reasons))
        reasons.append(f"{kernels} {why}")
    return ReferenceAttention(reason="; ".join(reasons))


def _refusal(kernels: AttentionKernels, dtype: torch.dtype | None, head_dim: int | None) -> str:
    """Why kernels cannot be used here; "" = they can. Those of other packages are compared with `reference`, once."""
    why = varlen_cuda.varlen_refusal(dtype, head_dim, kernels)
    return why if why or kernels == "varlen_cuda" else _failed_check(kernels, dtype, head_dim)


@functools.cache
def _failed_check(kernels: AttentionKernels, dtype: torch.dtype | None, head_dim: int | None) -> str:
    assert dtype is not None, "refused before"
    assert head_dim is not None, "refused before"
    try:
        backend = varlen_cuda.VarlenCudaAttention(kernels)
    except ConfigError as error:
        return str(error).removeprefix(f"attention backend {kernels} ")
    return disagreement(backend, dtype, head_dim, "cuda")


def disagreement(backend: RangeAttention, dtype: torch.dtype, head_dim: int, device: str) -> str:
    """Why kernels are not to be used: how far output, log-sum-exp and gradients are from those of `reference`, or the
    error that they raise; "" = they agree."""
    for scoring in _SCORINGS:
        try:
            errors = _errors(backend, scoring, dtype, head_dim, device)
        except Exception as error:  # of any kind: packages from elsewhere
            return f"fails its check ({type(error).__name__}: {' '.join(str(error).split())})"
        wrong = [f"{name} by {error:.1%}" for name, error in errors.items() if not error <= _MOST]
        if wrong:
            return f"differs from 'reference' under {scoring}: {', '.join(wrong)} (limit {_MOST:.0%})"
    return ""


def _errors(
    backend: RangeAttention, scoring: Scoring, dtype: torch.dtype, head_dim: int, device: str
) -> dict[str, float]:
    generator = torch.Generator(device).manual_seed(0)
    keys = [stop - first_visible_key(start, scoring.window) for start, stop in _RANGES]
    sizes = RangeSizes([stop - start for start, stop in _RANGES], keys)
    rows, heads = sum(sizes.rows), _GROUPS * _REPEAT
    shapes = (rows, heads), (rows, heads), (sizes.num_keys, _GROUPS), (sizes.num_keys, _GROUPS)
    q, grad, k, v = (torch.randn(*one, head_dim, generator=generator, device=device).to(dtype) for one in shapes)
    seen = [(k, v)]
    out, lse = _REFERENCE.forward(q, seen, sizes, scoring)
    made = backend.forward(q, seen, sizes, scoring)
    ours, theirs = (one.backward(grad, q, seen, out, lse, sizes, scoring) for one in (backend, _REFERENCE))
    names = ("output", "log-sum-exp", "gradient of queries", "of keys", "of values")
    pairs = zip(names, (*made, *ours), (out, lse, *theirs), strict=True)
    return {name: ((one.double() - true.double()).norm() / true.double().norm()).item() for name, one, true in pairs}


class CpuFlashAttention:
    """fp64, fp32 and bf16."""

    name = "cpu_flash"
    reason = ""

    def forward(self, q: Tensor, seen: KeyParts, sizes: RangeSizes, scoring: Scoring) -> tuple[Tensor, Tensor]:
        if _hides_keys(sizes, scoring):
            return _REFERENCE.forward(q, seen, sizes, scoring)
        groups = seen[0][0].shape[1]
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=work_dtype(q))
        pieces = (_by_group(tensor, groups).split(sizes.rows, dim=2) for tensor in (q, out, lse))
        for (keys, values), piece_q, *into in zip(keys_by_range(seen, sizes), *pieces, strict=True):
            for piece, made in zip(into, _forward_range(piece_q, keys, values, scoring), strict=True):
                piece.copy_(made)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, seen: KeyParts, out: Tensor, lse: Tensor, sizes: RangeSizes, scoring: Scoring
    ) -> Gradients:
        if _hides_keys(sizes, scoring):
            return _REFERENCE.backward(grad, q, seen, out, lse, sizes, scoring)
        groups, dim = seen[0][0].shape[1:]
        dq = torch.empty_like(q)
        dk, dv = (lse.new_empty(sizes.num_keys, groups, dim) for _ in range(2))
        pieces = (_by_group(tensor, groups).split(sizes.rows, dim=2) for tensor in (grad, q, out, lse, dq))
        into = zip(dk.split(sizes.keys), dv.split(sizes.keys), strict=True)
        for own, own_grads, *given, piece_dq in zip(keys_by_range(seen, sizes), into, *pieces, strict=True):
            piece_dq.copy_(_backward_range(given, own, own_grads, scoring))
        return dq, dk, dv


def _hides_keys(sizes: RangeSizes, scoring: Scoring) -> bool:
    """Say whether a window hides keys of some range."""
    return 0 < scoring.window < max(sizes.keys, default=0)


def _forward_range(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """q [G, H/G, n, D], k and v [s, G, D] -> output [G, H/G, n, D], log-sum-exp [G, H/G, n]."""
    repeat, prefix, scale = q.shape[1], k.shape[0] - q.shape[2], scoring.scale
    if not (scoring.is_causal and prefix):
        return _forward(q, _keys(k, repeat), _keys(v, repeat), 0.0, scoring.is_causal, scale=scale)
    out, lse = _forward(q, _keys(k[prefix:], repeat), _keys(v[prefix:], repeat), 0.0, True, scale=scale)
    out = out.to(lse.dtype)
    merge_into(out, lse, *_forward(q, _keys(k[:prefix], repeat), _keys(v[:prefix], repeat), 0.0, False, scale=scale))
    return out, lse


def _backward_range(
    given: Sequence[Tensor], own: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor], scoring: Scoring
) -> Tensor:
    """As `_forward_range`: return the gradient of q [G, H/G, n, D], write those of `own` keys and values, [s, G, D]
    each, to `into`; `given` are the output's gradient, q, output and log-sum-exp."""
    grad, q, out, lse = given
    (k, v), repeat = own, q.shape[1]
    prefix = k.shape[0] - q.shape[2] if scoring.is_causal else 0

    def keys_alone(keys: slice, *, is_causal: bool) -> Tensor:
        dq, *parts = _backward(
            grad, q, _keys(k[keys], repeat), _keys(v[keys], repeat), out, lse, 0.0, is_causal, scale=scoring.scale
        )
        for total, part in zip(into, parts, strict=True):
            torch.sum(part, 1, dtype=total.dtype, out=total[keys].transpose(0, 1))
        return dq

    dq = keys_alone(slice(prefix, None), is_causal=scoring.is_causal)
    return dq + keys_alone(slice(prefix), is_causal=False) if prefix else dq


def _by_group(rows: Tensor, groups: int) -> Tensor:
    """[n, H, ...] -> view [G, H/G, n, ...]."""
    return rows.unflatten(1, (groups, -1)).movedim(0, 2)


def _keys(k: Tensor, repeat: int) -> Tensor:
    """[s, G, D] -> view [G, repeat (stride 0), s, D]."""
    row, head, item = k.stride()
    # One operator, where transpose, unsqueeze and expand are three: with short documents their calls count.
    return k.as_strided((k.shape[1], repeat, k.shape[0], k.shape[2]), (head, 0, row, item))
