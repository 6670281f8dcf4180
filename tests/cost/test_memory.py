"""Bytes of weights, packs and processes, FLOPs and pairs, by hand."""

import dataclasses
import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import cut_documents, sample_coefficients, sample_model
from evenload.cost.layer_counts import (
    KEY_GRADIENT_BYTES,
    WorkspaceRates,
    forward_flops,
    training_flops,
    workspace_rates,
)
from evenload.cost.memory import (
    HEAD_ROWS,
    ReplicaPacks,
    parameters_per_rank,
    pipeline_bytes,
    static_bytes,
    static_kinds,
)
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_pricing import pipeline_tasks
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns, causal_pairs, whole_document_columns
from evenload.types.layout import even_layout
from evenload.types.pipeline import PackBytes

# Per token and layer, bf16: 2·(8 input + (8 + 2·4) qkv + 8 attention + 8 o_proj + 32 gate, up) + 2·4 lse = 152
ACTIVATION, KV, KV_GRADIENT = 152, 2 * 2 * 4, 4 * 2 * 4


def test_ledger_of_two_documents_by_hand() -> None:
    """Document 0 has 10 tokens in two forward slices and three backward slices, document 1 has 3 tokens."""
    layout = even_layout(3, pp=2)  # 2 + 1 layers; the last also keeps 2·8 bytes of final hidden states a token
    forward = SliceColumns.from_ranges([[(0, 0, 6)], [(0, 6, 10), (1, 0, 3)]])
    backward = SliceColumns.from_ranges([[(0, 8, 10)], [(0, 4, 8)], [(0, 0, 4), (1, 0, 3)]])
    result = pipeline_bytes(sample_model(), layout, ReplicaPacks(forward, backward, np.array([10, 3])))
    chunk = np.array([2 * ACTIVATION, ACTIVATION + 16])
    kv, gradient = np.array([2, 1]) * KV, np.array([2, 1]) * KV_GRADIENT
    np.testing.assert_array_equal(result.forward_kept_bytes, [6 * chunk + 10 * kv, 7 * chunk + 3 * kv])
    # The chunk [6, 10) is freed by the slice with token 6, which is [4, 8); [0, 6) by [0, 4).
    np.testing.assert_array_equal(
        result.backward_freed_bytes,
        [-10 * gradient, 4 * chunk, 6 * chunk + 10 * kv + 10 * gradient + 3 * chunk + 3 * kv],
    )
    # dK/dV appear inside the first backward pack, so its temporaries cover what `freed` takes back.
    plain = 2 * (6 * 8 + 4 * 16)
    logits = np.array([0, 32 * (2 + 8)])
    np.testing.assert_array_equal(result.backward_temp_bytes[0], 2 * (plain + logits) + 10 * gradient)
    np.testing.assert_array_equal(result.backward_temp_bytes[2], 7 * (plain + logits))


def test_static_bytes_by_hand() -> None:
    layer, embedding = 192 + 384 + 2 * 8, 32 * 8
    parameters = np.array([2 * layer + embedding, layer + embedding + 8])
    layout = even_layout(3, dp=4, pp=2)
    np.testing.assert_array_equal(parameters_per_rank(sample_model(), layout), parameters)
    # bf16 weights, fp32 gradients, and a quarter of master + two moments in fp32
    np.testing.assert_array_equal(static_bytes(sample_model(), layout), parameters * 6 + 12 * -(-parameters // 4))
    np.testing.assert_array_equal(
        static_bytes(sample_model(bytes_per_element=8), layout), parameters * 16 + 16 * -(-parameters // 4)
    )


def test_smaller_states_and_gradients_of_one_unit_by_hand() -> None:
    layer, embedding = 192 + 384 + 2 * 8, 32 * 8
    alone, wide = even_layout(3), 50 * 32 * 8
    halves = sample_model(bfloat16_moments=True)
    parameters = int(parameters_per_rank(halves, alone)[0])
    # bf16 weights, fp32 gradients, two bf16 moments, lower halves; and an fp32 average.
    assert static_bytes(halves, alone).tolist() == [parameters * (2 + 4 + 4 + 2)]
    averaged = msgspec.structs.replace(halves, averaged_weights=True)
    assert static_bytes(averaged, alone).tolist() == [parameters * (2 + 4 + 4 + 2 + 4)]
    for changes, largest in (
        ({}, layer),
        ({"vocab_size": 50 * 32}, wide + 8),  # the head with its norm
        ({"tied_embeddings": True}, embedding + layer),
        ({"tied_embeddings": True, "vocab_size": 50 * 32}, wide + layer),
    ):
        model = sample_model(unit_gradients=True, **changes)
        _, gradients, _ = static_kinds(model, alone)[0].tolist()
        assert gradients == 4 * largest, changes


def test_policies_keep_what_they_say_by_hand() -> None:
    """Documents of 10, 4 and 6 tokens: replay, recompute, offload."""
    packs = SliceColumns.from_ranges([[(0, 0, 10), (1, 0, 4)], [(2, 0, 6)]])
    lengths = np.array([10, 4, 6])
    layout = even_layout(3, pp=2)
    plain = pipeline_bytes(sample_model(), layout, ReplicaPacks(packs, packs, lengths))
    result = pipeline_bytes(sample_model(), layout, ReplicaPacks(packs, packs, lengths, np.array([0, 1, 2], np.int8)))
    layers, final = np.array([2, 1]), np.array([0, 16])
    recomputed = 2 * (8 + 8) + 2 * 4  # layer input, attention output, log-sum-exp
    kept = [
        10 * (layers * ACTIVATION + final) + 4 * (layers * recomputed + final) + 14 * layers * KV,
        6 * final + 6 * layers * KV,
    ]
    np.testing.assert_array_equal(result.forward_kept_bytes, kept)
    np.testing.assert_array_equal(result.forward_kept_bytes, result.backward_freed_bytes)
    # Backward holds one layer's remade tensors, and two layers' buffers of an offloaded document.
    remade = 2 * (8 + 2 * 4 + 8 + 32)
    extra = result.backward_temp_bytes - plain.backward_temp_bytes
    np.testing.assert_array_equal(extra, [[4 * remade] * 2, 6 * np.minimum(layers, 2) * ACTIVATION])
    extra = result.forward_temp_bytes - plain.forward_temp_bytes
    np.testing.assert_array_equal(extra, [[0, 0], 6 * np.minimum(layers, 2) * ACTIVATION])


@settings(max_examples=50)
@given(cut_documents(), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.data())
def test_kept_equals_freed_under_every_policy_and_sharing(case, pp: int, cp: int, data) -> None:
    lengths, forward, backward = case
    policy = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))), np.int8)
    layout = even_layout(3, cp=cp, pp=pp)
    forward, backward = (replace(packs, cp=np.full(packs.num_slices, cp)) for packs in (forward, backward))
    result = pipeline_bytes(sample_model(), layout, ReplicaPacks(forward, backward, np.array(lengths), policy))
    np.testing.assert_array_equal(result.forward_kept_bytes.sum(axis=0), result.backward_freed_bytes.sum(axis=0))
    live = result.forward_kept_bytes.sum(axis=0) - np.cumsum(result.backward_freed_bytes, axis=0)
    assert (live >= 0).all()
    assert (live[-1] == 0).all()


def test_context_parallel_ranks_hold_their_tokens_and_gathered_keys_of_cut_documents() -> None:
    pieces = [[(0, 0, 6)], [(0, 6, 9), (1, 0, 3)]], [[(0, 0, 9), (1, 0, 3)]]
    shared, whole = ([SliceColumns.from_ranges(packs, cp) for packs in pieces] for cp in (2, 1))
    result = pipeline_bytes(sample_model(), even_layout(3, cp=2), ReplicaPacks(*shared, np.array([9, 3])))
    chunk = 3 * ACTIVATION + 16
    # 9 tokens of keys of the cut document, 2 of 3 (rounded up) of the whole one.
    assert result.forward_kept_bytes[:, 0].tolist() == [3 * chunk + 9 * 3 * KV, (2 + 2) * chunk + 2 * 3 * KV]
    alone = pipeline_bytes(sample_model(), even_layout(3), ReplicaPacks(*whole, np.array([9, 3])))
    gathered = 12 * (KV + KV_GRADIENT)
    assert result.backward_temp_bytes[0, 0] - gathered == (alone.backward_temp_bytes[0, 0]) // 12 * 7
    # Optimizer state is sharded over context ranks too.
    static = static_bytes(sample_model(), even_layout(3, dp=2, cp=2))
    np.testing.assert_array_equal(static, static_bytes(sample_model(), even_layout(3, dp=4)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_bytes_are_those_of_the_fullest_rank(lengths, cp, packs, mixed, data) -> None:
    """All ranks are priced in one call; rank by rank, as each of them counts, gives the same."""
    num_tokens = np.array(lengths, np.int64)
    groups = [part.tolist() for part in np.array_split(np.arange(len(lengths)), packs)]
    count = len(lengths)
    owner = np.array(data.draw(st.lists(st.integers(-1, cp - 1), min_size=count, max_size=count)), np.int64)
    policy = (
        np.array(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), np.int8) if mixed else None
    )
    layout, model = even_layout(3, cp=cp), sample_model()
    columns = whole_document_columns(groups, num_tokens)
    columns = dataclasses.replace(columns, cp=np.where(owner < 0, cp, 1))
    result = pipeline_bytes(model, layout, ReplicaPacks(columns, columns, num_tokens, policy, (owner, owner)))
    pack, views = columns.pack_of_slice(), []
    for rank in range(cp):
        mine = np.flatnonzero((owner == rank) | (owner < 0))
        views.append(columns.taken(mine, pack[mine], columns.num_packs))
    held = [pipeline_bytes(model, layout, ReplicaPacks(view, view, num_tokens, policy)) for view in views]
    for field in dataclasses.fields(PackBytes):
        expected = np.max([getattr(one, field.name) for one in held], axis=0)
        assert getattr(result, field.name).tolist() == expected.tolist(), field.name


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 40))
def test_pairs_equal_the_direct_sum(start: int, length: int, window: int) -> None:
    """A wrong closed form would shift every cut of every planner."""
    direct = sum(min(t + 1, window) if window else t + 1 for t in range(start, start + length))
    assert causal_pairs(start, start + length, window) == direct


def test_forward_flops_equal_hand_arithmetic() -> None:
    model = sample_model(num_layers=2)
    # attention 8·4·(2·2 + 2·1) = 192 weights, ffn 3·8·16 = 384, head 32·8 = 256
    linear = 2 * (2 * (192 + 384) + 256) * 5
    attention = 2 * 4 * 2 * 4 * (5 * 6 / 2)
    assert forward_flops(model, 5) == linear + attention
    assert training_flops(model, 5) == 3 * (linear + attention)


def test_forward_flops_count_windows_per_layer() -> None:
    full, mixed = sample_model(num_layers=2), sample_model(num_layers=2, sliding_windows=(0, 3))
    lost_pairs = causal_pairs(0, 10) - causal_pairs(0, 10, 3)
    assert forward_flops(full, 10) - forward_flops(mixed, 10) == pytest.approx(4 * 2 * 4 * lost_pairs)


LLAMA = sample_model(num_heads=32, num_kv_heads=8, head_dim=128, attention_workspace=True)
TINY = sample_model(attention_workspace=True)


def test_a_row_has_sums_in_fp32_and_a_document_a_block_of_rows_more():
    rates = workspace_rates(LLAMA, 1)
    assert rates.row == 4 * 32 * 129
    assert rates.piece == 128 * rates.row == 2_113_536
    of_dim = {dim: sample_model(head_dim=dim, attention_workspace=True) for dim in (80, 160)}
    assert workspace_rates(of_dim[80], 1).row == 4 * 2 * 97
    assert workspace_rates(of_dim[160], 1).row == 4 * 2 * 193


def test_sums_in_one_order_are_held_for_every_processor():
    """As torch allocates them: ceil(processors / (documents · heads)) times, for all heads or for some of them at a
    time, of the GPUs that there are."""
    ordered = msgspec.structs.replace(LLAMA, ordered_attention=True)
    rates = workspace_rates(ordered, 1)
    assert rates.row == 4 * ((32 + 147) * 128 + 32)
    assert rates.piece == 128 * rates.row
    for processors, documents in itertools.product((108, 132, 148), (1, 2, 5, 40)):
        for heads in range(4, 33, 4):
            splits = -(-processors // (documents * heads))
            assert 4 * heads * (splits * 128 + 1) <= rates.row
    assert dataclasses.replace(rates, row=0, piece=0) == dataclasses.replace(workspace_rates(LLAMA, 1), row=0, piece=0)
    assert workspace_rates(msgspec.structs.replace(ordered, attention_workspace=False), 1) == WorkspaceRates()


@pytest.mark.parametrize(
    ("kernels", "head_dim", "rounded", "keys_of_block"),
    [("varlen_cuda_fa3", 80, 96, 128), ("varlen_cuda_fa3", 160, 192, 128), ("varlen_cuda_fa4", 80, 96, 256)],
)
def test_workspace_of_other_kernels_as_their_sources_make_it(kernels, head_dim, rounded, keys_of_block):
    """Sums of dQ, of dO·O and a copy of log-sum-exps; dK and dV of grouped keys in fp32 for every key head, for a
    document's keys rounded up to a block."""
    grouped, alone = (
        workspace_rates(
            sample_model(
                num_heads=32,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                attention_workspace=True,
                attention_kernels=kernels,
            ),
            tp=1,
        )
        for kv_heads in (8, 32)
    )
    assert grouped.row == alone.row == 4 * 32 * (rounded + 2)
    assert (grouped.grouped_key, grouped.grouped_key_head) == (2 * 4 * 8 * rounded, 2 * 4 * rounded)
    assert (alone.grouped_key, alone.piece) == (0, 128 * alone.row)
    assert grouped.piece == 128 * grouped.row + keys_of_block * grouped.grouped_key


def test_gradients_of_grouped_keys_do_not_grow_with_the_prefix_as_keys_do():
    """Behind 256K tokens they would be 4.3 GB, 8 times what is charged."""
    rates = workspace_rates(LLAMA, 1)
    assert rates.grouped_key * (1 << 18) == 1 << 32
    result = rates.of_grouped_keys(np.array([0, 1024, 1 << 15, 1 << 18, 1 << 20]))
    assert result.tolist() == [0, 1 << 24, KEY_GRADIENT_BYTES, KEY_GRADIENT_BYTES, 1 << 31]


def test_packs_by_hand():
    """A row 4·2·33 bytes, a slice 128 rows more, a key before it copies and gradients of K and V, a key that one sees
    dK and dV for two heads in place of one."""
    packs = SliceColumns.from_ranges([[(0, 8, 10)], [(0, 4, 8)], [(0, 0, 4), (1, 0, 3)]])
    forward = SliceColumns.from_ranges([[(0, 0, 10), (1, 0, 3)]])
    layout, lengths = even_layout(3, pp=2), np.array([10, 3])
    without = pipeline_bytes(sample_model(), layout, ReplicaPacks(forward, packs, lengths))
    result = pipeline_bytes(TINY, layout, ReplicaPacks(forward, packs, lengths))
    workspace = [
        264 * (rows + 128 * slices) + 32 * prefix_keys + 32 * keys
        for rows, slices, prefix_keys, keys in ((2, 1, 8, 10), (4, 1, 4, 8), (7, 2, 0, 7))
    ]
    added = result.backward_temp_bytes - without.backward_temp_bytes
    assert added.tolist() == [[one, one] for one in workspace]
    np.testing.assert_array_equal(result.forward_temp_bytes, without.forward_temp_bytes)


@pytest.mark.parametrize(("tp", "saved"), [(1, 8 * 32), (2, 0)])
def test_the_heads_logits_become_their_gradient_in_a_kernel(tp, saved):
    """Of e + 8 bytes a logit e are left, on the last stage; a vocabulary that is divided has no kernel."""
    layout, lengths = even_layout(2, pp=2, tp=tp), np.array([5000])
    whole = SliceColumns.from_ranges([[(0, 0, 5000)]])
    plain, fused = (
        pipeline_bytes(sample_model(fused_cross_entropy=one), layout, ReplicaPacks(whole, whole, lengths))
        for one in (False, True)
    )
    assert (plain.backward_temp_bytes - fused.backward_temp_bytes).tolist() == [[0, HEAD_ROWS * saved]]
    np.testing.assert_array_equal(plain.forward_temp_bytes, fused.forward_temp_bytes)


@settings(max_examples=50, deadline=None)
@given(cut_documents(), st.sampled_from([1, 2]), st.sampled_from([1, 300]))
def test_the_core_charges_the_same(case, cp, kv_heads):
    """Also where the gradients of grouped keys are more than one call makes: 1,200 heads."""
    lengths, forward, backward = case
    num_tokens, layout = np.array(lengths), even_layout(3, cp=cp, pp=2)
    forward, backward = (dataclasses.replace(packs, cp=np.full(packs.num_slices, cp)) for packs in (forward, backward))
    model = sample_model(num_heads=1200, num_kv_heads=kv_heads, head_dim=2048, attention_workspace=True)
    link = LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=0.1)
    coefficients = sample_coefficients(intra_node=link, inter_node=link, devices_per_node=64)
    costs = PackCosts(model, coefficients, layout)
    packs = ReplicaPacks(forward, backward, num_tokens)
    result, expected = pipeline_tasks(costs, packs).held, pipeline_bytes(model, layout, packs)
    np.testing.assert_array_equal(result.backward_temp_bytes, expected.backward_temp_bytes)
