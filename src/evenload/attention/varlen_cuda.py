"""Range attention on a GPU's flash-attention kernels, through torch's operators for packed sequences.

    q       rows of all ranges of a pack            cu_q = 0, n1, n1 + n2, ...
    k, v    the keys that each range sees, packed   cu_k = 0, s1, s1 + s2, ...

One kernel call a layer and direction for a whole pack. `aten::_flash_attention_forward` masks *bottom-right*: of n
queries and s keys, row i sees keys up to s - n + i, which is exactly a range of a document against its prefix. Backward
is called by hand, so it takes any output and log-sum-exp. With fewer key heads than query heads the kernel holds
gradients of keys as wide as the queries; where these exceed `KEY_GRADIENT_BYTES`, key heads go in several calls.
Lengths of a pack go to the device once, for all its layers, from pinned memory, so the host never waits.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenload.attention.range_attention import (
    KeyRange,
    PackedGradients,
    RangeGradients,
    Scoring,
    range_sizes,
    rows_of_all,
)
from evenload.cost.layer_counts import KEY_GRADIENT_BYTES
from evenload.errors import ConfigError

IMPLEMENTATIONS = {"varlen_cuda": None, "varlen_cuda_fa3": "FA3", "varlen_cuda_fa4": "FA4"}
"""Backend name -> name that torch knows the kernels by; None = those of torch itself (FlashAttention 2)."""

_MAX_HEAD_DIM = 256
_MIN_CAPABILITY = 8  # Ampere
_KEPT_LENGTHS = 8  # of so many packs: full and windowed layers of a forward and a backward pack


class _Lengths(NamedTuple):
    """cu_q, cu_k: int32[ranges + 1] on the device; max_q, max_k: upper bounds of single ranges."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class VarlenCudaAttention:
    """fp16 and bf16; head dims up to 256 that are multiples of 8.

    Args:
        name: of `IMPLEMENTATIONS`; other than the first, the kernels of the process are switched over.

    Raises:
        ConfigError: torch does not know the kernels, or their package is missing.
    """

    soft_cap = 0.0  # torch's operators have none

    def __init__(self, name: str = "varlen_cuda") -> None:
        self.name = name
        _activate(name)
        self._lengths = functools.lru_cache(maxsize=_KEPT_LENGTHS)(_cumulative_lengths)

    def forward(self, q: Tensor, ranges: Sequence[KeyRange], scoring: Scoring) -> tuple[Tensor, Tensor]:
        keys, values = _packed([r.keys for r in ranges]), _packed([r.values for r in ranges])
        lengths = self._lengths(*range_sizes(ranges), q.device)
        is_causal, left, right = _mask(scoring)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            _dense_rows(q[rows_of_all(ranges)]), _dense_rows(keys), _dense_rows(values), *lengths,
            dropout_p=0.0, is_causal=is_causal, return_debug_mask=False, scale=scoring.scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, lse.transpose(0, 1)  # the operator's are [H, T]

    def backward(
        self, grad: Tensor, q: Tensor, ranges: Sequence[KeyRange], out: Tensor, lse: Tensor, scoring: Scoring
    ) -> Iterable[RangeGradients]:
        if not ranges:
            return ()
        keys, values = _packed([r.keys for r in ranges]), _packed([r.values for r in ranges])
        rows, lengths = rows_of_all(ranges), self._lengths(*range_sizes(ranges), q.device)
        whole = _Inputs(grad[rows], q[rows], keys, values, out[rows], lse[rows])
        (num_heads, dim), (num_keys, kv_heads) = q.shape[1:], keys.shape[:2]
        at_once = _key_heads_at_once(num_keys * num_heads * dim * keys.element_size(), num_heads, kv_heads)
        if at_once == kv_heads:
            return PackedGradients(ranges, *_backward_call(whole, lengths, scoring))
        gradients = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (whole.q, keys, values)]
        for first in range(0, kv_heads, at_once):
            of_keys = slice(first, min(first + at_once, kv_heads))
            heads = slice(*(edge * (num_heads // kv_heads) for edge in (of_keys.start, of_keys.stop)))
            parts = _backward_call(whole.of_heads(heads, of_keys), lengths, scoring)
            for total, part, some in zip(gradients, parts, (heads, of_keys, of_keys), strict=True):
                total[:, some] = part
        return PackedGradients(ranges, *gradients)


class _Inputs(NamedTuple):
    """Of a backward: grad, q, out [n, H, D], keys, values [S, G, D], lse [n, H]."""

    grad: Tensor
    q: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    lse: Tensor

    def of_heads(self, heads: slice, of_keys: slice) -> "_Inputs":
        grad, q, out, lse = (t[:, heads] for t in (self.grad, self.q, self.out, self.lse))
        return _Inputs(grad, q, self.keys[:, of_keys], self.values[:, of_keys], out, lse)


def _backward_call(given: _Inputs, lengths: _Lengths, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor]:
    is_causal, left, right = _mask(scoring)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=given.q.device)
    # The kernel reads log-sum-exps as one block of memory [H, T].
    return torch.ops.aten._flash_attention_backward(
        _dense_rows(given.grad), _dense_rows(given.q), _dense_rows(given.keys), _dense_rows(given.values),
        _dense_rows(given.out), given.lse.transpose(0, 1).contiguous(), *lengths,
        dropout_p=0.0, is_causal=is_causal, rng_state=no_dropout, unused=no_dropout[:0], scale=scoring.scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip


def _key_heads_at_once(side_bytes: int, num_heads: int, kv_heads: int) -> int:
    """Key heads of one call, whose gradients for every query head then take at most `KEY_GRADIENT_BYTES`, keys and
    values together (each `side_bytes` for all key heads); at least one head."""
    if num_heads == kv_heads:
        return kv_heads
    fitting = min(kv_heads, max(1, KEY_GRADIENT_BYTES * kv_heads // (2 * side_bytes)))
    num_calls = -(-kv_heads // fitting)
    return -(-kv_heads // num_calls)


def varlen_refusal(dtype: torch.dtype | None, head_dim: int | None) -> str:
    """Why the kernels cannot compute with a precision, head dimension or this machine's GPU; "" = they can."""
    if dtype not in (torch.bfloat16, torch.float16):
        given = str(dtype).removeprefix("torch.")
        why = f"computes in bfloat16 or float16, the model's precision is {given}; set model.dtype = 'bfloat16'"
    elif head_dim is None or head_dim > _MAX_HEAD_DIM or head_dim % 8:
        why = f"needs a head dimension of at most {_MAX_HEAD_DIM} that is a multiple of 8, the model's is {head_dim}"
    elif not torch.cuda.is_available():
        why = "needs a GPU that torch can use"
    elif (major := torch.cuda.get_device_capability()[0]) < _MIN_CAPABILITY:
        why = f"needs a GPU of compute capability {_MIN_CAPABILITY}.0 (Ampere) or newer, this one has {major}.x"
    else:
        return ""
    return f"{why}; or use train.attention = 'reference'"


def _activate(name: str) -> None:
    from torch.nn import attention

    implementation: Any = IMPLEMENTATIONS[name]
    if attention.current_flash_attention_impl() == implementation:
        return
    if implementation is None:
        attention.restore_flash_attention_impl()
        return
    try:
        attention.activate_flash_attention_impl(implementation)
    except (ImportError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"attention backend {name} needs the kernels that torch calls {implementation}, which cannot be used here "
            f"({error}); install their package, or use train.attention = 'varlen_cuda'"
        ) from error


def _mask(scoring: Scoring) -> tuple[bool, int, int]:
    """(is causal, keys to the left, to the right) of the operators; their window does not count the row itself."""
    if scoring.window:
        return False, scoring.window - 1, 0
    return (True, -1, 0) if scoring.is_causal else (False, -1, -1)


def _packed(parts: list[Tensor]) -> Tensor:
    """Rows of all parts, one after the other: the memory in which they lie so, or a copy."""
    first, *others = parts
    stride, memory = first.stride(), first.untyped_storage()._cdata
    end = first.storage_offset() + first.shape[0] * stride[0]
    for part in others:
        if part.storage_offset() != end or part.stride() != stride or part.untyped_storage()._cdata != memory:
            return torch.cat(parts)
        end += part.shape[0] * stride[0]
    num_rows = sum(part.shape[0] for part in parts)
    return first.as_strided((num_rows, *first.shape[1:]), stride)


def _dense_rows(rows: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _cumulative_lengths(num_rows: tuple[int, ...], num_keys: tuple[int, ...], device: torch.device) -> _Lengths:
    cu_q, cu_k = (
        torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0, dtype=torch.int32) for sizes in (num_rows, num_keys)
    )
    if device.type == "cuda":
        cu_q, cu_k = (lengths.pin_memory().to(device, non_blocking=True) for lengths in (cu_q, cu_k))
    # With one query a sequence FlashAttention 2 lays heads out in another way (its decoding path), which is wrong
    # where only the longest of several has one; a larger bound keeps it away.
    return _Lengths(cu_q, cu_k, max(2, *num_rows), max(num_keys))
