"""Memory of a switch: what a device holds while one layout becomes another, and behind the first step in the new one.

    the switch      weights and gradients of the units of both layouts, and the optimizer state of both shares: what is
                    gained is taken, and filled, before what is left can go
    the first step  its own peak, and beside it the optimizer state that other devices still read, until their update

A unit, or an element of optimizer state, that a device has in both layouts counts once: it stays where it is
(`runtime.stages.twin_memory`). Without shared memory a share that is cut anew is copied, so the kept part counts twice.
Price: O(units · devices) in plain Python, below a millisecond for forty layers on sixteen devices.
"""

from collections.abc import Sequence

from evenload.cost.memory import (
    embedding_parameters,
    layer_parameters,
    optimizer_bytes_per_parameter,
    trained_layer_parameters,
)
from evenload.plan.reconfiguration.moves import Piece, holders, state_share
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


class SwitchMemory(Frozen):
    """Of the fullest device.

    Args:
        switch_bytes: held at once between the two steps.
        left_bytes: held beside the first step, of what the new layout does not have there.
    """

    switch_bytes: int
    left_bytes: int


def switch_memory(
    model: ModelSpec, old: ParallelLayout, new: ParallelLayout, *, is_shared: bool = True
) -> SwitchMemory:
    """What a change between two layouts takes.

    Args:
        is_shared: ranks read each other's memory; else kept state that is cut anew lies twice.
    """
    devices = max(old.world_size, new.world_size)
    both, left = [0] * devices, [0] * devices
    for piece, gradient_bytes in _pieces(model, new.tp):
        before, after = holders(old, piece), holders(new, piece)
        for rank in before.keys() | after.keys():
            both[rank] += piece.num_elements * (piece.weight_bytes + gradient_bytes)
            had = state_share(old, piece, *before[rank]) if rank in before else (0, 0)
            wanted = state_share(new, piece, *after[rank]) if rank in after else (0, 0)
            kept = max(0, min(had[1], wanted[1]) - max(had[0], wanted[0]))
            lies_twice = 0 if is_shared or had == wanted else kept
            both[rank] += piece.state_bytes * (had[1] - had[0] + wanted[1] - wanted[0] - kept + lies_twice)
            left[rank] += piece.state_bytes * (had[1] - had[0] - kept + lies_twice)
    return SwitchMemory(switch_bytes=max(both), left_bytes=max(left))


def _pieces(model: ModelSpec, tp: int) -> Sequence[tuple[Piece, int]]:
    """Units with what is trained of them, and the bytes of an element's gradient."""
    embedding, layer = embedding_parameters(model, tp), layer_parameters(model, tp)
    head = 0 if model.tied_embeddings else embedding
    units = [embedding, *[layer] * model.num_layers, head + model.norm_parameters]
    units[1] += model.position_parameters  # where the first layer is; a tied embedding's other end has none
    state, grads = optimizer_bytes_per_parameter(model), max(model.bytes_per_element, 4)
    trained = list(units)
    if model.adapter_parameters_per_layer:
        trained = [0, *[trained_layer_parameters(model, tp)] * model.num_layers, 0]
    found = []
    for unit, (whole, learned) in enumerate(zip(units, trained, strict=True)):
        is_tied = unit == 0 and model.tied_embeddings
        shape = {"unit": unit, "weight_bytes": model.bytes_per_element, "at_both_ends": is_tied}
        if learned:
            found.append((Piece(num_elements=learned, state_bytes=state, **shape), grads))
        if whole > learned:
            found.append((Piece(num_elements=whole - learned, **shape), 0))
    return found
