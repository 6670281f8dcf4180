"""What a token counts on one layer."""

import dataclasses
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import cut_documents, sample_coefficients, sample_model
from evenload.cost.memory import ReplicaPacks, parameters_per_rank, pipeline_bytes, static_bytes
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pipeline_tasks import pipeline_tasks
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns, whole_document_columns
from evenload.types.layout import even_layout
from evenload.types.pipeline import PackBytes
from reference.prices import split_backward

# Per token and layer, bf16: 2·(8 input + (8 + 2·4) qkv + 8 attention + 8 o_proj + 32 gate, up) + 2·4 lse = 152
ACTIVATION, KV, KV_GRADIENT = 152, 2 * 2 * 4, 4 * 2 * 4


def test_ledger_of_two_documents_by_hand() -> None:
    """Document 0 has 10 tokens in two forward slices and three backward slices, document 1 has 3 tokens."""
    layout = even_layout(3, pp=2)  # 2 + 1 layers; the last also keeps 2·8 bytes of final hidden states a token
    forward = SliceColumns.from_ranges([[(0, 0, 6)], [(0, 6, 10), (1, 0, 3)]])
    backward = SliceColumns.from_ranges([[(0, 8, 10)], [(0, 4, 8)], [(0, 0, 4), (1, 0, 3)]])
    found = pipeline_bytes(sample_model(), layout, ReplicaPacks(forward, backward, np.array([10, 3])))
    chunk = np.array([2 * ACTIVATION, ACTIVATION + 16])
    kv, gradient = np.array([2, 1]) * KV, np.array([2, 1]) * KV_GRADIENT
    np.testing.assert_array_equal(found.forward_kept_bytes, [6 * chunk + 10 * kv, 7 * chunk + 3 * kv])
    # The chunk [6, 10) is freed by the slice with token 6, which is [4, 8); [0, 6) by [0, 4).
    np.testing.assert_array_equal(
        found.backward_freed_bytes,
        [-10 * gradient, 4 * chunk, 6 * chunk + 10 * kv + 10 * gradient + 3 * chunk + 3 * kv],
    )
    # dK/dV appear inside the first backward pack, so its temporaries cover what `freed` takes back.
    plain = 2 * (6 * 8 + 4 * 16)
    logits = np.array([0, 32 * (2 + 8)])
    np.testing.assert_array_equal(found.backward_temp_bytes[0], 2 * (plain + logits) + 10 * gradient)
    np.testing.assert_array_equal(found.backward_temp_bytes[2], 7 * (plain + logits))


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


def test_policies_keep_what_they_say_by_hand() -> None:
    """Documents of 10, 4 and 6 tokens: replay, recompute, offload."""
    packs = SliceColumns.from_ranges([[(0, 0, 10), (1, 0, 4)], [(2, 0, 6)]])
    lengths = np.array([10, 4, 6])
    layout = even_layout(3, pp=2)
    plain = pipeline_bytes(sample_model(), layout, ReplicaPacks(packs, packs, lengths))
    found = pipeline_bytes(sample_model(), layout, ReplicaPacks(packs, packs, lengths, np.array([0, 1, 2], np.int8)))
    layers, final = np.array([2, 1]), np.array([0, 16])
    recomputed = 2 * (8 + 8) + 2 * 4  # layer input, attention output, log-sum-exp
    kept = [
        10 * (layers * ACTIVATION + final) + 4 * (layers * recomputed + final) + 14 * layers * KV,
        6 * final + 6 * layers * KV,
    ]
    np.testing.assert_array_equal(found.forward_kept_bytes, kept)
    np.testing.assert_array_equal(found.forward_kept_bytes, found.backward_freed_bytes)
    # Backward holds one layer's remade tensors, and two layers' buffers of an offloaded document.
    remade = 2 * (8 + 2 * 4 + 8 + 32)
    extra = found.backward_temp_bytes - plain.backward_temp_bytes
    np.testing.assert_array_equal(extra, [[4 * remade] * 2, 6 * np.minimum(layers, 2) * ACTIVATION])
    extra = found.forward_temp_bytes - plain.forward_temp_bytes
    np.testing.assert_array_equal(extra, [[0, 0], 6 * np.minimum(layers, 2) * ACTIVATION])


@settings(max_examples=50)
@given(cut_documents(), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.data())
def test_kept_equals_freed_under_every_policy_and_sharing(case, pp: int, cp: int, data) -> None:
    lengths, forward, backward = case
    policy = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))), np.int8)
    layout = even_layout(3, cp=cp, pp=pp)
    forward, backward = (replace(packs, cp=np.full(packs.num_slices, cp)) for packs in (forward, backward))
    found = pipeline_bytes(sample_model(), layout, ReplicaPacks(forward, backward, np.array(lengths), policy))
    np.testing.assert_array_equal(found.forward_kept_bytes.sum(axis=0), found.backward_freed_bytes.sum(axis=0))
    live = found.forward_kept_bytes.sum(axis=0) - np.cumsum(found.backward_freed_bytes, axis=0)
    assert (live >= 0).all()
    assert (live[-1] == 0).all()


def test_context_parallel_ranks_hold_their_tokens_and_gathered_keys_of_cut_documents() -> None:
    pieces = [[(0, 0, 6)], [(0, 6, 9), (1, 0, 3)]], [[(0, 0, 9), (1, 0, 3)]]
    shared, whole = ([SliceColumns.from_ranges(packs, cp) for packs in pieces] for cp in (2, 1))
    found = pipeline_bytes(sample_model(), even_layout(3, cp=2), ReplicaPacks(*shared, np.array([9, 3])))
    chunk = 3 * ACTIVATION + 16
    # 9 tokens of keys of the cut document, 2 of 3 (rounded up) of the whole one.
    assert found.forward_kept_bytes[:, 0].tolist() == [3 * chunk + 9 * 3 * KV, (2 + 2) * chunk + 2 * 3 * KV]
    alone = pipeline_bytes(sample_model(), even_layout(3), ReplicaPacks(*whole, np.array([9, 3])))
    gathered = 12 * (KV + KV_GRADIENT)
    assert found.backward_temp_bytes[0, 0] - gathered == (alone.backward_temp_bytes[0, 0]) // 12 * 7
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
    found = pipeline_bytes(model, layout, ReplicaPacks(columns, columns, num_tokens, policy, (owner, owner)))
    pack, views = columns.pack_of_slice(), []
    for rank in range(cp):
        mine = np.flatnonzero((owner == rank) | (owner < 0))
        views.append(columns.taken(mine, pack[mine], columns.num_packs))
    held = [pipeline_bytes(model, layout, ReplicaPacks(view, view, num_tokens, policy)) for view in views]
    for field in dataclasses.fields(PackBytes):
        expected = np.max([getattr(one, field.name) for one in held], axis=0)
        assert getattr(found, field.name).tolist() == expected.tolist(), field.name


LINK = LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=0.1)


def priced(layout, forward, backward, num_tokens, policy=None, *, split=False):
    coefficients = sample_coefficients(intra_node=LINK, inter_node=LINK, host_link=LINK, devices_per_node=64)
    costs = PackCosts(sample_model(), coefficients, layout)
    tasks = pipeline_tasks(costs, ReplicaPacks(forward, backward, num_tokens, policy))
    return dataclasses.replace(tasks, split=split_backward(costs, tasks, backward, policy)) if split else tasks
