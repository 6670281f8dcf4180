"""Process groups that meshes really make, as one rank of a `GlooPool`."""

import torch

from evenload.runtime.comm.mesh import create_meshes
from evenload.types.layout import ParallelLayout
from gloo_pool import TIMEOUT_S


def groups_made(layouts: tuple[ParallelLayout, ...]) -> int:
    """Of a run that may take these layouts."""
    return create_meshes(layouts, torch.device("cpu"), TIMEOUT_S).num_groups
