"""A decision prices what the runtime does: what is shared is read, the rest sent; over links once a machine."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.coefficients import CopySpec
from evenload.cost.switch import switch_seconds
from evenload.plan.layouts.moves import SwitchPieces, model_pieces, moved_bytes
from evenload.plan.layouts.switch_prices import SwitchPrices, stall_seconds, state_seconds
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout

MODEL = sample_model(num_layers=4)
PIECES = model_pieces(MODEL, 1)
PP4, PP2, DP4 = even_layout(4, pp=4), even_layout(4, pp=2, dp=2), even_layout(4, dp=4)
COPIES = CopySpec(rank_bytes_per_s=10.0, machine_bytes_per_s=20.0, taken_bytes_per_s=1.0, fixed_s=4.0, layer_s=1.0)
NEAR, FAR = (LinkSpec(bandwidth_bytes_per_s=rate, latency_s=0.0) for rate in (2.0, 1.0))


def costs(ranks_per_machine: int, copies: CopySpec | None = COPIES):
    return sample_coefficients(intra_node=NEAR, inter_node=FAR, devices_per_node=ranks_per_machine, copies=copies)


def moved(shared, ranks_per_machine: int) -> SwitchPieces:
    return SwitchPieces(pieces=PIECES, shared=frozenset(shared), ranks_per_machine=ranks_per_machine)


def prices(shared, ranks_per_machine: int = 4) -> SwitchPrices:
    return SwitchPrices(MODEL, PP4, costs(ranks_per_machine), moved(shared, ranks_per_machine))


def weights_bytes(old, new) -> dict[int, int]:
    found = dict.fromkeys(range(4), 0)
    for move in moved((), 4).moves(old, new).weights:
        found[move.target] += moved_bytes([move], PIECES, of_state=False)
    return found


def test_one_machine_reads_what_is_shared():
    """Four layers are arranged; whoever is faster waits for the slower: a rank at its rate, or all at the machine's."""
    read = weights_bytes(PP4, DP4)
    reading_s = max(max(read.values()) / 10, sum(read.values()) / 20)
    assert prices(range(len(PIECES))).seconds(costs(4), PP4, DP4, 1e9) == pytest.approx(4 + 4 * 1.0 + reading_s)
    # With nothing shared everything is sent, with a budget a part, at once with what is read.
    sent = SwitchPrices(MODEL, PP4, costs(4), moved((), 4)).seconds(costs(4), PP4, DP4, 1e9)
    assert sent > 8.0 + max(read.values()) / 2.0 - 1e-9
    some = prices([0, 1, 4, 5]).seconds(costs(4), PP4, DP4, 1e9)
    assert 8.0 + reading_s < some < sent


def test_between_machines_a_shared_piece_travels_once():
    """Two machines of two: the ranks of a machine lack the same layers of the other one, which one of them fetches and
    the other reads there."""
    stages = even_layout(4, pp=2, dp=2)
    here = moved(range(len(PIECES)), 2)
    moves = here.moves(stages, DP4)
    crossing = sum(moved_bytes([move], PIECES, of_state=False) for move in moves.weights)
    relayed = sum(moved_bytes([move], PIECES, of_state=False) for move in moves.relayed)
    assert crossing == relayed
    whole = sum(piece.num_elements * piece.weight_bytes for piece in PIECES)
    assert crossing == whole
    alone = moved((), 2).moves(stages, DP4)
    assert sum(moved_bytes([move], PIECES, of_state=False) for move in alone.weights) == 2 * whole
    found = SwitchPrices(MODEL, stages, costs(2), here).seconds(costs(2), stages, DP4, 1e9)
    assert found == pytest.approx(stall_seconds(moves, here, costs(2), stages, DP4, is_taken=True))


@given(
    st.sampled_from([PP4, PP2, DP4]),
    st.sampled_from([PP4, PP2, DP4]),
    st.sets(st.integers(0, len(PIECES) - 1)),
    st.sampled_from([1, 2, 4]),
    st.floats(0, 1e5),
)
def test_a_decision_has_the_seconds_that_the_switch_is_told_with(old, new, shared, ranks_per_machine, hidden_s):
    """What `LiveStages.move_to` predicts of its own moves, and what of the state the step does not hide."""
    here, measured = moved(shared, ranks_per_machine), costs(ranks_per_machine)
    found = SwitchPrices(MODEL, PP4, measured, here).seconds(
        measured, old, msgspec.structs.replace(new, generation=3), hidden_s
    )
    if old == new:
        assert found == 0.0
        return
    moves = here.moves(old, new)
    left_s = max(0.0, state_seconds(moves, here, measured) - hidden_s)
    assert found == pytest.approx(stall_seconds(moves, here, measured, old, new, is_taken=True) + left_s)


def test_without_measured_copies_links_price_all_devices_at_once():
    links = costs(2, None)
    expected = switch_seconds(MODEL, links, PP4, DP4, 3.0)
    assert SwitchPrices(MODEL, PP4, links).seconds(links, PP4, DP4, 3.0) == expected > 0
