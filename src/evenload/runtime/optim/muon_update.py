"""Muon's update of this rank's shard of a buffer of matrices (Jordan et al. 2024; Liu et al. 2025, §2).

Momentum is elementwise, so it lies in shards as AdamW's moments do, and checkpoints and other layouts treat it alike.
Orthogonalising needs whole matrices: the shards of what is to be orthogonalised are gathered once a buffer, and every
rank orthogonalises the matrices of which it owns some elements: one that spans k shards is orthogonalised k times.

    momentum <- lerp(gradient, 1 - m)    direction = lerp(gradient, momentum, m)    (Nesterov, as `torch.optim.Muon`)
    update of a matrix = 0.2 sqrt(max(rows, columns)) NewtonSchulz(direction)       (as large as AdamW's)

Newton-Schulz runs in bfloat16, in float64 for float64 models. Price: one more gather of gradients' size a step, which
nothing hides, and five times three products of every matrix of which this rank owns a part. These are divided over the
ranks only as far as a shard holds several matrices: on many ranks, each shard a part of one matrix, every rank pays for
at least one whole matrix a buffer, however many ranks there are.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from evenload.runtime.comm.collectives import all_gather_single
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.optim.parameter_units import FlatBuffer

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7
_AS_LARGE_AS_ADAMW = 0.2


@torch.no_grad()
def muon_update(buffer: FlatBuffer, gradient: Tensor, momentum: Tensor, decay: float, mesh: Mesh) -> Tensor:
    """What the learning rate is multiplied with, of this rank's shard of a buffer, [shard] like the gradient.
    Collective over the data group; `momentum` changes.

    Args:
        decay: of momentum.
    """
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
    """First element and shape of every parameter."""
    start = 0
    for parameter in buffer.parameters:
        yield start, parameter.shape
        start += parameter.numel()


def orthogonalised(matrix: Tensor) -> Tensor:
    """About U Vᵀ of the singular value decomposition U S Vᵀ of a matrix [rows, columns], by five steps of
    Newton-Schulz; in bfloat16, for float64 in float64."""
    a, b, c = _COEFFICIENTS
    work = matrix.double() if matrix.dtype == torch.float64 else matrix.bfloat16()
    is_tall = work.shape[0] > work.shape[1]
    work = work.T if is_tall else work
    work = work / work.norm().clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = work @ work.T
        work = torch.addmm(work, torch.addmm(gram, gram, gram, beta=b, alpha=c), work, beta=a)
    return (work.T if is_tall else work).to(matrix.dtype)
