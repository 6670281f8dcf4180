"""Select the attention backend by name, device and model. A GPU's kernels of other packages are compared with
`reference` on a few ranges before a run trusts them."""

import functools

import torch

from evenload.attention import varlen_cuda
from evenload.attention.cpu_flash import CpuFlashAttention
from evenload.attention.range_attention import RangeAttention, RangeSizes, Scoring, first_visible_key
from evenload.attention.reference import ReferenceAttention
from evenload.errors import ConfigError
from evenload.types.model import AttentionKernels

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
    for kernels in varlen_cuda.fastest_kernels():
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
