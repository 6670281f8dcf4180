"""One number a rank: the largest or the smallest of all, the same on every rank, so that all decide alike."""

import torch
import torch.distributed as dist

from evenload.runtime.comm.mesh import Mesh


def most_of_ranks(value: float, mesh: Mesh) -> float:
    """The largest that any rank has; whole numbers to 2^53 stay exact. Collective over the control group."""
    return _reduced(value, dist.ReduceOp.MAX, mesh)


def least_of_ranks(value: float, mesh: Mesh) -> float:
    """As `most_of_ranks`, the smallest."""
    return _reduced(value, dist.ReduceOp.MIN, mesh)


def _reduced(value: float, op: dist.ReduceOp.RedOpType, mesh: Mesh) -> float:
    told = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(told, op=op, group=mesh.control)
    return float(told)
