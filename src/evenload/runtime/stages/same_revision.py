"""`require_same_revision`: every rank takes a model of the Hub in the same revision.

Without "@revision" each machine takes what its own cache calls the newest, and those may be of different days.
"""

from pathlib import Path

import torch.distributed as dist

from evenload.errors import ConfigError
from evenload.runtime.comm.mesh import Mesh


def require_same_revision(path: str, folder: str, mesh: Mesh) -> None:
    """A `ConfigError` on all ranks where they would load different revisions. Collective over the control group.

    Args:
        path: `model.path`.
        folder: what this rank loads; `path` itself where it lies here.
    """
    # A folder of a cache is called as the revision is.
    mine = None if folder == path else Path(folder).name
    everyone: list[str | None] = [None] * mesh.num_ranks
    dist.all_gather_object(everyone, mine, group=mesh.control)
    if len(set(everyone)) == 1:
        return
    by_revision = {
        one: [rank for rank, other in enumerate(everyone) if other == one] for one in dict.fromkeys(everyone)
    }
    told = "; ".join(f"{one or 'a folder of that name'} on ranks {ranks}" for one, ranks in by_revision.items())
    first = next(one for one in everyone if one is not None)
    raise ConfigError(
        f"model.path '{path}' is not the same on all ranks: {told}; name one revision, such as model.path = "
        f'"{path.partition("@")[0]}@{first}", or give a folder that all machines reach'
    )
