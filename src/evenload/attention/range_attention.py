"""The one primitive under every strategy: attention of a token range against its document's prefix.

    keys      0 ......... p ......... p+n
    queries               [ n rows   )         row i sees keys (p+i-window, p+i]

Slices with a KV prefix, backward packs cut differently from forward packs, context parallelism and
DP-Merge are all lists of such ranges (DESIGN §8). Forward also returns the log-sum-exp per row and
head; backward takes *any* output and log-sum-exp, so results merged from parts may be passed in.
Autograd must never run through such a merge: the gradient would be silently wrong.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from evenload.errors import ConfigError


class RangeAttention(Protocol):
    """A backend. Shapes: n query rows, s >= n keys (the last n belong to the queries), H query heads,
    G key/value heads (H a multiple of G), D head dim. `window` in tokens, 0 = full causal.

    A caller with a sliding window may pass only the keys that the first row can see.

    Attributes:
        soft_cap: scores s are squeezed to soft_cap·tanh(s / soft_cap) before the softmax (Gemma 2); 0 = not. It is a
            constant of the model, so that it belongs to the backend and no caller can forget it.
    """

    name: str
    soft_cap: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int) -> tuple[Tensor, Tensor]:
        """q [n, H, D], k and v [s, G, D] -> output [n, H, D] and log-sum-exp [n, H] (fp32, or fp64 for fp64)."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q [n, H, D], k [s, G, D] and v [s, G, D]."""
        ...


@runtime_checkable
class FullAttention(Protocol):
    """What ring context parallelism needs of a backend besides: every row sees every key (no mask, no window)."""

    def forward_full(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """q [n, H, D], k and v [s, G, D], s at least 1 -> output [n, H, D] and log-sum-exp [n, H]."""
        ...

    def backward_full(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; `out` and `lse` may be of more keys than these."""
        ...


def first_visible_key(start: int, window: int) -> int:
    """Index of the first key that the query row at position `start` sees."""
    return max(0, start - window + 1) if window else 0


def select_backend(
    name: str, device: str, soft_cap: float = 0.0, *, dtype: torch.dtype | None = None, head_dim: int | None = None
) -> RangeAttention:
    """The backend of that name; `auto` takes the fastest one for the device and the model.

    Args:
        soft_cap: of the model's attention scores, 0 = none.
        dtype, head_dim: of the model; needed for a GPU's kernels, which do not take all.

    Raises:
        ConfigError: unknown name, or a backend that does not run on the device, for this precision or head dimension,
            or has no soft cap.
    """
    from evenload.attention import varlen_cuda
    from evenload.attention.cpu_flash import CpuFlashAttention
    from evenload.attention.reference import ReferenceAttention

    if name == "auto":
        kernels = "cpu_flash" if device == "cpu" else "varlen_cuda"
        runs = device == "cpu" or varlen_cuda.runs_varlen(dtype, head_dim)
        name = kernels if runs and not soft_cap else "reference"
    if name == "reference":
        return ReferenceAttention(soft_cap)
    if soft_cap:
        raise ConfigError(
            f"attention backend {name} has no soft cap of scores, the model's is {soft_cap}; use 'auto' or 'reference'"
        )
    if name == "cpu_flash":
        if device != "cpu":
            raise ConfigError(f"attention backend cpu_flash runs on the CPU only, the device is {device}; use 'auto'")
        return CpuFlashAttention()
    if name in varlen_cuda.IMPLEMENTATIONS:
        if device == "cpu":
            raise ConfigError(f"attention backend {name} runs on a GPU only, the device is {device}; use 'auto'")
        varlen_cuda.require_varlen(name, dtype, head_dim)
        return varlen_cuda.VarlenCudaAttention(name)
    known = ", ".join(("auto", "reference", "cpu_flash", *varlen_cuda.IMPLEMENTATIONS))
    raise ConfigError(f"unknown attention backend '{name}'; choose one of {known}")
