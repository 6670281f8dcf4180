"""`ShardedAdamW`: fused AdamW on this rank's shard of every flat buffer (ZeRO-1, cut by unit).

fp32 and fp64 parameters are updated in place in their shard; bf16 parameters have fp32 master weights.
Afterwards every rank gathers the other shards.
"""

import math
from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.errors import ConfigError
from evenload.runtime.mesh import Mesh
from evenload.runtime.parameter_units import FlatBuffer
from evenload.types.base import Frozen


class OptimizerConfig(Frozen):
    """AdamW with warm-up and decay.

    Args:
        learning_rate: after warm-up.
        beta1, beta2, eps: as in `torch.optim.AdamW`.
        weight_decay: of matrices; norms and biases have none.
        clip_norm: global gradient norm limit; 0 = no clipping.
        warmup_steps: linear warm-up from 0.
        decay: "constant", or "cosine" down to `final_ratio` of the learning rate at `train.steps`.
        final_ratio: of the learning rate, where the cosine ends.
    """

    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup_steps: int = 0
    decay: Literal["constant", "cosine"] = "constant"
    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ConfigError(f"optimizer.learning_rate is {self.learning_rate}, must be above 0")
        if self.clip_norm < 0 or self.warmup_steps < 0:
            raise ConfigError("optimizer.clip_norm and optimizer.warmup_steps must be 0 or more")

    def rate(self, step: int, total_steps: int) -> float:
        """Learning rate of a step (from 0) in a run of `total_steps`."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.learning_rate
        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.learning_rate * (self.final_ratio + (1 - self.final_ratio) * share)


class ShardedAdamW:
    """Optimizer state of one rank.

    Args:
        buffers: of this rank's stage, from `flatten_units`.
    """

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
        """Clip, update this rank's shards and gather the rest. Collective over the data group.

        Args:
            shards: reduced gradients from `reduce_gradients`.
            grad_norm: from `global_gradient_norm`.
        """
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
        """Before every step."""
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
