"""Compare a GPU's attention kernels with `reference` on a few ranges, before a run trusts those of other packages."""

import torch

from evenload.attention.range_attention import RangeAttention, Scoring, first_visible_key
from evenload.attention.range_sizes import RangeSizes
from evenload.attention.reference import ReferenceAttention

# (start, stop) of ranges: a whole document, behind a prefix, one token, and around a block of rows.
_RANGES = ((0, 200), (300, 413), (64, 65), (127, 257))
_SCORINGS = (Scoring(0.1), Scoring(0.1, window=100))
_GROUPS, _REPEAT = 2, 2
_MOST = 0.02  # Error of a tensor, of its norm; rounding to bf16 makes about 0.004.


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
    exact, seen = ReferenceAttention(), [(k, v)]
    out, lse = exact.forward(q, seen, sizes, scoring)
    made = backend.forward(q, seen, sizes, scoring)
    ours, theirs = (one.backward(grad, q, seen, out, lse, sizes, scoring) for one in (backend, exact))
    names = ("output", "log-sum-exp", "gradient of queries", "of keys", "of values")
    pairs = zip(names, (*made, *ours), (out, lse, *theirs), strict=True)
    return {name: ((one.double() - true.double()).norm() / true.double().norm()).item() for name, one, true in pairs}
