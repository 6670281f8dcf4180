"""What packs in halves cost and save, against numbers made by hand; which packs are halved, and where."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.coefficients import BesideHalves, PassCoefficients
from evenload.cost.pack_cost import PackCosts
from evenload.cost.tensor_halves import HalvedPacks, as_if_halved, halved_packs, least_share, pays, wanted_cuts
from evenload.errors import ConfigError
from evenload.stepplan.ranked_packs import ranked_in_halves
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns
from evenload.types.layout import even_layout
from evenload.types.micropack import Direction

TOKEN_S = 8 * 2 / 2 / 100.0  # hidden · bytes, half of it over the link
LATENCY_S = 0.25
LINKS = {
    "intra_node": LinkSpec(bandwidth_bytes_per_s=100.0, latency_s=LATENCY_S),
    "devices_per_node": 4,
}
FREE = BesideHalves(stretch=1.0, slowdown=0.0, turns_s=0.0, host_turns_s=0.0)
LAYERS = 3


def costs(beside: BesideHalves | None = FREE, tp: int = 2, cp: int = 1, **changes) -> PackCosts:
    passes = {
        name: PassCoefficients(linear_s_per_token=2.0, attention_s_per_pair=0.0, slice_s=0.5, pack_s=1.0)
        for name in ("forward", "backward")
    }
    fields = {"source": "analytic", "tensor_beside": beside, **LINKS, **passes, **changes}
    return PackCosts(sample_model(), sample_coefficients(**fields), even_layout(LAYERS, tp=tp, cp=cp))


def transfers_s(tokens: int, rings: int = 4) -> float:
    """Of all layers."""
    return LAYERS * rings * (tokens * TOKEN_S + LATENCY_S)


def test_all_but_the_first_and_the_last_transfer_hide_behind_enough_compute() -> None:
    packs = SliceColumns.from_ranges([[(0, 0, 100), (1, 0, 100)]])
    for direction, rings in (("forward", 4), ("backward", 6)):
        found = halved_packs(costs(), packs, direction)
        hidden_s = 2 * transfers_s(100, rings) * (1 - 1 / (rings * LAYERS))
        another_pack_s = LAYERS * (1.0 + rings * LATENCY_S)
        assert found.first_rows.tolist() == [100]
        assert found.transfer_s.item() == pytest.approx(2 * transfers_s(100, rings))
        assert found.hidden_s.item() == pytest.approx(hidden_s)
        assert found.more_s.item() == pytest.approx(another_pack_s - hidden_s)


def test_embedding_and_head_hide_nothing() -> None:
    """They run before or after all halves, and once."""
    packs = SliceColumns.from_ranges([[(0, 0, 100), (1, 0, 100)]])
    for direction in ("forward", "backward"):
        plain = halved_packs(costs(), packs, direction)
        heavy = costs(embedding_s_per_token=50.0, head_s_per_token=50.0, head_pack_s=500.0)
        assert halved_packs(heavy, packs, direction).more_s == pytest.approx(plain.more_s)


def test_a_transfer_hides_no_longer_than_the_other_half_computes() -> None:
    """The second half has 40 rows: of the first's transfers no more than 40 rows' compute hides."""
    slow = costs(intra_node=LinkSpec(bandwidth_bytes_per_s=4.0, latency_s=0.0))
    packs = SliceColumns.from_ranges([[(0, 0, 60), (1, 0, 40)]])
    found = halved_packs(slow, packs, "forward", first_rows=np.array([60]))
    # Every ring of a token takes 2 s on 4 rings, its compute 1 s.
    compute_s = [LAYERS * (rows * 2.0 / 2 + 1.0 + 0.5) for rows in (40, 60)]
    assert found.hidden_s.item() == pytest.approx(sum(compute_s))


def test_what_transfers_and_compute_take_from_each_other_is_paid() -> None:
    packs = SliceColumns.from_ranges([[(0, 0, 100), (1, 0, 100)]])
    free, paid = (
        halved_packs(costs(one), packs, "forward")
        for one in (FREE, BesideHalves(stretch=1.5, slowdown=0.4, turns_s=0.2, host_turns_s=0.0))
    )
    assert paid.hidden_s.item() == pytest.approx(1.5 * free.hidden_s.item())
    lost_s = 0.4 * 1.5 * free.hidden_s.item() + LAYERS * 0.2
    assert paid.more_s.item() == pytest.approx(free.more_s.item() + lost_s)


def test_measured_layers_hold_their_transfers() -> None:
    """So that compute is the rest, and nothing is charged on top but another pack."""
    measured = costs(source="calibrated", tensor_exposed_share=0.0)
    packs = SliceColumns.from_ranges([[(0, 0, 100), (1, 0, 100)]])
    hidden_s = 2 * transfers_s(100) * (1 - 1 / (4 * LAYERS))
    assert halved_packs(measured, packs, "forward").more_s.item() == pytest.approx(LAYERS * 1.0 - hidden_s)


def test_small_packs_are_computed_in_one_go() -> None:
    """A pack that is halved is shorter by it; one that is not would not be."""
    packs = SliceColumns.from_ranges([[(0, 0, rows)] for rows in range(2, 200, 3)])
    found = halved_packs(costs(), packs, "forward")
    halved = found.first_rows > 0
    assert halved.any()
    assert not halved.all()
    assert (found.more_s[halved] < 0).all()
    assert not found.more_s[~halved].any()
    forced = halved_packs(costs(), packs, "forward", first_rows=packs.pack_tokens() // 2)
    assert (forced.more_s[~halved] >= 0).all()


@pytest.mark.parametrize("source", ["analytic", "calibrated"])
@settings(deadline=None)
@given(
    packs=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=4), min_size=1, max_size=5),
    exposed=st.floats(0, 1),
    bandwidth=st.floats(5, 1e4),
    stretch=st.floats(0.1, 2),
)
def test_halves_take_no_less_than_the_least_share(source, packs, exposed, bandwidth, stretch) -> None:
    link = LinkSpec(bandwidth_bytes_per_s=bandwidth, latency_s=LATENCY_S)
    free = BesideHalves(stretch=stretch, slowdown=0.0, turns_s=0.0, host_turns_s=0.0)
    priced = costs(free, source=source, tensor_exposed_share=exposed, intra_node=link)
    documents = iter(range(100))
    columns = SliceColumns.from_ranges([[(next(documents), 0, n) for n in pack] for pack in packs])
    for direction in ("forward", "backward"):
        whole_s = priced.pack_seconds(columns, direction)
        halves_s = whole_s + halved_packs(priced, columns, direction).more_s
        assert (halves_s >= least_share(priced) * whole_s * (1 - 1e-9)).all()


def test_where_nothing_is_halved_nothing_is_shorter() -> None:
    assert least_share(costs(None)) == 1.0
    assert 0 < least_share(costs()) < 1


def test_cuts_are_between_slices_near_the_middle_else_at_whole_tiles() -> None:
    wide = costs(attention_tile=16)
    packs = SliceColumns.from_ranges(
        [
            [(0, 0, 300), (1, 0, 320), (2, 0, 20)],
            [(0, 0, 600), (1, 0, 20)],
            [(0, 48, 448)],
            [(0, 0, 30), (1, 0, 600)],
        ]
    )
    first = halved_packs(wide, packs, "backward").first_rows.tolist()
    assert first == [300, 304, 192, 30 + 272]
    two_way = PackCosts(sample_model(causal=False), wide.coefficients, even_layout(LAYERS, tp=2))
    whole = SliceColumns.from_ranges([[(0, 0, 600), (1, 0, 300)], [(0, 0, 600)]])
    assert halved_packs(two_way, whole, "forward").first_rows.tolist() == [600, 0], "its documents are never cut"


def test_a_cut_slice_pays_for_two() -> None:
    costly = costs(
        backward=PassCoefficients(
            linear_s_per_token=2.0, attention_s_per_pair=0.0, prefix_s_per_token=0.1, slice_s=0.5, pack_s=1.0
        )
    )
    one = SliceColumns.from_ranges([[(0, 10, 210)]])
    found = halved_packs(costly, one, "backward", first_rows=np.array([100])).more_s.item()
    two = SliceColumns.from_ranges([[(0, 0, 100), (1, 0, 100)]])
    uncut = halved_packs(costly, two, "backward", first_rows=np.array([100])).more_s.item()
    assert found - uncut == pytest.approx(LAYERS * (0.5 + 110 * 0.1 / 2))


def test_what_may_not_be_halved() -> None:
    packs = SliceColumns.from_ranges([[(0, 0, 300), (1, 0, 300)]])
    with_host = costs(host_link=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=0.0))
    for policy in ([0, 0], [1, 1], [0, 1], [2, 2], [0, 2], [1, 2]):
        found = halved_packs(with_host, packs, "backward", np.array(policy, np.int8))
        assert found.first_rows.any(), policy
    shared = SliceColumns.from_ranges([[(0, 0, 300), (1, 0, 300)]], cp=2)
    assert not halved_packs(costs(), shared, "forward").first_rows.any()
    for one in (costs(None), costs(tp=1), costs(BesideHalves(stretch=2.0, slowdown=0.5))):
        assert not pays(one)
        assert not halved_packs(one, packs, "forward").first_rows.any()
    empty = SliceColumns.from_ranges([[], [(0, 0, 600)], []])
    assert halved_packs(costs(), empty, "forward").first_rows.tolist() == [0, 300, 0]


def test_recomputing_pays_its_constants_twice() -> None:
    packs = SliceColumns.from_ranges([[(0, 0, 300), (1, 0, 300)]])
    stored, again = (
        halved_packs(costs(), packs, "backward", np.full(2, code, np.int8)).more_s.item() for code in (0, 1)
    )
    assert again - stored == pytest.approx(float(costs().linear_again_s[1].sum()))


@pytest.mark.parametrize(("first_rows", "policy", "halves"), [(300, [1, 0], 1), (200, [1, 0], 2), (200, [0, 1], 1)])
def test_a_half_without_recomputed_documents_pays_the_latency_of_empty_transfers(first_rows, policy, halves) -> None:
    packs, first = SliceColumns.from_ranges([[(0, 0, 300), (1, 0, 300)]]), np.array([first_rows])
    stored, mixed = (
        halved_packs(costs(), packs, "backward", np.array(codes, np.int8), first).more_s.item()
        for codes in ([0, 0], policy)
    )
    constants_s = float(costs().linear_again_s[1].sum())
    assert constants_s > LAYERS * LATENCY_S
    assert mixed - stored == pytest.approx(constants_s if halves == 2 else LAYERS * LATENCY_S)


@pytest.mark.parametrize("stretch", [1.0, 1.4])
@pytest.mark.parametrize("host_turns_s", [0.0, 0.3])
def test_the_price_of_searches_is_that_of_packs_whose_halves_cut_no_document(stretch, host_turns_s) -> None:
    """Where compute is long enough for all transfers, and no slice is cut, which would cost a slice more. Turns that
    only a host takes are a margin on top."""
    beside = BesideHalves(stretch=stretch, slowdown=0.2, turns_s=0.1, host_turns_s=host_turns_s)
    priced = costs(beside, embedding_s_per_token=3.0, head_pack_s=7.0)
    packs = SliceColumns.from_ranges([[(0, 0, 200), (1, 0, 200)], [(2, 0, 500), (3, 0, 500)]])
    for direction in ("forward", "backward"):
        found = halved_packs(priced, packs, direction, first_rows=np.array([200, 500]))
        in_halves_s = priced.pack_seconds(packs, direction) + found.more_s + LAYERS * host_turns_s
        assert as_if_halved(priced).pack_seconds(packs, direction) == pytest.approx(in_halves_s)
        assert priced.pack_seconds(packs, direction) != pytest.approx(in_halves_s)


def test_halves_take_no_less_than_the_copies_of_their_offloaded_documents() -> None:
    packs, offloaded = SliceColumns.from_ranges([[(0, 0, 300), (1, 0, 300)]]), np.array([2, 0], np.int8)
    stored = halved_packs(costs(), packs, "forward")
    whole_s, halved_s = (float(one.sum()) for one in (costs().pack_seconds(packs, "forward"), stored.more_s))
    for share, gained in ((0.5, 1.0), (0.9, None), (1.1, 0.0)):
        # Of one document's bytes: so fast that its copies take this share of the pack.
        fast = costs(host_link=LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=0.0))
        copy_s = float(fast.copy_seconds(packs, offloaded).sum())
        link = LinkSpec(bandwidth_bytes_per_s=1e6 * copy_s / (share * whole_s), latency_s=0.0)
        more_s = float(halved_packs(costs(host_link=link), packs, "forward", offloaded, stored.first_rows).more_s.sum())
        expected = max(whole_s + halved_s, share * whole_s) - max(whole_s, share * whole_s)
        assert more_s == pytest.approx(expected), share
        assert gained is None or more_s == pytest.approx(gained * halved_s)


def test_padding_is_rows_too() -> None:
    packs = SliceColumns.from_ranges([[(0, 0, 300), (1, 0, 100)]])
    padded = SliceColumns(packs.doc, packs.start, packs.stop, packs.pack_offset, np.array([300]), packs.cp)
    assert halved_packs(costs(), padded, "forward").first_rows.tolist() == [300]


def shared_price(priced: PackCosts, direction: Direction, pack, sharding, first_rows: int | None) -> HalvedPacks:
    """Of one pack that context ranks share, the same in both directions."""
    columns = SliceColumns.from_ranges([pack], cp=priced.layout.cp)
    rows = wanted_cuts(priced, columns) if first_rows is None else np.array([first_rows])
    ranked = ranked_in_halves(priced, columns, columns, [sharding], (rows, rows))
    of_direction = ranked[direction == "backward"]
    return halved_packs(priced, columns, direction, None, None if first_rows is None else rows, of_direction)


def test_halves_of_a_shared_pack_are_those_of_its_ranks_with_another_latency_of_keys_and_values() -> None:
    """100 rows of either document on each of two ranks; K and V travel once forward, and twice in backward, as of
    documents that are never cut."""
    for direction, rings, gathers in (("forward", 4, 1), ("backward", 6, 2)):
        found = shared_price(costs(cp=2), direction, [(0, 0, 200), (1, 0, 200)], "per_document", 200)
        hidden_s = 2 * transfers_s(100, rings) * (1 - 1 / (rings * LAYERS))
        another_pack_s = LAYERS * (1.0 + rings * LATENCY_S)
        assert found.hidden_s.item() == pytest.approx(hidden_s)
        assert found.transfer_s.item() == pytest.approx(2 * transfers_s(100, rings))
        assert found.more_s.item() == pytest.approx(another_pack_s + LAYERS * gathers * LATENCY_S - hidden_s)


def test_a_document_that_halves_cut_is_even_on_its_ranks_and_pays_for_two() -> None:
    """Each of the ranks has two chunks of it in either half, where it had two; 2 more slices at 0.5 s a layer."""
    one = shared_price(costs(cp=2), "forward", [(0, 0, 400)], "per_document", 200).more_s.item()
    two = shared_price(costs(cp=2), "forward", [(0, 0, 200), (1, 0, 200)], "per_document", 200).more_s.item()
    # Rank 1 has the two chunks in the middle, which are one range: of one document once, of two twice.
    assert one - two == pytest.approx(LAYERS * 2 * 0.5)


def test_ranks_wait_for_the_slowest_in_either_half() -> None:
    """A document whole on each rank: every rank computes one half and waits in the other."""
    whole = [(0, 0, 200), (1, 0, 200)]
    found = shared_price(costs(cp=2), "forward", whole, (0, 1), 200)
    alone = halved_packs(costs(), SliceColumns.from_ranges([whole]), "forward", None, np.array([200]))
    assert found.more_s.item() > LAYERS * 200 * 2.0 / 2 > 0 > alone.more_s.item()
    assert not shared_price(costs(cp=2), "forward", whole, (0, 1), None).first_rows.any()


def test_halves_of_the_other_direction_cut_rows_of_a_pack_in_one_go() -> None:
    """Every rank keeps its rows, so it has one more range of them there: three for two, and two for one."""
    priced = costs(cp=2)
    columns, none, cut = SliceColumns.from_ranges([[(0, 0, 400)]], cp=2), np.array([0]), np.array([200])
    _, backward = ranked_in_halves(priced, columns, columns, ["per_document"], (cut, none))
    found = halved_packs(priced, columns, "backward", None, none, backward)
    assert found.more_s.item() == pytest.approx(LAYERS * 0.5)


def test_shared_packs_stay_in_one_go_round_a_ring() -> None:
    ring = costs(cp=2, context_exchange="ring")
    assert not pays(ring)
    assert pays(costs(context_exchange="ring"))
    merged = SliceColumns.from_ranges([[(0, 0, 400), (1, 0, 400)]], cp=2)
    assert not wanted_cuts(costs(context_exchange="ring"), merged).any()
    assert wanted_cuts(costs(), merged).tolist() == [400]


def test_beside_a_pack_in_halves_a_pack_round_a_ring_costs_what_it_did() -> None:
    """Also the prefix that travels with it."""
    priced = costs(context_exchange="ring")
    packs = [[(0, 0, 200)], [(0, 200, 400)], [(1, 0, 400)]]
    columns = replace(SliceColumns.from_ranges(packs), cp=np.array([2, 2, 1]))
    rows = wanted_cuts(priced, columns)
    assert rows.tolist() == [0, 0, 200]
    forward, _ = ranked_in_halves(priced, columns, columns, ["per_document"] * 2 + [""], (rows, rows))
    found = halved_packs(priced, columns, "forward", None, rows, forward)
    assert found.more_s[:2] == pytest.approx(0)
    assert found.more_s[2] < 0


def test_cuts_of_shared_packs_are_at_whole_tiles_of_every_chunk() -> None:
    """Two chunks a rank: 2 · 2 · 16 tokens."""
    wide = costs(attention_tile=16, cp=2)
    assert wanted_cuts(wide, SliceColumns.from_ranges([[(0, 100, 1111)]], cp=2)).tolist() == [505 // 64 * 64]


def test_coefficients_below_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_beside\.turns_s is -1\.0"):
        BesideHalves(turns_s=-1.0)
    with pytest.raises(ConfigError, match=r"host_turns_s is -1\.0"):
        BesideHalves(host_turns_s=-1.0)
    with pytest.raises(ConfigError, match=r"slowdown by transfers beside compute is 1\.5"):
        BesideHalves(slowdown=1.5)
    assert msgspec.json.decode(msgspec.json.encode(FREE), type=BesideHalves) == FREE
