"""What travels when the layout changes: everything that is lacking, nothing else, from the nearest rank."""

import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.coefficients import CopySpec
from evenload.cost.memory import embedding_parameters, layer_parameters, optimizer_bytes_per_parameter, static_bytes
from evenload.errors import ConfigError
from evenload.planning.layouts.moves import (
    Move,
    Moves,
    Piece,
    SwitchPieces,
    SwitchPrices,
    model_pieces,
    moved_bytes,
    moving_seconds,
    pipeline_ranks,
    plan_moves,
    shared_bytes,
    shared_pieces,
    switch_memory,
    switch_seconds,
)
from evenload.types.cluster import LinkSpec
from evenload.types.layout import ParallelLayout, even_layout, split_layout


def held(layout: ParallelLayout, pieces: list[Piece], tp_rank: int = 0) -> dict[int, dict[int, set[int]]]:
    """Element by element, by rank and piece: the optimizer state that a rank must have; its keys are the weights."""
    result: dict[int, dict[int, set[int]]] = {}
    for rank in range(layout.world_size):
        if rank % layout.tp != tp_rank:
            continue
        owner = rank // (layout.tp * layout.dp * layout.cp)
        first, count = next(
            (low, width)
            for low, width in zip(layout.stage_to_rank, layout.devices, strict=True)
            if low <= owner < low + width
        )
        place = rank // layout.tp - first * layout.dp * layout.cp
        mine = result[rank] = {}
        for index, piece in enumerate(pieces):
            if owner in pipeline_ranks(layout, piece):
                size = -(-piece.num_elements // (count * layout.dp * layout.cp))
                own = range(place * size, min((place + 1) * size, piece.num_elements))
                mine[index] = set(own) if piece.state_bytes else set()
    return result


def pieces_of(num_layers: int, sizes: list[int], *, tied: bool = False, frozen: bool = False) -> list[Piece]:
    """Two pieces a layer, as matrices and norms; frozen ones beside trained ones where asked."""
    state = 0 if frozen else 8
    result = [Piece(unit=0, num_elements=sizes[0], weight_bytes=4, state_bytes=state, at_both_ends=tied)]
    for layer in range(num_layers):
        result.append(Piece(unit=1 + layer, num_elements=sizes[1], weight_bytes=4, state_bytes=8))
        result.append(Piece(unit=1 + layer, num_elements=sizes[2], weight_bytes=4, state_bytes=state))
    if not tied:
        result.append(Piece(unit=num_layers + 1, num_elements=sizes[0], weight_bytes=4, state_bytes=state))
    return [*result, Piece(unit=num_layers + 1, num_elements=sizes[3], weight_bytes=4, state_bytes=state)]


@st.composite
def switches(draw):
    num_layers, cp, tp = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))

    def one() -> ParallelLayout:
        virtual = draw(st.sampled_from([1, 2])) if num_layers > 1 else 1
        pp = draw(st.integers(1, max(1, num_layers // virtual)))
        cuts = draw(st.lists(st.integers(1, num_layers), min_size=pp * virtual, max_size=pp * virtual))
        counts = [1] * (pp * virtual)
        for cut in cuts:
            if sum(counts) < num_layers:
                counts[cut % len(counts)] += 1
        counts[-1] += num_layers - sum(counts)
        devices = draw(st.lists(st.integers(1, 3), min_size=pp, max_size=pp))
        if cp * tp * virtual == 1 and len(set(devices)) > 1 and draw(st.booleans()):
            return split_layout(counts, pp=pp, devices=devices)
        return split_layout(counts, dp=draw(st.integers(1, 4)), cp=cp, pp=pp, tp=tp)

    sizes = draw(st.lists(st.integers(1, 13), min_size=4, max_size=4))
    pieces = pieces_of(num_layers, sizes, tied=draw(st.booleans()), frozen=draw(st.booleans()))
    return one(), one(), pieces, draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(0, tp - 1))


@given(switches())
def test_afterwards_every_rank_holds_what_its_layout_needs_and_nothing_came_twice(case) -> None:
    """Applied element by element; every move is from a rank that has what it sends, to one that does not."""
    old, new, pieces, ranks_per_node, tp_rank = case
    moves = plan_moves(old, new, pieces, ranks_per_node=ranks_per_node, tp_rank=tp_rank)
    before, after = held(old, pieces, tp_rank), held(new, pieces, tp_rank)
    weights = {rank: set(mine) for rank, mine in before.items()}
    for move in moves.weights:
        assert move.piece in before[move.source]
        assert (move.start, move.stop) == (0, pieces[move.piece].num_elements)
        assert move.piece not in weights.setdefault(move.target, set())
        weights[move.target].add(move.piece)
    state = {rank: {index: set(own) for index, own in mine.items()} for rank, mine in before.items()}
    for move in moves.state:
        elements = set(range(move.start, move.stop))
        assert elements
        assert elements <= before[move.source][move.piece]
        has = state.setdefault(move.target, {}).setdefault(move.piece, set())
        assert not elements & has
        has |= elements
    for rank, mine in after.items():
        assert set(mine) <= weights.get(rank, set())
        for index, own in mine.items():
            assert own <= state.get(rank, {}).get(index, set())
    # The fewest bytes: exactly what is lacking.
    lacking = sum(
        pieces[index].num_elements * pieces[index].weight_bytes
        for rank, mine in after.items()
        for index in mine
        if index not in before.get(rank, {})
    )
    assert moved_bytes(moves.weights, pieces, of_state=False) == lacking
    lacking = sum(
        len(own - before.get(rank, {}).get(index, set())) * pieces[index].state_bytes
        for rank, mine in after.items()
        for index, own in mine.items()
    )
    assert moved_bytes(moves.state, pieces, of_state=True) == lacking


@given(switches())
def test_what_a_rank_of_the_node_has_comes_from_there(case) -> None:
    """No order of senders could send less between nodes, short of relaying."""
    old, new, pieces, ranks_per_node, tp_rank = case
    moves = plan_moves(old, new, pieces, ranks_per_node=ranks_per_node, tp_rank=tp_rank)
    before = held(old, pieces, tp_rank)
    for move in moves.weights:
        sources = [rank for rank, mine in before.items() if move.piece in mine]
        assert_nearest(move, sources, ranks_per_node)
    for move in moves.state:
        elements = set(range(move.start, move.stop))
        sources = [rank for rank, mine in before.items() if elements <= mine.get(move.piece, set())]
        assert_nearest(move, sources, ranks_per_node)


def assert_nearest(move: Move, sources: list[int], ranks_per_node: int) -> None:
    assert move.source in sources
    node = move.target // ranks_per_node
    near = [rank for rank in sources if rank // ranks_per_node == node]
    assert not near or move.source in near


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 3))
def test_equal_holders_send_as_evenly_as_any_choice_could(num_pieces, holders, targets) -> None:
    """Brute force over all senders of pieces of one size: the busiest sends no more than it must."""
    old = even_layout(1, dp=holders)
    new = even_layout(1, dp=holders + targets)
    pieces = [Piece(unit=1, num_elements=1, weight_bytes=1)] * num_pieces
    moves = plan_moves(old, new, pieces, ranks_per_node=16)
    sent = Counter(move.source for move in moves.weights)
    assert max(sent.values()) == -(-num_pieces * targets // holders)
    if holders ** (num_pieces * targets) <= 4096:
        best = min(
            max(Counter(chosen).values()) for chosen in itertools.product(range(holders), repeat=num_pieces * targets)
        )
        assert max(sent.values()) == best


def test_four_stages_become_two_by_hand() -> None:
    """pp 4 -> pp 2 x dp 2, a layer a stage, 10 elements a layer: who sends what to whom."""
    pieces = [Piece(unit=1 + layer, num_elements=10, weight_bytes=2, state_bytes=12) for layer in range(4)]
    moves = plan_moves(even_layout(4, pp=4), even_layout(4, pp=2, dp=2), pieces, ranks_per_node=4)
    # Ranks 0 and 1 get layers 0 and 1, ranks 2 and 3 layers 2 and 3; each had one.
    assert [(move.piece, move.source, move.target) for move in moves.weights] == [
        (0, 0, 1),
        (1, 1, 0),
        (2, 2, 3),
        (3, 3, 2),
    ]
    # The first rank of a stage owns elements 0..5 of both layers, the second 5..10.
    assert [(move.piece, move.source, move.target, move.start, move.stop) for move in moves.state] == [
        (0, 0, 1, 5, 10), (1, 1, 0, 0, 5), (2, 2, 3, 5, 10), (3, 3, 2, 0, 5)
    ]  # fmt: skip
    assert moved_bytes(moves.weights, pieces, of_state=False) == 4 * 10 * 2
    assert moved_bytes(moves.state, pieces, of_state=True) == 4 * 5 * 12
    link = LinkSpec(bandwidth_bytes_per_s=10.0, latency_s=1.0)
    costs = sample_coefficients(intra_node=link, inter_node=link, devices_per_node=4)
    assert moving_seconds(moves.weights, pieces, costs, of_state=False) == 20 / 10 + 1
    assert moving_seconds(moves.state, pieces, costs, of_state=True) == 60 / 10 + 1
    assert moving_seconds((), pieces, costs, of_state=True) == 0.0


def test_other_groups_and_other_models_are_refused() -> None:
    for new in (even_layout(4, cp=2), even_layout(4, tp=2), even_layout(5)):
        with pytest.raises(ConfigError, match="cp and tp may not"):
            plan_moves(even_layout(4), new, [], ranks_per_node=1)


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


def stall(moves: Moves, shared: set[int]) -> float:
    return switch_seconds(moves, moved(shared), COSTS, PP4, DP4).stall_s(0.0)


# Four layers are arranged; a rank in the middle had one of the six pieces and gains five.
AROUND_S = 0.1 + 4 * 0.1 + 5 * 0.01


def test_reading_is_bounded_by_a_rank_and_by_the_machine():
    """Weights of 40, 80, ... bytes, 840 in all; in four stages layers lie on ranks 0 to 3, embedding and head at the
    ends."""
    moves = plan_moves(PP4, DP4, PIECES, ranks_per_node=4, shared=range(6))
    received = {rank: 840 - held for rank, held in enumerate((40 + 80, 120, 160, 200 + 240))}
    assert stall(moves, set(range(6))) == pytest.approx(AROUND_S + sum(received.values()) * (1 / 150 + 1 / 50))
    one = Moves(weights=moves.weights[:1], state=())
    assert stall(one, set(range(6))) == pytest.approx(AROUND_S + 40 / 100 + 40 / 50)
    # What is not shared is sent, at once with what is read.
    assert stall(one, set()) == pytest.approx(AROUND_S + 40 / 10 + 40 / 50)
    assert stall(Moves(weights=(), state=()), set()) == pytest.approx(AROUND_S)


def test_state_is_priced_by_what_is_read_too():
    moves = plan_moves(DP4, PP4, PIECES, ranks_per_node=4, shared=range(6))
    total = sum(8 * move.num_elements for move in moves.state)
    assert switch_seconds(moves, moved(set(range(6))), COSTS, PP4, DP4).state_s == pytest.approx(total / 150)


@pytest.mark.parametrize("field", CopySpec.__struct_fields__)
def test_impossible_copies_are_refused(field):
    known = {"rank_bytes_per_s": 1.0, "machine_bytes_per_s": 1.0, "taken_bytes_per_s": 1.0, "fixed_s": 0.0}
    with pytest.raises(ConfigError, match=field):
        CopySpec(**known | {field: -1.0})


FOUR_LAYERS = sample_model(num_layers=4)
MODEL_PIECES = model_pieces(FOUR_LAYERS, 1)
FAST_COPIES = CopySpec(rank_bytes_per_s=10.0, machine_bytes_per_s=20.0, taken_bytes_per_s=1.0, fixed_s=4.0, layer_s=1.0)
NEAR, FAR = (LinkSpec(bandwidth_bytes_per_s=rate, latency_s=0.0) for rate in (2.0, 1.0))


def costs(ranks_per_machine: int, copies: CopySpec | None = FAST_COPIES):
    return sample_coefficients(intra_node=NEAR, inter_node=FAR, devices_per_node=ranks_per_machine, copies=copies)


def moved_of_model(shared, ranks_per_machine: int) -> SwitchPieces:
    return SwitchPieces(pieces=MODEL_PIECES, shared=frozenset(shared), ranks_per_machine=ranks_per_machine)


def prices(shared, ranks_per_machine: int = 4) -> SwitchPrices:
    return SwitchPrices(FOUR_LAYERS, PP4, costs(ranks_per_machine), moved_of_model(shared, ranks_per_machine))


def weights_bytes(old, new) -> dict[int, int]:
    result = dict.fromkeys(range(4), 0)
    for move in moved_of_model((), 4).moves(old, new).weights:
        result[move.target] += moved_bytes([move], MODEL_PIECES, of_state=False)
    return result


def test_one_machine_reads_what_is_shared():
    """Four layers are arranged; whoever is faster waits for the slower: a rank at its rate, or all at the machine's."""
    read = weights_bytes(PP4, DP4)
    reading_s = max(max(read.values()) / 10, sum(read.values()) / 20)
    touching_s = sum(read.values()) / 1
    assert prices(range(len(MODEL_PIECES))).seconds(costs(4), PP4, DP4, 1e9) == pytest.approx(
        4 + 4 * 1.0 + reading_s + touching_s
    )
    # With nothing shared everything is sent, with a budget a part, at once with what is read.
    sent = SwitchPrices(FOUR_LAYERS, PP4, costs(4), moved_of_model((), 4)).seconds(costs(4), PP4, DP4, 1e9)
    assert sent > 8.0 + max(read.values()) / 2.0 + touching_s - 1e-9
    some = prices([0, 1, 4, 5]).seconds(costs(4), PP4, DP4, 1e9)
    assert 8.0 + reading_s + touching_s < some < sent


def test_between_machines_a_shared_piece_travels_once():
    """Two machines of two: the ranks of a machine lack the same layers of the other one, which one of them fetches and
    the other reads there."""
    stages = even_layout(4, pp=2, dp=2)
    here = moved_of_model(range(len(MODEL_PIECES)), 2)
    moves = here.moves(stages, DP4)
    crossing = sum(moved_bytes([move], MODEL_PIECES, of_state=False) for move in moves.weights)
    relayed = sum(moved_bytes([move], MODEL_PIECES, of_state=False) for move in moves.relayed)
    assert crossing == relayed
    whole = sum(piece.num_elements * piece.weight_bytes for piece in MODEL_PIECES)
    assert crossing == whole
    alone = moved_of_model((), 2).moves(stages, DP4)
    assert sum(moved_bytes([move], MODEL_PIECES, of_state=False) for move in alone.weights) == 2 * whole
    result = SwitchPrices(FOUR_LAYERS, stages, costs(2), here).seconds(costs(2), stages, DP4, 1e9)
    assert result == pytest.approx(switch_seconds(moves, here, costs(2), stages, DP4).stall_s(0.0))


@given(
    st.sampled_from([PP4, PP2, DP4]),
    st.sampled_from([PP4, PP2, DP4]),
    st.sets(st.integers(0, len(MODEL_PIECES) - 1)),
    st.sampled_from([1, 2, 4]),
    st.floats(0, 1e5),
)
def test_a_decision_has_the_seconds_that_the_switch_is_told_with(old, new, shared, ranks_per_machine, hidden_s):
    """What `LiveStages.move_to` predicts of its own moves, and what of the state the step does not hide."""
    here, measured = moved_of_model(shared, ranks_per_machine), costs(ranks_per_machine)
    result = SwitchPrices(FOUR_LAYERS, PP4, measured, here).seconds(
        measured, old, msgspec.structs.replace(new, generation=3), hidden_s
    )
    if old == new:
        assert result == 0.0
        return
    moves = here.moves(old, new)
    parts = switch_seconds(moves, here, measured, old, new)
    assert result == pytest.approx(parts.stall_s(0.0) + max(0.0, parts.state_s - hidden_s))


def test_without_measured_copies_everything_is_sent_and_the_step_hides_its_state():
    links, sent = costs(2, None), moved_of_model((), 2)
    moves = sent.moves(PP4, DP4)
    _, _, weights_s, state_s = switch_seconds(moves, sent, links, PP4, DP4)
    prices = SwitchPrices(FOUR_LAYERS, PP4, links)
    for hidden_s in (0.0, state_s / 2, 2 * state_s):
        expected = weights_s + max(0.0, state_s - hidden_s)
        assert prices.seconds(links, PP4, DP4, hidden_s) == pytest.approx(expected)
    assert 0 < weights_s < prices.seconds(links, PP4, DP4, 0.0)


def test_forwards_hide_weights_behind_their_first_unit_and_the_step_what_is_left_of_both():
    """PP4 to DP4: the busiest ranks gain five of six units; state moves behind the weights."""
    links, sent = costs(2, None), moved_of_model((), 2)
    moves = sent.moves(PP4, DP4)
    gained = {(move.target, MODEL_PIECES[move.piece].unit) for move in moves.weights}
    most = max(sum(target == rank for target, _ in gained) for rank in range(4))
    parts = switch_seconds(moves, sent, links, PP4, DP4)
    whole_s, state_s = parts.weights_s, parts.state_s
    first_s, prices = whole_s / most, SwitchPrices(FOUR_LAYERS, PP4, links)
    assert most == 5
    for forward_s, expected_s in ((0.0, whole_s), (whole_s / 4, 0.75 * whole_s), (2 * whole_s, first_s)):
        stall_s = parts.stall_s(forward_s)
        assert stall_s == pytest.approx(expected_s)
        for hidden_s in (0.0, state_s / 2, 2 * (whole_s + state_s)):
            waited_s = max(0.0, whole_s - stall_s + state_s - hidden_s)
            result = prices.seconds(links, PP4, DP4, hidden_s, forward_s)
            assert result == pytest.approx(stall_s + waited_s)


SMALL = sample_model()
LAYERS = SMALL.num_layers
STATE = optimizer_bytes_per_parameter(SMALL)
EACH = SMALL.bytes_per_element + max(SMALL.bytes_per_element, 4)
WHOLE = 2 * embedding_parameters(SMALL, 1) + SMALL.norm_parameters + LAYERS * int(layer_parameters(SMALL, 1)[0])
SMALL_PIECES = model_pieces(SMALL, 1)
SENT = SwitchPieces(pieces=SMALL_PIECES, shared=frozenset(), ranks_per_machine=8)
SHARED = msgspec.structs.replace(SENT, shared=frozenset(range(len(SMALL_PIECES))))


def test_a_layout_that_stays_takes_what_it_takes():
    layout = even_layout(LAYERS, pp=2, dp=2)
    result = switch_memory(SHARED, layout, layout)
    assert result.left_bytes == 0
    assert result.switch_bytes == pytest.approx(int(static_bytes(SMALL, layout).max()), rel=1e-3)


def test_one_rank_becomes_two_replicas_and_back():
    """Alone it has all optimizer state; beside another one it has half, which it had before or keeps."""
    alone, two = even_layout(LAYERS), even_layout(LAYERS, dp=2)
    grown = switch_memory(SHARED, alone, two)
    assert grown.switch_bytes == WHOLE * (EACH + STATE)
    assert grown.left_bytes == pytest.approx(WHOLE * STATE / 2, rel=1e-3)
    shrunk = switch_memory(SHARED, two, alone)
    assert shrunk.switch_bytes == WHOLE * (EACH + STATE)
    # Rank 1 leaves its half behind; rank 0 nothing. Weights that nobody lacks go at once.
    assert shrunk.left_bytes == pytest.approx(WHOLE * STATE / 2, rel=1e-3)


def test_weights_that_others_read_stay_for_the_first_step():
    """One rank becomes two stages: the second one reads all of its layers from the first."""
    one, two = even_layout(LAYERS), even_layout(LAYERS, pp=2)
    moves = SHARED.moves(one, two)
    sent = moved_bytes(moves.weights, SMALL_PIECES, of_state=False)
    state = moved_bytes(moves.state, SMALL_PIECES, of_state=True)
    tied = sum(
        piece.num_elements * (piece.weight_bytes + piece.state_bytes) for piece in SMALL_PIECES if piece.at_both_ends
    )
    assert sent > tied >= 0
    assert switch_memory(SHARED, one, two).left_bytes == sent + state - tied


def test_without_shared_memory_what_is_kept_is_copied():
    """Alone to two replicas: the half that rank 0 keeps lies twice while it is copied."""
    alone, two = even_layout(LAYERS), even_layout(LAYERS, dp=2)
    result = switch_memory(SENT, alone, two)
    assert result.switch_bytes == pytest.approx(WHOLE * (EACH + 1.5 * STATE), rel=1e-3)
    assert result.left_bytes == pytest.approx(WHOLE * STATE, rel=1e-3)
    still = switch_memory(SENT, two, two)
    assert still == switch_memory(SHARED, two, two)


def test_what_a_budget_leaves_out_is_copied_and_the_rest_is_not():
    """Alone to two replicas, all but the embedding shared: half of its state lies twice."""
    alone, two = even_layout(LAYERS), even_layout(LAYERS, dp=2)
    some = msgspec.structs.replace(SENT, shared=SHARED.shared - {0})
    result = switch_memory(some, alone, two)
    half = -(-SMALL_PIECES[0].num_elements // 2) * STATE
    assert result.switch_bytes == switch_memory(SHARED, alone, two).switch_bytes + half
