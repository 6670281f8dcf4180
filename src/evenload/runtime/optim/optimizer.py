"""`ShardedOptimizer`: AdamW, fused, or Muon on this rank's shard of every flat buffer (ZeRO-1, cut by unit).

Muon updates the matrices of layers; everything else has AdamW. With `train.ema_decay` every shard has a moving average
with its weights. bf16 parameters have fp32 master weights. Units are updated from the start of the model to its end,
and the other shards of a unit are gathered as soon as its own is updated (`WeightGathers`).

**Muon** (Jordan et al. 2024; Liu et al. 2025, section 2). Momentum lies in shards as AdamW's moments do. What is to be
orthogonalised is gathered once a buffer, and every rank orthogonalises the matrices of which it owns some elements.

    momentum <- lerp(gradient, 1 - m)    direction = lerp(gradient, momentum, m)    (Nesterov, as `torch.optim.Muon`)
    update of a matrix = 0.2 sqrt(max(rows, columns)) NewtonSchulz(direction)       (as large as AdamW's)

Newton-Schulz runs in bfloat16, in float64 for float64 models. Price: one more gather of gradients' size a step, which
nothing hides, and fifteen products of every matrix of which this rank owns a part.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

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
    """Return what the learning rate is multiplied with, [shard] like the gradient; `momentum` changes. Collective."""
    momentum.lerp_(gradient, 1 - decay)
    direction = gradient.lerp(momentum, decay)
    whole = direction
    if mesh.data_size > 1:
        whole = direction.new_empty(mesh.data_size * direction.numel())
        all_gather_single(whole, direction, group=mesh.data)
    first = mesh.data_rank * direction.numel()
    update = torch.zeros_like(direction)
    for start, shape in _matrices(buffer):
        low, high = (min(max(at - first, 0), direction.numel()) for at in (start, start + shape.numel()))
        if low == high:
            continue
        matrix = orthogonalised(whole[start : start + shape.numel()].view(shape))
        scale = _AS_LARGE_AS_ADAMW * math.sqrt(max(shape))
        update[low:high] = matrix.flatten()[first + low - start :][: high - low] * scale
    return update


def _matrices(buffer: FlatBuffer) -> Iterator[tuple[int, torch.Size]]:
    start = 0
    for parameter in buffer.parameters:
        yield start, parameter.shape
        start += parameter.numel()


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return about U Vᵀ of a matrix [rows, columns] = U S Vᵀ, by Newton-Schulz in bfloat16, for float64 in it."""
    a, b, c = _COEFFICIENTS
    work = matrix.double() if matrix.dtype == torch.float64 else matrix.bfloat16()
    is_tall = work.shape[0] > work.shape[1]
    work = work.T if is_tall else work
    work = work / work.norm().clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = work @ work.T
        work = torch.addmm(work, torch.addmm(gram, gram, gram, beta=b, alpha=c), work, beta=a)
    return (work.T if is_tall else work).to(matrix.dtype)


AVERAGE = "average"
"""As `state_tensors` calls the moving average of the weights."""


class ShardedOptimizer:
    """Optimizer state of one rank, for the buffers of `flatten_units`, after `num_steps` updates; `state` has every
    buffer's shards by the names of `state_tensors`, None = the run begins."""

    def __init__(
        self,
        buffers: list[FlatBuffer],
        mesh: Mesh,
        config: OptimizerConfig,
        state: Sequence[Mapping[str, Tensor]] | None = None,
        num_steps: int = 0,
        average_decay: float | None = None,
    ) -> None:
        self._buffers, self._mesh, self._config = buffers, mesh, config
        self.num_steps = num_steps
        """Updates done so far; the same on every rank."""
        self.gathers = WeightGathers(mesh)
        """Of the last update."""
        self._masters: list[Tensor] = []
        given: Sequence[Mapping[str, Tensor]] = [{} for _ in buffers] if state is None else state
        for buffer, known in zip(buffers, given, strict=True):
            master = self._shard(buffer)
            if buffer.has_master:
                master = known["master"] if known else master.to(buffer.grads.dtype)
            self._masters.append(master)
        # State exists from the start, so that a checkpoint of step 0 and a load have the same shape.
        self._states = [
            {"step": torch.full((), float(num_steps), dtype=torch.float32, device=master.device)}
            | {name: known[name] if known else torch.zeros_like(master) for name in self._moments(buffer)}
            for buffer, master, known in zip(buffers, self._masters, given, strict=True)
        ]
        self._average_decay = average_decay
        self._averages = [] if average_decay is None else [master.clone() for master in self._masters]
        # In the order in which a first forward reads them, and the same on all ranks that hold them.
        self._units = {unit: self._of_unit(unit) for unit in sorted({buffer.unit for buffer in buffers})}

    @torch.no_grad()
    def step(
        self, shards: list[Tensor], grad_norm: float, learning_rate: float, *, is_overlapped: bool = False
    ) -> None:
        """Clip, update shards, gather the rest, still under way where `is_overlapped`. Collective (data group)."""
        self.gathers.finish()
        self.gathers = WeightGathers(self._mesh, is_overlapped=is_overlapped)
        self.num_steps += 1
        limit = self._config.clip_norm
        scale = limit / (grad_norm + 1e-6) if limit and grad_norm > limit else 1.0
        if scale != 1.0:
            for shard in shards:
                shard.mul_(scale)
        self._make_muon_updates(shards)
        for numbers, adamw in self._units.values():
            if adamw is not None:
                with_adamw = [at for at in numbers if not self._has_muon(self._buffers[at])]
                for at, group in zip(with_adamw, adamw.param_groups, strict=True):
                    group["lr"] = learning_rate
                    self._masters[at].grad = shards[at]
                adamw.step()
            for at in numbers:
                buffer, master = self._buffers[at], self._masters[at]
                master.grad = None
                if self._has_muon(buffer):
                    master.mul_(1 - learning_rate * self._config.weight_decay).add_(shards[at], alpha=-learning_rate)
                if self._average_decay is not None:
                    self._averages[at].lerp_(master, 1 - self._average_decay)
                if buffer.has_master:
                    self._shard(buffer).copy_(master)
                self.gathers.put(buffer)
        self.gathers.seal()

    def _has_muon(self, buffer: FlatBuffer) -> bool:
        return self._config.name == "muon" and buffer.decays and buffer.is_of_layer

    def _moments(self, buffer: FlatBuffer) -> tuple[str, ...]:
        return ("momentum",) if self._has_muon(buffer) else ("exp_avg", "exp_avg_sq")

    def _make_muon_updates(self, shards: list[Tensor]) -> None:
        """Of gradients that Muon takes, in their place; in the order of units, the same on all ranks that hold them."""
        for at in itertools.chain.from_iterable(numbers for numbers, _ in self._units.values()):
            if self._has_muon(self._buffers[at]):
                momentum, decay = self._states[at]["momentum"], self._config.momentum
                shards[at].copy_(muon_update(self._buffers[at], shards[at], momentum, decay, self._mesh))

    def _of_unit(self, unit: int) -> tuple[list[int], torch.optim.AdamW | None]:
        """Which of the buffers are a unit's, and what updates those without Muon; None where there are none."""
        config, numbers = self._config, [at for at, buffer in enumerate(self._buffers) if buffer.unit == unit]
        groups = [
            {"params": [self._masters[at]], "weight_decay": config.weight_decay if self._buffers[at].decays else 0.0}
            for at in numbers
            if not self._has_muon(self._buffers[at])
        ]
        if not groups:
            return numbers, None
        adamw = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        for at in numbers:
            if not self._has_muon(self._buffers[at]):
                adamw.state[self._masters[at]] = self._states[at]
        return numbers, adamw

    def state_tensors(self) -> Iterator[tuple[str, FlatBuffer, Tensor]]:
        """(name, buffer, this rank's shard) of everything a checkpoint must hold except the parameters."""
        for at, (buffer, master, state) in enumerate(zip(self._buffers, self._masters, self._states, strict=True)):
            for name in self._moments(buffer):
                yield name, buffer, state[name]
            if buffer.has_master:
                yield "master", buffer, master
            if self._average_decay is not None:
                yield AVERAGE, buffer, self._averages[at]

    @contextmanager
    def average_as_weights(self) -> Iterator[None]:
        """Have all ranks' weights be the moving average inside, restored to the bit afterwards. Collective."""
        assert self._average_decay is not None, "there is a moving average with train.ema_decay alone"
        self.gathers.finish()
        kept = [self._shard(buffer).clone() for buffer in self._buffers]
        self._put_whole(self._averages)
        try:
            yield
        finally:
            self._put_whole(kept)

    def _put_whole(self, shards: Sequence[Tensor]) -> None:
        gathers = WeightGathers(self._mesh)
        for at in itertools.chain.from_iterable(numbers for numbers, _ in self._units.values()):
            self._shard(self._buffers[at]).copy_(shards[at])
            gathers.put(self._buffers[at])
        gathers.seal()
        gathers.finish()

    def _shard(self, buffer: FlatBuffer) -> Tensor:
        return buffer.shard(buffer.values, self._mesh.data_rank, self._mesh.data_size)

    def close(self) -> None:
        """Let go of all tensors: they go on elsewhere, and this object is of no use any more."""
        self.gathers.finish()
        self._buffers, self._masters, self._states, self._averages, self._units = [], [], [], [], {}

    def set_num_steps(self, num_steps: int) -> None:
        """Set the updates done so far, after a resume (AdamW's bias correction)."""
        self.num_steps = num_steps
        for state in self._states:
            state["step"].fill_(num_steps)

    def static_bytes(self) -> int:
        """Weights, gradients and optimizer state held on this rank."""
        total = sum(b.values.nbytes + b.grads.nbytes for b in self._buffers)
        return total + sum(tensor.nbytes for _, _, tensor in self.state_tensors())
