"""Overlap data parallelism with compute: reduce-scatter gradients into shards, all-gather updated weights.

Parameters of units are views of a flat buffer in compute precision, gradients (`parameter.main_grad`) views of a flat
fp32 buffer (fp64 for fp64), which are cut into shards. Buffers are separate by unit, because a change of stages moves
whole units, and by whether they have weight decay (matrices) or not (norms, biases).

`GradientReduction`: losses are already divided by the label count of the global batch, so gradients are summed, never
averaged. A unit's reduce-scatter is queued as soon as the last pack has added to its gradients: the head's first, the
embedding's last, in one order on all ranks that hold them. No action waits for one, and replicas run what they share
before, so there is no circle of waits (docs/decisions/03). Results are equal to the bit either way. Tied weights of
both ends of a pipeline, and gradients of norms in a tensor-parallel group, are never overlapped.

`WeightGathers`: an update runs from the embedding to the head, as the next forward reads them, and queues each unit's
gather at once; a forward waits for its own unit alone, other readers of whole weights call `finish` first. All gathers
are finished before the next step's first backward, so they come before its first reduce-scatter.

`UpdatesInBackward` (`optimizer.in_backward`) sums, updates and gathers a unit while the backward waits, in the same
order on all ranks, so there is no circle of waits either; only in layouts of replicas, with one backward pack each.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from evenload.attention.range_attention import work_dtype
from evenload.errors import UnsupportedModelError
from evenload.runtime.comm.collectives import Span, all_gather_single, collective_queue, reduce_scatter_single
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.device import HostClock
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.model.structure import Structure
from evenload.runtime.model.tensor_weights import tensor_split


@dataclass(eq=False)
class BufferGroup:
    """Describes parameters of one unit and one weight-decay group, which share a flat buffer.

    Args:
        names: Hugging Face parameter names, in order.
        is_part: this rank's parts of matrices that are cut over a tensor-parallel group; else all its ranks hold the
            same.
        unit: number of the unit (`StageModel.units`).
        tied: only the embedding/head weight that another rank holds too.
        tied_name: name of a tied weight in checkpoints: that of the embedding.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    decays: bool
    is_part: bool
    unit: int
    tied: bool = False
    tied_name: str = ""

    @property
    def num_elements(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def in_memory(self, values: Tensor, grads: Tensor, dp: int) -> "FlatBuffer":
        """Make the buffer in the first elements of this memory, cut for `dp` ranks."""
        padded = padded_size(self.num_elements, dp)
        return FlatBuffer(**vars(self), values=values[:padded], grads=grads[:padded])


@dataclass(eq=False, kw_only=True)
class FlatBuffer(BufferGroup):
    """Holds a group in memory: `values` in compute precision, `grads` in fp32 or fp64; flat, [padded to dp]."""

    values: Tensor
    grads: Tensor

    def shard(self, flat: Tensor, dp_rank: int, dp: int) -> Tensor:
        size = flat.numel() // dp
        return flat[dp_rank * size : (dp_rank + 1) * size]


def flatten_units(
    stages: StageModel | Sequence[StageModel], dp: int, others: Sequence[int] = (), *, unit_gradients: bool = False
) -> list[FlatBuffer]:
    """Move the parameters of one rank's stages into flat buffers, cut for `dp` ranks and later perhaps for `others`,
    and give each a `main_grad`, to which gradients of autograd are added. A parameter of two units (a tied embedding
    whose head is on the same rank) belongs to the first. `unit_gradients`: those of all units lie in the same memory,
    as large as the largest; a tied embedding, to which the head adds first, has its own."""
    stages = [stages] if isinstance(stages, StageModel) else stages
    groups = list(buffer_groups(stages))
    sizes = [padded_size(group.num_elements, dp, *others) for group in groups]
    shared = _memory_in_turn(groups, sizes) if unit_gradients else {}
    buffers = []
    for at, (group, padded) in enumerate(zip(groups, sizes, strict=True)):
        like, shapes = group.parameters[0], [parameter.shape for parameter in group.parameters]
        values = torch.zeros(padded, dtype=like.dtype, device=like.device)
        grads = shared[at] if at in shared else torch.zeros_like(values, dtype=work_dtype(values))
        parts = values[: group.num_elements].split([shape.numel() for shape in shapes])
        for parameter, part in zip(group.parameters, parts, strict=True):
            part.copy_(parameter.detach().flatten())
            parameter.data = part  # frees its memory before the next one is copied
            parameter.register_post_accumulate_grad_hook(add_to_main_grad)
        attach(group.parameters, shapes, values, grads)
        buffers.append(group.in_memory(values, grads, dp))
    return buffers


def _memory_in_turn(groups: Sequence[BufferGroup], sizes: Sequence[int]) -> dict[int, Tensor]:
    """Make gradients of the groups, by place, in the memory of the largest unit; none of a tied embedding."""
    starts: dict[int, int] = {}
    ends: dict[int, int] = defaultdict(int)
    for at, group in enumerate(groups):
        if group.names[0] != group.tied_name:
            starts[at] = ends[group.unit]
            ends[group.unit] += sizes[at]
    like = groups[0].parameters[0]
    memory = torch.zeros(max(ends.values()), dtype=work_dtype(like), device=like.device)
    return {at: memory[start : start + sizes[at]] for at, start in starts.items()}


def buffer_groups(stages: Sequence[StageModel]) -> Iterator[BufferGroup]:
    """Yield the groups of one rank's stages in the order of their buffers, the same on all ranks of these stages."""
    is_within = any(stage.is_first for stage in stages) and any(stage.is_last for stage in stages)
    seen: set[int] = set()
    for part in stages:
        tied = tied_names(part.structure)
        for unit, named in zip(part.units, part.unit_parameters(), strict=True):
            named = [(name, p) for name, p in named if id(p) not in seen]
            seen |= {id(p) for _, p in named}
            for group in unit_groups(named, tied, unit):
                yield replace(group, tied=group.names[0] in tied and not is_within)


def tied_names(structure: Structure) -> tuple[str, ...]:
    """Return the names of a tied embedding on a first and on a last stage; none where it is not tied."""
    return (f"{structure.embedding}.weight", f"{structure.head}.weight") if structure.is_tied else ()


def unit_groups(named: Sequence[tuple[str, nn.Parameter]], tied: Sequence[str], unit: int) -> Iterator[BufferGroup]:
    """Yield the groups of one unit's trained parameters; a `tied` embedding shares its buffer with nothing."""
    for is_tied, decays, is_part in itertools.product((True, False), repeat=3):
        group = [
            (name, p)
            for name, p in named
            if (p.ndim >= 2, tensor_split(p) is not None, name in tied) == (decays, is_part, is_tied)
        ]
        if group:
            names, parameters = zip(*group, strict=True)
            yield BufferGroup(names, parameters, decays, is_part, unit, tied_name=tied[0] if tied else "")


def padded_size(num_elements: int, *data_sizes: int) -> int:
    """Return the elements of a buffer that can be cut into equal shards for any of these numbers of ranks."""
    return max(-(-num_elements // size) * size for size in data_sizes)


def frozen_bytes(stages: Sequence[StageModel]) -> int:
    """Return the bytes of weights that one rank holds without gradient or optimizer state."""
    weights = (p for stage in stages for module in stage.modules for p in module.parameters())
    return sum({id(p): p.nbytes for p in weights if not p.requires_grad}.values())


def attach(
    parameters: Sequence[nn.Parameter], shapes: Sequence[torch.Size], values: Tensor, grads: Tensor | None
) -> None:
    """Make parameters, and their `main_grad` where they are trained, views of flat buffers, one after the other."""
    sizes = [shape.numel() for shape in shapes]
    for parameter, shape, part in zip(parameters, shapes, values[: sum(sizes)].split(sizes), strict=True):
        parameter.data = part.view(shape)
    if grads is not None:
        for parameter, shape, part in zip(parameters, shapes, grads[: sum(sizes)].split(sizes), strict=True):
            parameter.main_grad = part.view(shape)  # type: ignore[attr-defined]


def add_to_main_grad(parameter: Tensor) -> None:
    """Add the gradient that autograd has accumulated to a parameter's `main_grad`; a hook."""
    if parameter.grad is None:
        # Either it changes nothing, or a path from it to the loss was not recorded; which, nobody knows here.
        raise UnsupportedModelError(
            f"a weight of shape {list(parameter.shape)} gets no gradient where replay runs it; the model is not trained"
        )
    parameter.main_grad += parameter.grad  # type: ignore[attr-defined]
    parameter.grad = None


class GradientReduction:
    """Sums one step's gradients over replicas, tied weights over both stages that hold them, and norms over a
    tensor-parallel group. `close` ends the queue after an error."""

    def __init__(self, buffers: Sequence[FlatBuffer], mesh: Mesh, *, is_overlapped: bool = False) -> None:
        self._buffers, self._mesh = buffers, mesh
        self._is_overlapped = is_overlapped
        self._has_replicated_stages = mesh.layout.has_replicated_stages
        self._shards = [buffer.shard(buffer.grads, mesh.data_rank, mesh.data_size) for buffer in buffers]
        # From the end of the model to its start. Tied ends of wide stages are summed at once in `finish`.
        summed = [at for at, buffer in enumerate(buffers) if not (buffer.tied and self._has_replicated_stages)]
        self._left = sorted(summed if mesh.data_size > 1 else [], key=lambda at: -buffers[at].unit)
        self._queued: list[int] = []  # units
        self._released: set[int] = set()
        self._squares: dict[int, Tensor] = {}
        self._queue = collective_queue(mesh.device, is_overlapped=is_overlapped and bool(self._left))

    def close(self) -> None:
        self._queue.close()

    def release(self, unit: int) -> None:
        """Mark a unit's gradients on this rank as complete. Takes no time."""
        self._released.add(unit)
        if self._is_overlapped:
            self._put_released()

    def finish(self) -> list[Tensor]:
        """Sum the rest and wait; return this rank's shard of every gradient, a view [padded / (dp·cp)]. Collective."""
        buffers, shards, mesh = self._buffers, self._shards, self._mesh
        self._released |= {buffer.unit for buffer in buffers}
        self._put_released()
        self._spans = self._queue.wait()
        for buffer, shard in zip(buffers, shards, strict=True):
            if buffer.tied:
                assert mesh.tie is not None
                # Ends with different numbers of ranks have other shards: sum the whole weight.
                tied = buffer.grads[: buffer.num_elements] if self._has_replicated_stages else shard
                dist.all_reduce(tied, op=dist.ReduceOp.SUM, group=mesh.tie)
        whole = [shard for buffer, shard in zip(buffers, shards, strict=True) if not buffer.is_part]
        if mesh.tensor is not None and whole:
            # Small, so in one transfer.
            summed = mesh.tensor.all_reduce(torch.cat(whole), "the sum of gradients of norms")
            for shard, part in zip(whole, summed.split([shard.numel() for shard in whole]), strict=True):
                shard.copy_(part)
        return shards

    def norm_and_loss(self, loss: Tensor) -> tuple[float, float]:
        """After `finish`, return the gradient's Euclidean norm, each parameter counted once, and the sum of all ranks'
        `loss`, an fp64 scalar on the device; the same on every rank. Collective."""
        mesh = self._mesh
        total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        total[1] = loss
        for at, (buffer, shard) in enumerate(zip(self._buffers, self._shards, strict=True)):
            # Counted once: the first and the last stage hold a tied weight with the same summed gradient, and every
            # rank of a tensor-parallel group holds what is not cut.
            if not (buffer.tied and mesh.is_last_stage) and (buffer.is_part or mesh.tp_rank == 0):
                total[0] += self._squares[at] if at in self._squares else _square_sum(shard)
        total = total.cpu()  # the step's only read of the device before its end
        dist.all_reduce(total, group=mesh.control)
        return float(total[0].sqrt()), float(total[1])

    def trace(self) -> NDArray[np.float64]:
        """Return starts and ends of the sums after `finish`, seconds on this rank's clock, [2, n]. Waits for a GPU."""
        return _seconds(self._queue.clock, self._spans)

    def _put_released(self) -> None:
        while self._left and self._buffers[self._left[0]].unit in self._released:
            at = self._left.pop(0)
            self._queued.append(self._buffers[at].unit)
            self._queue.put(functools.partial(self._sum, at))

    def _sum(self, at: int) -> None:
        # In place, so that it takes no memory from a backward.
        buffer, shard = self._buffers[at], self._shards[at]
        reduce_scatter_single(shard, buffer.grads, op=dist.ReduceOp.SUM, group=self._mesh.data)
        changes_later = buffer.tied or (self._mesh.tensor is not None and not buffer.is_part)
        if self._is_overlapped and not changes_later:
            self._squares[at] = _square_sum(shard)


class UpdatesInBackward(GradientReduction):
    """Has `update` called with a unit and this rank's shards of its gradients as soon as they are complete, and zeroes
    them, so that the next unit's can take their memory (`flatten_units`). What `finish` returns is zero."""

    def __init__(
        self, buffers: Sequence[FlatBuffer], mesh: Mesh, update: Callable[[int, Sequence[Tensor]], None]
    ) -> None:
        super().__init__(buffers, mesh)
        self._left.clear()  # nothing is queued: units are summed in `release`
        self._update = update

    def release(self, unit: int) -> None:
        if unit in self._released:
            return
        self._released.add(unit)
        of_unit = [at for at, buffer in enumerate(self._buffers) if buffer.unit == unit]
        for at in of_unit:
            if self._mesh.data_size > 1:
                self._sum(at)
            self._squares[at] = _square_sum(self._shards[at])
        self._update(unit, [self._shards[at] for at in of_unit])
        for at in of_unit:
            self._buffers[at].grads.zero_()

    def finish(self) -> list[Tensor]:
        for unit in sorted({buffer.unit for buffer in self._buffers}, reverse=True):
            self.release(unit)
        return super().finish()


_NORM_ELEMENTS = 2**12


def _square_sum(shard: Tensor) -> Tensor:
    """Return the sum of squares, in the shard's precision within some thousand elements, in fp64 over them: fp64 norms
    of fp32 gradients would copy them."""
    whole = shard.numel() - shard.numel() % _NORM_ELEMENTS
    parts = shard[:whole].view(-1, _NORM_ELEMENTS), shard[None, whole:]
    return torch.cat([torch.linalg.vector_norm(part, dim=1) for part in parts]).double().square().sum()


def _seconds(clock: HostClock, spans: Sequence[Span]) -> NDArray[np.float64]:
    """Return starts and ends in seconds, [2, n]."""
    return np.array([clock.seconds(span) for span in spans], np.float64).reshape(-1, 2).T


class GatherTrace(NamedTuple):
    """Records when one rank's gathers of an update ran, and its waits: starts and ends in seconds, [2, n] each."""

    gathers: NDArray[np.float64]
    waits: NDArray[np.float64]


class WeightsUnderWay(Protocol):
    """What brings whole weights to one rank while it computes: the gathers of an update, or a change of the layout."""

    def await_unit(self, unit: int) -> None:
        """Wait until a unit's weights are whole; takes no time where they are."""

    def finish(self) -> None:
        """Wait until all weights of this rank are complete; raise what went wrong."""

    def take_traces(self, mesh: Mesh) -> list[GatherTrace]:
        """Finish; return what gathers took in this layout, once."""
        ...


class WeightGathers:
    """Gathers one update's weights on one rank, overlapped with the next packs or each as it is put."""

    def __init__(self, mesh: Mesh, *, is_overlapped: bool = False) -> None:
        self.is_overlapped = is_overlapped and mesh.data_size > 1
        self._mesh = mesh
        self._queue = collective_queue(mesh.device, is_overlapped=self.is_overlapped)
        self._last: dict[int, int] = {}  # by unit that nobody has waited for, the number of its last gather
        self._waits: list[Span] = []
        self._is_taken = False

    def put(self, buffer: FlatBuffer) -> None:
        """Queue the gather of a buffer, whose shard on this rank is final."""
        if self._mesh.data_size == 1:
            return
        number = self._queue.put(functools.partial(self._gather, buffer))
        if self.is_overlapped:
            self._last[buffer.unit] = number

    def seal(self) -> None:
        self._queue.seal()

    def await_unit(self, unit: int) -> None:
        """Wait until a unit's weights are whole; takes no time where they are."""
        if self._last and (number := self._last.get(unit)) is not None:
            with self._waiting(f"the updated weights of unit {unit}"):
                self._queue.await_call(number)
            self._last.pop(unit, None)

    def finish(self) -> None:
        """Wait until all weights of this rank are complete; raise what a gather raised."""
        if self._last:
            with self._waiting("the updated weights"):
                self._queue.wait()
            self._last.clear()

    def take_traces(self, mesh: Mesh) -> list[GatherTrace]:
        """Finish; return the trace once, and none in another layout. Waits for a GPU."""
        self.finish()
        if self._is_taken or mesh is not self._mesh:
            return []
        self._is_taken = True
        clock = self._queue.clock
        return [GatherTrace(_seconds(clock, self._queue.wait()), _seconds(clock, self._waits))]

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        start = self._queue.clock.mark()
        with self._mesh.watch.waiting(what, f"the ranks that hold stage {self._mesh.pipeline_stage}"):
            yield
        self._waits.append(Span(start, self._queue.clock.mark()))

    def _gather(self, buffer: FlatBuffer) -> None:
        # A copy: its own memory is written meanwhile.
        shard = buffer.shard(buffer.values, self._mesh.data_rank, self._mesh.data_size).clone()
        all_gather_single(buffer.values, shard, group=self._mesh.data)
