"""Flatten the parameters of units into buffers that are cut into data-parallel shards.

Parameters become views of a flat buffer in compute precision, gradients (`parameter.main_grad`) views of a flat fp32
buffer (fp64 for fp64). Buffers are separate by unit, because a change of stages moves whole units, and by whether they
have weight decay (matrices) or not (norms, biases).
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from evenload.attention.range_attention import work_dtype
from evenload.errors import UnsupportedModelError
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
            add_gradients_of_autograd(parameter)
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
    return sum({id(p): p.nbytes for stage in stages for p in stage.frozen_parameters()}.values())


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


def add_gradients_of_autograd(parameter: nn.Parameter) -> None:
    """Make autograd add a parameter's gradients to its `main_grad`."""
    parameter.register_post_accumulate_grad_hook(_add_to_main_grad)


def _add_to_main_grad(parameter: Tensor) -> None:
    if parameter.grad is None:
        # Either it changes nothing, or a path from it to the loss was not recorded; which, nobody knows here.
        raise UnsupportedModelError(
            f"a weight of shape {list(parameter.shape)} gets no gradient where replay runs it; the model is not trained"
        )
    parameter.main_grad += parameter.grad  # type: ignore[attr-defined]
    parameter.grad = None
