"""Flash attention's packed operators for the CPU, which torch has for GPUs only.

Written from their documented contract: packed sequences of different query and key lengths, bottom-right causal mask,
window, grouped heads, log-sum-exps [H, T], any output and log-sum-exp in backward. So our lengths, packing, shapes and
signs are executed against torch's own schema. What this cannot show is that the GPU's kernels keep that contract.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

calls: list[str] = []
widened: list[int] = []
"""Bytes of gradients of keys and values that kernels made for every query head."""
given_keys: list[torch.Tensor] = []


def visible_pairs(n, s, is_causal, left, right):
    """bool[n, s], aligned at the bottom right; -1 = no limit to that side."""
    row, column = torch.arange(n)[:, None] + s - n, torch.arange(s)[None]
    visible = torch.ones(n, s, dtype=torch.bool)
    if is_causal or right >= 0:
        visible &= column <= row + (0 if is_causal else right)
    if left >= 0:
        visible &= column >= row - left
    return visible


def sequences(cu_q, cu_k, max_q, max_k):
    """(query rows, key rows) of every sequence, after checking what the kernels would read beyond."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q.is_contiguous()
    assert cu_k.is_contiguous()
    q, k = cu_q.tolist(), cu_k.tolist()
    assert q[0] == k[0] == 0
    # A longest query of 1 is FlashAttention 2's decoding path, which takes one query from *every* sequence.
    assert max_q >= max(2, *(b - a for a, b in itertools.pairwise(q)))
    assert max_k >= max(b - a for a, b in itertools.pairwise(k))
    pairs = zip(itertools.pairwise(q), itertools.pairwise(k), strict=True)
    return [(slice(*rows), slice(*keys)) for rows, keys in pairs]


def probabilities(q, k, scale, visible, lse=None):
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("thd,shd->hts", q.float(), keys) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, -1) if lse is None else lse
    return (scores - lse[..., None]).exp(), lse


def flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert dropout_p == 0
    assert seqused_k is None
    assert alibi_slopes is None
    assert block_table is None
    calls.append("forward")
    given_keys.append(key)
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[1], query.shape[0])
    pieces = sequences(cum_seq_q, cum_seq_k, max_q, max_k)
    assert pieces[-1][0].stop == query.shape[0]
    assert pieces[-1][1].stop == key.shape[0]
    for rows, keys in pieces:
        visible = visible_pairs(
            rows.stop - rows.start, keys.stop - keys.start, is_causal, window_size_left, window_size_right
        )
        p, lse[:, rows] = probabilities(query[rows], key[keys], scale, visible)
        values = value[keys].float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        out[rows] = torch.einsum("hts,shd->thd", p, values).to(out.dtype)
    unused = torch.empty(0, dtype=torch.uint64)
    return out, lse, unused, unused, torch.empty(0)


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    tensors = (grad_out, query, key, value, out)
    assert len({t.dtype for t in tensors}) == 1
    assert all(t.stride(-1) == 1 for t in tensors)
    assert logsumexp.shape == (query.shape[1], query.shape[0])
    assert logsumexp.dtype == torch.float32
    assert logsumexp.is_contiguous(), "kernels read it as one block"
    calls.append("backward")
    repeat = query.shape[1] // key.shape[1]
    widened.append(2 * key.shape[0] * query.shape[1] * query.shape[2] * 2 if repeat > 1 else 0)
    dq, dk, dv = (torch.empty_like(t) for t in (query, key, value))
    for rows, keys in sequences(cum_seq_q, cum_seq_k, max_q, max_k):
        n, s = rows.stop - rows.start, keys.stop - keys.start
        visible = visible_pairs(n, s, is_causal, window_size_left, window_size_right)
        p, _ = probabilities(query[rows], key[keys], scale, visible, logsumexp[:, rows])
        all_k, all_v = (t[keys].float().repeat_interleave(repeat, dim=1) for t in (key, value))
        grad = grad_out[rows].float()
        dp = torch.einsum("thd,shd->hts", grad, all_v)
        ds = p * (dp - (grad * out[rows].float()).sum(-1).t()[..., None]) * scale
        dq[rows] = torch.einsum("hts,shd->thd", ds, all_k).to(dq.dtype)
        for total, part in (
            (dk, torch.einsum("hts,thd->shd", ds, query[rows].float())),
            (dv, torch.einsum("hts,thd->shd", p, grad)),
        ):
            total[keys] = part.unflatten(1, (-1, repeat)).sum(2).to(total.dtype)
    return dq, dk, dv


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """The operators have kernels for the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    try:
        yield
    finally:
        library._destroy()
