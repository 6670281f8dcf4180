"""`PipelineTasks` checked once, as the plain tuple that the native core takes."""

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.types.pipeline import PipelineTasks, SplitBackward

_DTYPES: dict[str, tuple[type[np.generic], int]] = {
    "forward_s": (np.float64, 2),
    "backward_s": (np.float64, 2),
    "p2p_forward_s": (np.float64, 1),
    "p2p_backward_s": (np.float64, 1),
    "forwards_needed": (np.int32, 1),
    "stage_to_rank": (np.int32, 1),
    "static_bytes": (np.int64, 1),
    "forward_kept_bytes": (np.int64, 2),
    "forward_temp_bytes": (np.int64, 2),
    "backward_freed_bytes": (np.int64, 2),
    "backward_temp_bytes": (np.int64, 2),
}
_NAMES = tuple(field.name for field in fields(PipelineTasks) if field.name != "split")
_SPLIT_NAMES = tuple(field.name for field in fields(SplitBackward))


def task_arrays(tasks: PipelineTasks) -> tuple[NDArray[Any], ...]:
    """The columns of `tasks` in field order, with dtypes, shapes and memory order checked. O(1).

    Raises:
        ConfigError: a column of another dtype, shape or memory order than `PipelineTasks` documents.
    """
    arrays = tuple(getattr(tasks, name) for name in _NAMES)
    m_f, m_b, num_stages = len(tasks.forward_s), len(tasks.backward_s), len(tasks.stage_to_rank)
    for name, array in zip(_NAMES, arrays, strict=True):
        dtype, ndim = _DTYPES[name]
        if array.dtype != dtype or array.ndim != ndim or not array.flags.c_contiguous:
            raise ConfigError(
                f"tasks.{name} is {array.dtype}{list(array.shape)}, contiguous={array.flags.c_contiguous}; "
                f"expected contiguous {np.dtype(dtype)} with {ndim} dimensions"
            )
        rows = m_b if "backward" in name or name == "forwards_needed" else m_f
        shape = (rows, num_stages) if ndim == 2 else (rows,)
        if name not in ("stage_to_rank", "static_bytes") and array.shape != shape:
            raise ConfigError(f"tasks.{name} has shape {array.shape}, expected {shape} (packs, stages)")
    return arrays


def split_arrays(tasks: PipelineTasks) -> tuple[NDArray[Any], ...] | None:
    """As `task_arrays`, for `tasks.split`; None where there is none."""
    if tasks.split is None:
        return None
    arrays = tuple(getattr(tasks.split, name) for name in _SPLIT_NAMES)
    shape = (tasks.num_backward, tasks.num_stages)
    for name, array in zip(_SPLIT_NAMES, arrays, strict=True):
        dtype = np.float64 if name.endswith("_s") else np.int64
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            raise ConfigError(
                f"tasks.split.{name} is {array.dtype}{list(array.shape)}, contiguous={array.flags.c_contiguous}; "
                f"expected contiguous {np.dtype(dtype)}{list(shape)} (packs, stages)"
            )
    return arrays


def check_values(tasks: PipelineTasks) -> None:
    """What the native core checks about values, for its Python twins. O(packs * stages).

    Raises:
        ConfigError: a negative or non-finite duration, `forwards_needed` or a rank out of range.
    """
    for name in ("forward_s", "backward_s", "p2p_forward_s", "p2p_backward_s"):
        values = getattr(tasks, name)
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ConfigError(f"{name} holds a negative or non-finite duration: {values.min()} .. {values.max()}")
    for name in ("input_s", "weight_s") if tasks.split else ():
        values = getattr(tasks.split, name)
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ConfigError(f"{name} holds a negative or non-finite duration: {values.min()} .. {values.max()}")
    for name, limit in (("forwards_needed", tasks.num_forward + 1), ("stage_to_rank", tasks.num_ranks)):
        values = getattr(tasks, name)
        if len(values) and not 0 <= values.min() <= values.max() < limit:
            raise ConfigError(f"{name} holds {values.min()} .. {values.max()}, not in 0..{limit - 1}")
