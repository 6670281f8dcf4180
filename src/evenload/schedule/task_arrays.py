"""`PipelineTasks` checked once, as the plain tuple that the native core takes."""

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.types.pipeline import PackBytes, PipelineTasks, SplitBackward

_SECONDS = tuple(field.name for field in fields(PipelineTasks) if field.name not in ("held", "split"))
_BYTES = tuple(field.name for field in fields(PackBytes))
_SPLIT = tuple(field.name for field in fields(SplitBackward))
_OF_STAGE_OR_RANK = ("stage_to_rank", "static_bytes")
_OF_PACK = ("p2p_forward_s", "p2p_backward_s", "forwards_needed")
_DTYPES = {
    name: np.dtype(np.float64 if name.endswith("_s") else np.int64 if name.endswith("_bytes") else np.int32)
    for name in (*_SECONDS, *_BYTES, *_SPLIT)
}


def task_arrays(tasks: PipelineTasks) -> tuple[NDArray[Any], ...]:
    """The columns of `tasks` and `tasks.held` in field order, with dtypes, shapes and memory order checked. O(1).

    Raises:
        ConfigError: a column of another dtype, shape or memory order than `PipelineTasks` documents.
    """
    return _checked(tasks, "tasks", tasks, _SECONDS) + _checked(tasks, "tasks.held", tasks.held, _BYTES)


def split_arrays(tasks: PipelineTasks) -> tuple[NDArray[Any], ...] | None:
    """As `task_arrays`, for `tasks.split`; None where there is none."""
    return None if tasks.split is None else _checked(tasks, "tasks.split", tasks.split, _SPLIT)


def _checked(tasks: PipelineTasks, path: str, part: object, names: tuple[str, ...]) -> tuple[NDArray[Any], ...]:
    num_forward, num_backward, num_stages = tasks.num_forward, tasks.num_backward, tasks.num_stages
    arrays = tuple([getattr(part, name) for name in names])
    for name, array in zip(names, arrays, strict=True):
        shape: tuple[int, ...] = (num_forward if "forward_" in name else num_backward, num_stages)
        if name in _OF_PACK:
            shape = shape[:1]
        elif name in _OF_STAGE_OR_RANK:
            shape = (len(array),)
        if array.dtype != _DTYPES[name] or array.shape != shape or not array.flags.c_contiguous:
            raise ConfigError(
                f"{path}.{name} is {array.dtype}{list(array.shape)}, contiguous={array.flags.c_contiguous}; "
                f"expected contiguous {_DTYPES[name]}{list(shape)} (packs, stages)"
            )
    return arrays
