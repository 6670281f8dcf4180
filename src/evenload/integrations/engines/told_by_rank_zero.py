"""`told_by_rank_zero`: what rank 0 finds on its disk, on all ranks; what fails there fails on all of them.

Ranks that looked for themselves could find different things (folders of their own nodes), and those that go on would
wait for ever for those that raise.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from evenload.errors import CheckpointError

Found = TypeVar("Found")


def told_by_rank_zero(find: Callable[[], Found], failure: str) -> Found:
    """What `find` returns on rank 0, the only one that calls it. Collective; without a process group, alone.

    Args:
        find: something that can be pickled.
        failure: what could not be done, for messages.

    Raises:
        CheckpointError: on all ranks, where `find` raises one or an `OSError` on rank 0.
    """
    if not dist.is_available() or not dist.is_initialized():
        found, message = _attempt(find, failure)
    else:
        told: list[Any] = list(_attempt(find, failure)) if dist.get_rank() == 0 else [None, None]
        dist.broadcast_object_list(told, src=0)
        found, message = told
    if message is not None:
        raise CheckpointError(message)
    return found


def _attempt(find: Callable[[], Any], failure: str) -> tuple[Any, str | None]:
    try:
        return find(), None
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{failure}: {error}"
