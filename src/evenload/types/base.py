"""The common base of all data types: frozen, keyword-only, strict about unknown fields."""

from typing import Any, dataclass_transform

import msgspec


# msgspec hands `frozen` and `forbid_unknown_fields` down to subclasses, but not `kw_only`.
@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class _FrozenMeta(msgspec.StructMeta):
    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any) -> type:
        config.setdefault("kw_only", True)
        return super().__new__(mcls, name, bases, namespace, **config)


class Frozen(msgspec.Struct, metaclass=_FrozenMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base struct. Tuples instead of lists, units in field names, half-open ranges."""
