"""What travels when the layout changes: everything that is lacking, nothing else, from the nearest rank."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.memory import embedding_parameters, layer_parameters, optimizer_bytes_per_parameter
from evenload.cost.switch import _holds, _missing_bytes, _state_of, _weights_of
from evenload.errors import ConfigError
from evenload.plan.layouts.moves import Move, Piece, moved_bytes, moving_seconds, pipeline_ranks, plan_moves
from evenload.types.cluster import LinkSpec
from evenload.types.layout import ParallelLayout, even_layout, split_layout


def held(layout: ParallelLayout, pieces: list[Piece], tp_rank: int = 0) -> dict[int, dict[int, set[int]]]:
    """Element by element, by rank and piece: the optimizer state that a rank must have; its keys are the weights."""
    found: dict[int, dict[int, set[int]]] = {}
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
        mine = found[rank] = {}
        for index, piece in enumerate(pieces):
            if owner in pipeline_ranks(layout, piece):
                size = -(-piece.num_elements // (count * layout.dp * layout.cp))
                own = range(place * size, min((place + 1) * size, piece.num_elements))
                mine[index] = set(own) if piece.state_bytes else set()
    return found


def pieces_of(num_layers: int, sizes: list[int], *, tied: bool = False, frozen: bool = False) -> list[Piece]:
    """Two pieces a layer, as matrices and norms; frozen ones beside trained ones where asked."""
    state = 0 if frozen else 8
    found = [Piece(unit=0, num_elements=sizes[0], weight_bytes=4, state_bytes=state, at_both_ends=tied)]
    for layer in range(num_layers):
        found.append(Piece(unit=1 + layer, num_elements=sizes[1], weight_bytes=4, state_bytes=8))
        found.append(Piece(unit=1 + layer, num_elements=sizes[2], weight_bytes=4, state_bytes=state))
    if not tied:
        found.append(Piece(unit=num_layers + 1, num_elements=sizes[0], weight_bytes=4, state_bytes=state))
    return [*found, Piece(unit=num_layers + 1, num_elements=sizes[3], weight_bytes=4, state_bytes=state)]


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


@given(switches(), st.booleans())
def test_predicted_bytes_are_those_that_move(case, tied) -> None:
    """`cost.switch` counts shares as fractions, what runs pads every buffer: at most a few elements a rank apart."""
    old, new, _, ranks_per_node, _ = case
    model = sample_model(num_layers=old.num_layers, num_heads=2, num_kv_heads=2, tied_embeddings=tied)
    embedding, layer = embedding_parameters(model, old.tp), layer_parameters(model, old.tp)
    state = optimizer_bytes_per_parameter(model)

    def piece(unit: int, size: int, at_both_ends: bool = False) -> Piece:
        weight = model.bytes_per_element
        return Piece(
            unit=unit, num_elements=size, weight_bytes=weight, state_bytes=int(state), at_both_ends=at_both_ends
        )

    head = model.hidden_size + (0 if tied else embedding)
    pieces = [piece(0, embedding, tied), *(piece(1 + index, layer) for index in range(model.num_layers))]
    pieces.append(piece(model.num_layers + 1, head))
    moved = 0.0
    for tp_rank in range(old.tp):
        moves = plan_moves(old, new, pieces, ranks_per_node=ranks_per_node, tp_rank=tp_rank)
        moved += moved_bytes(moves.weights, pieces, of_state=False) + moved_bytes(moves.state, pieces, of_state=True)
    needed = _holds(new, model)
    predicted = sum(
        float((part * needed).sum())
        for units in (_weights_of(model, new), _state_of(model, new))
        for part in _missing_bytes(units, model, ranks_per_node, old, new)
    )
    assert moved == pytest.approx(predicted, rel=0.05, abs=200)


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
