"""`ShardedOptimizer` runs fused AdamW, or Muon, on this rank's shard of every flat buffer (ZeRO-1, cut by unit).

bf16 parameters have fp32 master weights; with `train.ema_decay` every shard has a moving average of its weights.

**bfloat16 moments** (`optimizer.moments`) are rounded after every update, and of a master, as int32, only what its bf16
weight lacks is kept: master = weight * 2^16 + lower half, int16. A few elements at a time are widened for the update.

**In host memory** (`optimizer.offload_stages`; ZeRO-Offload, Ren et al. 2021, but the device computes) the state of a
rank comes to the device a few elements at a time while weights are updated, and goes back:

    host to device   chunk 1   chunk 2   chunk 3             chunk 4
    update                     chunk 1   chunk 2             chunk 3
    device to host                       chunk 1             chunk 2

Copies run beside the update, each direction in an order of its own, since a link carries both at once; a step begins
when all of the step before has been written. AdamW updates every element by itself, so the result is the same to the
bit. The device holds three chunks at once. Price: state bytes there and back over the link to host memory a step, of
which the update hides its own seconds at most.

**Muon** (Jordan et al. 2024; Liu et al. 2025, section 2) updates the matrices of layers; everything else has AdamW. The
directions of a buffer are gathered once, and every rank orthogonalises the matrices of which it owns some elements.

    momentum <- lerp(gradient, 1 - m)    direction = lerp(gradient, momentum, m)    (Nesterov, as `torch.optim.Muon`)
    update of a matrix = 0.2 sqrt(max(rows, columns)) NewtonSchulz(direction)       (as large as AdamW's)

Newton-Schulz runs in bfloat16, in float64 for float64 models. Price: one more, exposed gather of gradients' size a
step, and fifteen products of every matrix of which this rank owns a part.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from evenload.config.sections import OptimizerConfig
from evenload.cost.memory import WIDENED_ELEMENTS
from evenload.runtime.comm.collectives import all_gather_single
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.optim.data_parallel import FlatBuffer, WeightGathers
from evenload.runtime.replay.host_copies import HostCopies, Wait

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
MASTER, LOWER_HALF = "master", "master_lower_half"


@dataclass(eq=False)
class _Part:
    """Holds one buffer's shards on this rank: its own of the weights, the state by its name in checkpoints, masters and
    moving average included."""

    buffer: FlatBuffer
    has_muon: bool
    weights: Tensor
    state: dict[str, Tensor]


def joined(weights: Tensor, lower: Tensor) -> Tensor:
    """Return fp32 masters of bf16 weights and int16 lower halves, [n] each."""
    return weights.view(torch.int16).int().bitwise_left_shift_(16).add_(lower).view(torch.float32)


def split(master: Tensor, weights: Tensor, lower: Tensor) -> None:
    """Write the halves of fp32 masters, which change; ties are rounded away from 0. On little-endian machines."""
    bits, is_nan = master.view(torch.int32), master.isnan()
    lower.copy_(bits.view(torch.int16)[::2])
    weights.view(torch.int16).copy_(bits.sub_(lower).view(torch.int16)[1::2])
    weights.masked_fill_(is_nan, math.nan)  # a GPU's NaN would be rounded up to -0


CHUNK_ELEMENTS = 2**22
"""Of a tensor of the state: 16 MiB in fp32, which a copy over PCIe does not notice to be cut."""
_AHEAD = 2

Chunk = Mapping[str, Tensor]
"""A few elements of every tensor of a state, by name."""


class OffloadedState:
    """Holds tensors in host memory; `begin` names the chunks of an update, which are then taken in order, updated in
    place and given back."""

    def __init__(self, copies_in: HostCopies, copies_out: HostCopies, device: torch.device) -> None:
        self._in, self._out, self._device = copies_in, copies_out, device
        self._coming = deque[Chunk]()
        self._brought = deque[tuple[Chunk, dict[str, tuple[Tensor, Wait]]]]()
        self._written = deque[list[Wait]]()

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a copy of a flat tensor in host memory, of this object for its life."""
        memory = self._in.arena.new_segment(max(1, tensor.nbytes))
        return memory[: tensor.nbytes].view(tensor.dtype).copy_(tensor)

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Begin an update of these chunks of what is kept."""
        assert not self._brought, "an update has not taken all of its chunks"
        self.synchronize()
        self._coming = deque(chunks)
        for _ in range(_AHEAD):
            self._bring()

    def take(self) -> dict[str, Tensor]:
        """Return the next chunk on the device."""
        copies = self._brought[0][1]
        for _, wait in copies.values():
            wait()
        return {name: tensor for name, (tensor, _) in copies.items()}

    def give_back(self, state: Mapping[str, Tensor]) -> None:
        """Write the chunk that was taken last, with its new values, and bring another one."""
        chunk, _ = self._brought.popleft()
        self._written.append([self._out.to_rows(state[name], rows) for name, rows in chunk.items()])
        if len(self._written) == _AHEAD:
            for wait in self._written.popleft():
                wait()
        self._bring()

    def synchronize(self) -> None:
        """Wait until what was given back is in host memory, where the processor reads it."""
        while self._written:
            for wait in self._written.popleft():
                wait()
        self._out.synchronize()

    def _bring(self) -> None:
        if self._coming:
            chunk = self._coming.popleft()
            self._brought.append(
                (chunk, {name: self._in.to_device([rows], self._device) for name, rows in chunk.items()})
            )


class ShardedOptimizer:
    """Holds the optimizer state of one rank, for the buffers of `flatten_units`, after `num_steps` updates; `state` has
    every buffer's shards by the names of `state_tensors`, None = the run begins; `host` keeps it, None = the device."""

    def __init__(
        self,
        buffers: list[FlatBuffer],
        mesh: Mesh,
        config: OptimizerConfig,
        state: Sequence[Mapping[str, Tensor]] | None = None,
        num_steps: int = 0,
        average_decay: float | None = None,
        host: OffloadedState | None = None,
    ) -> None:
        self._mesh, self._config, self._average_decay = mesh, config, average_decay
        self._host = host
        self.num_steps = num_steps
        """Updates done so far, which AdamW corrects its bias by; the same on every rank."""
        self.gathers = WeightGathers(mesh)
        """Of the last update."""
        given: Sequence[Mapping[str, Tensor]] = [{} for _ in buffers] if state is None else state
        # State exists from the start, so that a checkpoint of step 0 and a load have the same shape.
        self._parts = [self._new_part(buffer, known) for buffer, known in zip(buffers, given, strict=True)]
        # Buffers are in the order in which a first forward reads them, the same on all ranks that hold them.
        by_unit = itertools.groupby(self._parts, key=lambda part: part.buffer.unit)
        self._units = {unit: list(parts) for unit, parts in by_unit}

    def _new_part(self, buffer: FlatBuffer, known: Mapping[str, Tensor]) -> _Part:
        weights, state = buffer.shard(buffer.values, self._mesh.data_rank, self._mesh.data_size), dict(known)
        is_of_layer = buffer.unit > 0 and not buffer.tied and "lm_head.weight" not in buffer.names
        has_muon = self._config.name == "muon" and buffer.decays and is_of_layer
        if not known:
            is_halved = self._config.moments == "bfloat16"
            dtype = torch.bfloat16 if is_halved else buffer.grads.dtype
            for name in ("momentum",) if has_muon else ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weights, dtype=dtype)
            if is_halved:
                state[LOWER_HALF] = torch.zeros_like(weights, dtype=torch.int16)
            elif weights.dtype != buffer.grads.dtype:
                state[MASTER] = weights.to(buffer.grads.dtype)
        if self._average_decay is not None:
            state[AVERAGE] = weights.to(buffer.grads.dtype, copy=True)
        if self._host is not None:
            state = {name: self._host.kept(tensor) for name, tensor in state.items()}
        return _Part(buffer, has_muon, weights, state)

    @torch.no_grad()
    def step(self, shards: list[Tensor], grad_norm: float, rate: float, *, is_overlapped: bool = False) -> None:
        """Clip, update shards and gather the rest, which may still run on return (`is_overlapped`). Collective."""
        self.begin_step(is_overlapped=is_overlapped)
        config, limit = self._config, self._config.clip_norm
        scale = limit / (grad_norm + 1e-6) if limit and grad_norm > limit else 1.0
        for part, shard in zip(self._parts, shards, strict=True):
            if scale != 1.0:
                shard.mul_(scale)  # fused AdamW's `grad_scale` divides, which rounds otherwise, and writes them, too
            if part.has_muon:  # before any gather of weights, as its own gathers are
                update = muon_update(part.buffer, shard, part.state["momentum"], config.momentum, self._mesh)
                master = part.state.get(MASTER, part.weights)  # in the precision of gradients: not in halves
                master.mul_(1 - rate * config.weight_decay).add_(update, alpha=-rate)
        given = iter(shards)
        for unit, parts in self._units.items():
            self.update_unit(unit, list(itertools.islice(given, len(parts))), rate)
        self.gathers.seal()

    def begin_step(self, *, is_overlapped: bool = False) -> None:
        """Begin an update, of which `update_unit` makes parts until `gathers.seal`. Collective, as they are."""
        self.gathers.finish()
        self.gathers = WeightGathers(self._mesh, is_overlapped=is_overlapped)
        self.num_steps += 1
        if self._host is not None:
            parts = [(part, few) for part in self._parts for few in self._pieces(part)]
            self._host.begin({name: kept[few] for name, kept in part.state.items()} for part, few in parts)

    @torch.no_grad()
    def update_unit(self, unit: int, shards: Sequence[Tensor], rate: float) -> None:
        """Update this rank's shards of a unit's buffers by their gradients, but for Muon's, and gather the rest."""
        for part, shard in zip(self._units[unit], shards, strict=True):
            for few in self._pieces(part):
                if self._host is None:
                    self._update(part, few, {name: kept[few] for name, kept in part.state.items()}, shard, rate)
                else:
                    self._update(part, few, state := self._host.take(), shard, rate)
                    self._host.give_back(state)
            self.gathers.put(part.buffer)

    def _pieces(self, part: _Part) -> list[slice]:
        """Cut a shard into what is updated at once."""
        most = WIDENED_ELEMENTS if LOWER_HALF in part.state else part.weights.numel()
        most = most if self._host is None else min(most, CHUNK_ELEMENTS)
        return [slice(at, at + most) for at in range(0, part.weights.numel(), most)]

    def _update(self, part: _Part, few: slice, state: dict[str, Tensor], shard: Tensor, rate: float) -> None:
        weights, config = part.weights[few], self._config
        master = joined(weights, state[LOWER_HALF]) if LOWER_HALF in state else state.get(MASTER, weights)
        if not part.has_muon:
            wide = [state[name].to(master.dtype) for name in ("exp_avg", "exp_avg_sq")]
            decay = config.weight_decay if part.buffer.decays else 0.0
            rates = {"lr": rate, "beta1": config.beta1, "beta2": config.beta2, "weight_decay": decay, "eps": config.eps}
            how = {"fused": True, "amsgrad": False, "maximize": False, **rates}
            done = torch.full((), float(self.num_steps - 1), dtype=torch.float32, device=master.device)
            adamw([master], [shard[few]], wide[:1], wide[1:], [], [done], **how)
            if LOWER_HALF in state:
                state["exp_avg"].copy_(wide[0])
                state["exp_avg_sq"].copy_(wide[1])
        if AVERAGE in state and self._average_decay is not None:
            state[AVERAGE].lerp_(master, 1 - self._average_decay)
        if LOWER_HALF in state:
            split(master, weights, state[LOWER_HALF])
        elif MASTER in state:
            weights.copy_(master)

    def state_tensors(self) -> Iterator[tuple[str, FlatBuffer, Tensor]]:
        """Yield (name, buffer, this rank's shard) of everything that a checkpoint holds except the parameters; in host
        memory where it is kept there."""
        if self._host is not None:
            self._host.synchronize()
        for part in self._parts:
            for name, tensor in part.state.items():
                yield name, part.buffer, tensor

    @contextmanager
    def average_as_weights(self) -> Iterator[None]:
        """Make all ranks' weights the moving average inside, and restore them to the bit afterwards. Collective."""
        self.gathers.finish()
        if self._host is not None:
            self._host.synchronize()
        kept = [part.weights.clone() for part in self._parts]
        self._set_weights([part.state[AVERAGE] for part in self._parts])
        try:
            yield
        finally:
            self._set_weights(kept)

    def _set_weights(self, shards: Sequence[Tensor]) -> None:
        gathers = WeightGathers(self._mesh)
        for part, shard in zip(self._parts, shards, strict=True):
            part.weights.copy_(shard)
            gathers.put(part.buffer)
        gathers.seal()
        gathers.finish()

    def close(self) -> None:
        """Drop all tensors, which live on elsewhere."""
        self.gathers.finish()
        self._parts, self._units = [], {}

    def static_bytes(self) -> int:
        grads: dict[int, int] = {}  # by memory, which units may share
        for part in self._parts:
            one = part.buffer.grads
            memory, end = one.untyped_storage().data_ptr(), int(one.storage_offset()) * one.itemsize + one.nbytes
            grads[memory] = max(grads.get(memory, 0), end)
        values = sum(part.buffer.values.nbytes for part in self._parts)
        state = 0 if self._host else sum(tensor.nbytes for part in self._parts for tensor in part.state.values())
        return values + sum(grads.values()) + state
