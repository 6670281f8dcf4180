"""Price a change between two layouts of a run: seconds for which training stands still, and memory.

    stall           fixed seconds + stages and pieces gained and given up, of the rank with most of them
                    + the longer of sending and reading + relaying + touching new memory
    state           the longer of sending and reading; the step hides it, as far as that lasts
    the switch      bytes: weights and gradients of the pieces of both layouts, and the optimizer state of both shares
    the first step  bytes: its own peak, and the optimizer state that other devices still read, until their update

Reading is priced by what ranks of a machine measured of it (`CopySpec`), sending by links; without measured copies all
is sent. What a device has in both layouts counts once, but optimizer state twice where a share that is not shared
memory is cut anew. O(pieces · devices) in plain Python.

A search over mappings has no time for moves: `ReceiveSeconds` bounds them by the weights that every device lacks, which
come from its own node if a device there holds them. O(devices · units) numpy.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CopySpec, CostCoefficients
from evenload.cost.memory import unit_parameters
from evenload.planning.layouts.moves import (
    Move,
    Moves,
    Piece,
    SwitchPieces,
    holders,
    model_pieces,
    moved_bytes,
    moving_seconds,
    require_switchable,
    state_share,
)
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


def stall_seconds(
    moves: Moves, moved: SwitchPieces, coefficients: CostCoefficients, old: ParallelLayout, new: ParallelLayout
) -> float:
    """Return the seconds until the step can begin."""
    copies = coefficients.copies
    both_s = _both_ways(moves.weights, moved, coefficients, of_state=False)
    relayed_s = _both_ways(moves.relayed, moved, coefficients, of_state=False)
    if copies is None:
        return both_s + relayed_s
    machines = Counter[int]()
    for rank, count in _received([*moves.weights, *moves.relayed], moved.pieces, of_state=False).items():
        machines[rank // moved.ranks_per_machine] += count * moved.tp
    taking_s = max(machines.values(), default=0) / copies.taken_bytes_per_s
    return _arranging_seconds(copies, moved.pieces, old, new) + both_s + relayed_s + taking_s


def state_seconds(moves: Moves, moved: SwitchPieces, coefficients: CostCoefficients) -> float:
    return _both_ways(moves.state, moved, coefficients, of_state=True)


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
    for move in moves:
        (read if copies is not None and moved.is_read(move) else sent).append(move)
    sent_s = moving_seconds(sent, moved.pieces, coefficients, of_state=of_state)
    if copies is None:
        return sent_s
    received = _received(read, moved.pieces, of_state=of_state)
    return max(sent_s, copies.seconds(received, moved.ranks_per_machine, moved.tp))


def _received(moves: Sequence[Move], pieces: Sequence[Piece], *, of_state: bool) -> Counter[int]:
    received = Counter[int]()
    for move in moves:
        received[move.target] += moved_bytes([move], pieces, of_state=of_state)
    return received


class SwitchMemory(Frozen):
    """Hold the bytes of the fullest device: all at once between the two steps, and during the first step those that the
    new layout does not have there."""

    switch_bytes: int
    left_bytes: int


def switch_memory(moved: SwitchPieces, old: ParallelLayout, new: ParallelLayout) -> SwitchMemory:
    devices = max(old.world_size, new.world_size)
    both, left = [0] * devices, [0] * devices
    for index, piece in enumerate(moved.pieces):
        gradient_bytes = max(piece.weight_bytes, 4) if piece.state_bytes else 0
        before, after = holders(old, piece), holders(new, piece)
        for rank in before.keys() | after.keys():
            both[rank] += piece.num_elements * (piece.weight_bytes + gradient_bytes)
            had = state_share(old, piece, *before[rank]) if rank in before else (0, 0)
            wanted = state_share(new, piece, *after[rank]) if rank in after else (0, 0)
            kept = max(0, min(had[1], wanted[1]) - max(had[0], wanted[0]))
            lies_twice = 0 if index in moved.shared or had == wanted else kept
            both[rank] += piece.state_bytes * (had[1] - had[0] + wanted[1] - wanted[0] - kept + lies_twice)
            left[rank] += piece.state_bytes * (had[1] - had[0] - kept + lies_twice)
    return SwitchMemory(switch_bytes=max(both), left_bytes=max(left))


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
        self._seconds: dict[tuple[ParallelLayout, ParallelLayout], tuple[float, float]] = {}
        self._memory = cache(lambda old, new: switch_memory(self._moved, old, new))

    def seconds(
        self, coefficients: CostCoefficients, old: ParallelLayout, new: ParallelLayout, hidden_s: float
    ) -> float:
        """Return the seconds for which training stands still: until the step begins, and until its optimizer state is
        there, which it needs after `hidden_s`. `coefficients` are of the new layout."""
        old, new = old.arrangement, new.arrangement
        if old == new:
            return 0.0
        if (old, new) not in self._seconds:
            moves = self._moved.moves(old, new)
            self._seconds[old, new] = (
                stall_seconds(moves, self._moved, coefficients, old, new),
                state_seconds(moves, self._moved, coefficients),
            )
        stall_s, state_s = self._seconds[old, new]
        return stall_s + max(0.0, state_s - hidden_s)

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
        self._devices = [_devices_of(new, stage) for stage in range(new.num_stages)]
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


def _devices_of(layout: ParallelLayout, stage: int) -> slice:
    span, ranks = layout.dp * layout.cp * layout.tp, layout.ranks_of_stage(stage)
    return slice(ranks.start * span, ranks.stop * span)


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
