"""`ShardedAdamW`: fused AdamW on this rank's shard of every flat buffer (ZeRO-1, cut by unit).

fp32 and fp64 parameters are updated in place in their shard; bf16 parameters have fp32 master weights.
Afterwards every rank gathers the other shards.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.config.optimizer_config import OptimizerConfig
from evenload.runtime.optim.parameter_units import FlatBuffer


class ShardedAdamW:
    """Optimizer state of one rank, for the buffers of `flatten_units`."""

    def __init__(self, buffers: list[FlatBuffer], mesh: Mesh, config: OptimizerConfig) -> None:
        self._buffers = buffers
        self._mesh = mesh
        self._config = config
        self._masters = []
        groups = []
        for buffer in buffers:
            shard = buffer.shard(buffer.values, mesh.data_rank, mesh.data_size)
            master = shard if shard.dtype == buffer.grads.dtype else shard.to(buffer.grads.dtype)
            self._masters.append(master)
            groups.append({"params": [master], "weight_decay": config.weight_decay if buffer.decays else 0.0})
        self._adamw = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        # State exists from the start, so that a checkpoint of step 0 and a load have the same shape.
        for master in self._masters:
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    @torch.no_grad()
    def step(self, shards: list[Tensor], grad_norm: float, learning_rate: float) -> None:
        """Clip, update with shards of reduced gradients, and gather the rest. Collective over the data group."""
        limit = self._config.clip_norm
        scale = limit / (grad_norm + 1e-6) if limit and grad_norm > limit else 1.0
        for master, shard, group in zip(self._masters, shards, self._adamw.param_groups, strict=True):
            group["lr"] = learning_rate
            master.grad = shard.mul_(scale) if scale != 1.0 else shard
        self._adamw.step()
        for buffer, master in zip(self._buffers, self._masters, strict=True):
            master.grad = None
            shard = buffer.shard(buffer.values, self._mesh.data_rank, self._mesh.data_size)
            if shard.dtype != master.dtype:
                shard.copy_(master)
            if self._mesh.data_size > 1:
                dist.all_gather_single(buffer.values, shard.clone(), group=self._mesh.data)

    def zero_gradients(self) -> None:
        for buffer in self._buffers:
            buffer.grads.zero_()

    def state_tensors(self) -> Iterator[tuple[str, FlatBuffer, Tensor]]:
        """(name, buffer, this rank's shard) of everything a checkpoint must hold besides the parameters."""
        for buffer, master in zip(self._buffers, self._masters, strict=True):
            state = self._adamw.state[master]
            yield "exp_avg", buffer, state["exp_avg"]
            yield "exp_avg_sq", buffer, state["exp_avg_sq"]
            if buffer.values.dtype != master.dtype:
                yield "master", buffer, master

    def set_num_steps(self, num_steps: int) -> None:
        """After a resume: updates done so far (AdamW's bias correction)."""
        for master in self._masters:
            self._adamw.state[master]["step"].fill_(num_steps)

    def static_bytes(self) -> int:
        """Weights, gradients and optimizer state held on this rank."""
        total = sum(b.values.nbytes + b.grads.nbytes for b in self._buffers)
        return total + sum(tensor.nbytes for _, _, tensor in self.state_tensors())
