"""Which pieces are shared, what they take, what crosses the links between machines, and what a switch costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_samples import sample_coefficients
from evenload.cost.coefficients import CopySpec
from evenload.errors import ConfigError
from evenload.plan.layouts.moves import Moves, Piece, SwitchPieces, plan_moves, shared_bytes, shared_pieces
from evenload.plan.layouts.switch_prices import stall_seconds, state_seconds
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout

PP4, DP4, PP2 = even_layout(4, pp=4), even_layout(4, dp=4), even_layout(4, pp=2, dp=2)
PIECES = [Piece(unit=unit, num_elements=10 * (1 + unit), weight_bytes=4, state_bytes=8) for unit in range(6)]


def test_a_piece_takes_what_all_holders_of_a_machine_hold():
    """Ten elements: four copies of the weights and one of the state; on machines of two ranks half of both."""
    assert shared_bytes(PIECES[0], [PP4, DP4], 4) == 4 * 10 * 4 + 10 * 8
    # Shares of three, the last of one: the first machine has six elements' state.
    assert shared_bytes(PIECES[0], [PP4, DP4], 2) == 2 * 10 * 4 + 6 * 8
    assert shared_bytes(PIECES[0], [PP4], 2) == 10 * 4 + 10 * 8


def test_a_budget_is_filled_in_the_order_of_the_model():
    needed = [shared_bytes(piece, [PP4, DP4], 4) for piece in PIECES]
    assert needed == [240 * (1 + unit) for unit in range(6)]
    assert shared_pieces(PIECES, [PP4, DP4], 4, None) == set(range(6))
    assert shared_pieces(PIECES, [PP4, DP4], 4, sum(needed)) == set(range(6))
    assert shared_pieces(PIECES, [PP4, DP4], 4, sum(needed) - 1) == set(range(5))
    # The second and third do not fit into what the first leaves; nothing behind them is smaller.
    assert shared_pieces(PIECES, [PP4, DP4], 4, 240 + 479) == {0}
    # From the other end: four that do not fit are left out, the fifth does.
    assert shared_pieces(PIECES[::-1], [PP4, DP4], 4, 240 + 479) == {4}
    assert shared_pieces(PIECES, [PP4, DP4], 4, 0) == set()


@given(st.sampled_from([PP4, PP2, DP4]), st.sampled_from([PP4, PP2, DP4]), st.sets(st.integers(0, 5)))
def test_a_shared_piece_comes_to_a_machine_once(old, new, shared):
    """And reaches every rank that lacks it, from one that has it by then."""
    moves = plan_moves(old, new, PIECES, ranks_per_node=2, shared=shared)
    plain = plan_moves(old, new, PIECES, ranks_per_node=2)
    assert plain.relayed == ()
    both = (*moves.weights, *moves.relayed)
    assert {(move.piece, move.target) for move in both} == {(move.piece, move.target) for move in plain.weights}
    assert moves.state == plain.state
    crossing = [(move.piece, move.target // 2) for move in moves.weights if move.source // 2 != move.target // 2]
    assert all(crossing.count(one) == 1 for one in crossing if one[0] in shared)
    there = {(move.piece, move.target) for move in moves.weights}
    for move in moves.relayed:
        assert move.piece in shared
        assert move.source // 2 == move.target // 2
        assert (move.piece, move.source) in there


COPIES = CopySpec(
    rank_bytes_per_s=100.0, machine_bytes_per_s=150.0, taken_bytes_per_s=50.0, fixed_s=0.1, layer_s=0.1,
    gained_s=0.01, left_s=0.001,
)  # fmt: skip
COSTS = sample_coefficients(
    intra_node=LinkSpec(bandwidth_bytes_per_s=10.0, latency_s=0.0), devices_per_node=4, copies=COPIES
)


def moved(shared: set[int], ranks_per_machine: int = 4) -> SwitchPieces:
    return SwitchPieces(pieces=tuple(PIECES), shared=frozenset(shared), ranks_per_machine=ranks_per_machine)


def stall(moves: Moves, shared: set[int], *, is_taken: bool = True) -> float:
    return stall_seconds(moves, moved(shared), COSTS, PP4, DP4, is_taken=is_taken)


# Four layers are arranged; a rank in the middle had one of the six pieces and gains five.
AROUND_S = 0.1 + 4 * 0.1 + 5 * 0.01


def test_reading_is_bounded_by_a_rank_and_by_the_machine():
    """Weights of 40, 80, ... bytes, 840 in all; in four stages layers lie on ranks 0 to 3, embedding and head at the
    ends."""
    moves = plan_moves(PP4, DP4, PIECES, ranks_per_node=4, shared=range(6))
    received = {rank: 840 - held for rank, held in enumerate((40 + 80, 120, 160, 200 + 240))}
    assert stall(moves, set(range(6))) == pytest.approx(AROUND_S + sum(received.values()) / 150)
    assert stall(moves, set(range(6)), is_taken=False) == pytest.approx(
        AROUND_S + sum(received.values()) * (1 / 150 + 1 / 50)
    )
    one = Moves(weights=moves.weights[:1], state=())
    assert stall(one, set(range(6))) == pytest.approx(AROUND_S + 40 / 100)
    # What is not shared is sent, at once with what is read.
    assert stall(one, set()) == pytest.approx(AROUND_S + 40 / 10)
    assert stall(Moves(weights=(), state=()), set()) == pytest.approx(AROUND_S)


def test_state_is_priced_by_what_is_read_too():
    moves = plan_moves(DP4, PP4, PIECES, ranks_per_node=4, shared=range(6))
    total = sum(8 * move.num_elements for move in moves.state)
    assert state_seconds(moves, moved(set(range(6))), COSTS) == pytest.approx(total / 150)


@pytest.mark.parametrize("field", CopySpec.__struct_fields__)
def test_impossible_copies_are_refused(field):
    known = {"rank_bytes_per_s": 1.0, "machine_bytes_per_s": 1.0, "taken_bytes_per_s": 1.0, "fixed_s": 0.0}
    with pytest.raises(ConfigError, match=field):
        CopySpec(**known | {field: -1.0})
