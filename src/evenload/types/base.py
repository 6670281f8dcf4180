"""Define what all types share: the frozen, strict struct (`Frozen`), and registries that packages add to
(`Registry`)."""

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Annotated, Any, Generic, Protocol, TypeVar, dataclass_transform, get_args, get_type_hints

import msgspec

from evenload.errors import ConfigError, did_you_mean

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


def require_at_least_one(what: str, settings: object, *fields: str) -> None:
    """Raise a `ConfigError` for the first of these fields that is set and below 1; `what` stands before its name."""
    for field in fields:
        if (value := getattr(settings, field)) is not None and value < 1:
            raise ConfigError(f"{what}{field} is {value}, must be at least 1")


class Named(Protocol):
    """A record of a registry."""

    @property
    def name(self) -> str:
        """By which users choose it."""
        ...


Record = TypeVar("Record", bound=Named)


class Registry(Mapping[str, Record], Generic[Record]):
    """Map names to records: built-in ones, registered ones, and those of installed packages, by entry points such as
    `toy = "toy_package.strategy:TOY"`, which are read once, at the first use.

    Args:
        what: what messages call a record: "strategy".
        kind: class of the records.
        group: of entry points, whose values are records.
        built_in: records of this package.
    """

    def __init__(self, what: str, kind: type[Record], group: str, built_in: Sequence[Record]) -> None:
        self.group = group
        self.built_in = {record.name: record for record in built_in}
        self._what, self._kind = what, kind
        self._registered: dict[str, Record] = {}
        self._discovered: dict[str, Record] | None = None

    def register(self, record: Record) -> None:
        """Add a record in this process; `ConfigError` where it is no record of this registry, or its name is taken."""
        self._require_new(record, dict(self), f"register({record!r})")
        self._registered[record.name] = record

    def named(self, name: str) -> Record:
        """Return the record of a name; `ConfigError` where it is unknown, with the nearest name, or where an entry
        point cannot be used."""
        records = self._records()
        if name in records:
            return records[name]
        raise ConfigError(
            f"unknown {self._what} '{name}'; {did_you_mean(name, records)}available: {', '.join(records)}"
        )

    def __getitem__(self, name: str) -> Record:
        return self._records()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records())

    def __len__(self) -> int:
        return len(self._records())

    def _records(self) -> dict[str, Record]:
        if self._discovered is None:
            discovered: dict[str, Record] = {}
            for entry in sorted(entry_points(group=self.group), key=lambda entry: entry.name):
                package = f" of package {entry.dist.name}" if entry.dist else ""
                origin = f"entry point {entry.group}: {entry.name} = {entry.value}{package}"
                try:
                    record = entry.load()
                except (ImportError, AttributeError) as error:
                    raise ConfigError(
                        f"{origin} cannot be loaded: {error}; repair the package or uninstall it"
                    ) from error
                self._require_new(record, self.built_in | discovered, origin)
                discovered[record.name] = record
            self._discovered = discovered
        return self.built_in | self._discovered | self._registered

    def _require_new(self, record: object, known: Mapping[str, Record], origin: str) -> None:
        if not isinstance(record, self._kind):
            raise ConfigError(
                f"{origin}: a {type(record).__name__}, expected a {self._kind.__name__} (a {self._what} is one record)"
            )
        if record.name in known:
            raise ConfigError(f"{origin}: {self._what} '{record.name}' exists already; choose another name")
