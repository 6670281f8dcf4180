"""A cache of calibrated cost files, keyed by everything that changes the measured seconds."""

import hashlib
import os
from pathlib import Path

import msgspec

from evenload.cost.coefficients import CostCoefficients, read_coefficients, write_coefficients
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

# Raise when calibration measures or fits differently.
_VERSION = 19


def cached_path(
    directory: Path, model: ModelSpec, layout: ParallelLayout, device_name: str, threads: int, backend: str
) -> Path:
    """Where the cost file of this model, layout and device lies, or would lie."""
    key = (_VERSION, model, layout, device_name, threads, backend)
    return directory / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:24]}.json"


def read_cached(path: Path) -> CostCoefficients | None:
    return read_coefficients(path) if os.path.isfile(path) else None  # no directory that may not be searched


def write_cached(path: Path, coefficients: CostCoefficients) -> None:
    """Keep coefficients for the next run; complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    write_coefficients(partial, coefficients)
    partial.replace(path)
