"""What of a rank is kept for survivors (`kept_steps`), and how a rank of another layout takes it over.

Of every parameter that a rank trains it keeps the elements that it owns: moments, and the weights in the precision in
which they are updated, so fp32 masters where there are some. Weights of a stage are all of its shards together, which
is to the bit what its ranks had gathered.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from evenload.cost.survivor_memory import survivor_bytes
from evenload.runtime.checkpoint.checkpoint import RunPosition, shard_pieces, whole_pieces
from evenload.runtime.checkpoint.kept_steps import KeptStep, KeptSteps
from evenload.runtime.checkpoint.pieces import TensorPieces
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.optim.optimizer import ShardedOptimizer
from evenload.runtime.optim.parameter_units import FlatBuffer
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

_WEIGHTS = "weights"


class SurvivorState:
    """Of one rank in one round.

    Args:
        kept: None = nothing is kept, and nothing happens here.
        layouts: in which the rank may hold its part of the model.
    """

    def __init__(self, kept: KeptSteps | None, model: ModelSpec, layouts: Sequence[ParallelLayout]) -> None:
        self.kept = kept
        self.num_bytes = 0 if kept is None else max(int(survivor_bytes(model, one).max()) for one in layouts)
        """Of shared memory that the fullest rank takes."""

    def write(self, steps_done: int, buffers: Sequence[FlatBuffer], optimizer: ShardedOptimizer, mesh: Mesh) -> None:
        """After an update, or the first of all. `ConfigError` where there is no room."""
        if self.kept is not None:
            self.kept.write(steps_done, survivor_tensors(buffers, optimizer, mesh))

    def mark(self, steps_done: int, position: Callable[[], RunPosition], mesh: Mesh) -> None:
        """The steps are finished and told: whoever goes on after a loss trains none of them again."""
        if self.kept is not None:
            self.kept.mark(steps_done, position() if mesh.rank == 0 else None)


def survivor_tensors(buffers: Sequence[FlatBuffer], optimizer: ShardedOptimizer, mesh: Mesh) -> dict[str, TensorPieces]:
    """What this rank alone has, views of live storage. Of what two ranks have in the same way, a tied matrix at both
    ends of the pipeline or what tensor-parallel ranks hold whole, only the first keeps it."""
    found: dict[str, TensorPieces] = {}
    for kind, buffer, shard in _shards(buffers, optimizer, mesh):
        if (buffer.tied and mesh.is_last_stage) or (mesh.tp_rank > 0 and not buffer.is_part):
            continue
        found |= {f"{kind}.{name}": pieces for name, pieces in shard_pieces(buffer, shard, mesh)}
    return found


def load_survivor_state(
    kept: KeptStep, buffers: Sequence[FlatBuffer], optimizer: ShardedOptimizer, mesh: Mesh
) -> RunPosition:
    """Fill weights and optimizer with what was kept, whatever the layout was; where the run stands.

    Raises:
        CheckpointError: something of it is not there.
    """
    wanted = [(f"{_WEIGHTS}.{name}", pieces) for buffer in buffers for name, pieces in whole_pieces(buffer)]
    for kind, buffer, shard in _shards(buffers, optimizer, mesh):
        wanted += [(f"{kind}.{name}", pieces) for name, pieces in shard_pieces(buffer, shard, mesh)]
    kept.fill(wanted)
    position = kept.position()
    optimizer.set_num_steps(position.progress.steps_done - position.progress.skipped_steps)
    return position


def _shards(
    buffers: Sequence[FlatBuffer], optimizer: ShardedOptimizer, mesh: Mesh
) -> Iterator[tuple[str, FlatBuffer, Tensor]]:
    """(kind, buffer, shard) of all that this rank updates."""
    for kind, buffer, shard in optimizer.state_tensors():
        yield _WEIGHTS if kind == "master" else kind, buffer, shard
    for buffer in buffers:
        if not buffer.has_master:
            yield _WEIGHTS, buffer, buffer.shard(buffer.values, mesh.data_rank, mesh.data_size)
