"""Gradients of all replicas summed into shards; the global gradient norm and the global loss.

The loss of every rank is already divided by the label count of the *global* batch (known from the plan),
so gradients are summed, never averaged: ranks may hold any number of packs, tokens or labels.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.runtime.comm.collectives import reduce_scatter_single
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.optim.parameter_units import FlatBuffer


def reduce_gradients(buffers: list[FlatBuffer], mesh: Mesh) -> list[Tensor]:
    """Sum `grads` of every buffer over the replicas and, for tied weights, over both stages that hold them.

    Where a tensor-parallel group holds a parameter whole (norms), every rank has the gradient of its rows or heads, and
    they are summed too.

    Returns:
        This rank's shard of every buffer's gradient, [padded / (dp·cp)] each.
    """
    shards = []
    if mesh.layout.has_wide_stages and mesh.tie is not None:
        _sum_tied_ends(buffers, mesh)
    for buffer in buffers:
        shard = buffer.shard(buffer.grads, mesh.data_rank, mesh.data_size)
        if mesh.data_size > 1 and not (buffer.tied and mesh.layout.has_wide_stages):
            shard = torch.empty_like(shard)
            reduce_scatter_single(shard, buffer.grads, op=dist.ReduceOp.SUM, group=mesh.data)
        shards.append(shard)
    for buffer, shard in zip(buffers, shards, strict=True):
        if buffer.tied and not mesh.layout.has_wide_stages:
            assert mesh.tie is not None
            dist.all_reduce(shard, op=dist.ReduceOp.SUM, group=mesh.tie)
    whole = [shard for buffer, shard in zip(buffers, shards, strict=True) if not buffer.is_part]
    if mesh.tensor is not None and whole:
        # They are small: in one transfer.
        summed = mesh.tensor.all_reduce(torch.cat(whole), "the sum of gradients of norms")
        for shard, part in zip(whole, summed.split([shard.numel() for shard in whole]), strict=True):
            shard.copy_(part)
    return shards


def _sum_tied_ends(buffers: list[FlatBuffer], mesh: Mesh) -> None:
    """Over all ranks of both ends at once, in place: where these are not as many at either end, their shards are not
    the same elements. Price: an all-reduce of the whole weight in place of a reduce-scatter and one of shards."""
    for buffer in buffers:
        if buffer.tied:
            dist.all_reduce(buffer.grads[: buffer.num_elements], op=dist.ReduceOp.SUM, group=mesh.tie)


def global_norm_and_loss(
    buffers: list[FlatBuffer], shards: list[Tensor], loss: Tensor, mesh: Mesh
) -> tuple[float, float]:
    """Euclidean norm of the gradient over all parameters of the model, each counted once, and the sum of all ranks'
    shares of the loss; the same numbers on every rank, so that all decide alike whether to take the step.

    Collective over the control group.

    Args:
        loss: fp64 scalar on the device, this rank's share.
    """
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    total[1] = loss
    for buffer, shard in zip(buffers, shards, strict=True):
        # A tied weight is held by the first and the last stage with the same summed gradient, and what is not cut by
        # every rank of a tensor-parallel group.
        if not (buffer.tied and mesh.is_last_stage) and (buffer.is_part or mesh.tp_rank == 0):
            total[0] += torch.linalg.vector_norm(shard, dtype=torch.float64).square()
    total = total.cpu()  # The step's only read of the device before its end: clipping and metrics need it.
    dist.all_reduce(total, group=mesh.control)
    return float(total[0].sqrt()), float(total[1])
