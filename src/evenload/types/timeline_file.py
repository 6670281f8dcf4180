"""A `Timeline` on disk: numpy's compressed archive of its columns; columns that are not known are left out."""

from dataclasses import fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from evenload.errors import DataError
from evenload.types.timeline import SideTasks, Timeline

_SIDE = "side."
_OPTIONAL = ("is_critical", "memory_kind_bytes")
_ALWAYS = tuple(f.name for f in fields(Timeline) if f.name not in (*_OPTIONAL, "side"))


def write_timeline(path: Path | IO[bytes], timeline: Timeline) -> None:
    """Write all columns to a `.npz` file, or to an open one."""
    known = (*_ALWAYS, *(name for name in _OPTIONAL if getattr(timeline, name) is not None))
    columns: dict[str, Any] = {name: np.asarray(getattr(timeline, name)) for name in known}
    if timeline.side is not None:
        columns |= {_SIDE + f.name: getattr(timeline.side, f.name) for f in fields(SideTasks)}
    np.savez_compressed(path, **columns)


def read_timeline(path: Path | IO[bytes]) -> Timeline:
    """Inverse of `write_timeline`.

    Raises:
        DataError: not such a file.
    """
    try:
        with np.load(path) as columns:
            values: dict[str, Any] = {
                name: columns[name] for name in (*_ALWAYS, *(name for name in _OPTIONAL if name in columns))
            }
            side = None
            if _SIDE + "kind" in columns:
                side = SideTasks(**{f.name: columns[_SIDE + f.name] for f in fields(SideTasks)})
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{path} is not a timeline file: {error}") from error
    values["step_time_s"] = float(values["step_time_s"])
    return Timeline(**values, side=side)
