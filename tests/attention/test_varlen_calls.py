"""Every call that the `varlen_cuda` backend makes of torch's packed attention, without a GPU.

Its operators get CPU kernels for the duration of a test (tests/support/flash_kernels.py). What this cannot show is that
the GPU's kernels keep their contract: tests/gpu does.
"""

import itertools
import re
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cost_samples import sample_model
from evenload.attention import range_attention, varlen_cuda
from evenload.attention.backends import select_backend
from evenload.attention.range_attention import RangeSizes, Scoring
from evenload.attention.reference import ReferenceAttention
from evenload.attention.varlen_cuda import VarlenCudaAttention, varlen_refusal
from evenload.cost.layer_counts import key_gradient_bytes, workspace_rates
from evenload.errors import ConfigError
from evenload.runtime.replay.context_attention import AttentionCall
from evenload.runtime.replay.store import ActivationStore
from evenload.types.document import Range
from evenload.types.model import AttentionKernels
from flash_kernels import calls, cpu_kernels, given_keys, widened
from single_range import attend, attend_backward, backward_by_range, random_pack
from single_stage import assert_bf16_as_good_as_plain

REFERENCE = ReferenceAttention()


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with cpu_kernels():
        yield


def close(ours, exact):
    torch.testing.assert_close(ours.double(), exact.double(), rtol=0.03, atol=0.03)


RANGES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 40)).map(lambda r: (r[0], r[0] + r[1])), min_size=1, max_size=5
)


@settings(max_examples=40, deadline=None)
@given(ranges=RANGES, window=st.sampled_from([0, 1, 7, 64]), shape=st.sampled_from([(4, 2), (3, 3), (6, 1)]))
def test_a_pack_in_one_call_equals_reference_range_by_range(ranges, window, shape):
    """Wrong cumulative lengths, mask alignment, or an off-by-one window would mix or lose documents' tokens."""
    backend, (heads, groups), scale = VarlenCudaAttention(), shape, 0.3
    pack = random_pack(ranges, heads, groups, 16, window, len(ranges))
    q, grad = pack.q, pack.grad
    calls.clear()
    out, lse = backend.forward(q, pack.seen, pack.sizes, Scoring(scale, window))
    parts = backward_by_range(backend, pack, out, lse, Scoring(scale, window))
    assert calls == ["forward", "backward"], "a kernel call a range costs more in launches than in work"
    for rows, (keys, values), (dq, dk, dv) in zip(pack.rows, pack.seen, parts, strict=True):
        single, single_lse = attend(REFERENCE, q[rows], keys, values, Scoring(scale, window))
        close(out[rows], single)
        torch.testing.assert_close(lse[rows], single_lse, rtol=1e-5, atol=1e-5)
        expected = attend_backward(
            REFERENCE, grad[rows], q[rows], keys, values, out[rows], lse[rows], Scoring(scale, window)
        )
        for ours, theirs in zip((dq, dk, dv), expected, strict=True):
            close(ours, theirs)
        assert dk.dtype == dv.dtype == torch.bfloat16, "as the kernel rounded them; a copy in fp32 adds nothing"


def assert_backward_is_the_references(*given):
    ours, theirs = (attend_backward(backend, *given) for backend in (VarlenCudaAttention(), REFERENCE))
    for mine, other in zip(ours, theirs, strict=True):
        close(mine, other)


def test_ring_hops_see_every_key():
    """A hop of ring context parallelism has no mask, also where there are fewer keys than queries."""
    scoring = Scoring(0.25, is_causal=False)
    q, grad, *_ = random_pack([(0, 9)], 4, 2, 16, 0, 1)
    keys, values = (torch.randn(5, 2, 16).bfloat16() for _ in range(2))
    out, lse = attend(VarlenCudaAttention(), q, keys, values, scoring)
    for mine, other in zip((out, lse), attend(REFERENCE, q, keys, values, scoring), strict=True):
        close(mine, other)
    assert_backward_is_the_references(grad, q, keys, values, out, lse, scoring)


def test_backward_uses_the_merged_output_and_log_sum_exp():
    """Results merged over key sets (context parallelism) must not be replaced by the call's own softmax."""
    q, grad, [(keys, values)], *_ = random_pack([(8, 20)], 2, 2, 16, 0, 2)
    out, lse = attend(REFERENCE, q, keys, values, Scoring(0.25))
    out, lse = (out * 0.5).bfloat16(), lse + 0.7  # as if other keys had taken their share
    assert_backward_is_the_references(grad, q, keys, values, out, lse, Scoring(0.25))


@pytest.mark.parametrize("fitting_heads", [4, 3, 2, 1, 0])
def test_gradients_for_every_query_head_stay_within_their_memory(monkeypatch, fitting_heads):
    """Key heads in several calls, to the bit as in one; a single key head is the least."""
    backend, scoring = VarlenCudaAttention(), Scoring(0.3)
    pack = random_pack([(0, 9), (90, 100)], 8, 4, 16, 0, 5)
    out, lse = backend.forward(pack.q, pack.seen, pack.sizes, scoring)
    whole = backend.backward(pack.grad, pack.q, pack.seen, out, lse, pack.sizes, scoring)
    of_a_key_head = 2 * (9 + 100) * 2 * 16 * 2
    limit = int(of_a_key_head * (fitting_heads or 0.5))
    monkeypatch.setattr(varlen_cuda, "KEY_GRADIENT_BYTES", limit)
    calls.clear()
    widened.clear()
    parts = backend.backward(pack.grad, pack.q, pack.seen, out, lse, pack.sizes, scoring)
    assert len(calls) == {4: 1, 3: 2, 2: 2, 1: 4, 0: 4}[fitting_heads]
    assert max(widened) <= max(limit, of_a_key_head)
    assert all(map(torch.equal, parts, whole))


@given(
    keys=st.integers(1, 1 << 20),
    groups=st.integers(1, 16),
    repeat=st.integers(1, 8),
    dim=st.sampled_from([64, 80, 128]),
    kernels=st.sampled_from(get_args(AttentionKernels)),
)
def test_wide_gradients_of_a_call_are_what_plans_charge(keys, groups, repeat, dim, kernels):
    """`cost.layer_counts` for the model, what one call makes for the kernel: FlashAttention 2 in bf16 for every query
    head, 3 and 4 in fp32 for every key head."""
    heads = groups * repeat
    calls = list(varlen_cuda._head_groups(keys * key_gradient_bytes(kernels, heads, groups, dim, 2), groups))
    assert [head for one in calls for head in range(one.start, one.stop)] == list(range(groups))
    most = max(one.stop - one.start for one in calls)
    rounded = {"varlen_cuda_fa3": {80: 96}, "varlen_cuda_fa4": {80: 96}}.get(kernels, {}).get(dim, dim)
    a_head = 2 * 2 * keys * repeat * dim if kernels == "varlen_cuda" else 2 * 4 * keys * rounded
    made = most * a_head if repeat > 1 else 0
    model = sample_model(
        head_dim=dim, num_heads=heads, num_kv_heads=groups, attention_workspace=True, attention_kernels=kernels
    )
    charged = workspace_rates(model, 1).of_grouped_keys(np.array([keys]))
    assert made <= charged[0]


@pytest.mark.parametrize("window", [0, 7])
def test_calls_of_their_own_for_long_ranges_equal_one_call_to_the_bit(monkeypatch, window):
    """Also with key heads in several calls; lengths go to the device once a pack."""
    monkeypatch.setattr(range_attention, "BLOCK_ROWS", 4)
    monkeypatch.setattr(range_attention, "CALL_BLOCKS", 3)
    monkeypatch.setattr(range_attention, "COPY_BLOCKS", 0)
    backend, scoring = VarlenCudaAttention(), Scoring(0.3, window)
    ranges = [(0, 3), (0, 2), (4, 7), (0, 60), (10, 70), (0, 4), (0, 1)]
    pack = random_pack(ranges, 8, 4, 16, window, 5)
    together = RangeSizes(pack.sizes.rows, pack.sizes.keys)
    with monkeypatch.context() as patch:
        patch.setattr(range_attention, "CALL_BLOCKS", 1000)
        assert len(together.calls(pack.q.device)) == 1
    assert [one.cu_q.tolist() for one in pack.sizes.calls(pack.q.device)] == [[0, 3, 5, 8], [0, 60, 120], [0, 4, 5]]
    assert pack.sizes.calls(pack.q.device) is pack.sizes.calls(pack.q.device)
    calls.clear()
    out, lse = backend.forward(pack.q, pack.seen, pack.sizes, scoring)
    assert all(map(torch.equal, (out, lse), backend.forward(pack.q, pack.seen, together, scoring)))
    ours, theirs = (
        backend.backward(pack.grad, pack.q, pack.seen, out, lse, sizes, scoring) for sizes in (pack.sizes, together)
    )
    assert calls == ["forward"] * 4 + ["backward"] * 4
    assert all(map(torch.equal, ours, theirs))
    monkeypatch.setattr(varlen_cuda, "KEY_GRADIENT_BYTES", 1)
    by_head = backend.backward(pack.grad, pack.q, pack.seen, out, lse, pack.sizes, scoring)
    assert len(calls) == 8 + 3 * 4
    assert all(map(torch.equal, by_head, theirs))


@given(blocks=st.lists(st.one_of(st.integers(1, 8), st.integers(1, 512)), min_size=1, max_size=60))
def test_started_blocks_are_a_small_multiple_of_those_that_work(blocks):
    """Calls hold all ranges in order; they divide only where that spares more than it costs, and leave no more empty
    blocks than a copy of the results costs, or than neighbours that alternate cannot spare."""
    sizes = range_attention.call_sizes(blocks)
    assert sum(sizes) == len(blocks)
    edges = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    started = sum((stop - start) * max(blocks[start:stop]) for start, stop in edges)
    alone, extra = len(blocks) * max(blocks), range_attention.CALL_BLOCKS * (len(sizes) - 1)
    assert started + extra <= alone
    if len(sizes) > 1:
        assert alone > (1 + range_attention.COPY_BLOCKS) * sum(blocks)
    ordered = sorted(blocks, reverse=True)
    sorted_sizes = range_attention.call_sizes(ordered)
    sorted_edges = itertools.pairwise(itertools.accumulate(sorted_sizes, initial=0))
    left = sum((stop - start) * ordered[start] for start, stop in sorted_edges)
    # Within a call of ranges up to twice as long as the shortest half the blocks work; each power of two is a call.
    most = (1 + range_attention.COPY_BLOCKS) * sum(blocks) + range_attention.CALL_BLOCKS * max(blocks).bit_length()
    assert left <= most


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([512, *[6] * 200], [1, 200]),
        ([*[6] * 100, 512, *[6] * 100], [100, 1, 100]),
        ([32, 6, 4] * 60, [180]),  # empty blocks, but fewer than a copy costs
        ([512, 1] * 2, [4]),
    ],
)
def test_one_long_document_among_short_ones_goes_alone(blocks, expected):
    assert range_attention.call_sizes(blocks) == expected


def test_keys_of_several_parts_are_packed_in_their_order():
    parts = [tuple(torch.randn(size, 2, 16).bfloat16() for _ in range(2)) for size in (5, 8)]
    q, sizes = torch.randn(13, 4, 16).bfloat16(), RangeSizes([5, 1, 7], [5, 1, 7])
    given_keys.clear()
    VarlenCudaAttention().forward(q, parts, sizes, Scoring(0.3))
    assert torch.equal(given_keys[0], torch.cat([keys for keys, _ in parts]))
    VarlenCudaAttention().forward(q[:5], parts[:1], RangeSizes([5], [5]), Scoring(0.3))
    assert given_keys[1] is parts[0][0] or given_keys[1].data_ptr() == parts[0][0].data_ptr()


@pytest.mark.parametrize("value_dim", [8, 16, 24])
@pytest.mark.parametrize("given", [{"chunk": 7}, {"chunk": 100}, {"window": 7}, {"soft_cap": 2.0}, {}])
def test_calls_with_chunks_capped_scores_and_values_of_another_width_equal_reference(given, value_dim):
    """Kernels know none of these; a cap takes the call to `reference`, in the precision of the model."""
    ranges, scoring = [Range(0, 0, 30), Range(1, 9, 20), Range(2, 14, 15)], Scoring(0.25, **given)
    store, generator = ActivationStore({}, []), torch.Generator().manual_seed(value_dim)
    ours, exact = (AttentionCall(backend, store, 0, scoring) for backend in (VarlenCudaAttention(), REFERENCE))

    def random(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    seen = [(random(n, 2, 16), random(n, 2, value_dim)) for n in (r.stop - ours.first_key(r.start) for r in ranges)]
    q, grad = random(42, 4, 16), random(42, 4, value_dim)
    calls.clear()
    made = ours.forward(q, seen, ours.sizes(ranges))
    exact_q, exact_grad, exact_seen = q.double(), grad.double(), [(k.double(), v.double()) for k, v in seen]
    out, lse = exact.forward(exact_q, exact_seen, exact.sizes(ranges))
    parts = ours.backward(grad, q, seen, *made, ours.sizes(ranges))
    expected = exact.backward(exact_grad, exact_q, exact_seen, out, lse, exact.sizes(ranges))
    assert bool(calls) == ("soft_cap" not in given)
    assert [one.shape[-1] for one in (*made[:1], *parts)] == [value_dim, 16, 16, value_dim]
    for one, true in zip((*made, *parts), (out, lse, *expected), strict=True):
        close(one, true)


class Given(TorchDispatchMode):
    """What torch's operators of flash attention are given, by the names of this torch's own schema."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("_flash_attention"):
            names = (one.name for one in func._schema.arguments)
            self.by_name[name] = dict(zip(names, args, strict=False)) | (kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scoring", [Scoring(0.25), Scoring(0.25, window=9), Scoring(0.25, is_causal=False)], ids=str)
def test_operators_of_this_torch_take_what_they_are_given(scoring):
    """Every value under the name that the installed torch has for it: one that is moved, renamed or has no default any
    more would fail here, before a GPU."""
    pack = random_pack([(0, 9), (30, 44)], 4, 2, 16, scoring.window, 1)
    backend, (q, grad, seen, _, sizes) = VarlenCudaAttention(), pack
    with Given() as given:
        out, lse = backend.forward(q, seen, sizes, scoring)
        backend.backward(grad, q, seen, out, lse, sizes, scoring)
    left, right = {0: (-1, 0 if scoring.is_causal else -1), 9: (8, 0)}[scoring.window]
    shared = {
        "max_q": 14, "max_k": max(sizes.keys), "dropout_p": 0.0, "scale": 0.25, "window_size_left": left,
        "window_size_right": right, "is_causal": scoring.is_causal and not scoring.window,
    }  # fmt: skip
    tensors = {"query": q, "key": torch.cat([k for k, _ in seen]), "value": torch.cat([v for _, v in seen])}
    of_backward = {"grad_out": grad, "out": out, "logsumexp": lse.transpose(0, 1)}
    lengths = {"cum_seq_q": [0, 9, 23], "cum_seq_k": [0, sizes.keys[0], sum(sizes.keys)]}
    for name, more in (("_flash_attention_forward", {}), ("_flash_attention_backward", of_backward)):
        values = given.by_name[name]
        assert {key: values[key] for key in shared} == shared
        assert {key: values[key].tolist() for key in lengths} == lengths
        assert all(torch.equal(values[key], tensor) for key, tensor in (tensors | more).items())
    assert given.by_name["_flash_attention_forward"]["return_debug_mask"] is False
    assert given.by_name["_flash_attention_backward"]["rng_state"].tolist() == [0, 0]


def test_what_the_kernels_cannot_compute_is_refused_by_name():
    assert "float64; set model.dtype = 'bfloat16'" in varlen_refusal(torch.float64, 64)
    assert re.search(r"at most 256 .* the model's is 288", varlen_refusal(torch.bfloat16, 288))
    assert "multiple of 8, the model's is 36" in varlen_refusal(torch.bfloat16, 36)
    with pytest.raises(ConfigError, match="runs on a GPU only, the device is cpu"):
        select_backend("varlen_cuda", "cpu", dtype=torch.bfloat16, head_dim=64)


@pytest.mark.parametrize("name", ["varlen_cuda_fa3", "varlen_cuda_fa4"])
def test_kernels_whose_package_is_missing_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"attention backend {name} needs the kernels that torch calls FA\d"):
        VarlenCudaAttention(name)


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_a_model_in_bf16_errs_at_most_twice_as_much_as_plain_bf16(kind):
    """All layers, asymmetric packs, grouped heads, windows: the whole path but the kernels themselves."""
    assert_bf16_as_good_as_plain(kind, VarlenCudaAttention())
