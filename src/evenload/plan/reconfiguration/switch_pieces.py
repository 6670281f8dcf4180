"""`SwitchPieces`: what of a model travels when the layout changes, and what of it the ranks of a machine share.

A run knows its pieces from its modules (`runtime.stages.live_pieces`) and hands them to its planner, so that decisions
are priced by what switches do. Without a run they follow from the model's sizes.
"""

from evenload.cost.memory import (
    embedding_parameters,
    layer_parameters,
    optimizer_bytes_per_parameter,
    trained_layer_parameters,
)
from evenload.plan.reconfiguration.moves import Move, Moves, Piece, plan_moves
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


class SwitchPieces(Frozen):
    """Of one tensor-parallel place.

    Args:
        shared: indices of the pieces that the ranks of a machine read from each other's memory; others are sent.
        ranks_per_machine: which are neighbours in the order of ranks.
        tp: tensor-parallel places, which all move their pieces at once and are neighbours.
    """

    pieces: tuple[Piece, ...]
    shared: frozenset[int]
    ranks_per_machine: int
    tp: int = 1

    def moves(self, old: ParallelLayout, new: ParallelLayout, tp_rank: int = 0) -> Moves:
        """What travels between two layouts; errors as `plan_moves`."""
        return plan_moves(
            old, new, self.pieces, ranks_per_node=self.ranks_per_machine, tp_rank=tp_rank, shared=self.shared
        )

    def is_read(self, move: Move) -> bool:
        """And not sent."""
        is_near = move.source // self.ranks_per_machine == move.target // self.ranks_per_machine
        return is_near and move.piece in self.shared


def model_pieces(model: ModelSpec, tp: int) -> tuple[Piece, ...]:
    """Units of a model in order, what is trained of each before what is frozen."""
    embedding, layer = embedding_parameters(model, tp), layer_parameters(model, tp)
    head = 0 if model.tied_embeddings else embedding
    units = [embedding, *[layer] * model.num_layers, head + model.norm_parameters]
    units[1] += model.position_parameters  # where the first layer is; a tied embedding's other end has none
    trained = list(units)
    if model.adapter_parameters_per_layer:
        trained = [0, *[trained_layer_parameters(model, tp)] * model.num_layers, 0]
    found = []
    for unit, (whole, learned) in enumerate(zip(units, trained, strict=True)):
        is_tied = unit == 0 and model.tied_embeddings
        shape = {"unit": unit, "weight_bytes": model.bytes_per_element, "at_both_ends": is_tied}
        if learned:
            found.append(Piece(num_elements=learned, state_bytes=optimizer_bytes_per_parameter(model), **shape))
        if whole > learned:
            found.append(Piece(num_elements=whole - learned, **shape))
    return tuple(found)
