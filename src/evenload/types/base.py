"""The common base of all data types: frozen, keyword-only, strict about unknown fields."""

import msgspec


class Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base struct. Tuples instead of lists, units in field names, half-open ranges."""
