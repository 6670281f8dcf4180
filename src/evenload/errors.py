"""Define every error Evenload raises on purpose: one line with values, limit and fix that needs no traceback.

`exit_code` is what the command line returns for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


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
