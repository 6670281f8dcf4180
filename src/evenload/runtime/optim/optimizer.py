"""`ShardedOptimizer` runs fused AdamW, or Muon, on this rank's shard of every flat buffer (ZeRO-1, cut by unit).

bf16 parameters have fp32 master weights; with `train.ema_decay` every shard has a moving average of its weights.

**Muon** (Jordan et al. 2024; Liu et al. 2025, section 2) updates the matrices of layers; everything else has AdamW. The
directions of a buffer are gathered once, and every rank orthogonalises the matrices of which it owns some elements.

    momentum <- lerp(gradient, 1 - m)    direction = lerp(gradient, momentum, m)    (Nesterov, as `torch.optim.Muon`)
    update of a matrix = 0.2 sqrt(max(rows, columns)) NewtonSchulz(direction)       (as large as AdamW's)

Newton-Schulz runs in bfloat16, in float64 for float64 models. Price: one more, exposed gather of gradients' size a
step, and fifteen products of every matrix of which this rank owns a part.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from evenload.config.optimizer import OptimizerConfig
from evenload.runtime.comm.collectives import all_gather_single
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.optim.data_parallel import WeightGathers
from evenload.runtime.optim.parameter_units import FlatBuffer

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7
_AS_LARGE_AS_ADAMW = 0.2


@torch.no_grad()
def muon_update(buffer: FlatBuffer, gradient: Tensor, momentum: Tensor, decay: float, mesh: Mesh) -> Tensor:
    """Return the direction that the learning rate scales, [shard] like the gradient; `momentum` changes. Collective."""
    momentum.lerp_(gradient, 1 - decay)
    direction = gradient.lerp(momentum, decay)
    whole = direction
    if mesh.data_size > 1:
        whole = direction.new_empty(mesh.data_size * direction.numel())
        all_gather_single(whole, direction, group=mesh.data)
    first, stop = mesh.data_rank * direction.numel(), 0
    update = torch.zeros_like(direction)
    for shape in (parameter.shape for parameter in buffer.parameters):
        start, stop = stop, stop + shape.numel()
        low, high = (min(max(at - first, 0), direction.numel()) for at in (start, stop))
        if low == high:
            continue
        matrix = orthogonalised(whole[start:stop].view(shape))
        scale = _AS_LARGE_AS_ADAMW * math.sqrt(max(shape))
        update[low:high] = matrix.flatten()[first + low - start :][: high - low] * scale
    return update


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return about U Vᵀ of a matrix [rows, columns] = U S Vᵀ, by Newton-Schulz in bfloat16, or float64 for float64."""
    a, b, c = _COEFFICIENTS
    work = matrix.double() if matrix.dtype == torch.float64 else matrix.bfloat16()
    is_tall = work.shape[0] > work.shape[1]
    work = work.T if is_tall else work
    work = work / work.norm().clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = work @ work.T
        work = torch.addmm(work, torch.addmm(gram, gram, gram, beta=b, alpha=c), work, beta=a)
    return (work.T if is_tall else work).to(matrix.dtype)


AVERAGE = "average"  # name of the weights' moving average in `state_tensors`


@dataclass(eq=False)
class _Part:
    """Holds one buffer's shards on this rank: weights in the precision of gradients, state by name, moving average."""

    buffer: FlatBuffer
    has_muon: bool
    master: Tensor
    state: dict[str, Tensor]
    average: Tensor | None


class ShardedOptimizer:
    """Holds the optimizer state of one rank, for the buffers of `flatten_units`, after `num_steps` updates; `state` has
    every buffer's shards by the names of `state_tensors`, None = the run begins."""

    def __init__(
        self,
        buffers: list[FlatBuffer],
        mesh: Mesh,
        config: OptimizerConfig,
        state: Sequence[Mapping[str, Tensor]] | None = None,
        num_steps: int = 0,
        average_decay: float | None = None,
    ) -> None:
        self._mesh, self._config, self._average_decay = mesh, config, average_decay
        self.num_steps = num_steps
        """Updates done so far; the same on every rank."""
        self.gathers = WeightGathers(mesh)
        """Of the last update."""
        given: Sequence[Mapping[str, Tensor]] = [{} for _ in buffers] if state is None else state
        # State exists from the start, so that a checkpoint of step 0 and a load have the same shape.
        self._parts = [self._new_part(buffer, known) for buffer, known in zip(buffers, given, strict=True)]
        # Buffers are in the order in which a first forward reads them, the same on all ranks that hold them.
        units = [list(parts) for _, parts in itertools.groupby(self._parts, key=lambda part: part.buffer.unit)]
        self._units = [(parts, self._new_adamw(parts)) for parts in units]

    def _new_part(self, buffer: FlatBuffer, known: Mapping[str, Tensor]) -> _Part:
        master = self._shard(buffer)
        if buffer.has_master:
            master = known["master"] if known else master.to(buffer.grads.dtype)
        has_muon = self._config.name == "muon" and buffer.decays and buffer.is_of_layer
        state = {"step": torch.full((), float(self.num_steps), dtype=torch.float32, device=master.device)}
        for name in ("momentum",) if has_muon else ("exp_avg", "exp_avg_sq"):
            state[name] = known[name] if known else torch.zeros_like(master)
        return _Part(buffer, has_muon, master, state, None if self._average_decay is None else master.clone())

    def _new_adamw(self, parts: Sequence[_Part]) -> torch.optim.AdamW | None:
        """Make what updates the parts without Muon; None where there are none."""
        config, parts = self._config, [part for part in parts if not part.has_muon]
        if not parts:
            return None
        decay = config.weight_decay
        groups = [{"params": [part.master], "weight_decay": decay if part.buffer.decays else 0.0} for part in parts]
        betas = config.beta1, config.beta2
        adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)
        for part in parts:
            adamw.state[part.master] = part.state
        return adamw

    @torch.no_grad()
    def step(self, shards: list[Tensor], grad_norm: float, rate: float, *, is_overlapped: bool = False) -> None:
        """Clip, update shards and gather the rest, which may still run on return (`is_overlapped`). Collective."""
        self.gathers.finish()
        self.gathers = WeightGathers(self._mesh, is_overlapped=is_overlapped)
        self.num_steps += 1
        config, limit = self._config, self._config.clip_norm
        scale = limit / (grad_norm + 1e-6) if limit and grad_norm > limit else 1.0
        for part, shard in zip(self._parts, shards, strict=True):
            if scale != 1.0:
                shard.mul_(scale)
            if part.has_muon:
                update = muon_update(part.buffer, shard, part.state["momentum"], config.momentum, self._mesh)
                part.master.mul_(1 - rate * config.weight_decay).add_(update, alpha=-rate)
            else:
                part.master.grad = shard
        for parts, adamw in self._units:
            if adamw is not None:
                for group in adamw.param_groups:
                    group["lr"] = rate
                adamw.step()
            for part in parts:
                part.master.grad = None
                if part.average is not None and self._average_decay is not None:
                    part.average.lerp_(part.master, 1 - self._average_decay)
                if part.buffer.has_master:
                    self._shard(part.buffer).copy_(part.master)
                self.gathers.put(part.buffer)
        self.gathers.seal()

    def state_tensors(self) -> Iterator[tuple[str, FlatBuffer, Tensor]]:
        """Yield (name, buffer, this rank's shard) of everything that a checkpoint holds except the parameters."""
        for part in self._parts:
            for name, tensor in part.state.items():
                if name != "step":
                    yield name, part.buffer, tensor
            if part.buffer.has_master:
                yield "master", part.buffer, part.master
            if part.average is not None:
                yield AVERAGE, part.buffer, part.average

    @contextmanager
    def average_as_weights(self) -> Iterator[None]:
        """Make all ranks' weights the moving average inside, and restore them to the bit afterwards. Collective."""
        self.gathers.finish()
        kept = [self._shard(part.buffer).clone() for part in self._parts]
        self._set_weights([part.average for part in self._parts])
        try:
            yield
        finally:
            self._set_weights(kept)

    def _set_weights(self, shards: Sequence[Tensor | None]) -> None:
        gathers = WeightGathers(self._mesh)
        for part, shard in zip(self._parts, shards, strict=True):
            assert shard is not None, "there is a moving average with train.ema_decay alone"
            self._shard(part.buffer).copy_(shard)
            gathers.put(part.buffer)
        gathers.seal()
        gathers.finish()

    def _shard(self, buffer: FlatBuffer) -> Tensor:
        return buffer.shard(buffer.values, self._mesh.data_rank, self._mesh.data_size)

    def close(self) -> None:
        """Drop all tensors, which live on elsewhere."""
        self.gathers.finish()
        self._parts, self._units = [], []

    def set_num_steps(self, num_steps: int) -> None:
        """Set the updates done so far, after a resume (AdamW's bias correction)."""
        self.num_steps = num_steps
        for part in self._parts:
            part.state["step"].fill_(num_steps)

    def static_bytes(self) -> int:
        total = sum(part.buffer.values.nbytes + part.buffer.grads.nbytes for part in self._parts)
        return total + sum(tensor.nbytes for _, _, tensor in self.state_tensors())
