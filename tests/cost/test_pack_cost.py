"""Prices of packs by hand: compute, transfers, causes and bounds."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import BACKWARD, FORWARD, reduction_seconds, sample_coefficients, sample_model
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.layer_counts import training_flops
from evenload.cost.memory import ReplicaPacks
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_pricing import PackSplit, pipeline_tasks, split_pack_seconds
from evenload.cost.units import layout_bound_seconds, physical_bound_seconds
from evenload.data.hub import model_from
from evenload.errors import ConfigError
from evenload.explore.batches import BatchRule
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.types.cluster import LinkSpec, cluster_from
from evenload.types.columns import SliceColumns, whole_document_columns
from evenload.types.layout import ParallelLayout, even_layout, split_layout
from reference.slice_work import slice_works_s


def test_pack_seconds_equal_hand_arithmetic() -> None:
    costs = PackCosts(sample_model(), sample_coefficients(), even_layout(3, pp=2))  # stages of 2 and 1 layers
    packs = SliceColumns.from_ranges([[(0, 0, 4)], [(0, 4, 6), (1, 0, 3)]])
    pairs = [4 * 5 / 2, (6 * 7 - 4 * 5) / 2 + 3 * 4 / 2]
    layer = [4 * 1.0 + pairs[0] * 0.1 + 0.01 + 5.0, 5 * 1.0 + pairs[1] * 0.1 + 0.02 + 5.0]
    expected = [[2 * layer[0] + 4 * 0.5, layer[0]], [2 * layer[1] + 5 * 0.5, layer[1]]]
    np.testing.assert_allclose(costs.pack_seconds(packs, "forward"), expected)


def test_a_pack_takes_its_host_where_that_is_slower() -> None:
    """Two packs on stages of 2 and 1 layers: the host needs 6 s a layer and 2 more a slice, whatever tp."""
    forward = msgspec.structs.replace(FORWARD, host_slice_s=2.0, host_pack_s=6.0)
    packs = SliceColumns.from_ranges([[(0, 0, 1), (1, 0, 1)], [(2, 0, 100)]])
    for tp in (1, 2):
        layout = even_layout(3, pp=2, tp=tp)
        links = {"intra_node": LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=0.0), "devices_per_node": 8}
        plain = PackCosts(sample_model(), sample_coefficients(**links), layout)
        costs = PackCosts(sample_model(), sample_coefficients(**links, forward=forward), layout)
        device_s = plain.pack_seconds(packs, "forward")
        assert (device_s[0] < [20, 10]).all()
        assert (device_s[1] > [16, 8]).all()
        np.testing.assert_allclose(costs.pack_seconds(packs, "forward"), [[2 * (6 + 2 * 2), 6 + 2 * 2], device_s[1]])
        np.testing.assert_array_equal(costs.pack_seconds(packs, "backward"), plain.pack_seconds(packs, "backward"))
        assert costs.pack_constant_s == pytest.approx(plain.pack_constant_s + 3 * (6 - 5.0))
        assert costs.lower_bound_seconds(np.array([1, 100])) == plain.lower_bound_seconds(np.array([1, 100]))


def test_prefix_is_paid_by_every_slice_within_the_window() -> None:
    """Finer cuts pay the prefix again and again; without this term the finest cut would always look best."""
    coefficients = sample_coefficients()
    dear = msgspec.structs.replace(
        coefficients, backward=msgspec.structs.replace(coefficients.backward, prefix_s_per_token=0.5)
    )
    packs = SliceColumns.from_ranges([[(0, 0, 4)], [(0, 4, 6), (1, 7, 9)]])
    for windows, expected in [((0, 0, 0), [0, 3 * (4 + 7) * 0.5]), ((0, 5, 5), [0, (11 + 9 + 9) * 0.5])]:
        model = sample_model(sliding_windows=windows)
        extra = PackCosts(model, dear, even_layout(3)).pack_seconds(packs, "backward") - PackCosts(
            model, coefficients, even_layout(3)
        ).pack_seconds(packs, "backward")
        np.testing.assert_allclose(extra[:, 0], expected)


def test_head_is_charged_to_the_last_stage_backward_only() -> None:
    with_head = PackCosts(sample_model(), sample_coefficients(), even_layout(3, pp=3))
    without = PackCosts(
        sample_model(), sample_coefficients(head_s_per_token=0.0, head_pack_s=0.0), even_layout(3, pp=3)
    )
    packs = SliceColumns.from_ranges([[(0, 0, 4)]])
    np.testing.assert_array_equal(with_head.pack_seconds(packs, "forward"), without.pack_seconds(packs, "forward"))
    difference = with_head.pack_seconds(packs, "backward") - without.pack_seconds(packs, "backward")
    np.testing.assert_allclose(difference, [[0, 0, 4 * 3.0 + 11.0]])


def test_bidirectional_documents_cannot_be_sliced() -> None:
    costs = PackCosts(sample_model(causal=False), sample_coefficients(), even_layout(3))
    assert costs.pack_seconds(SliceColumns.from_ranges([[(0, 0, 10)]]), "forward")[0, 0] == pytest.approx(
        3 * (10 + 100 * 0.1 + 0.01 + 5) + 5
    )
    with pytest.raises(ConfigError, match="bidirectional"):
        costs.pack_seconds(SliceColumns.from_ranges([[(0, 0, 4)], [(0, 4, 10)]]), "forward")


@settings(max_examples=50)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.integers(1, 3), st.booleans())
def test_work_curves_agree_with_pack_seconds(lengths: list[int], pp: int, windows: bool) -> None:
    """Partitioners cut by the curve, the simulator prices by pack_seconds: they must be one cost model."""
    spec = sample_model(sliding_windows=(0, 16, 16)) if windows else sample_model()
    costs = PackCosts(spec, sample_coefficients(), even_layout(3, pp=pp))
    packs = SliceColumns.from_ranges([[(0, 0, n)] for n in lengths])
    for stage in range(pp):
        layers = costs.layout.stage_layers[stage][1] - costs.layout.stage_layers[stage][0]
        result = np.array(slice_works_s(costs.work_curve("forward", stage), packs))
        np.testing.assert_allclose(result + layers * 5.0, costs.pack_seconds(packs, "forward")[:, stage])


def test_reduction_and_optimizer_of_the_fullest_rank() -> None:
    costs = PackCosts(sample_model(), sample_coefficients(), even_layout(3, dp=2))
    parameters = 3 * (192 + 384 + 16) + 2 * 32 * 8 + 8
    assert reduction_seconds(costs) == pytest.approx((4 + 2) * parameters / 2 / 1000.0 + 2 * 0.25)
    assert costs.optimizer_seconds() == pytest.approx(1e-3 * parameters / 2)
    assert reduction_seconds(PackCosts(sample_model(), sample_coefficients(), even_layout(3))) == 0.0


def test_state_in_host_memory_crosses_the_link_twice() -> None:
    """AdamW's state of a bf16 weight is 12 bytes; an update that takes longer than its copies hides them."""
    model = msgspec.structs.replace(sample_model(), offloaded_state=(0,))
    parameters = 3 * (192 + 384 + 16) + 2 * 32 * 8 + 8
    for rate, expected_s in ((24.0, parameters / 2), (1e9, 1e-3 * parameters / 2)):
        link = LinkSpec(bandwidth_bytes_per_s=rate, latency_s=0.0)
        coefficients = msgspec.structs.replace(sample_coefficients(), host_link=link)
        assert PackCosts(model, coefficients, even_layout(3, dp=2)).optimizer_seconds() == pytest.approx(expected_s)
    unknown = msgspec.structs.replace(sample_coefficients(), host_link=None, copy_s_per_byte=1.0)
    copied_s = PackCosts(model, unknown, even_layout(3, dp=2)).optimizer_seconds()
    assert copied_s == pytest.approx(24 * parameters / 2)


LINKS = {
    "intra_node": LinkSpec(bandwidth_bytes_per_s=100.0, latency_s=0.25),
    "inter_node": LinkSpec(bandwidth_bytes_per_s=10.0, latency_s=1.0),
    "devices_per_node": 4,
}


def test_recomputed_documents_pay_their_linear_work_again_in_backward() -> None:
    costs = PackCosts(sample_model(), sample_coefficients(), even_layout(3, pp=2))
    packs = SliceColumns.from_ranges([[(0, 0, 4), (1, 0, 3)], [(2, 0, 5)]])
    policy = np.array([1, 0, 0], np.int8)
    again = costs.pack_seconds(packs, "backward", policy) - costs.pack_seconds(packs, "backward")
    share = 1 - 8 * 16 / (8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16)  # all matrices but the down projection's
    once = share * (4 * 1.0 + 5.0)  # a layer: tokens, a pack
    np.testing.assert_allclose(again, [[2 * once, once], [0, 0]])
    np.testing.assert_array_equal(costs.pack_seconds(packs, "forward", policy), costs.pack_seconds(packs, "forward"))
    whole = costs.document_seconds([4, 3], np.array([1, 0], np.int8)) - costs.document_seconds([4, 3])
    np.testing.assert_allclose(whole, [3 * share * 4 * 1.0, 0])
    curve = costs.work_curve("backward", 0, recomputed_share=0.5)
    assert curve.linear_s == pytest.approx(costs.work_curve("backward", 0).linear_s + 0.5 * share * 2 * 1.0)
    with_norm = PackCosts(sample_model(post_norm=True), sample_coefficients(), even_layout(3, pp=2))
    again = with_norm.pack_seconds(packs, "backward", policy) - with_norm.pack_seconds(packs, "backward")
    np.testing.assert_allclose(again, [[2 * (4 * 1.0 + 5.0), 4 * 1.0 + 5.0], [0, 0]])


def test_offloaded_documents_hide_their_copies_behind_compute_or_wait() -> None:
    packs = SliceColumns.from_ranges([[(0, 0, 4)]])
    bytes_copied = 4 * 3 * 152
    for bandwidth, waits in ((1e9, False), (10.0, True)):
        link = LinkSpec(bandwidth_bytes_per_s=bandwidth, latency_s=0.5)
        costs = PackCosts(sample_model(), sample_coefficients(host_link=link), even_layout(3))
        for direction in ("forward", "backward"):
            result = costs.pack_seconds(packs, direction, np.array([2], np.int8))[0, 0]
            copy_s, compute_s = bytes_copied / bandwidth + 0.5, costs.pack_seconds(packs, direction)[0, 0]
            assert (copy_s > compute_s) == waits
            assert result == pytest.approx(max(copy_s, compute_s))
    with pytest.raises(ConfigError, match="no host_link"):
        PackCosts(sample_model(), sample_coefficients(), even_layout(3)).pack_seconds(
            packs, "forward", np.array([2], np.int8)
        )


def test_tensor_parallelism_divides_work_and_adds_its_transfers() -> None:
    """Of their bytes the exposed share, and all of their latency; nothing where layers were measured with them."""
    # 4 rings of 4 tokens · 8 hidden · 2 bytes, half of it over the link
    bytes_s, latency_s = 4 * 4 * 16 * 0.5 / 100.0, 4 * 0.25
    for changes, rings in (
        ({}, bytes_s + latency_s),
        ({"tensor_exposed_share": 0.5}, 0.5 * bytes_s + latency_s),
        ({"tensor_exposed_share": 0.0}, 0.0),
    ):
        coefficients = sample_coefficients(**LINKS, **changes)
        costs = PackCosts(sample_model(), coefficients, even_layout(3, tp=2))
        result = costs.pack_seconds(SliceColumns.from_ranges([[(0, 0, 4)]]), "forward")[0, 0]
        assert result == pytest.approx(3 * (4 * 0.5 + 10 * 0.05 + 0.01 + 5.0 + rings) + 4 * 0.25)
    with pytest.raises(ConfigError, match="know no link"):
        PackCosts(sample_model(), sample_coefficients(), even_layout(3, tp=2))


def test_transfers_hide_behind_attention_of_local_documents_only() -> None:
    """16 tokens shared by 4 ranks, and 7 whole on one of them."""
    shared = SliceColumns.from_ranges([[(0, 0, 16)]], cp=4)
    both = dataclasses.replace(SliceColumns.from_ranges([[(0, 0, 16), (1, 0, 7)]]), cp=np.array([4, 1]))
    for bandwidth in (1e9, 100.0, 1.0):
        link = LinkSpec(bandwidth_bytes_per_s=bandwidth, latency_s=0.0)
        coefficients = sample_coefficients(intra_node=link, devices_per_node=8, copy_s_per_byte=0.001)
        costs = PackCosts(sample_model(), coefficients, even_layout(3, cp=4))
        moved = 3 * 16 * 16 * 0.75 / bandwidth  # layers, tokens, bytes of K and V a token, 3 of 4 ranks
        placed = 3 * 16 * 16 * 0.001
        compute = 3 * (4 * 1.0 + 136 / 4 * 0.1 + 2 * 0.01 + 5.0) + 4 * 0.5
        assert costs.pack_seconds(shared, "forward")[0, 0] == pytest.approx(compute + moved + placed)
        local = 3 * 28 * 0.1  # pairs of the short document
        compute += 3 * (7 * 1.0 + 0.01) + 7 * 0.5 + local
        exposed = max(0.0, moved - 0.8 * local)
        assert costs.pack_seconds(both, "forward")[0, 0] == pytest.approx(compute + exposed + placed)


SLOW_LINK = LinkSpec(bandwidth_bytes_per_s=100.0, latency_s=0.25)
SLOW_LINKS = {"intra_node": SLOW_LINK, "inter_node": SLOW_LINK, "devices_per_node": 64}


def split_of(coefficients, *, tp: int, **model):
    """(I + W, B) of a pack of 4 tokens on the first of 3 stages."""
    packs = SliceColumns.from_ranges([[(0, 0, 4)]])
    costs = PackCosts(sample_model(num_kv_heads=2, **model), coefficients, even_layout(3, pp=3, tp=tp))
    tasks = pipeline_tasks(costs, ReplicaPacks(packs, packs, np.array([4])), split=True)
    assert tasks.split is not None
    return tasks.split.input_s[0, 0] + tasks.split.weight_s[0, 0], tasks.backward_s[0, 0]


def test_weight_gradients_gather_four_times_again() -> None:
    """4 rings of 4 tokens · 8 hidden · 2 bytes, half of it over the link; the exposed share of them."""
    rings = 4 * (4 * 16 * 0.5 / 100.0 + 0.25)
    for share in (0.5, 1.0):
        parts_s, whole_s = split_of(sample_coefficients(**SLOW_LINKS, weight_gather_exposed_share=share), tp=2)
        assert parts_s - whole_s == pytest.approx(share * rings)
    # A calibrated run has the other transfers in its layers' seconds, but never these.
    timed = sample_coefficients(**SLOW_LINKS, tensor_exposed_share=0.0, weight_gather_exposed_share=1.0)
    parts_s, whole_s = split_of(timed, tp=2)
    assert parts_s - whole_s == pytest.approx(rings)


def ring_and_gathered(packs, direction: str, size: int):
    """Seconds of a layer's transfers, where transfers take a second a byte and a million a hop."""
    link = LinkSpec(bandwidth_bytes_per_s=1.0, latency_s=1e6)
    packs = dataclasses.replace(packs, cp=np.full(packs.num_slices, size))
    result = []
    for exchange in ("ring", "all_gather"):
        coefficients = sample_coefficients(intra_node=link, devices_per_node=8, context_exchange=exchange)
        costs = PackCosts(sample_model(num_layers=1), coefficients, even_layout(1, cp=size))
        result.append(costs.context_seconds(packs, direction)[0][:, 0].tolist())
    return result


def test_a_ring_carries_the_prefix_of_every_slice() -> None:
    """K and V of a token are 16 bytes, their fp32 gradients 32. Three quarters of a slice's whole prefix travel to the
    next rank in 3 hops. Gathered keys of a document that is cut do not travel again in backward."""
    packs = SliceColumns.from_ranges([[(0, 0, 64)], [(0, 64, 128)], [(0, 64, 128), (1, 0, 32)]])
    ring, gathered = ring_and_gathered(packs, "forward", 4)
    assert ring == pytest.approx([3e6 + 0.75 * 16 * n for n in (64, 128, 160)])
    assert gathered == pytest.approx([3e6 + 0.75 * 16 * n for n in (64, 64, 96)])
    ring, gathered = ring_and_gathered(packs, "backward", 4)
    assert ring == pytest.approx([6e6 + 0.75 * 48 * n for n in (64, 128, 160)])
    assert gathered == pytest.approx([3e6 + 0.75 * 32 * 64, 3e6 + 0.75 * 32 * 64, 6e6 + 0.75 * (32 * 64 + 48 * 32)])


SHORT_LINK = LinkSpec(bandwidth_bytes_per_s=200.0, latency_s=0.1)
CAUSES = tuple(PackSplit.__annotations__)


def costs_of(layout, **changes) -> PackCosts:
    links = {"intra_node": SHORT_LINK, "inter_node": SHORT_LINK, "devices_per_node": 64, "host_link": SHORT_LINK}
    return PackCosts(sample_model(), sample_coefficients(**(links | changes)), layout)


def test_causes_of_a_forward_pack_by_hand():
    """Documents of 3 and 9 tokens padded to 9, one stage of three layers, tiles of 8 rows.

    useful   12 tokens (3·1.0 + 0.5 embedding), 6 + 45 pairs at 3·0.1
    padding  6 tokens, 39 pairs
    kernels  2 slices at 3·0.01, a pack at 3·5, and 2 slices lack 7 rows to 16, each of which sees 9 keys
    """
    columns = whole_document_columns([[0, 1]], np.array([3, 9]), padded=True)
    split = split_pack_seconds(costs_of(even_layout(3), attention_tile=8), columns, "forward")
    assert split.useful_s.item() == pytest.approx(12 * 3.5 + 51 * 0.3)
    assert split.padding_s.item() == pytest.approx(6 * 3.5 + 39 * 0.3)
    assert split.kernels_s.item() == pytest.approx(0.06 + 15 + 2 * 7 * 9 * 0.3)
    for name in CAUSES[3:]:
        assert getattr(split, name).item() == 0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.sampled_from(["forward", "backward"]),
    st.data(),
)
def test_causes_add_up_and_none_is_negative(lengths, cp, tp, pp, direction, data):
    """A negative cause would mean that something of the model is counted twice."""
    num_tokens = np.array(lengths)
    padded = data.draw(st.booleans())
    groups = [[doc] for doc in range(len(lengths))] if data.draw(st.booleans()) else [list(range(len(lengths)))]
    columns = whole_document_columns(groups, num_tokens, cp, padded=padded)
    policy = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))), np.int8)
    forward, backward = (
        msgspec.structs.replace(one, prefix_s_per_token=0.02, host_slice_s=5.0, host_pack_s=10.0)
        for one in (FORWARD, BACKWARD)
    )
    passes = {"forward": forward, "backward": backward}
    costs = costs_of(even_layout(3, cp=cp, tp=tp, pp=pp), attention_tile=4, **passes)
    split = split_pack_seconds(costs, columns, direction, policy)
    total_s = sum(getattr(split, name) for name in CAUSES)
    np.testing.assert_allclose(total_s, costs.pack_seconds(columns, direction, policy), rtol=1e-12)
    for name in CAUSES:
        assert (getattr(split, name) >= -1e-9 * total_s).all(), name


def test_short_shared_slices_cost_one_tensor_rank_no_transfers() -> None:
    """What a planner prices is split by costs that cut slices alike, however short they are."""
    given = costs_of(even_layout(3, cp=4), attention_tile=16)
    costs = StepPlanner(given.model, given.coefficients, given.layout, None, host="unlimited").costs
    split = split_pack_seconds(costs, SliceColumns.from_ranges([[(0, 0, 7)]], cp=4), "forward")
    np.testing.assert_array_equal(split.tp_communication_s, 0.0)
    assert (split.kernels_s > 0).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_useful_work_of_all_ranks_is_the_lower_bound(lengths, cp, tp):
    """Whatever the cuts, padding and sharing: `fraction_of_bound` and the split speak of the same useful work."""
    num_tokens = np.array(lengths)
    layout = even_layout(3, cp=cp, tp=tp, pp=3)
    costs = costs_of(layout, attention_tile=4)
    columns = whole_document_columns([list(range(len(lengths)))], num_tokens, cp, padded=True)
    useful_s = sum(split_pack_seconds(costs, columns, way).useful_s.sum() for way in ("forward", "backward"))
    assert useful_s / layout.pp == pytest.approx(costs.lower_bound_seconds(num_tokens), rel=1e-12)


MODEL, CLUSTER = model_from("qwen2.5-0.5b"), cluster_from("h100x8")
LAYOUTS = [
    even_layout(24, dp=8),
    even_layout(24, dp=2, pp=4),
    split_layout((9, 7, 6, 2), devices=None, dp=2, cp=1, pp=4, tp=1),
    even_layout(24, dp=2, tp=2, pp=2),
    even_layout(24, dp=2, cp=2, pp=2),
    split_layout((12, 12), devices=(3, 5), dp=1, cp=1, pp=2, tp=1),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=ParallelLayout.describe)
def test_no_plan_is_faster_than_its_layout_allows(layout: ParallelLayout) -> None:
    coefficients = analytic_coefficients(MODEL, CLUSTER, layout)
    planner = StepPlanner(
        MODEL, coefficients, layout, None, PlanOptions(max_pack_tokens=8192, candidates=3), host="unlimited"
    )
    lengths = np.random.default_rng(0).lognormal(7, 1.2, 200).astype(np.int64) + 1
    (batch,) = BatchRule(num_documents=64, context=8192, overlong="truncate").sample(lengths, steps=1, seed=0)
    tokens = np.array([document.num_tokens for document in batch.documents])
    bounds_s = [
        physical_bound_seconds(planner.costs, tokens),
        planner.costs.lower_bound_seconds(tokens),
        layout_bound_seconds(planner.costs, tokens),
    ]
    assert bounds_s == sorted(bounds_s)
    for strategy in ("balanced",) if layout.has_replicated_stages else ("best_fit", "slimpack", "auto"):
        step_s = planner.plan(0, batch.documents, strategy).predicted.step_time_s
        assert step_s > bounds_s[-1], strategy


def test_the_slowest_stage_is_the_bound_and_the_update_comes_after_it() -> None:
    """Of stages with 9, 7, 6 and 2 layers and the head on the last, none can be left to the others."""
    layout = LAYOUTS[2]
    costs = PackCosts(MODEL, analytic_coefficients(MODEL, CLUSTER, layout), layout)
    tokens = np.full(4000, 2000)
    slowest_s = float(costs.useful_stage_seconds(tokens).max()) / 2
    assert layout_bound_seconds(costs, tokens) == pytest.approx(slowest_s + costs.optimizer_seconds())
    assert slowest_s > 1.05 * costs.lower_bound_seconds(tokens)


def test_the_physical_bound_is_all_flops_at_the_peak() -> None:
    layout = LAYOUTS[1]
    costs = PackCosts(MODEL, analytic_coefficients(MODEL, CLUSTER, layout), layout)
    flops = float(training_flops(MODEL, [3000, 500]).sum())
    assert physical_bound_seconds(costs, [3000, 500]) == pytest.approx(flops / (8 * CLUSTER.device.peak_flops_per_s))
