"""`ShardedAdamW`: fused AdamW on this rank's shard of every flat buffer (ZeRO-1, cut by unit).

fp32 and fp64 parameters are updated in place in their shard; bf16 parameters have fp32 master weights.
Afterwards every rank gathers the other shards.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from evenload.runtime.comm.collectives import all_gather_single
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.config.optimizer_config import OptimizerConfig
from evenload.runtime.optim.parameter_units import FlatBuffer


class ShardedAdamW:
    """Optimizer state of one rank, for the buffers of `flatten_units`; none where it holds none.

    Args:
        state: of every buffer, its shards by the names of `state_tensors`; None = the run begins.
        num_steps: updates done so far.
    """

    def __init__(
        self,
        buffers: list[FlatBuffer],
        mesh: Mesh,
        config: OptimizerConfig,
        state: Sequence[Mapping[str, Tensor]] | None = None,
        num_steps: int = 0,
    ) -> None:
        self._buffers = buffers
        self._mesh = mesh
        self._config = config
        self.num_steps = num_steps
        """Updates done so far; the same on every rank."""
        self._masters: list[Tensor] = []
        groups = []
        given: Sequence[Mapping[str, Tensor]] = [{} for _ in buffers] if state is None else state
        for buffer, known in zip(buffers, given, strict=True):
            shard = buffer.shard(buffer.values, mesh.data_rank, mesh.data_size)
            master = shard
            if buffer.has_master:
                master = known["master"] if known else shard.to(buffer.grads.dtype)
            self._masters.append(master)
            groups.append({"params": [master], "weight_decay": config.weight_decay if buffer.decays else 0.0})
        # torch refuses an optimizer of nothing.
        self._adamw = None
        if groups:
            self._adamw = torch.optim.AdamW(
                groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
            )
        # State exists from the start, so that a checkpoint of step 0 and a load have the same shape.
        self._states = []
        for master, known in zip(self._masters, given, strict=True):
            self._states.append(
                {
                    "step": torch.full((), float(num_steps), dtype=torch.float32, device=master.device),
                    "exp_avg": known["exp_avg"] if known else torch.zeros_like(master),
                    "exp_avg_sq": known["exp_avg_sq"] if known else torch.zeros_like(master),
                }
            )
            assert self._adamw is not None
            self._adamw.state[master] = self._states[-1]

    @torch.no_grad()
    def step(self, shards: list[Tensor], grad_norm: float, learning_rate: float) -> None:
        """Clip, update with shards of reduced gradients, and gather the rest. Collective over the data group."""
        self.num_steps += 1
        if self._adamw is None:
            return
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
                all_gather_single(buffer.values, shard.clone(), group=self._mesh.data)

    def state_tensors(self) -> Iterator[tuple[str, FlatBuffer, Tensor]]:
        """(name, buffer, this rank's shard) of everything a checkpoint must hold besides the parameters."""
        for buffer, master, state in zip(self._buffers, self._masters, self._states, strict=True):
            yield "exp_avg", buffer, state["exp_avg"]
            yield "exp_avg_sq", buffer, state["exp_avg_sq"]
            if buffer.has_master:
                yield "master", buffer, master

    def close(self) -> None:
        """Let go of all tensors: they go on elsewhere, and this object is of no use any more."""
        self._buffers, self._masters, self._states, self._adamw = [], [], [], None

    def set_num_steps(self, num_steps: int) -> None:
        """After a resume: updates done so far (AdamW's bias correction)."""
        self.num_steps = num_steps
        for state in self._states:
            state["step"].fill_(num_steps)

    def static_bytes(self) -> int:
        """Weights, gradients and optimizer state held on this rank."""
        total = sum(b.values.nbytes + b.grads.nbytes for b in self._buffers)
        return total + sum(tensor.nbytes for _, _, tensor in self.state_tensors())
