"""Memory of attention's backward beside its results, by hand for an 8B Llama: 32 heads, 8 key heads of 128, bf16."""

import dataclasses
import itertools

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
from evenload.cost.memory import ReplicaPacks, pipeline_bytes
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pipeline_tasks import pipeline_tasks
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns, causal_pairs
from evenload.types.layout import even_layout


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
    rates = workspace_rates(LLAMA, 32, 8)
    assert rates.row == 4 * 32 * 129
    assert rates.piece == 128 * rates.row == 2_113_536
    of_dim = {dim: sample_model(head_dim=dim, attention_workspace=True) for dim in (80, 160)}
    assert workspace_rates(of_dim[80], 2, 1).row == 4 * 2 * 97
    assert workspace_rates(of_dim[160], 2, 1).row == 4 * 2 * 193


def test_sums_in_one_order_are_held_for_every_processor():
    """As torch allocates them: ceil(processors / (documents · heads)) times, for all heads or for some of them at a
    time, of the GPUs that there are."""
    ordered = msgspec.structs.replace(LLAMA, ordered_attention=True)
    rates = workspace_rates(ordered, 32, 8)
    assert rates.row == 4 * ((32 + 147) * 128 + 32)
    assert rates.piece == 128 * rates.row
    for processors, documents in itertools.product((108, 132, 148), (1, 2, 5, 40)):
        for heads in range(4, 33, 4):
            splits = -(-processors // (documents * heads))
            assert 4 * heads * (splits * 128 + 1) <= rates.row
    assert dataclasses.replace(rates, row=0, piece=0) == dataclasses.replace(
        workspace_rates(LLAMA, 32, 8), row=0, piece=0
    )
    assert workspace_rates(msgspec.structs.replace(ordered, attention_workspace=False), 32, 8) == WorkspaceRates()


def test_gradients_of_grouped_keys_do_not_grow_with_the_prefix_as_keys_do():
    """Behind 256K tokens they would be 4.3 GB, 8 times what is charged."""
    rates = workspace_rates(LLAMA, 32, 8)
    assert rates.grouped_key * (1 << 18) == 1 << 32
    found = rates.of_grouped_keys(np.array([0, 1024, 1 << 15, 1 << 18, 1 << 20]))
    assert found.tolist() == [0, 1 << 24, KEY_GRADIENT_BYTES, KEY_GRADIENT_BYTES, 1 << 31]


def test_packs_by_hand():
    """A row 4·2·33 bytes, a slice 128 rows more, a key before it copies and gradients of K and V, a key that one sees
    dK and dV for two heads in place of one."""
    packs = SliceColumns.from_ranges([[(0, 8, 10)], [(0, 4, 8)], [(0, 0, 4), (1, 0, 3)]])
    forward = SliceColumns.from_ranges([[(0, 0, 10), (1, 0, 3)]])
    layout, lengths = even_layout(3, pp=2), np.array([10, 3])
    without = pipeline_bytes(sample_model(), layout, ReplicaPacks(forward, packs, lengths))
    found = pipeline_bytes(TINY, layout, ReplicaPacks(forward, packs, lengths))
    workspace = [
        264 * (rows + 128 * slices) + 32 * prefix_keys + 32 * keys
        for rows, slices, prefix_keys, keys in ((2, 1, 8, 10), (4, 1, 4, 8), (7, 2, 0, 7))
    ]
    added = found.backward_temp_bytes - without.backward_temp_bytes
    assert added.tolist() == [[one, one] for one in workspace]
    np.testing.assert_array_equal(found.forward_temp_bytes, without.forward_temp_bytes)


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
    found, expected = pipeline_tasks(costs, packs).held, pipeline_bytes(model, layout, packs)
    np.testing.assert_array_equal(found.backward_temp_bytes, expected.backward_temp_bytes)
