"""The GPU's own kernels against `reference`: what tests/attention/test_varlen_calls.py cannot show without a GPU."""

import pytest
import torch

from evenload.attention import range_attention
from evenload.attention.backends import select_backend
from evenload.attention.range_attention import RangeSizes, Scoring
from evenload.attention.reference import ReferenceAttention
from evenload.attention.varlen_cuda import VarlenCudaAttention, varlen_refusal
from evenload.errors import ConfigError
from single_range import attend, attend_backward, backward_by_range, random_pack
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


def plain_bf16(q, keys, values, grad, scale, window):
    """Output and gradients by torch's own autograd in bf16, one range."""
    n, s = q.shape[0], keys.shape[0]
    row, column = torch.arange(n, device="cuda")[:, None] + s - n, torch.arange(s, device="cuda")[None]
    visible = (column <= row) & ((column > row - window) if window else True)
    leaves = [t.detach().clone().requires_grad_() for t in (q, keys, values)]
    heads_first = [t.transpose(0, 1)[None] for t in leaves]
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=visible, scale=scale, enable_gqa=True
    )[0].transpose(0, 1)
    out.backward(grad)
    return out.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("window", [0, 1, 100, 5000])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(8, 2, 64), (4, 4, 128), (6, 1, 80), (4, 2, 256)])
def test_kernels_err_at_most_twice_as_much_as_plain_bf16(window, heads, groups, dim):
    """Prefix alignment, window, one-token ranges beside long ones, grouped heads, all in one call."""
    backend, scale = VarlenCudaAttention(), dim**-0.5
    pack = random_pack(RANGES, heads, groups, dim, window, heads + window, device="cuda")
    q, grad = pack.q, pack.grad
    out, lse = backend.forward(q, pack.seen, pack.sizes, Scoring(scale, window))
    parts = backward_by_range(backend, pack, out, lse, Scoring(scale, window))
    for rows, (keys, values), (dq, dk, dv) in zip(pack.rows, pack.seen, parts, strict=True):
        exact = [t.double() for t in (grad[rows], q[rows], keys, values)]
        exact_out, exact_lse = attend(REFERENCE, *exact[1:], Scoring(scale, window))
        expected = attend_backward(REFERENCE, *exact, exact_out, exact_lse, Scoring(scale, window))
        plain = plain_bf16(q[rows], keys, values, grad[rows], scale, window)
        torch.testing.assert_close(lse[rows].double(), exact_lse, rtol=1e-3, atol=1e-3)
        for ours, theirs, true in zip((out[rows], dq, dk, dv), plain, (exact_out, *expected), strict=True):
            error, allowed = (ours.double() - true).norm(), (theirs.double() - true).norm()
            # Where a row sees one key, its true gradients of q and k are 0 and plain bf16's are rounding, too.
            assert error <= 2 * allowed + 1e-3 * true.norm() + ROUNDING * true.numel() ** 0.5, f"range {rows}"


def test_kernels_accept_merged_log_sum_exps():
    """Context parallelism hands in output and log-sum-exp of more keys than the call's."""
    backend, scale = VarlenCudaAttention(), 0.125
    pack = random_pack(RANGES, 4, 2, 64, 0, 4, device="cuda")
    q, grad, (keys, values) = pack.q[pack.rows[0]], pack.grad[pack.rows[0]], pack.seen[0]
    more = torch.randn(300, 2, 64, device="cuda").bfloat16()
    merged_out, merged_lse = attend(REFERENCE, q, torch.cat([more, keys]), torch.cat([more, values]), Scoring(scale))
    ours = attend_backward(backend, grad, q, keys, values, merged_out, merged_lse, Scoring(scale))
    theirs = attend_backward(REFERENCE, grad, q, keys, values, merged_out, merged_lse, Scoring(scale))
    full = attend_backward(backend, grad, q, more, more, merged_out, merged_lse, Scoring(scale, is_causal=False))
    expected = attend_backward(REFERENCE, grad, q, more, more, merged_out, merged_lse, Scoring(scale, is_causal=False))
    for mine, other in zip((*ours, *full), (*theirs, *expected), strict=True):
        assert (mine.double() - other.double()).norm() <= 2e-2 * other.double().norm()


def test_calls_of_their_own_for_long_ranges_change_no_bit_forward(monkeypatch):
    """A range's blocks do not know how many others are started; backward adds up queries in any order."""
    backend, scoring = VarlenCudaAttention(), Scoring(0.125)
    ranges = [(0, 90)] * 40 + [(0, 9000)] + [(50, 140)] * 40
    pack = random_pack(ranges, 4, 2, 64, 0, 6, device="cuda")
    together = RangeSizes(pack.sizes.rows, pack.sizes.keys)
    with monkeypatch.context() as patch:
        patch.setattr(range_attention, "CALL_BLOCKS", 1 << 40)
        assert len(together.calls(pack.q.device)) == 1
    assert len(pack.sizes.calls(pack.q.device)) == 3
    out, lse = backend.forward(pack.q, pack.seen, pack.sizes, scoring)
    for mine, other in zip((out, lse), backend.forward(pack.q, pack.seen, together, scoring), strict=True):
        assert torch.equal(mine, other)
    ours, theirs = (
        backend.backward(pack.grad, pack.q, pack.seen, out, lse, sizes, scoring) for sizes in (pack.sizes, together)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.double() - other.double()).norm() <= 1e-3 * other.double().norm()


@pytest.mark.parametrize("name", ["varlen_cuda_fa3", "varlen_cuda_fa4"])
def test_kernels_of_other_packages_agree_with_reference_where_they_run(name):
    """Also at the head dimensions that `auto` would try. Skipped where a package is missing or raises, with the reason:
    FlashAttention 4 under PyTorch 2.11 refuses every window, "none" too."""
    if why := varlen_refusal(torch.bfloat16, 64, name):
        pytest.skip(why)
    try:
        VarlenCudaAttention(name)
    except ConfigError as error:
        pytest.skip(str(error))
    for dim in (64, 128):
        try:
            assert select_backend(name, "cuda", dtype=torch.bfloat16, head_dim=dim).name == name
        except ConfigError as error:
            if "differs from" in str(error):
                raise
            pytest.skip(str(error))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "olmo2", "gemma3"])
def test_whole_models_err_at_most_twice_as_much_as_plain_bf16(kind):
    """Loss and every gradient of asymmetric packs, the model on the GPU."""
    assert_bf16_as_good_as_plain(kind, None, device="cuda")
