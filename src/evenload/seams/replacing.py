"""Put functions in the place of a trainer's own, wherever modules hold them, and take them back."""

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from types import TracebackType
from typing import Any, Self

from evenload.errors import ConfigError, MissingPackageError


class Replacement:
    """Hold functions that stand in for others until `uninstall()` or the end of a `with` block."""

    def __init__(self, stand_ins: Iterable[tuple[Callable, Callable]]) -> None:
        """Let each second function stand in for the first, in every module imported so far."""
        self._stand_ins = list(stand_ins)
        _swap(self._stand_ins)

    def uninstall(self) -> None:
        """Take the functions back, also in modules that were imported since; a second call does nothing."""
        _swap((ours, theirs) for theirs, ours in self._stand_ins)
        self._stand_ins = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()


def replace(
    module: str, functions: Mapping[Callable, Mapping[str, Any]], tested: str, used: Iterable[str] = ()
) -> Replacement:
    """Let each function stand in for the one of its name in a module of a trainer.

    Args:
        module: the trainer's module that defines them.
        functions: ours, and settings that each takes by name besides the trainer's arguments.
        tested: the release or commit that they were tested with, for errors.
        used: what else of that module they call.

    Raises:
        MissingPackageError: the module cannot be imported.
        ConfigError: something is missing there, a function takes other arguments, or is replaced already.
    """
    try:
        theirs = vars(import_module(module))
    except ImportError as error:
        raise MissingPackageError(f"{module} cannot be imported ({error}); install {tested}") from error
    for name in (*used, *(ours.__name__ for ours in functions)):
        if name not in theirs:
            raise ConfigError(f"there is no {module}.{name}; this seam was tested with {tested}, install that")
    stand_ins = []
    for ours, settings in functions.items():
        known = f"{module}.{ours.__name__}"
        given = theirs[ours.__name__]
        if isinstance(given, partial) and given.func is ours:
            raise ConfigError(f"{known} is replaced already; uninstall() that first")
        if _arguments(given) != _arguments(ours, settings):
            raise ConfigError(
                f"{known} takes {signature(given)}, other arguments than that of {tested}, with which this seam was "
                "tested; install that"
            )
        stand_ins.append((given, partial(ours, **settings)))
    return Replacement(stand_ins)


def _arguments(function: Callable, but: Iterable[str] = ()) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.kind, one.default) for one in signature(function).parameters.values() if one.name not in but]


def _swap(pairs: Iterable[tuple[Callable, Callable]]) -> None:
    """Put the second of each pair wherever a module's name stands for the first."""
    new = {id(old): new for old, new in pairs}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if id(value) in new]:
            names[name] = new[id(names[name])]
