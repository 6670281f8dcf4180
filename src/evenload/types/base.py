"""The common base of all data types: frozen, keyword-only, strict about unknown fields."""

import os
from typing import Annotated, Any, dataclass_transform, get_args, get_type_hints

import msgspec

from evenload.errors import ConfigError

PathText = Annotated[str, "path"]
"""A setting that is the path of a file or folder here; `write_out_home` knows it by this type."""


# msgspec hands `frozen` and `forbid_unknown_fields` down to subclasses, but not `kw_only`.
@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class _FrozenMeta(msgspec.StructMeta):
    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any) -> type:
        config.setdefault("kw_only", True)
        return super().__new__(mcls, name, bases, namespace, **config)


class Frozen(msgspec.Struct, metaclass=_FrozenMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base struct. Tuples instead of lists, units in field names, half-open ranges."""


def write_out_home(settings: Frozen) -> None:
    """Replace `~` at the beginning of every `PathText` of a struct that is being made; a `ConfigError` where nobody has
    that home."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        if PathText in (hint, *get_args(hint)) and (value := getattr(settings, name) or "").startswith("~"):
            if (path := os.path.expanduser(value)) == value:
                raise ConfigError(f"{name} is '{value}', and no such home is known; ./{value} is a path here")
            msgspec.structs.force_setattr(settings, name, path)
