"""What keys and values cost beyond attention where they travel in parts: against timelines played part by part."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.coefficients import BesideCompute, CostCoefficients
from evenload.cost.context_waiting import MOST_PARTS, ContextWork, context_parts, most_parts, waiting_seconds
from evenload.cost.pack_cost import PackCosts
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns
from evenload.types.layout import even_layout

FREE = BesideCompute(stretch=1.0, slowdown=0.0)


def costs_of(beside: BesideCompute | None, part_s: float = 0.0, share: float = 1.0) -> CostCoefficients:
    found = sample_coefficients(context_beside=beside, context_hidden_share=share)
    passes = {
        name: msgspec.structs.replace(found.of_pass(name), context_part_s=seconds)
        for name, seconds in (("forward", part_s), ("backward", 0.0))
    }
    return msgspec.structs.replace(found, **passes)


def one_pack(transfer_s: float, shared_s: float, local_s: float = 0.0, latency_s: float = 0.0) -> ContextWork:
    """On one stage of one layer."""
    return ContextWork(
        transfer_s=np.array([transfer_s]),
        latency_s=np.array([latency_s]),
        plain_s=np.zeros(1),
        local_s=np.array([[local_s]]),
        all_s=np.array([[local_s + shared_s]]),
        layers=np.ones(1, np.int64),
    )


def played(parts: int, transfer_s: float, shared_s: float, local_s: float, latency_s: float) -> float:
    """End of a layer's attention: transfers follow one another, and every part is computed once it is there."""
    arrived_s, now_s = 0.0, local_s
    for _ in range(parts):
        arrived_s += (transfer_s - latency_s) / parts + latency_s
        now_s = max(now_s, arrived_s) + shared_s / parts
    return now_s


SECONDS = st.floats(0.0, 10.0)


@given(st.integers(1, 8), SECONDS, SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_waiting_is_what_a_timeline_of_parts_shows(parts, transfer_s, shared_s, local_s, latency_share):
    """Exactly, where transfers and attention do not disturb each other; with documents of the rank's own first."""
    latency_s = latency_share * transfer_s
    work = one_pack(transfer_s, shared_s, local_s, latency_s)
    found_s = waiting_seconds(costs_of(FREE), "forward", np.array([parts]), work)[0, 0] + local_s + shared_s
    assert found_s == pytest.approx(played(parts, transfer_s, shared_s, local_s, latency_s))


@given(SECONDS, SECONDS, st.floats(0.001, 2.0), st.floats(0.0, 0.5))
def test_the_chosen_number_of_parts_costs_least(transfer_s, shared_s, part_s, slowdown):
    """Of those at most `MOST_PARTS`, where attention is longer than its transfers, or much shorter."""
    beside = BesideCompute(stretch=1.0, slowdown=slowdown)
    costs, work = costs_of(beside, part_s), one_pack(transfer_s, shared_s)
    [chosen] = context_parts(costs, "forward", MOST_PARTS, work).tolist()
    price_s = [waiting_seconds(costs, "forward", np.array([n]), work)[0, 0] for n in range(1, MOST_PARTS + 1)]
    if shared_s >= transfer_s or shared_s * MOST_PARTS <= transfer_s * beside.computed_share:
        gained_s = price_s[0] - min(price_s)
        assert price_s[0] - price_s[chosen - 1] >= 0.75 * gained_s - 1e-9
    assert price_s[chosen - 1] <= price_s[0] + 1e-9


def test_parts_by_hand() -> None:
    """A layer with 6 s of transfers and 12 s of attention; a part more costs 0.25 s. In n parts 6/n + (n - 1)/4 s are
    left: least, 2.25 s, with 4 or 5 parts, and with 2 at most 3.25 s."""
    costs, work = costs_of(FREE, 0.25), one_pack(6.0, 12.0)
    [chosen] = context_parts(costs, "forward", 8, work).tolist()
    assert chosen == 5
    assert waiting_seconds(costs, "forward", np.array([chosen]), work)[0, 0] == pytest.approx(6 / 5 + 1.0)
    assert context_parts(costs, "forward", 2, work).tolist() == [2]
    assert waiting_seconds(costs, "forward", np.array([2]), work)[0, 0] == pytest.approx(3.25)
    # What runs beside attention takes twice as long and a quarter of that from it: half is gained.
    beside = BesideCompute(stretch=2.0, slowdown=0.25)
    assert waiting_seconds(costs_of(beside), "forward", np.array([2]), work)[0, 0] == pytest.approx(6 - 0.5 * 3)
    # Attention of 1.5 s is computed while 1 s of transfers runs so, which alone takes 1 s.
    short = one_pack(6.0, 3.0)
    assert waiting_seconds(costs_of(beside), "forward", np.array([2]), short)[0, 0] == pytest.approx(6 - 0.5 * 1.0)
    assert context_parts(costs, "forward", 8, one_pack(6.0, 12.0, local_s=6.0)).tolist() == [1], "hidden already"


def test_parts_are_heads_and_none_where_it_does_not_pay() -> None:
    model = sample_model(num_heads=16, num_kv_heads=4)
    assert [most_parts(model, costs_of(FREE), tp) for tp in (1, 2, 4, 8)] == [4, 2, 1, 1]
    assert most_parts(sample_model(num_heads=16, num_kv_heads=16), costs_of(FREE), 1) == MOST_PARTS
    assert most_parts(model, costs_of(None), 1) == 1
    assert most_parts(model, costs_of(BesideCompute(stretch=2.0, slowdown=0.5)), 1) == 1
    assert most_parts(model, msgspec.structs.replace(costs_of(FREE), context_exchange="ring"), 1) == 1
    assert most_parts(model, sample_coefficients(context_beside=FREE), 1) == 1, "what a part costs is not known"


def test_a_pack_that_ranks_share_is_cheaper_in_parts() -> None:
    """Of the transfers of 64 tokens over 4 ranks, shorter than attention, a quarter is left in four parts."""
    model = sample_model(num_heads=4, num_kv_heads=4)
    link = LinkSpec(bandwidth_bytes_per_s=1000.0, latency_s=0.0)
    packs, layout = SliceColumns.from_ranges([[(0, 0, 64)]], cp=4), even_layout(3, cp=4)
    waits = []
    for beside in (None, FREE):
        coefficients = msgspec.structs.replace(costs_of(beside), intra_node=link, devices_per_node=8)
        costs = PackCosts(model, coefficients, layout)
        waits.append((costs.pack_seconds(packs, "forward") - costs.compute_seconds(packs, "forward"))[0, 0])
    moved_s = 3 * 64 * (2 * 4 * 4 * 2) * 0.75 / 1000.0  # layers, tokens, bytes of K and V a token
    assert waits == pytest.approx([moved_s, moved_s / 4])
