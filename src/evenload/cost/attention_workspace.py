"""Memory that attention's backward takes beside its results, as FlashAttention 2's kernels in torch make it.

Of one layer of one backward pack with T rows in n slices that see K keys in all, prefixes included; H query heads, G
key heads of dimension D (kernels: rounded up), e bytes an element:

    sums of dQ and of dO·O      4·(T + 128·n)·H·(D + 1)    fp32; every document is rounded up to a block of rows
      added in one order        4·(T + 128·n)·D·S more     of every processor of S apart (`train.deterministic`): as
                                                           for one document; n of them share S
    keys of prefixes            4·e·G·D a key              K and V copied into one tensor, and their gradients
    gradients of grouped keys   2·e·H·D a key              dK and dV for every query head, where H > G; above
                                                           `KEY_GRADIENT_BYTES` they are made for some key heads at a
                                                           time, at least for one (`attention.varlen_cuda`)

An estimate as all temporaries: windows are not counted, and a pack of a context-parallel group takes its documents one
after the other, so it holds less. Charged where a run's attention is these kernels' (`ModelSpec.attention_workspace`).

Source: `mha_varlen_bwd` of torch 2.13 (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.types.model import ModelSpec

KEY_GRADIENT_BYTES = 1 << 29
"""Of gradients of keys and values that a kernel makes for every query head before it adds those of a key head."""
_ROWS_OF_BLOCK = 128
_PROCESSORS = 148
"""Of the largest GPU that the kernels run on (B200; an H100 has 132)."""


@dataclass(frozen=True)
class WorkspaceRates:
    """Bytes of one layer.

    Args:
        row, piece: a row, and a slice, of a backward pack.
        prefix_key: a key before a slice.
        grouped_key: a key that a slice sees, for every query head; grouped_key_head: for those of one key head.
    """

    row: int = 0
    piece: int = 0
    prefix_key: int = 0
    grouped_key: int = 0
    grouped_key_head: int = 0

    def of_grouped_keys(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of gradients for every query head, of packs whose slices see so many keys."""
        most = np.maximum(KEY_GRADIENT_BYTES, keys * self.grouped_key_head)
        return np.minimum(keys * self.grouped_key, most)


def workspace_rates(model: ModelSpec, heads: int, kv_heads: int) -> WorkspaceRates:
    """Of the heads of one rank."""
    if not model.attention_workspace:
        return WorkspaceRates()
    element, dim = model.bytes_per_element, model.head_dim
    rounded_dim = -(-dim // 32) * 32 if dim <= 128 else -(-dim // 64) * 64
    # In one order every call holds `ceil(S / (documents · heads))` sums of dQ. It has at most all heads of the rank, so
    # sums times heads are fewer than S and heads together.
    sums = heads + (_PROCESSORS - 1 if model.ordered_attention else 0)
    row = 4 * (sums * rounded_dim + heads)
    grouped = 2 * element * heads * dim if heads > kv_heads else 0
    return WorkspaceRates(
        row=row,
        piece=_ROWS_OF_BLOCK * row,
        prefix_key=4 * element * kv_heads * dim,
        grouped_key=grouped,
        grouped_key_head=grouped // kv_heads,
    )
