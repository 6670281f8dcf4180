"""Put functions in the place of a framework's own, in its classes and in all modules, and take them back."""

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from types import ModuleType
from typing import Any, Self

from evenload.errors import ConfigError, MissingPackageError


class Replaced:
    """Hold functions that stand in for others until `uninstall()` or the end of a `with` block.

    Args:
        tested: the release or commit that they were tested with, for errors.
        ours: a module or class of the framework, and a function that stands in for the one of its name there; what a
            `partial` gives by name are no arguments of theirs.

    Raises:
        ConfigError: a function is missing, takes other arguments, or is replaced already; then none is replaced.
    """

    def __init__(self, tested: str, *ours: tuple[ModuleType | type, Callable]) -> None:
        self._owners, self._pairs = [owner for owner, _ in ours], []
        for owner, function in ours:
            name = getattr(function, "func", function).__name__
            theirs, known = vars(owner).get(name), f"{owner.__name__}.{name}"
            if hasattr(theirs, "_of_evenload"):
                raise ConfigError(f"{known} is replaced already; uninstall() that first")
            if not callable(theirs) or _arguments(theirs) != _arguments(function):
                found = f"takes {signature(theirs)}" if callable(theirs) else "does not exist"
                raise ConfigError(f"{known} {found}, other than in {tested}, with which this was tested; install that")
            self._pairs.append((theirs, function))
        for _, function in self._pairs:
            function._of_evenload = True
        _swap(self._pairs, self._owners)

    def uninstall(self) -> None:
        """Take the functions back, also in modules that were imported since; a second call does nothing."""
        _swap([(ours, theirs) for theirs, ours in self._pairs], self._owners)
        self._pairs = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()


def module_of(name: str, tested: str, used: Sequence[str] = ()) -> ModuleType:
    """Import a framework's module; refuse one that is not installed, or that lacks something that a seam calls."""
    try:
        module = import_module(name)
    except ImportError as error:
        raise MissingPackageError(f"{name} cannot be imported ({error}); install {tested}") from error
    if missing := [one for one in used if one not in vars(module)]:
        raise ConfigError(f"there is no {name}.{missing[0]}; this seam was tested with {tested}, install that")
    return module


def require_release(package: str, releases: Sequence[str]) -> str:
    """Return a package and its release; refuse one that is not installed, or is none of these ("5.23": all 5.23.x)."""
    known = " or ".join(releases)
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise MissingPackageError(f"{package} is not installed; this seam was tested with {known}") from error
    if not any(found == one or found.startswith(f"{one}.") for one in releases):
        raise ConfigError(f"{package} is {found}, this seam was tested with {known}; install one of them")
    return f"{package} {found}"


def _arguments(function: Callable) -> list[tuple[str, Any, Any]]:
    ours = getattr(function, "keywords", {})
    return [
        (one.name, one.kind, one.default) for one in signature(function).parameters.values() if one.name not in ours
    ]


def _swap(pairs: Iterable[tuple[Callable, Callable]], owners: Iterable[ModuleType | type]) -> None:
    """Put the second of each pair wherever a name of a module, or of these classes, stands for the first."""
    new = {id(old): new for old, new in pairs}
    for holder in [*sys.modules.values(), *owners]:
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if id(value) in new:
                setattr(holder, name, new[id(value)])
