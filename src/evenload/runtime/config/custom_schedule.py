"""`custom_schedule`: a learning-rate schedule that a user has written, found by "module:function". Needs no torch."""

import importlib
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from evenload.errors import ConfigError

ScheduleFunction = Callable[[int, int | None], float]
"""Given a step, from 0, and the steps of the run (None = it ends with its data), what the learning rate is multiplied
with."""


@cache
def custom_schedule(name: str) -> ScheduleFunction:
    """The function of that name; modules are looked for in the working directory first. Looked up once in a process.

    Raises:
        ConfigError: there is none, or its module cannot be imported.
    """
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ConfigError(
            f"optimizer.schedule is '{name}', not of the form module:function, such as schedules:sawtooth"
        )
    with _working_directory_first():
        try:
            found = importlib.import_module(module)
        except Exception as error:  # whatever the user's module raises while it is imported
            raise ConfigError(
                f"optimizer.schedule is '{name}', but module '{module}' cannot be imported from {Path.cwd()} or the "
                f"Python path ({type(error).__name__}: {error})"
            ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"optimizer.schedule is '{name}', but '{module}' has no '{path}'")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"optimizer.schedule is '{name}', which is a {type(found).__name__} and no function")
    return found


def custom_factor(name: str, step: int, steps: int | None) -> float:
    """What the function gives for a step. `ConfigError` where it fails, or gives no number from 0 on."""
    function = custom_schedule(name)
    try:
        factor = function(step, steps)
    except Exception as error:  # the user's own
        raise ConfigError(
            f"optimizer.schedule '{name}' failed for step {step} of {steps}: {type(error).__name__}: {error}; it is "
            "called with the step, from 0, and the number of steps (None where data.epochs ends the run)"
        ) from error
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < float("inf"):
        raise ConfigError(
            f"optimizer.schedule '{name}' gave {factor!r} for step {step} of {steps}; return what the learning rate is "
            "multiplied with, a finite number from 0 on"
        )
    return float(factor)


@contextmanager
def _working_directory_first():
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
