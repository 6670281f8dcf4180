"""Machines with different memory: every rank plans for the least."""

import torch
import torch.distributed as dist

from evenload.cli.worker_setup import least_of_all
from evenload.runtime.comm.mesh import create_meshes
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S


def memory_of_all(num_bytes: list[int]) -> int:
    mesh = create_meshes([even_layout(2, pp=2)], torch.device("cpu"), TIMEOUT_S).start
    return least_of_all(num_bytes[dist.get_rank()], mesh)


def test_every_rank_has_the_least_of_all(gloo_pool):
    assert gloo_pool.run(2, memory_of_all, [2**40 + 1, 2**35 + 3]) == [2**35 + 3] * 2
