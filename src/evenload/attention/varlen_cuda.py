"""Range attention on a GPU's flash-attention kernels, through torch's operators for packed sequences.

    q       rows of all ranges of a pack            cu_q = 0, n1, n1 + n2, ...
    k, v    the keys that each range sees, packed   cu_k = 0, s1, s1 + s2, ...

One kernel call a layer and direction for a whole pack, or a few where one would start mostly empty blocks
(`RangeSizes`). `aten::_flash_attention_forward` masks *bottom-right*: of n queries and s keys, row i sees keys up to
s - n + i, which is exactly a range of a document against its prefix. Backward is called by hand, so it takes any output
and log-sum-exp. Gradients of keys that kernels hold wider than they return them are made for some key heads at a time
where they exceed `KEY_GRADIENT_BYTES`.

torch has FlashAttention 2 and gives the same operators to FlashAttention 3 (`flash_attn_interface`, Hopper) and 4
(`flash_attn.cute`, Hopper and Blackwell) where these packages are installed. What each computes is of their sources.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenload.attention.range_attention import Gradients, KernelCall, KeyParts, RangeSizes, Scoring
from evenload.cost.layer_counts import KEY_GRADIENT_BYTES, key_gradient_bytes
from evenload.errors import ConfigError
from evenload.types.model import AttentionKernels

_MAX_HEAD_DIM = 256


class _Implementation(NamedTuple):
    """Describes kernels: torch's name of them (None = those of torch itself), compute capabilities (major) that they
    run on (None = all from Ampere on), and those on which they are the fastest."""

    torch_name: str | None
    runs_on: tuple[int, ...] | None
    fastest_on: tuple[int, ...]


IMPLEMENTATIONS: dict[AttentionKernels, _Implementation] = {
    "varlen_cuda": _Implementation(None, None, ()),
    "varlen_cuda_fa3": _Implementation("FA3", (9,), (9,)),
    "varlen_cuda_fa4": _Implementation("FA4", (9, 10), (10,)),
}
"""By name of the backend."""
_AMPERE, _BLACKWELL = 8, 10


class VarlenCudaAttention:
    """fp16 and bf16; head dims up to 256 that are multiples of 8.

    Args:
        name: other than of torch's own kernels, those of the process are switched over.

    Raises:
        ConfigError: torch does not know the kernels, or their package is missing.
    """

    def __init__(self, name: AttentionKernels = "varlen_cuda", reason: str = "") -> None:
        self.name: str = name
        self._kernels, self.reason = name, reason
        _activate(name)

    def forward(self, q: Tensor, seen: KeyParts, sizes: RangeSizes, scoring: Scoring) -> tuple[Tensor, Tensor]:
        keys, values = _packed(seen)
        calls = sizes.calls(q.device)
        if len(calls) == 1:
            return _forward_call(q, keys, values, calls[0], scoring)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for call in calls:
            made = _forward_call(q[call.rows], keys[call.keys], values[call.keys], call, scoring)
            out[call.rows], lse[call.rows] = made
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, seen: KeyParts, out: Tensor, lse: Tensor, sizes: RangeSizes, scoring: Scoring
    ) -> Gradients:
        keys, values = _packed(seen)
        (num_heads, dim), kv_heads = q.shape[1:], keys.shape[1]
        wide_bytes = key_gradient_bytes(self._kernels, num_heads, kv_heads, dim, q.element_size())
        calls = [
            (call, heads)
            for call in sizes.calls(q.device)
            for heads in _head_groups((call.keys.stop - call.keys.start) * wide_bytes, kv_heads)
        ]
        if len(calls) == 1:
            return _backward_call(grad, q, keys, values, out, lse, calls[0][0], scoring)
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, keys, values))
        repeat = num_heads // kv_heads
        for call, heads in calls:
            rows, own = (call.rows, slice(heads.start * repeat, heads.stop * repeat)), (call.keys, heads)
            dq[rows], dk[own], dv[own] = _backward_call(
                grad[rows], q[rows], keys[own], values[own], out[rows], lse[rows], call, scoring
            )
        return dq, dk, dv


def _forward_call(q: Tensor, keys: Tensor, values: Tensor, call: KernelCall, scoring: Scoring) -> tuple[Tensor, Tensor]:
    is_causal, left, right = _mask(scoring)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        _dense_rows(q), _dense_rows(keys), _dense_rows(values), call.cu_q, call.cu_k, call.max_q, call.max_k,
        dropout_p=0.0, is_causal=is_causal, return_debug_mask=False, scale=scoring.scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse.transpose(0, 1)  # the operator's are [H, T]


def _backward_call(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, call: KernelCall, scoring: Scoring
) -> Gradients:
    is_causal, left, right = _mask(scoring)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    # The kernel reads log-sum-exps as one block of memory [H, T].
    return torch.ops.aten._flash_attention_backward(
        *(_dense_rows(one) for one in (grad, q, keys, values, out)), lse.transpose(0, 1).contiguous(),
        call.cu_q, call.cu_k, call.max_q, call.max_k,
        dropout_p=0.0, is_causal=is_causal, rng_state=no_dropout, unused=no_dropout[:0], scale=scoring.scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip


def _head_groups(wide_bytes: int, kv_heads: int) -> list[slice]:
    """Return the key heads of every call, whose wide gradients (`wide_bytes` for all) then take at most
    `KEY_GRADIENT_BYTES`; at least one head."""
    fitting = max(1, KEY_GRADIENT_BYTES * kv_heads // wide_bytes) if wide_bytes else kv_heads
    at_once = -(-kv_heads // -(-kv_heads // fitting))
    return [slice(first, min(first + at_once, kv_heads)) for first in range(0, kv_heads, at_once)]


def varlen_refusal(dtype: torch.dtype | None, head_dim: int | None, name: AttentionKernels = "varlen_cuda") -> str:
    """Why the kernels cannot compute with a precision, head dimension or this machine's GPU; "" = they can."""
    runs_on = IMPLEMENTATIONS[name].runs_on
    if dtype not in (torch.bfloat16, torch.float16):
        given = str(dtype).removeprefix("torch.")
        why = f"computes in bfloat16 or float16, the model's precision is {given}; set model.dtype = 'bfloat16'"
    elif head_dim is None or head_dim > _MAX_HEAD_DIM or head_dim % 8:
        why = f"needs a head dimension of at most {_MAX_HEAD_DIM} that is a multiple of 8, the model's is {head_dim}"
    elif not torch.cuda.is_available():
        why = "needs a GPU that torch can use"
    elif (major := torch.cuda.get_device_capability()[0]) < _AMPERE:
        why = f"needs a GPU of compute capability {_AMPERE}.0 (Ampere) or newer, this one has {major}.x"
    elif runs_on is not None and major not in runs_on:
        known = " or ".join(f"{one}.x" for one in runs_on)
        why = f"needs a GPU of compute capability {known}, this one has {major}.x"
    elif name == "varlen_cuda_fa4" and major == _BLACKWELL and 128 < head_dim < 256:
        why = f"needs a head dimension of at most 128, or of 256, on Blackwell, the model's is {head_dim}"
    elif runs_on is not None and torch.are_deterministic_algorithms_enabled():
        why = "is not tested with train.deterministic; use train.attention = 'varlen_cuda'"
    else:
        return ""
    return f"{why}; or use train.attention = 'reference'"


def _activate(name: AttentionKernels) -> None:
    from torch.nn import attention

    implementation: Any = IMPLEMENTATIONS[name].torch_name
    if attention.current_flash_attention_impl() == implementation:
        return
    if implementation is None:
        attention.restore_flash_attention_impl()
        return
    try:
        attention.activate_flash_attention_impl(implementation)
    except Exception as error:  # of any kind: a package from elsewhere is imported
        raise ConfigError(
            f"attention backend {name} needs the kernels that torch calls {implementation}, which cannot be used here "
            f"({error}); install their package, or use train.attention = 'varlen_cuda'"
        ) from error


def _mask(scoring: Scoring) -> tuple[bool, int, int]:
    """(is causal, keys to the left, to the right) of the operators; their window does not count the row itself."""
    if scoring.window:
        return False, scoring.window - 1, 0
    return (True, -1, 0) if scoring.is_causal else (False, -1, -1)


def _packed(seen: KeyParts) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranges, one after the other: as they lie where they are one part."""
    if len(seen) == 1:
        return seen[0]
    keys, values = zip(*seen, strict=True)
    return torch.cat(keys), torch.cat(values)


def _dense_rows(rows: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
