"""Find out what records hold, where `data.record` is "auto" (`with_kinds`).

The first records of every file decide, of tables their columns, unless a setting names a column. Nothing is guessed:
records that could be of two kinds, and files of different kinds, are errors. All ranks find the same. Price: every file
is opened once, several at a time, but those of text or of ids alone.
"""

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import msgspec

from evenload.data.config import DataConfig, mixture_configs
from evenload.data.part_files import HELD, column_reader, list_files
from evenload.data.records import KIND_FIELDS, FilePart, RecordReader
from evenload.data.sources import SourceFile
from evenload.errors import ConfigError, DataError

_FIRST_RECORDS = 100  # of a file
_MOST_DAMAGED = 900  # that are passed over to find these
_THREADS = 16
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(DataConfig)}
_KIND_OF_SETTING = {name: kind for kind, names in KIND_FIELDS.items() for name in names if name in _DEFAULTS}
_KEYS = {kind: [key for name in names if (key := _DEFAULTS.get(name, name))] for kind, names in KIND_FIELDS.items()}
"""Keys by which a kind of record is known."""


def with_kinds(config: DataConfig, datasets: Mapping[str, Any] | None = None) -> DataConfig:
    """Return settings in which `record` is no longer "auto"; `datasets` are Hugging Face's by source name. Raises
    `DataError` for records of no kind or of several, `ConfigError` where a setting has to choose."""
    parts = mixture_configs(config)
    kinds = [_named_kind(part) or _found_kind(part, datasets or {}) if part.record == "auto" else "" for part in parts]
    if not config.mixture:
        return msgspec.structs.replace(config, record=kinds[0]) if kinds[0] else config
    # What holds for all parts, "text", is what states of earlier runs say.
    mixture = (
        msgspec.structs.replace(part, record=None if kind == "text" and config.record == "auto" else kind)
        if kind
        else part
        for part, kind in zip(config.mixture, kinds, strict=True)
    )
    record = "text" if config.record == "auto" else config.record
    return msgspec.structs.replace(config, record=record, mixture=tuple(mixture))


def kinds_text(parts: Iterable[DataConfig]) -> str:
    """Say how the records of parts, whose kinds are known, are read; "" of no part."""
    kinds = []
    for part in parts:
        columns = filter(None, (getattr(part, name, name) for name in KIND_FIELDS[part.record]))
        template = f", written by chat template {part.chat_template}" if part.chat_template else ""
        kinds.append(f"records are read as {part.record} ({', '.join(columns)}){template}")
    return "; ".join(dict.fromkeys(kinds))


def kinds_of(keys: Iterable[str]) -> list[str]:
    """Return the kinds of record that have all of their keys among these; messages come with prompts of their own."""
    kinds = [kind for kind, needed in _KEYS.items() if set(needed) <= set(keys)]
    return [kind for kind in kinds if kind != "prompt_completion" or "messages" not in kinds]


def _named_kind(config: DataConfig) -> str | None:
    named = {name: kind for name, kind in _KIND_OF_SETTING.items() if getattr(config, name) != _DEFAULTS[name]}
    if len(set(named.values())) > 1:
        columns = " and ".join(f"data.{name} '{getattr(config, name)}'" for name in named)
        raise ConfigError(f"{columns} are columns of different kinds of record; {_choice(named.values())}")
    return next(iter(named.values()), None)


def _found_kind(config: DataConfig, datasets: Mapping[str, Any]) -> str:
    dataset = next((datasets[source] for source in config.sources if source in datasets), None)
    files = [file for listing in list_files(config, dataset) for file in listing.files]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda file: _kind_of_file(file, dataset), files))
    names = {kind: file.name for file, (kind, _) in reversed(list(zip(files, found, strict=True))) if kind}
    if len(names) > 1:
        (other, other_name), (kind, name) = list(names.items())[-2:]
        raise ConfigError(
            f"{name} holds records of kind {kind}, {other_name} of kind {other}; make each kind a part of its own "
            "([[data.mixture]] with name, weight and sources), or leave one of them out (data.include)"
        )
    if not names and (problem := next((problem for _, problem in found if problem), "")):
        raise DataError(problem)
    return next(iter(names), "text")  # where nothing can be read, as reading reports


def _kind_of_file(file: SourceFile, dataset: Any) -> tuple[str, str]:
    """Return the kind of a file's records, "" where none that can be read is of any, and what is wrong then."""
    if file.format in HELD:
        return HELD[file.format][0], ""
    reader, places, problem = column_reader(file, (), dataset), dict[str, int](), ""
    for offset, keys in _first_keys(reader):
        kinds = kinds_of(keys)
        if len(kinds) > 1:
            raise ConfigError(f"{reader.origin(offset)} has the keys {', '.join(keys)}; {_choice(kinds)}")
        if kinds:
            places.setdefault(kinds[0], offset)
        elif not problem:
            known = "; ".join(f"{kind}: {', '.join(needed)}" for kind, needed in _KEYS.items())
            problem = (
                f"{reader.origin(offset)} has the keys {', '.join(map(repr, keys)) or 'of an empty object'}, which no "
                f"kind of record has ({known}); rename them, or name them, as by data.text_column"
            )
    if len(places) > 1:
        (kind, place), (other, other_place) = list(places.items())[:2]
        raise DataError(
            f"{reader.origin(place)} is a record of kind {kind}, {reader.origin(other_place)} of kind {other}; write "
            f"each kind to a file of its own, as a part of [[data.mixture]], or {_choice(places)}"
        )
    return next(iter(places), ""), problem


def _first_keys(reader: RecordReader) -> list[tuple[int, tuple[str, ...]]]:
    """Return place and keys of the first records that can be read, of tables the columns alone."""
    if not reader.file.format.startswith("json"):
        columns = reader.summary().columns
        if columns or reader.file.format != "dataset":
            return [(0, columns)] if columns else []
    records = islice(reader.records(FilePart()), _FIRST_RECORDS + _MOST_DAMAGED)
    readable = ((record.offset, record.values[0]) for record in records if record.values is not None)
    return list(islice(readable, _FIRST_RECORDS))


def _choice(kinds: Iterable[str]) -> str:
    return f"choose by data.record = {' or '.join(map(json.dumps, dict.fromkeys(kinds)))} (evenload plan: --record)"
