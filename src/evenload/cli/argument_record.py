"""`command_of`: a command whose arguments are the fields of a frozen dataclass, instead of dozens of parameters."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

Arguments = TypeVar("Arguments")


def command_of(kind: type[Arguments], run: Callable[[Arguments], None]) -> Callable[..., None]:
    """The function that typer makes a command of: its options are the fields of a dataclass, whose types carry typer's
    annotations; the docstring of `run` is its help text."""
    hints = get_type_hints(kind, include_extras=True)

    def command(**given: Any) -> None:
        run(kind(**given))

    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)  # type: ignore[arg-type]
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = run.__doc__
    return command
