import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import FORWARD, reduction_seconds, sample_coefficients, sample_model
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns
from evenload.types.layout import even_layout
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
        found = np.array(slice_works_s(costs.work_curve("forward", stage), packs))
        np.testing.assert_allclose(found + layers * 5.0, costs.pack_seconds(packs, "forward")[:, stage])


def test_reduction_and_optimizer_of_the_fullest_rank() -> None:
    costs = PackCosts(sample_model(), sample_coefficients(), even_layout(3, dp=2))
    parameters = 3 * (192 + 384 + 16) + 2 * 32 * 8 + 8
    assert reduction_seconds(costs) == pytest.approx((4 + 2) * parameters / 2 / 1000.0 + 2 * 0.25)
    assert costs.optimizer_seconds() == pytest.approx(1e-3 * parameters / 2)
    assert reduction_seconds(PackCosts(sample_model(), sample_coefficients(), even_layout(3))) == 0.0


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
            found = costs.pack_seconds(packs, direction, np.array([2], np.int8))[0, 0]
            copy_s, compute_s = bytes_copied / bandwidth + 0.5, costs.pack_seconds(packs, direction)[0, 0]
            assert (copy_s > compute_s) == waits
            assert found == pytest.approx(max(copy_s, compute_s))
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
        found = costs.pack_seconds(SliceColumns.from_ranges([[(0, 0, 4)]]), "forward")[0, 0]
        assert found == pytest.approx(3 * (4 * 0.5 + 10 * 0.05 + 0.01 + 5.0 + rings) + 4 * 0.25)
    with pytest.raises(ConfigError, match="know no link"):
        PackCosts(sample_model(), sample_coefficients(), even_layout(3, tp=2))


def test_transfers_hide_behind_attention_of_local_documents_only() -> None:
    """16 tokens shared by 4 ranks, and 7 that are too short to be cut (tile 1): whole on one of them."""
    shared, both = (SliceColumns.from_ranges([docs], cp=4) for docs in ([(0, 0, 16)], [(0, 0, 16), (1, 0, 7)]))
    for bandwidth in (1e9, 100.0, 1.0):
        link = LinkSpec(bandwidth_bytes_per_s=bandwidth, latency_s=0.0)
        coefficients = sample_coefficients(intra_node=link, devices_per_node=8, copy_s_per_byte=0.001)
        costs = PackCosts(sample_model(), coefficients, even_layout(3, cp=4))
        moved = 3 * 16 * 16 * 0.75 / bandwidth  # layers, tokens, bytes of K and V a token, 3 of 4 ranks
        placed = 3 * 16 * 16 * 0.001
        compute = 3 * (4 * 1.0 + 136 / 4 * 0.1 + 2 * 0.01 + 5.0) + 4 * 0.5
        assert costs.pack_seconds(shared, "forward")[0, 0] == pytest.approx(compute + moved + placed)
        local = 3 * 28 / 4 * 0.1  # pairs of the short document on the average rank
        compute += 3 * (7 / 4 * 1.0 + 0.25 * 0.01) + 7 / 4 * 0.5 + local
        exposed = max(0.0, moved - 0.8 * local)
        assert costs.pack_seconds(both, "forward")[0, 0] == pytest.approx(compute + exposed + placed)
