"""`newest_state`: from where a run goes on, and the tensors of it, in weights and optimizer."""

from pathlib import Path

import torch.distributed as dist

from evenload.runtime.checkpoint.checkpoint import RunPosition, load_checkpoint
from evenload.runtime.checkpoint.directory import checkpoint_to_resume
from evenload.runtime.checkpoint.kept_steps import KeptStep, KeptSteps
from evenload.runtime.checkpoint.survivor_state import load_survivor_state
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.optim.optimizer import ShardedOptimizer
from evenload.runtime.optim.parameter_units import FlatBuffer


def newest_state(
    kept: KeptSteps | None,
    checkpoints: Path,
    buffers: list[FlatBuffer],
    optimizer: ShardedOptimizer,
    mesh: Mesh,
    *,
    may_resume: bool,
) -> tuple[Path | KeptStep, RunPosition] | None:
    """Take over what ranks before a loss have kept of their last step, else load the latest checkpoint; where it was
    found, and where the run stands after it. None = the run begins. Collective.

    Raises:
        ConfigError: there is a checkpoint, but `may_resume` is off; or it is damaged, or of another model.
        CheckpointError: what was kept is not whole.
    """
    # All take what rank 0 finds: a save that outlived its round, or a slow file system, may show others another one.
    found: list[KeptStep | str | None] = [None]
    if mesh.rank == 0:
        found[0] = None if kept is None else kept.last()
    if found[0] is None:
        seen = checkpoint_to_resume(checkpoints, may_resume=may_resume)
        found[0] = None if seen is None else seen.name
    with mesh.watch.waiting("the state to go on from"):
        dist.broadcast_object_list(found, src=0, group=mesh.control)
    state: tuple[Path | KeptStep, RunPosition] | None = None
    if isinstance(found[0], KeptStep):
        state = found[0], load_survivor_state(found[0], buffers, optimizer, mesh)
    elif found[0] is not None:
        path = checkpoints / found[0]
        state = path, load_checkpoint(path, buffers, optimizer, mesh)
    if kept is not None:
        kept.keep_only(found[0] if isinstance(found[0], KeptStep) else None)
    return state
