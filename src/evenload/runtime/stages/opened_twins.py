"""`opened_twins`: at the start of a run, the shared memory of a machine's ranks and what of the model lies in it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from evenload.errors import ConfigError
from evenload.plan.reconfiguration.twins import shared_bytes, shared_pieces
from evenload.runtime.comm.mesh import Meshes
from evenload.runtime.stages.live_pieces import LivePiece
from evenload.runtime.stages.twin_memory import TwinMemory, open_twins, placed, told_by_all
from evenload.runtime.stages.weight_arrival import mark_held


@dataclass(frozen=True)
class Twins:
    """What a user is told of it.

    Args:
        num_shared, num_pieces: pieces of the model.
        num_bytes: the most of one machine, in any layout.
        reason: why nothing is shared, where that was not asked for; "" else.
    """

    num_shared: int
    num_pieces: int
    num_bytes: int
    reason: str = ""


def opened_twins(
    budget_bytes: int | None, pieces: Sequence[LivePiece], meshes: Meshes
) -> tuple[TwinMemory | None, Collection[int], Twins | None]:
    """Shared memory for as many pieces as the budget holds, their indices, and what to tell; all that this rank holds
    of them lies there afterwards. None where ranks have nothing to share. Collective.

    Args:
        budget_bytes: of a machine; None = no limit.

    Raises:
        ConfigError: a budget is set, and ranks of a machine cannot read each other's memory.
    """
    mesh = meshes.start
    if mesh.device.type != "cpu" or mesh.ranks_per_machine == 1 or budget_bytes == 0:
        return None, (), None
    sizes = [live.piece for live in pieces]
    shared = shared_pieces(sizes, meshes.layouts, mesh.ranks_per_machine, budget_bytes)
    # Parts of other tensor-parallel places may be larger; what is shared decides what all ranks do together.
    shared = frozenset.intersection(*told_by_all(shared, mesh))
    parts = [live.dtypes if index in shared else None for index, live in enumerate(pieces)]
    places, num_bytes = placed(parts, [live.capacity for live in pieces])
    found = open_twins(places, num_bytes, len(sizes), mesh)
    if isinstance(found, str):
        if budget_bytes is not None:
            raise ConfigError(
                f"plan.twin_bytes is {budget_bytes}, but the ranks of a machine cannot read each other's memory "
                f"({found}); leave plan.twin_bytes out or set it to 0 to send what moves between layouts"
            )
        return None, (), Twins(0, len(sizes), 0, found)
    for index, live in enumerate(pieces):
        if (memory := found.of_piece(index)) is not None:
            live.share(memory)
    mark_held(pieces, found, 0)
    most = sum(shared_bytes(sizes[index], meshes.layouts, mesh.ranks_per_machine) for index in shared)
    return found, shared, Twins(len(shared), len(sizes), most * mesh.layout.tp)
