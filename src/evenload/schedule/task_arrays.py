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


def task_arrays(tasks: PipelineTasks) -> tuple[NDArray[Any], ...]:
    """The columns of `tasks` and `tasks.held` in field order, with dtypes, shapes and memory order checked. O(1).

    Raises:
        ConfigError: a column of another dtype, shape or memory order than `PipelineTasks` documents.
    """
    seconds = tuple(_checked(tasks, f"tasks.{name}", getattr(tasks, name)) for name in _SECONDS)
    return seconds + tuple(_checked(tasks, f"tasks.held.{name}", getattr(tasks.held, name)) for name in _BYTES)


def split_arrays(tasks: PipelineTasks) -> tuple[NDArray[Any], ...] | None:
    """As `task_arrays`, for `tasks.split`; None where there is none."""
    if tasks.split is None:
        return None
    return tuple(_checked(tasks, f"tasks.split.{name}", getattr(tasks.split, name)) for name in _SPLIT)


def _checked(tasks: PipelineTasks, path: str, array: NDArray[Any]) -> NDArray[Any]:
    name = path.rpartition(".")[2]
    dtype = np.float64 if name.endswith("_s") else np.int64 if name.endswith("_bytes") else np.int32
    num_packs = tasks.num_forward if "forward_" in name else tasks.num_backward
    shape: tuple[int, ...] = (num_packs, tasks.num_stages)
    if name.startswith("p2p") or name == "forwards_needed":
        shape = (num_packs,)
    elif name in ("stage_to_rank", "static_bytes"):
        shape = (len(array),)
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ConfigError(
            f"{path} is {array.dtype}{list(array.shape)}, contiguous={array.flags.c_contiguous}; "
            f"expected contiguous {np.dtype(dtype)}{list(shape)} (packs, stages)"
        )
    return array
