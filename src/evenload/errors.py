"""Define every error Evenload raises on purpose: one line with values, limit and fix that needs no traceback; and find
the nearest of the known names for a misspelt one (`did_you_mean`, `refusing_unknown`).

`exit_code` is what the command line returns for it.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import ParamSpec, TypeVar


class EvenloadError(Exception):
    """Base of all deliberate errors."""

    exit_code = 2


class ConfigError(EvenloadError, ValueError):
    """A setting, a layout or a combination of features that cannot work."""


def unreadable(what: str, error: OSError) -> ConfigError:
    """Return the error of a file that a user names; `what` says which."""
    return ConfigError(f"{what} cannot be read: {error.strerror or error}")


class MissingPackageError(EvenloadError, ImportError):
    """Packages of an optional part of Evenload are not installed."""


class DataError(EvenloadError, ValueError):
    """A document source that cannot be read or a document that breaks a limit."""


class CheckpointError(EvenloadError):
    """A checkpoint that could not be written; earlier ones are intact."""


class RankLostError(EvenloadError):
    """Another rank did not do its part of a step: it died, is stuck, or stopped by an error of its own."""


class NonFiniteStepError(EvenloadError):
    """The loss or the gradient of a step is NaN or infinite; its update was not applied."""


class CallbackError(EvenloadError):
    """A callback of the user raised an exception, which stopped the run."""


class UnsupportedModelError(EvenloadError):
    """A model part that replay cannot run exactly; named, never run wrong."""


class InfeasiblePlanError(EvenloadError):
    """No plan satisfies the limits (usually memory)."""

    exit_code = 3


class InvalidPlanError(EvenloadError):
    """A plan breaks an invariant (coverage, order, caps, digest)."""

    exit_code = 1


class ScheduleDeadlockError(InvalidPlanError):
    """A schedule whose actions wait for each other in a circle."""


@contextmanager
def needs_train_extra(what: str) -> Iterator[None]:
    """Turn a failed import of what trains into a `MissingPackageError` with the command that installs it; `what` is
    imported, as the user calls it: "evenload train"."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "evenload":
            raise  # a fault of ours, which installing something does not mend
        raise MissingPackageError(
            f"{what} needs PyTorch and transformers, which cannot be imported here ({error}); install them with: "
            "pip install 'evenload[train]'"
        ) from error


def require_train_extra(what: str) -> None:
    """Raise as `needs_train_extra`, without importing the packages, which takes seconds."""
    with needs_train_extra(what):
        for name in ("torch", "transformers"):
            if find_spec(name) is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)


LEAST_SIMILARITY = 0.4  # of 1; among few choices a name that shares half of its letters is usually what was meant


def nearest_name(name: str, known: Iterable[str], similarity: float = LEAST_SIMILARITY) -> str | None:
    """Return the most similar of `known`, upper and lower case alike; None where none is similar."""
    by_lower = {one.lower(): one for one in known}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str], similarity: float = LEAST_SIMILARITY) -> str:
    """Return "did you mean 'x'? ", to stand before the list of choices; "" where nothing is similar."""
    near = nearest_name(name, known, similarity)
    return f"did you mean '{near}'? " if near else ""


Given = ParamSpec("Given")
Result = TypeVar("Result")


def refusing_unknown(
    name: str, further: Iterable[str] = (), explain: Callable[[str], str] = lambda _: ""
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Make the function `name` refuse keyword arguments that neither it nor its `**` (`further`) knows, with a
    `ConfigError` that gives the nearest name, or what `explain` says of one that other libraries have."""

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        own = inspect.signature(function).parameters.values()
        known = (*(one.name for one in own if one.kind is not one.VAR_KEYWORD and one.name != "self"), *further)

        @functools.wraps(function)
        def checked(*args: Given.args, **given: Given.kwargs) -> Result:
            if wrong := next((one for one in given if one not in known), None):
                why = explain(wrong) or did_you_mean(wrong, known, 0.6).strip() or f"it takes {', '.join(known)}"
                raise ConfigError(f"{name} has no '{wrong}'; {why}")
            return function(*args, **given)

        return checked

    return decorate
