"""Plan what ranks send each other when the layout changes between two steps.

The model is a list of *pieces*: of every unit (embedding, a layer, head) what one rank keeps in one flat buffer, or
keeps frozen. A rank holds the weights of all pieces of its stages, and of each trained piece one share of the
optimizer state among the ranks that hold the same elements, in rank order (ZeRO-1, cut by unit). A tied embedding is
one piece that both the first and the last stage hold, each with a whole optimizer state.

Weights are sent as whole pieces to ranks that do not hold them, optimizer state as the overlaps of old and new shares:
the fewest bytes possible. Of several ranks that have what is needed one of the same node sends it, of those the one
with least to send so far. Only ranks with the same place in their tensor-parallel groups exchange anything. Every rank
plans the same, so ranks post moves in their order without negotiation. O(pieces · ranks) in plain Python, about a
millisecond for a hundred pieces on four ranks.

Twins (FlexPipe §4, TwinLayer): where devices compute in host memory, ranks of a machine read the layers that they gain
from each other's memory, within a budget; pieces beyond it are sent. Shared pieces come to a node once: the first of
its ranks fetches, and the others take it from there, *relayed*.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory import optimizer_bytes_per_parameter, unit_parameters
from evenload.errors import ConfigError
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


class Piece(Frozen):
    """Describe what one rank holds of one unit in one place.

    Args:
        unit: 0 = embedding, 1 + l = layer l, 1 + layers = final norm and head.
        weight_bytes: of one element; state_bytes: its optimizer state, fp32 master weights included; 0 = not trained.
        at_both_ends: a tied embedding, which the last stage holds too.
    """

    unit: int
    num_elements: int
    weight_bytes: int
    state_bytes: int = 0
    at_both_ends: bool = False


class Move(Frozen):
    """Move elements `[start, stop)` of a piece, by its index, from one global rank to another."""

    piece: int
    source: int
    target: int
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


class Moves(Frozen):
    """Hold all moves in the order in which every rank posts them: weights, which the step needs at its beginning, and
    optimizer state, at its end. `relayed` weights come from ranks that must receive them first."""

    weights: tuple[Move, ...]
    state: tuple[Move, ...]
    relayed: tuple[Move, ...] = ()


def plan_moves(
    old: ParallelLayout,
    new: ParallelLayout,
    pieces: Sequence[Piece],
    *,
    ranks_per_node: int,
    tp_rank: int = 0,
    shared: Collection[int] = (),
) -> Moves:
    """Plan what ranks with this place in their tensor-parallel groups send each other: `pieces` of one such rank, of
    which those at the indices `shared` are read from memory inside a node. Raises as `require_switchable`."""
    require_switchable(old, new)
    weights, state = Counter[int](), Counter[int]()
    weight_moves: list[Move] = []
    relayed: list[Move] = []
    state_moves: list[Move] = []
    for index, piece in enumerate(pieces):
        before, after = holders(old, piece, tp_rank), holders(new, piece, tp_rank)
        nodes = {rank // ranks_per_node for rank in before}
        fetched: dict[int, int] = {}
        for target, place in after.items():
            if target not in before:
                node, whole = target // ranks_per_node, {"start": 0, "stop": piece.num_elements}
                if node in fetched:
                    relayed.append(Move(piece=index, source=fetched[node], target=target, **whole))
                else:
                    num_bytes = piece.num_elements * piece.weight_bytes
                    source = _sender(before, target, num_bytes, weights, ranks_per_node)
                    weight_moves.append(Move(piece=index, source=source, target=target, **whole))
                    if index in shared and node not in nodes:
                        fetched[node] = target
            if piece.state_bytes:
                has = {rank: state_share(old, piece, *held) for rank, held in before.items()}
                wanted = state_share(new, piece, *place)
                for start, stop, sources in _lacking(wanted, has, target):
                    num_bytes = (stop - start) * piece.state_bytes
                    source = _sender(sources, target, num_bytes, state, ranks_per_node)
                    state_moves.append(Move(piece=index, source=source, target=target, start=start, stop=stop))
    return Moves(weights=tuple(weight_moves), state=tuple(state_moves), relayed=tuple(relayed))


def require_switchable(old: ParallelLayout, new: ParallelLayout) -> None:
    """Refuse, by a `ConfigError`, a switch that changes cp, tp or the number of layers."""
    if (old.cp, old.tp, old.num_layers) != (new.cp, new.tp, new.num_layers):
        raise ConfigError(
            f"switch from {old.describe()} to {new.describe()}: only pp, dp and the layers of stages may change, "
            "cp and tp may not"
        )


def pipeline_ranks(layout: ParallelLayout, piece: Piece) -> tuple[int, ...]:
    """Return the pipeline ranks that hold a piece: of one stage, or of the first and the last of a tied embedding."""
    if piece.at_both_ends:
        return tuple(dict.fromkeys((*layout.ranks_of_stage(0), *layout.ranks_of_stage(layout.num_stages - 1))))
    layer = min(max(piece.unit - 1, 0), layout.num_layers - 1)
    stage = next(s for s, (first, last) in enumerate(layout.stage_layers) if first <= layer < last)
    return tuple(layout.ranks_of_stage(stage))


def state_share(layout: ParallelLayout, piece: Piece, pp_rank: int, place: int) -> tuple[int, int]:
    """Return the elements whose optimizer state a holder has, `place` among the ranks that hold the same; without
    padding, so they may be none."""
    size = -(-piece.num_elements // layout.data_sizes[pp_rank])
    return min(place * size, piece.num_elements), min((place + 1) * size, piece.num_elements)


def moved_bytes(moves: Sequence[Move], pieces: Sequence[Piece], *, of_state: bool) -> int:
    return sum(
        move.num_elements * (pieces[move.piece].state_bytes if of_state else pieces[move.piece].weight_bytes)
        for move in moves
    )


def moving_seconds(
    moves: Sequence[Move], pieces: Sequence[Piece], coefficients: CostCoefficients, *, of_state: bool
) -> float:
    """Predict the seconds until all is there, of the busiest rank's busier side; links inside and between nodes work at
    once."""
    seconds = 0.0
    for leaves_node in (False, True):
        sent, received, messages = Counter[int](), Counter[int](), Counter[int]()
        for move in moves:
            nodes = move.source // coefficients.devices_per_node, move.target // coefficients.devices_per_node
            if (nodes[0] != nodes[1]) == leaves_node:
                num_bytes = moved_bytes([move], pieces, of_state=of_state)
                sent[move.source] += num_bytes
                received[move.target] += num_bytes
                messages[move.target] += 1
        if messages:
            link = coefficients.device_link(leaves_node=leaves_node)
            busiest = max(*sent.values(), *received.values())
            seconds = max(seconds, busiest / link.bandwidth_bytes_per_s + max(messages.values()) * link.latency_s)
    return seconds


def _sender(
    holders: Collection[int], target: int, num_bytes: int, sent_bytes: Counter[int], ranks_per_node: int
) -> int:
    """Choose, and count, the holder that sends so many bytes: of the target's node if there is one, then the idlest."""
    node = target // ranks_per_node
    source = min(holders, key=lambda rank: (rank // ranks_per_node != node, sent_bytes[rank], rank))
    sent_bytes[source] += num_bytes
    return source


def holders(layout: ParallelLayout, piece: Piece, tp_rank: int = 0) -> dict[int, tuple[int, int]]:
    """Return the ranks that hold a piece, each with its pipeline rank and its place among those that hold the same."""
    return {
        layout.global_rank(pp_rank=pp_rank, dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=tp_rank): (
            pp_rank,
            layout.data_rank(pp_rank=pp_rank, dp_rank=dp_rank, cp_rank=cp_rank),
        )
        for pp_rank in pipeline_ranks(layout, piece)
        for dp_rank in range(layout.dp)
        for cp_rank in range(layout.cp)
    }


def _lacking(
    wanted: tuple[int, int], has: dict[int, tuple[int, int]], target: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield ranges of the wanted elements that the target does not have, and the ranks that have all of each."""
    own = has.get(target, (0, 0))
    edges = sorted({min(max(edge, wanted[0]), wanted[1]) for held in (wanted, *has.values()) for edge in held})
    for start, stop in itertools.pairwise(edges):
        if not (own[0] <= start and stop <= own[1]):
            yield start, stop, [rank for rank, (low, high) in has.items() if low <= start and stop <= high]


class SwitchPieces(Frozen):
    """Hold the pieces of one tensor-parallel rank of a run, indices of those that ranks of a machine (neighbours in the
    order of ranks) read from each other's memory, and how many tensor-parallel ranks move theirs at once."""

    pieces: tuple[Piece, ...]
    shared: frozenset[int]
    ranks_per_machine: int
    tp: int = 1

    def moves(self, old: ParallelLayout, new: ParallelLayout, tp_rank: int = 0) -> Moves:
        return plan_moves(
            old, new, self.pieces, ranks_per_node=self.ranks_per_machine, tp_rank=tp_rank, shared=self.shared
        )

    def is_read(self, move: Move) -> bool:
        is_near = move.source // self.ranks_per_machine == move.target // self.ranks_per_machine
        return is_near and move.piece in self.shared


def model_pieces(model: ModelSpec, tp: int) -> tuple[Piece, ...]:
    """List the units of a model in order, what is trained of each before what is frozen."""
    stored, trained = unit_parameters(model, tp)
    result = []
    for unit, (whole, learned) in enumerate(zip(stored.tolist(), trained.tolist(), strict=True)):
        is_tied = unit == 0 and model.tied_embeddings
        shape = {"unit": unit, "weight_bytes": model.bytes_per_element, "at_both_ends": is_tied}
        if learned:
            result.append(Piece(num_elements=learned, state_bytes=optimizer_bytes_per_parameter(model), **shape))
        if whole > learned:
            result.append(Piece(num_elements=whole - learned, **shape))
    return tuple(result)


def shared_pieces(
    pieces: Sequence[Piece], layouts: Sequence[ParallelLayout], ranks_per_node: int, budget_bytes: int | None
) -> frozenset[int]:
    """Choose the pieces that are shared within a budget of one machine in any layout (None = no limit); indices."""
    if budget_bytes is None:
        return frozenset(range(len(pieces)))
    # A tensor-parallel rank knows the parts of its own place, and has a share of the budget for them.
    left, result = budget_bytes // layouts[0].tp, set()
    for index, piece in enumerate(pieces):
        if (needed := shared_bytes(piece, layouts, ranks_per_node)) <= left:
            result.add(index)
            left -= needed
    return frozenset(result)


def shared_bytes(piece: Piece, layouts: Sequence[ParallelLayout], ranks_per_node: int) -> int:
    """Count the most that one piece takes of a machine, weights whole and shares of optimizer state, in any layout."""
    most = 0
    for layout in layouts:
        by_node = Counter[int]()
        for rank, place in holders(layout, piece).items():
            start, stop = state_share(layout, piece, *place)
            by_node[rank // ranks_per_node] += piece.num_elements * piece.weight_bytes
            by_node[rank // ranks_per_node] += (stop - start) * piece.state_bytes
        most = max(most, *by_node.values())
    return most
