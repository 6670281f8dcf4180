"""Every backend's range attention equals full-document attention by autograd."""

import pytest
import torch

from evenload.attention.backends import CpuFlashAttention, backend_of_call, select_backend
from evenload.attention.range_attention import Scoring, first_visible_key
from evenload.attention.reference import ReferenceAttention
from evenload.errors import ConfigError
from single_range import attend, attend_backward

BACKENDS = [ReferenceAttention(), CpuFlashAttention()]


def full_attention(q, k, v, window):
    """torch's own attention over the whole document, [T, H, D]."""
    n = q.shape[0]
    row, column = torch.arange(n)[:, None], torch.arange(n)[None]
    visible = column <= row
    if window:
        visible &= column > row - window
    qh, kh, vh = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(qh, kh, vh, attn_mask=visible, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("window", [0, 1, 7, 300, 1000])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (6, 1)])
def test_slices_equal_the_whole_document(backend, window, heads, groups):
    """Forward cuts and other backward cuts give the output and gradients of one uncut document."""
    torch.manual_seed(heads * 100 + window)
    n, dim = 601, 16
    q = torch.randn(n, heads, dim, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(n, groups, dim, dtype=torch.float64, requires_grad=True) for _ in range(2))
    grad = torch.randn(n, heads, dim, dtype=torch.float64)
    expected = full_attention(q, k, v, window)
    expected.backward(grad)
    cuts = [(0, 1), (1, 290), (290, 555), (555, 601)], [(400, 601), (33, 400), (0, 33)]
    assert_slices_equal(backend, (q, k, v), grad, expected, Scoring(dim**-0.5, window), *cuts)


@torch.no_grad()
def assert_slices_equal(backend, qkv, grad, expected, scoring, forward, backward):
    """Output and gradients of a document in forward and backward slices equal those by autograd."""
    q, k, v = qkv
    out, lse = torch.empty_like(expected), torch.empty(q.shape[:2], dtype=torch.float64)
    for start, stop in forward:
        first = first_visible_key(start, scoring.window)
        out[start:stop], lse[start:stop] = attend(backend, q[start:stop], k[first:stop], v[first:stop], scoring)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start, stop in backward:
        first, rows = first_visible_key(start, scoring.window), slice(start, stop)
        dq[rows], part_k, part_v = attend_backward(
            backend, grad[rows], q[rows], k[first:stop], v[first:stop], out[rows], lse[rows], scoring
        )
        dk[first:stop] += part_k
        dv[first:stop] += part_v
    for ours, theirs in [(out, expected), (dq, q.grad), (dk, k.grad), (dv, v.grad)]:
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_unknown_backend_and_wrong_device_are_refused():
    with pytest.raises(ConfigError, match="unknown attention backend 'flash9'"):
        select_backend("flash9", "cpu")
    with pytest.raises(ConfigError, match="CPU only"):
        select_backend("cpu_flash", "cuda")
    assert select_backend("auto", "cpu").name == "cpu_flash"


@pytest.mark.parametrize("window", [0, 7, 300])
def test_capped_scores_equal_the_formula_by_autograd(window):
    """Gemma 2 squeezes scores by a tanh; forward and backward cuts must not change that, nor its derivative."""
    torch.manual_seed(window)
    n, heads, groups, dim, cap, scale = 301, 4, 2, 16, 3.0, 0.7
    q = torch.randn(n, heads, dim, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(n, groups, dim, dtype=torch.float64, requires_grad=True) for _ in range(2))
    keys, values = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
    row, column = torch.arange(n)[:, None], torch.arange(n)[None]
    hidden = (column > row) | ((column <= row - window) if window else torch.zeros(1, dtype=torch.bool))
    scores = cap * torch.tanh(torch.einsum("thd,shd->hts", q, keys) * scale / cap)
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    expected = torch.einsum("hts,shd->thd", probabilities, values)
    grad = torch.randn_like(expected)
    expected.backward(grad)

    scoring = Scoring(scale, window, soft_cap=cap)
    backend = backend_of_call(select_backend("auto", "cpu"), scoring)
    cuts = [(0, 100), (100, 301)], [(40, 301), (0, 40)]
    assert_slices_equal(backend, (q, k, v), grad, expected, scoring, *cuts)
