"""`ShardedAdamW`: fused AdamW on this rank's shard of every flat buffer (ZeRO-1, cut by unit).

fp32 and fp64 parameters are updated in place in their shard; bf16 parameters have fp32 master weights. Clipping needs
the norm of the whole gradient, so the first update comes after the last sum; from there on units are updated one by
one, from the start of the model to its end, and every rank gathers the other shards of a unit as soon as its own is
updated (`weight_gathers`), while later units are updated and, overlapped, the next step begins.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.config.optimizer_config import OptimizerConfig
from evenload.runtime.optim.parameter_units import FlatBuffer
from evenload.runtime.optim.weight_gathers import WeightGathers


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
        self.gathers = WeightGathers(mesh)
        """Of the last update."""
        self._masters: list[Tensor] = []
        given: Sequence[Mapping[str, Tensor]] = [{} for _ in buffers] if state is None else state
        for buffer, known in zip(buffers, given, strict=True):
            master = buffer.shard(buffer.values, mesh.data_rank, mesh.data_size)
            if buffer.has_master:
                master = known["master"] if known else master.to(buffer.grads.dtype)
            self._masters.append(master)
        # State exists from the start, so that a checkpoint of step 0 and a load have the same shape.
        self._states = [
            {
                "step": torch.full((), float(num_steps), dtype=torch.float32, device=master.device),
                "exp_avg": known["exp_avg"] if known else torch.zeros_like(master),
                "exp_avg_sq": known["exp_avg_sq"] if known else torch.zeros_like(master),
            }
            for master, known in zip(self._masters, given, strict=True)
        ]
        # In the order in which a first forward reads them, and the same on all ranks that hold them.
        self._units = {unit: self._of_unit(unit) for unit in sorted({buffer.unit for buffer in buffers})}

    @torch.no_grad()
    def step(
        self, shards: list[Tensor], grad_norm: float, learning_rate: float, *, is_overlapped: bool = False
    ) -> None:
        """Clip, update with shards of reduced gradients, and gather the rest. Collective over the data group.

        Args:
            is_overlapped: what is gathered may still be on its way on return; `gathers` knows.
        """
        self.gathers.finish()
        self.gathers = WeightGathers(self._mesh, is_overlapped=is_overlapped)
        self.num_steps += 1
        limit = self._config.clip_norm
        scale = limit / (grad_norm + 1e-6) if limit and grad_norm > limit else 1.0
        for numbers, adamw in self._units.values():
            for at, group in zip(numbers, adamw.param_groups, strict=True):
                group["lr"] = learning_rate
                self._masters[at].grad = shards[at].mul_(scale) if scale != 1.0 else shards[at]
            adamw.step()
            for at in numbers:
                buffer, master = self._buffers[at], self._masters[at]
                master.grad = None
                if buffer.has_master:
                    buffer.shard(buffer.values, self._mesh.data_rank, self._mesh.data_size).copy_(master)
                self.gathers.put(buffer)
        self.gathers.seal()

    def _of_unit(self, unit: int) -> tuple[list[int], torch.optim.AdamW]:
        """Which of the buffers are a unit's, and what updates them."""
        config, numbers = self._config, [at for at, buffer in enumerate(self._buffers) if buffer.unit == unit]
        groups = [
            {"params": [self._masters[at]], "weight_decay": config.weight_decay if self._buffers[at].decays else 0.0}
            for at in numbers
        ]
        adamw = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        for at in numbers:
            adamw.state[self._masters[at]] = self._states[at]
        return numbers, adamw

    def state_tensors(self) -> Iterator[tuple[str, FlatBuffer, Tensor]]:
        """(name, buffer, this rank's shard) of everything a checkpoint must hold besides the parameters."""
        for buffer, master, state in zip(self._buffers, self._masters, self._states, strict=True):
            yield "exp_avg", buffer, state["exp_avg"]
            yield "exp_avg_sq", buffer, state["exp_avg_sq"]
            if buffer.has_master:
                yield "master", buffer, master

    def close(self) -> None:
        """Let go of all tensors: they go on elsewhere, and this object is of no use any more."""
        self.gathers.finish()
        self._buffers, self._masters, self._states, self._units = [], [], [], {}

    def set_num_steps(self, num_steps: int) -> None:
        """After a resume: updates done so far (AdamW's bias correction)."""
        self.num_steps = num_steps
        for state in self._states:
            state["step"].fill_(num_steps)

    def static_bytes(self) -> int:
        """Weights, gradients and optimizer state held on this rank."""
        total = sum(b.values.nbytes + b.grads.nbytes for b in self._buffers)
        return total + sum(tensor.nbytes for _, _, tensor in self.state_tensors())
