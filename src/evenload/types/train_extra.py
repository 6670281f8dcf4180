"""`needs_train_extra`: what to install, instead of a traceback, where PyTorch or transformers is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from evenload.errors import MissingPackageError


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
