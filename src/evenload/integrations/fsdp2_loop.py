"""`Fsdp2Loop`: trains a model sharded by `fully_shard` (FSDP2) from a `PackedLoader`.

    loop = Fsdp2Loop(model, optimizer, loader)  # after fully_shard(layer) ..., fully_shard(model)

Exact gradients: every micro-batch's loss is divided by the label tokens of the global batch, and FSDP2 sums over ranks
instead of taking the mean. Gradients are kept whole (4 bytes a parameter and rank in float32) and reduced once a step;
with `reduce_every_pack` they stay sharded and are reduced after every micro-batch.

A checkpoint gets its name by one rename when it is whole; then the one before goes (`runtime.checkpoint.directory`).
"""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from evenload.errors import CheckpointError, ConfigError
from evenload.integrations.engine_loop import EngineLoop, PackLoss, from_rank_zero
from evenload.integrations.packed_loader import PackedLoader
from evenload.runtime.checkpoint.directory import (
    PROGRESS_FILE,
    checkpoint_path,
    complete_checkpoints,
    latest_checkpoint,
    partial_path,
    put_in_place,
    remove_leftovers,
    sync,
)


class Fsdp2Loop(EngineLoop):
    """Trains a sharded model; its FSDP2 modules then sum gradients over ranks, instead of taking the mean.

    Args:
        model: with `fully_shard` on all of its parameters, over all ranks.
        optimizer: of the sharded parameters.
        loader: with `equal_micro_batches`.
        loss: of one micro-batch; default: `hf_pack_loss`.
        max_grad_norm: gradients of the global batch are scaled down to this norm.
        reduce_every_pack: reduce after every micro-batch: less memory, more transfers.
        stateful: further objects with `state_dict` and `load_state_dict` for checkpoints: `{"scheduler": scheduler}`.

    Attributes:
        grad_norm: float[], of the last update before it was scaled; None without `max_grad_norm`.

    Raises a `ConfigError` for parameters that are offloaded, or not reduced over all ranks, and as `EngineLoop`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: PackedLoader,
        *,
        loss: PackLoss | None = None,
        max_grad_norm: float | None = None,
        reduce_every_pack: bool = False,
        stateful: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, loader, loss, engine="FSDP2", device=next(model.parameters()).device)
        self._require_equal_counts("gathers parameters in every forward pass")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is {max_grad_norm}, must be above 0, or None for no limit")
        _require_sharded(model, loader.world_size)
        if taken := {"model", "optimizer", "loader", "num_steps"} & set(stateful or {}):
            raise ConfigError(f"stateful has {sorted(taken)}, which the loop saves itself; choose other names")
        self.model, self.optimizer = model, optimizer
        self.grad_norm: torch.Tensor | None = None
        self._max_grad_norm, self._reduce_every_pack = max_grad_norm, reduce_every_pack
        self._stateful = dict(stateful or {})
        # Each setter concerns one module, and not those below it.
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def _run(self, batch: Any, is_last: bool) -> torch.Tensor:
        for module in self._modules:
            module.set_requires_gradient_sync(is_last or self._reduce_every_pack, recurse=False)
        loss = self._loss(self.model, batch)
        loss.backward()
        return loss

    def update(self) -> bool:
        """Apply the gradients, scaled down where they pass `max_grad_norm`, and forget them. Collective."""
        if self._max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
            self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    def save(self, directory: str | PathLike[str]) -> None:
        """Write a distributed checkpoint (DCP): model, optimizer, loader, number of steps, `stateful`. Collective. The
        last one in this folder, which all ranks have to reach, stays until the new one is whole, and then goes; raises
        a `CheckpointError` where that cannot be written."""
        if "://" in str(directory):
            raise ConfigError(f"'{directory}' is an address; give a folder that all ranks reach")
        folder = Path(directory)
        partial, place = partial_path(folder, self.num_steps), checkpoint_path(folder, self.num_steps)

        def finish() -> None:
            (partial / PROGRESS_FILE).write_text(json.dumps({"num_steps": self.num_steps}))
            sync(partial / PROGRESS_FILE)
            put_in_place(partial, place)
            for other in complete_checkpoints(folder):
                if other != place:
                    other.rename(other.with_name(f".{other.name}.removed"))
            remove_leftovers(folder)

        from_rank_zero(lambda: remove_leftovers(folder), f"'{folder}' cannot be read")
        try:
            dcp.save(self._state(), checkpoint_id=partial)
        except (dcp.api.CheckpointException, OSError) as err:
            raise CheckpointError(f"'{place}' could not be written: {err}; an earlier checkpoint is intact") from err
        from_rank_zero(finish, f"'{place}' was written, but could not get its name")

    def load(self, directory: str | PathLike[str]) -> None:
        """Go on from the folder that `save` wrote, with any number of ranks. Collective. Raises a `CheckpointError` for
        no whole checkpoint, or one of another model, a `ConfigError` for one of another loader."""
        fix, state = "give the folder that save wrote", self._state()
        place = from_rank_zero(lambda: latest_checkpoint(Path(directory)), f"'{directory}' cannot be read")
        if place is None:
            raise CheckpointError(f"'{directory}' holds no whole checkpoint; {fix}")
        try:
            dcp.load(state, checkpoint_id=place)
        except ConfigError:  # of the loader, and a ValueError
            raise
        except (dcp.api.CheckpointException, OSError, KeyError, ValueError) as err:
            what = "is no checkpoint of this model, optimizer and loader"
            raise CheckpointError(f"'{directory}' {what}: {err}; {fix}") from err
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.num_steps = state["num_steps"]

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        own = {"model": model, "optimizer": optimizer, "loader": self.loader, "num_steps": self.num_steps}
        return own | self._stateful


def _require_sharded(model: nn.Module, world_size: int) -> None:
    if not isinstance(model, FSDPModule):
        fix = "call fully_shard on its layers, then fully_shard(model)"
        raise ConfigError(f"{type(model).__name__} is not sharded; {fix}")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter, DTensor):
            raise ConfigError(f"parameter '{name}' is not sharded; leave ignored_params out of fully_shard")
        mesh = parameter.device_mesh
        if mesh.size() != world_size:
            sizes = f"over {mesh.size()} ranks, the loader has {world_size}"
            raise ConfigError(f"parameter '{name}' is sharded {sizes}; give fully_shard a mesh of all ranks")
        # fully_shard makes one dimension of shards, behind those of replicas (HSDP). Another one is of tensor-parallel
        # ranks, which need the same packs.
        *replicas, shards = parameter.placements
        if not shards.is_shard() or not all(one.is_replicate() for one in replicas):
            raise ConfigError(
                f"parameter '{name}' is placed {parameter.placements} on a mesh of {tuple(mesh.shape)} ranks: "
                "tensor-parallel ranks are not tested with FSDP2; shard over data-parallel ranks only"
            )
        if parameter.device.type != mesh.device_type:
            raise ConfigError(
                f"parameter '{name}' lies on {parameter.device.type}, its mesh is of {mesh.device_type} devices: "
                "offload is not tested; leave CPUOffloadPolicy out, and give weights to a model made on 'meta' first"
            )
