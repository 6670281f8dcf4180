"""Revisions of a model of the Hub on ranks of a `GlooPool`."""

import torch

from evenload.errors import ConfigError
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.stages.rank_stages import require_same_revision
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S


def told_of_revisions(path: str, folders: tuple[str, ...]) -> str:
    """What this rank is told where the ranks load these folders; "" = nothing."""
    mesh = create_meshes([even_layout(2, dp=len(folders))], torch.device("cpu"), TIMEOUT_S).start
    try:
        require_same_revision(path, folders[mesh.rank], mesh)
    except ConfigError as error:
        return str(error)
    return ""
