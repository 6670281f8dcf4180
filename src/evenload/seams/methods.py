"""Put our methods in the place of those of a framework's classes, and take them back.

A class is one object in all modules that have imported it, so its methods are replaced for all of them. Only releases
that a seam was tested with are accepted, because what a private method takes and returns may differ in others.
"""

import inspect
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, NamedTuple, Self

from evenload.errors import ConfigError, MissingPackageError


class Method(NamedTuple):
    """Name a method of a class, the parameters it must have, and the function that makes ours from it."""

    owner: type
    name: str
    parameters: Sequence[str]
    ours: Callable[[Callable], Callable]


class Replaced:
    """Hold methods that stand in for others until `uninstall()` or the end of a `with` block.

    Args:
        methods: to replace; a `ConfigError`, and none is replaced, where one takes other parameters than were tested or
            is replaced already.
    """

    def __init__(self, *methods: Method) -> None:
        for owner, name, parameters, _ in methods:
            theirs, known = vars(owner).get(name), f"{owner.__module__}.{owner.__qualname__}.{name}"
            if hasattr(theirs, "_of_evenload"):
                raise ConfigError(f"{known} is replaced already; uninstall() that first")
            if not callable(theirs) or [*inspect.signature(theirs).parameters] != [*parameters]:
                found = inspect.signature(theirs) if callable(theirs) else "does not exist"
                raise ConfigError(f"{known} {found} was tested with ({', '.join(parameters)}); use a tested release")
        self._theirs = [(owner, name, vars(owner)[name]) for owner, name, _, _ in methods]
        for owner, name, _, ours in methods:
            method: Any = ours(vars(owner)[name])
            method._of_evenload = True
            setattr(owner, name, method)

    def uninstall(self) -> None:
        """Put the framework's methods back; a second call does nothing."""
        for owner, name, theirs in self._theirs:
            setattr(owner, name, theirs)
        self._theirs = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()


def require_release(package: str, releases: Sequence[str]) -> None:
    """Refuse a package that is not installed, or of none of these releases ("5.23" is every 5.23.x)."""
    known = " or ".join(releases)
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise MissingPackageError(f"{package} is not installed; this seam was tested with {known}") from error
    if not any(found == one or found.startswith(f"{one}.") for one in releases):
        raise ConfigError(f"{package} is {found}, this seam was tested with {known}; install one of them")
