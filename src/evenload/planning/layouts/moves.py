"""Plan what ranks send each other when the layout changes between two steps, and price it: seconds for which training
stands still, and memory.

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
from each other's memory, within a budget; pieces beyond it are sent. GPUs of a node copy them out to its host memory
and in from there (`via_host`), at the rate of the host link. Shared pieces come to a node once: the first of its ranks
fetches, and the others take it from there, *relayed*.

    stall           fixed seconds + stages and pieces gained and given up, of the rank with most of them
                    + what the first forward through all stages does not hide of the weights; never their first unit
    weights         the longer of sending and reading + relaying + touching new memory
    state           the longer of sending and reading, behind the weights; the step hides both, as far as it lasts
    the switch      bytes: weights and gradients of the pieces of both layouts, and the optimizer state of both shares
    the first step  bytes: its own peak, the weights and optimizer state that other devices still read

Reading is priced by what ranks of a machine measured of it (`CopySpec`), sending by links; without measured copies all
is sent. What a device has in both layouts counts once, but optimizer state twice where a share that is not shared
memory is cut anew. A search over mappings has no time for moves: `ReceiveSeconds` bounds them by the weights that every
device lacks, which come from its own node if a device there holds them. O(devices · units) numpy.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CopySpec, CostCoefficients
from evenload.cost.memory import optimizer_bytes_per_parameter, unit_parameters
from evenload.errors import ConfigError
from evenload.types.base import Frozen
from evenload.types.cluster import LinkSpec
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
    by_link: dict[bool, list[Move]] = {}
    for move in moves:
        source, target = (rank // coefficients.devices_per_node for rank in (move.source, move.target))
        by_link.setdefault(source != target, []).append(move)
    links = ((some, coefficients.device_link(leaves_node=leaves_node)) for leaves_node, some in by_link.items())
    return max((_link_seconds(some, pieces, link, of_state=of_state) for some, link in links), default=0.0)


def _link_seconds(moves: Sequence[Move], pieces: Sequence[Piece], link: LinkSpec, *, of_state: bool) -> float:
    received, sent = (_bytes_by_rank(moves, pieces, side, of_state=of_state) for side in ("target", "source"))
    messages = Counter(move.target for move in moves)
    busiest = max(*sent.values(), *received.values())
    return busiest / link.bandwidth_bytes_per_s + max(messages.values()) * link.latency_s


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
    order of ranks) read from each other's memory, and how many tensor-parallel ranks move theirs at once. `via_host`:
    what is shared is not where training holds it, but passes through host memory."""

    pieces: tuple[Piece, ...]
    shared: frozenset[int]
    ranks_per_machine: int
    tp: int = 1
    via_host: bool = False

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
    pieces: Sequence[Piece],
    layouts: Sequence[ParallelLayout],
    ranks_per_node: int,
    budget_bytes: int | None,
    *,
    via_host: bool = False,
) -> frozenset[int]:
    """Choose the pieces that are shared within a budget of one machine in any layout (None = no limit); indices.
    `via_host` as of `SwitchPieces`."""
    if budget_bytes is None:
        return frozenset(range(len(pieces)))
    # A tensor-parallel rank knows the parts of its own place, and has a share of the budget for them.
    left, result = budget_bytes // layouts[0].tp, set()
    for index, piece in enumerate(pieces):
        if (needed := shared_bytes(piece, layouts, ranks_per_node, via_host=via_host)) <= left:
            result.add(index)
            left -= needed
    return frozenset(result)


def shared_bytes(
    piece: Piece, layouts: Sequence[ParallelLayout], ranks_per_node: int, *, via_host: bool = False
) -> int:
    """Count the most that one piece takes of a machine, weights whole and shares of optimizer state, in any layout;
    `via_host` it has one place for each."""
    if via_host:
        return piece.num_elements * (piece.weight_bytes + piece.state_bytes)
    most = 0
    for layout in layouts:
        by_node = Counter[int]()
        for rank, place in holders(layout, piece).items():
            start, stop = state_share(layout, piece, *place)
            by_node[rank // ranks_per_node] += piece.num_elements * piece.weight_bytes
            by_node[rank // ranks_per_node] += (stop - start) * piece.state_bytes
        most = max(most, *by_node.values())
    return most


class SwitchSeconds(NamedTuple):
    """Parts of what a switch takes: stages, weights and the first unit of them, and optimizer state behind them."""

    arranging_s: float
    first_s: float
    weights_s: float
    state_s: float

    def stall_s(self, forward_s: float) -> float:
        """Return for how long the step waits: to begin, and for weights, of which it reads all within `forward_s`."""
        return self.arranging_s + self.first_s + max(0.0, self.weights_s - self.first_s - forward_s)

    def all_s(self, forward_s: float, hidden_s: float) -> float:
        """Return for how long training stands still, where the update needs its state after `hidden_s`."""
        stall_s = self.stall_s(forward_s)
        behind_s = self.arranging_s + self.weights_s + self.state_s - stall_s
        return stall_s + max(0.0, behind_s - hidden_s)


def switch_seconds(
    moves: Moves, moved: SwitchPieces, coefficients: CostCoefficients, old: ParallelLayout, new: ParallelLayout
) -> SwitchSeconds:
    copies, incoming = coefficients.copies, (*moves.weights, *moves.relayed)
    weights_s = sum(_both_ways(some, moved, coefficients, of_state=False) for some in (moves.weights, moves.relayed))
    arranging_s = 0.0
    if copies is not None:
        machines = Counter[int]()
        for rank, count in _bytes_by_rank(incoming, moved.pieces, "target", of_state=False).items():
            machines[rank // moved.ranks_per_machine] += count * moved.tp
        weights_s += max(machines.values(), default=0) / copies.taken_bytes_per_s
        arranging_s = _arranging_seconds(copies, moved.pieces, old, new)
    units = Counter(rank for rank, _ in {(move.target, moved.pieces[move.piece].unit) for move in incoming})
    state_s = _both_ways(moves.state, moved, coefficients, of_state=True)
    return SwitchSeconds(arranging_s, weights_s / max(units.values(), default=1), weights_s, state_s)


def _arranging_seconds(copies: CopySpec, pieces: Sequence[Piece], old: ParallelLayout, new: ParallelLayout) -> float:
    """Return the seconds besides bytes, of the rank with most layers and pieces to arrange."""
    layers, gained, left = Counter[int](), Counter[int](), Counter[int]()
    for piece in pieces:
        before, after = holders(old, piece), holders(new, piece)
        gained.update(after.keys() - before.keys())
        left.update(before.keys() - after.keys())
    for first, last in new.stage_layers:
        for rank in holders(new, Piece(unit=first + 1, num_elements=0, weight_bytes=0)):
            layers[rank] += last - first
    ranks = layers.keys() | gained.keys() | left.keys()
    return max(copies.arranging_seconds(layers[rank], gained[rank], left[rank]) for rank in ranks)


def _both_ways(moves: Sequence[Move], moved: SwitchPieces, coefficients: CostCoefficients, *, of_state: bool) -> float:
    copies, sent, read = coefficients.copies, [], []
    link = coefficients.host_link if moved.via_host else None
    for move in moves:
        (read if (copies or link) is not None and moved.is_read(move) else sent).append(move)
    sent_s = moving_seconds(sent, moved.pieces, coefficients, of_state=of_state)
    if link is not None and read:  # in and out at once, piece by piece
        return max(sent_s, _link_seconds(read, moved.pieces, link, of_state=of_state))
    if copies is None:
        return sent_s
    received = _bytes_by_rank(read, moved.pieces, "target", of_state=of_state)
    return max(sent_s, copies.seconds(received, moved.ranks_per_machine, moved.tp))


def _bytes_by_rank(
    moves: Sequence[Move], pieces: Sequence[Piece], side: Literal["source", "target"], *, of_state: bool
) -> Counter[int]:
    by_rank = Counter[int]()
    for move in moves:
        by_rank[getattr(move, side)] += moved_bytes([move], pieces, of_state=of_state)
    return by_rank


class SwitchMemory(Frozen):
    """Hold the bytes of the fullest device: all at once between the two steps, and during the first step those that the
    new layout does not have there."""

    switch_bytes: int
    left_bytes: int


def switch_memory(moved: SwitchPieces, old: ParallelLayout, new: ParallelLayout) -> SwitchMemory:
    devices = max(old.world_size, new.world_size)
    both, left = [0] * devices, [0] * devices
    sources = {(move.piece, move.source) for move in moved.moves(old, new).weights}
    for index, piece in enumerate(moved.pieces):
        gradient_bytes = max(piece.weight_bytes, 4) if piece.state_bytes else 0
        before, after = holders(old, piece), holders(new, piece)
        for rank in before.keys() | after.keys():
            both[rank] += piece.num_elements * (piece.weight_bytes + gradient_bytes)
            had = state_share(old, piece, *before[rank]) if rank in before else (0, 0)
            wanted = state_share(new, piece, *after[rank]) if rank in after else (0, 0)
            kept = max(0, min(had[1], wanted[1]) - max(had[0], wanted[0]))
            lies_twice = 0 if had == wanted or (index in moved.shared and not moved.via_host) else kept
            both[rank] += piece.state_bytes * (had[1] - had[0] + wanted[1] - wanted[0] - kept + lies_twice)
            left[rank] += piece.state_bytes * (had[1] - had[0] - kept + lies_twice)
            is_sent = rank not in after and (index, rank) in sources
            left[rank] += piece.num_elements * piece.weight_bytes if is_sent else 0
    return SwitchMemory(switch_bytes=max(both), left_bytes=max(left))


_KEPT_SWITCHES = 256


class SwitchPrices:
    """Price the switches of one run between layouts of any generation, of which the coefficients are of one. `moved`:
    of a run that trains; None = the model's units, all shared where copies were measured."""

    def __init__(
        self, model: ModelSpec, start: ParallelLayout, coefficients: CostCoefficients, moved: SwitchPieces | None = None
    ) -> None:
        self.given = moved
        if moved is None:
            pieces = model_pieces(model, start.tp)
            is_shared = coefficients.copies is not None
            moved = SwitchPieces(
                pieces=pieces,
                shared=frozenset(range(len(pieces))) if is_shared else frozenset(),
                ranks_per_machine=coefficients.devices_per_node,
                tp=start.tp,
            )
        self._moved = moved
        self._seconds: dict[tuple[ParallelLayout, ParallelLayout], SwitchSeconds] = {}
        self._memory = lru_cache(_KEPT_SWITCHES)(lambda old, new: switch_memory(self._moved, old, new))

    def seconds(
        self,
        coefficients: CostCoefficients,
        old: ParallelLayout,
        new: ParallelLayout,
        hidden_s: float,
        forward_s: float = 0.0,
    ) -> float:
        """Return the seconds for which training stands still (`SwitchSeconds.all_s`). `coefficients` are of the new
        layout."""
        old, new = old.arrangement, new.arrangement
        if old == new:
            return 0.0
        if (old, new) not in self._seconds:
            if len(self._seconds) == _KEPT_SWITCHES:
                self._seconds.pop(next(iter(self._seconds)))
            moves = self._moved.moves(old, new)
            self._seconds[old, new] = switch_seconds(moves, self._moved, coefficients, old, new)
        return self._seconds[old, new].all_s(forward_s, hidden_s)

    def memory(self, old: ParallelLayout, new: ParallelLayout) -> SwitchMemory:
        return self._memory(old.arrangement, new.arrangement)  # type: ignore[bad-argument-type]  # frozen structs hash


class ReceiveSeconds:
    """Price the weights that a stage's devices receive, by its range of layers, for a search over mappings: without
    the senders' side, latency and optimizer state, so never above the seconds of the switch. Of `new` only sizes
    matter, not its layers. Where copies were measured, inside a node at their rate.

    Raises:
        ConfigError: the coefficients know no link that the bytes cross, or cp or tp change.
    """

    def __init__(
        self, model: ModelSpec, coefficients: CostCoefficients, old: ParallelLayout, new: ParallelLayout
    ) -> None:
        require_switchable(old, new)
        seconds = [
            part / _bandwidth_bytes_per_s(coefficients, leaves_node=leaves_node) if part.any() else part
            for leaves_node, part in zip(
                (False, True), _missing_bytes(model, coefficients.devices_per_node, old, new), strict=True
            )
        ]
        self._sums = np.pad(np.cumsum(seconds, axis=2), ((0, 0), (0, 0), (1, 0)))  # [link, device, units before]
        span, of_stages = new.dp * new.cp * new.tp, map(new.ranks_of_stage, range(new.num_stages))
        self._devices = [slice(ranks.start * span, ranks.stop * span) for ranks in of_stages]
        self._num_layers, self._is_tied = model.num_layers, model.tied_embeddings
        self._known: dict[tuple[int, int, int], float] = {}

    def of_stage(self, rank: int, first: int, last: int) -> float:
        """Return the seconds until stage `rank`, of a layout with one stage a rank, holds the layers `[first, last)` on
        all its devices."""
        key = rank, first, last
        if key not in self._known:
            low = 0 if first == 0 else first + 1
            high = self._num_layers + 2 if last == self._num_layers else last + 1
            stage = self._sums[:, self._devices[rank]]
            received = stage[:, :, high] - stage[:, :, low]
            if self._is_tied and low > 0 and last == self._num_layers:
                received = received + stage[:, :, 1]
            self._known[key] = float(received.max())
        return self._known[key]


def _bandwidth_bytes_per_s(coefficients: CostCoefficients, *, leaves_node: bool) -> float:
    if not leaves_node and (copies := coefficients.copies) is not None:
        return copies.rank_bytes_per_s
    return coefficients.device_link(leaves_node=leaves_node).bandwidth_bytes_per_s


def _holds(layout: ParallelLayout, model: ModelSpec, devices: int) -> NDArray[np.bool_]:
    """Return which units lie on every device's stage, none on devices beyond the layout's; bool[devices, U]."""
    rank, used = np.full(devices, -1), np.arange(min(devices, layout.world_size))
    rank[used] = np.array(layout.leading_ranks)[used // (layout.dp * layout.cp * layout.tp)]
    owners = np.repeat(layout.stage_to_rank, layout.stage_counts)
    held = rank[:, None] == np.concatenate([owners[:1], owners, owners[-1:]])
    if model.tied_embeddings:
        held[:, 0] |= rank == owners[-1]
    return held


def _missing_bytes(
    model: ModelSpec, devices_per_node: int, old: ParallelLayout, new: ParallelLayout
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Count the weights of every unit that every device of `new` would lack, were it on its stage, from its node and
    from others; float64[D, U] each."""
    nodes = -(-max(old.world_size, new.world_size) // devices_per_node)
    held = _holds(old, model, nodes * devices_per_node)
    on_node = held.reshape(nodes, devices_per_node, -1).any(axis=1).repeat(devices_per_node, axis=0)
    missing = model.bytes_per_element * unit_parameters(model, new.tp)[0].astype(np.float64) * ~held
    return (missing * on_node)[: new.world_size], (missing * ~on_node)[: new.world_size]
