"""A `Timeline` on disk: numpy's compressed archive of its columns."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from evenload.errors import DataError
from evenload.types.timeline import Timeline


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write all columns to a `.npz` file."""
    columns: dict[str, Any] = {f.name: np.asarray(getattr(timeline, f.name)) for f in fields(Timeline)}
    np.savez_compressed(path, **columns)


def read_timeline(path: Path) -> Timeline:
    """Inverse of `write_timeline`.

    Raises:
        DataError: not such a file.
    """
    try:
        with np.load(path) as columns:
            values = {f.name: columns[f.name] for f in fields(Timeline)}
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{path} is not a timeline file: {error}") from error
    return Timeline(**{**values, "step_time_s": float(values["step_time_s"])})
