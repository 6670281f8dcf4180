"""The GPU's own kernels against `reference`: what tests/attention/test_varlen_calls.py cannot show without a GPU."""

import pytest
import torch

from evenload.attention.range_attention import Scoring
from evenload.attention.reference import ReferenceAttention
from evenload.attention.varlen_cuda import VarlenCudaAttention
from single_range import attend, attend_backward, random_pack
from single_stage import assert_bf16_as_good_as_plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch.cuda.is_available() is false"),
    # Told, and no failure: what CUDA's libraries warn of on a machine that nobody here has seen.
    pytest.mark.filterwarnings("default::UserWarning"),
]
REFERENCE = ReferenceAttention()
# Of inputs of size 1 in bf16, an element.
ROUNDING = 2**-8
# (start, stop) of ranges of documents of their own: whole, with a long prefix, one token, all sizes beside a tile.
RANGES = [(0, 700), (1000, 1130), (5, 6), (0, 1), (127, 129), (0, 128), (4000, 4001), (333, 1024)]


def plain_bf16(q, r, grad, scale, window):
    """Output and gradients by torch's own autograd in bf16, one range."""
    n, s = r.rows.stop - r.rows.start, r.keys.shape[0]
    row, column = torch.arange(n, device="cuda")[:, None] + s - n, torch.arange(s, device="cuda")[None]
    visible = (column <= row) & ((column > row - window) if window else True)
    leaves = [t.detach().clone().requires_grad_() for t in (q[r.rows], r.keys, r.values)]
    heads_first = [t.transpose(0, 1)[None] for t in leaves]
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=visible, scale=scale, enable_gqa=True
    )[0].transpose(0, 1)
    out.backward(grad[r.rows])
    return out.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("window", [0, 1, 100, 5000])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(8, 2, 64), (4, 4, 128), (6, 1, 80), (4, 2, 256)])
def test_kernels_err_at_most_twice_as_much_as_plain_bf16(window, heads, groups, dim):
    """Prefix alignment, window, one-token ranges beside long ones, grouped heads, all in one call."""
    backend, scale = VarlenCudaAttention(), dim**-0.5
    q, grad, seen = random_pack(RANGES, heads, groups, dim, window, heads + window, device="cuda")
    out, lse = backend.forward(q, seen, Scoring(scale, window))
    parts = list(backend.backward(grad, q, seen, out, lse, Scoring(scale, window)))
    for r, (dq, dk, dv) in zip(seen, parts, strict=True):
        rows, keys, values = r
        exact = [t.double() for t in (grad[rows], q[rows], keys, values)]
        exact_out, exact_lse = attend(REFERENCE, *exact[1:], Scoring(scale, window))
        expected = attend_backward(REFERENCE, *exact, exact_out, exact_lse, Scoring(scale, window))
        plain = plain_bf16(q, r, grad, scale, window)
        torch.testing.assert_close(lse[rows].double(), exact_lse, rtol=1e-3, atol=1e-3)
        for ours, theirs, true in zip((out[rows], dq, dk, dv), plain, (exact_out, *expected), strict=True):
            error, allowed = (ours.double() - true).norm(), (theirs.double() - true).norm()
            # Where a row sees one key, its true gradients of q and k are 0 and plain bf16's are rounding, too.
            assert error <= 2 * allowed + 1e-3 * true.norm() + ROUNDING * true.numel() ** 0.5, f"range {r.rows}"


def test_kernels_accept_merged_log_sum_exps():
    """Context parallelism hands in output and log-sum-exp of more keys than the call's."""
    backend, scale = VarlenCudaAttention(), 0.125
    q, grad, [r, *_] = random_pack(RANGES, 4, 2, 64, 0, 4, device="cuda")
    q, grad = q[r.rows], grad[r.rows]
    more = torch.randn(300, 2, 64, device="cuda").bfloat16()
    merged_out, merged_lse = attend(
        REFERENCE, q, torch.cat([more, r.keys]), torch.cat([more, r.values]), Scoring(scale)
    )
    ours = attend_backward(backend, grad, q, r.keys, r.values, merged_out, merged_lse, Scoring(scale))
    theirs = attend_backward(REFERENCE, grad, q, r.keys, r.values, merged_out, merged_lse, Scoring(scale))
    full = attend_backward(backend, grad, q, more, more, merged_out, merged_lse, Scoring(scale, is_causal=False))
    expected = attend_backward(REFERENCE, grad, q, more, more, merged_out, merged_lse, Scoring(scale, is_causal=False))
    for mine, other in zip((*ours, *full), (*theirs, *expected), strict=True):
        assert (mine.double() - other.double()).norm() <= 2e-2 * other.double().norm()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "olmo2", "gemma3"])
def test_whole_models_err_at_most_twice_as_much_as_plain_bf16(kind):
    """Loss and every gradient of asymmetric packs, the model on the GPU."""
    assert_bf16_as_good_as_plain(kind, None, device="cuda")
