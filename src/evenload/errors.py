"""Every error Evenload raises on purpose.

A message says what is wrong, the values, the limit and the fix, so that it can be shown to a
user as one line without a traceback. `exit_code` is what the command line returns for it.
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
    """Of a file that a user names: `what` says which."""
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
    """Code that a user gave a run to be told how it goes raised an exception, which stopped the run."""


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
    """Around imports of what trains.

    Args:
        what: is imported, as the user calls it: "evenload train".

    Raises:
        MissingPackageError: one of the packages is not installed or cannot be loaded, with the command that installs
            all of them.
    """
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
    """The same at once and without importing them, which takes seconds.

    Raises:
        MissingPackageError: as `needs_train_extra`.
    """
    with needs_train_extra(what):
        for name in ("torch", "transformers"):
            if find_spec(name) is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
