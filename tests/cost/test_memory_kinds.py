import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import cut_documents, sample_coefficients, sample_model
from evenload.cost.layer_counts import WorkspaceRates
from evenload.cost.memory import ByteRates, byte_rates, bytes_by_kind, rates_by_kind
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pipeline_tasks import pipeline_tasks
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns
from evenload.types.layout import even_layout
from evenload.types.pipeline import PackBytes
from evenload.types.timeline import MEMORY_KINDS
from reference.prices import split_backward

LINK = LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=0.1)


def priced(layout, forward, backward, num_tokens, policy=None, *, split=False):
    coefficients = sample_coefficients(intra_node=LINK, inter_node=LINK, host_link=LINK, devices_per_node=64)
    costs = PackCosts(sample_model(), coefficients, layout)
    tasks = pipeline_tasks(costs, forward, backward, num_tokens, policy)
    return dataclasses.replace(tasks, split=split_backward(costs, tasks, backward, policy)) if split else tasks


@pytest.mark.parametrize("workspace", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("element", [2, 4, 8])
def test_rates_of_all_kinds_add_up(tp, element, workspace):
    """A rate that no kind names would be memory that no picture shows."""
    model = sample_model(bytes_per_element=element, attention_workspace=workspace)
    rates = byte_rates(model, even_layout(3, pp=2, tp=tp))
    kinds = rates_by_kind(rates)
    assert set(kinds) < set(MEMORY_KINDS)
    for field in dataclasses.fields(ByteRates):
        if field.name not in ("static_bytes", "attention"):
            total = sum(getattr(one, field.name) for one in kinds.values())
            np.testing.assert_array_equal(total, getattr(rates, field.name))
    of_attention = [one.attention for one in kinds.values() if one.attention != WorkspaceRates()]
    assert of_attention == ([rates.attention] if workspace else [])


@settings(max_examples=100, deadline=None)
@given(cut_documents(), st.integers(1, 3), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.booleans(), st.data())
def test_kinds_add_up_to_the_columns_that_planners_use(case, pp, cp, tp, split, data):
    lengths, forward, backward = case
    policy = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))), np.int8)
    layout, num_tokens = even_layout(3, cp=cp, pp=pp, tp=tp), np.array(lengths)
    forward, backward = (dataclasses.replace(packs, cp=np.full(packs.num_slices, cp)) for packs in (forward, backward))
    tasks = priced(layout, forward, backward, num_tokens, policy, split=split)
    kinds = bytes_by_kind(sample_model(), layout, tasks, forward, backward, num_tokens, policy)
    for field in dataclasses.fields(PackBytes):
        total = getattr(kinds.held, field.name).sum(axis=-1)
        np.testing.assert_array_equal(total, getattr(tasks.held, field.name), err_msg=field.name)
    if split:
        for name in ("input_freed_bytes", "input_temp_bytes", "weight_freed_bytes"):
            np.testing.assert_array_equal(getattr(kinds.split, name).sum(axis=-1), getattr(tasks.split, name))
    # What is kept goes again, kind by kind; buffers are never kept.
    kept, freed = kinds.held.forward_kept_bytes.sum(axis=0), kinds.held.backward_freed_bytes.sum(axis=0)
    np.testing.assert_array_equal(kept, freed)
    assert (kinds.held.forward_temp_bytes >= 0).all()
    assert (kinds.held.backward_temp_bytes >= 0).all()


def test_kinds_of_a_cut_document_by_hand():
    """The ledger of test_memory by kind: 10 tokens cut in two and three, 3 tokens whole; 2 + 1 layers of bf16.

    A token and layer: 152 activations, 16 K and V, 32 dK and dV; the last stage keeps 16 more of a token.
    """
    layout = even_layout(3, pp=2)
    forward = SliceColumns.from_ranges([[(0, 0, 6)], [(0, 6, 10), (1, 0, 3)]])
    backward = SliceColumns.from_ranges([[(0, 8, 10)], [(0, 4, 8)], [(0, 0, 4), (1, 0, 3)]])
    num_tokens = np.array([10, 3])
    tasks = priced(layout, forward, backward, num_tokens)
    kinds = bytes_by_kind(sample_model(), layout, tasks, forward, backward, num_tokens)

    def of(column, kind):
        return column[:, :, MEMORY_KINDS.index(kind)].tolist()

    assert of(kinds.held.forward_kept_bytes, "activations_replay") == [[6 * 304, 6 * 168], [7 * 304, 7 * 168]]
    assert of(kinds.held.forward_kept_bytes, "keys_and_values") == [[320, 160], [96, 48]]
    assert of(kinds.held.backward_temp_bytes, "key_value_gradients") == [[640, 320], [0, 0], [0, 0]]
    assert of(kinds.held.backward_freed_bytes, "key_value_gradients") == [[-640, -320], [0, 0], [640, 320]]
    assert of(kinds.held.backward_temp_bytes, "head_logits") == [[0, 2 * 320], [0, 4 * 320], [0, 7 * 320]]
    assert of(kinds.held.backward_temp_bytes, "layer_buffers") == [[2 * 224] * 2, [4 * 224] * 2, [7 * 224] * 2]
    parameters = 2 * 592 + 256
    names = [MEMORY_KINDS.index(name) for name in ("weights", "gradients", "optimizer_state")]
    assert kinds.held.static_bytes[0, names].tolist() == [2 * parameters, 4 * parameters, 12 * parameters]
