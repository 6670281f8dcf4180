"""Range attention on a GPU's flash-attention kernels, through torch's operators for packed sequences.

    q       rows of all ranges of a pack            cu_q = 0, n1, n1 + n2, ...
    k, v    the keys that each range sees, packed   cu_k = 0, s1, s1 + s2, ...

One kernel call a layer and direction for a whole pack. `aten::_flash_attention_forward` masks *bottom-right*: of n
queries and s keys, row i sees keys up to s - n + i, which is exactly a range of a document against its prefix. Backward
is `aten::_flash_attention_backward`, called by hand: it takes any output and log-sum-exp, so those of merged parts
(context parallelism) are fine. (The autograd formulas that torch registers are not used.) These are the operators
behind `torch.nn.attention.varlen`, whose own wrappers change their arguments from version to version and cost more.

The kernel's gradients of keys are in compute precision; each call's are handed on in fp32, and a document's slices add
up in fp32 (`store.add_key_grads`). With fewer key heads than query heads the kernel itself rounds every query head's
part before it adds them.

Price: a copy of the pack's keys and values, prefixes included (none for a pack of one range), and of their gradients
in fp32. Lengths of a pack go to the device once, for all its layers, from pinned memory, so the host never waits.

FlashAttention 3 and 4 take the place of version 2 behind the same operators
(`torch.nn.attention.activate_flash_attention_impl`, which is for the whole process), where their packages are
installed; that is all `varlen_cuda_fa3` and `varlen_cuda_fa4` do.

Written from the sources of torch 2.13; 2.11 and 2.12 have the same operators. tests/attention/test_varlen_calls.py runs
every call made here against the operators' schema with kernels written out on the CPU, tests/runtime/
test_stages_on_meta.py those of whole stages in bf16 by the operators' meta kernels; the GPU kernels themselves are
tested by tests/gpu, which has not run on hardware yet.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenload.attention.range_attention import KeyRange, RangeGradients, Scoring, rows_of_all
from evenload.errors import ConfigError

IMPLEMENTATIONS = {"varlen_cuda": None, "varlen_cuda_fa3": "FA3", "varlen_cuda_fa4": "FA4"}
"""Backend name -> name that torch knows the kernels by; None = those of torch itself (FlashAttention 2)."""

_MAX_HEAD_DIM = 256
_MIN_CAPABILITY = 8  # Ampere
# Lengths of this many packs stay on the device: full and windowed layers of a forward and a backward pack.
_KEPT_LENGTHS = 8


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
        lengths = self._lengths(*_sizes(ranges), q.device)
        is_causal, left, right = _mask(scoring)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            _dense_rows(q[rows_of_all(ranges)]), _dense_rows(keys), _dense_rows(values), *lengths,
            dropout_p=0.0, is_causal=is_causal, return_debug_mask=False, scale=scoring.scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, lse.transpose(0, 1)  # the operator's are [H, T]

    def backward(
        self, grad: Tensor, q: Tensor, ranges: Sequence[KeyRange], out: Tensor, lse: Tensor, scoring: Scoring
    ) -> Iterator[RangeGradients]:
        if not ranges:
            return
        keys, values = _packed([r.keys for r in ranges]), _packed([r.values for r in ranges])
        rows, (num_rows, num_keys) = rows_of_all(ranges), _sizes(ranges)
        lengths = self._lengths(num_rows, num_keys, q.device)
        is_causal, left, right = _mask(scoring)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        # The kernel reads log-sum-exps as one block of memory [H, T].
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            _dense_rows(grad[rows]), _dense_rows(q[rows]), _dense_rows(keys), _dense_rows(values),
            _dense_rows(out[rows]), lse[rows].transpose(0, 1).contiguous(), *lengths,
            dropout_p=0.0, is_causal=is_causal, rng_state=no_dropout, unused=no_dropout[:0], scale=scoring.scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        del keys, values
        pieces = zip(dq.split(num_rows), dk.split(num_keys), dv.split(num_keys), strict=True)
        for piece_q, piece_k, piece_v in pieces:
            yield piece_q, piece_k.float(), piece_v.float()


def require_varlen(name: str, dtype: torch.dtype | None, head_dim: int | None) -> None:
    """`ConfigError` for a precision, head dimension or GPU that the kernels cannot compute with."""
    if (why := _unsupported(dtype, head_dim)) is not None:
        raise ConfigError(f"attention backend {name} {why}; or use train.attention = 'reference'")
    if not torch.cuda.is_available():
        raise ConfigError(f"attention backend {name} needs a GPU that torch can use; use train.attention = 'auto'")
    if (major := torch.cuda.get_device_capability()[0]) < _MIN_CAPABILITY:
        raise ConfigError(
            f"attention backend {name} needs a GPU of compute capability {_MIN_CAPABILITY}.0 (Ampere) or newer, this "
            f"one has {major}.x; use train.attention = 'reference'"
        )


def runs_varlen(dtype: torch.dtype | None, head_dim: int | None) -> bool:
    """`auto` may take these kernels on this machine's GPU."""
    fits = _unsupported(dtype, head_dim) is None and torch.cuda.is_available()
    return fits and torch.cuda.get_device_capability()[0] >= _MIN_CAPABILITY


def _unsupported(dtype: torch.dtype | None, head_dim: int | None) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        given = str(dtype).removeprefix("torch.")
        return f"computes in bfloat16 or float16, the model's precision is {given}; set model.dtype = 'bfloat16'"
    if head_dim is None or head_dim > _MAX_HEAD_DIM or head_dim % 8:
        return f"needs a head dimension of at most {_MAX_HEAD_DIM} that is a multiple of 8, the model's is {head_dim}"
    return None


def _activate(name: str) -> None:
    """Have torch use the kernels of that name from now on."""
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


def _sizes(ranges: Sequence[KeyRange]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(r.rows.stop - r.rows.start for r in ranges), tuple(r.keys.shape[0] for r in ranges)


def _packed(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _dense_rows(rows: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _cumulative_lengths(num_rows: tuple[int, ...], num_keys: tuple[int, ...], device: torch.device) -> _Lengths:
    pinned = device.type == "cuda"
    cu_q, cu_k = (
        torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0, dtype=torch.int32) for sizes in (num_rows, num_keys)
    )
    if pinned:
        cu_q, cu_k = (lengths.pin_memory().to(device, non_blocking=True) for lengths in (cu_q, cu_k))
    # With one query a sequence FlashAttention 2 lays heads out in another way (its decoding path), which is wrong
    # where only the longest of several has one; a larger bound keeps it away.
    return _Lengths(cu_q, cu_k, max(2, *num_rows), max(num_keys))
