"""Find out what records hold, where `data.record` is "auto" (`with_kinds`).

The first records of every file decide, of tables their columns, unless a setting names a column. Nothing is guessed:
records that could be of two kinds, and files of different kinds, are errors. All ranks find the same. Price: every file
is opened once, several at a time, but those of text or of ids alone.
"""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from itertools import islice
from typing import Any

import msgspec

from evenload.data.config import DataConfig, mixture_configs
from evenload.data.part_files import HELD, dataset_file, open_reader
from evenload.data.records import KIND_FIELDS, FilePart, RecordReader
from evenload.data.sources import SourceListing, list_sources
from evenload.errors import ConfigError, DataError

_FIRST_RECORDS = 100  # of a file
_THREADS = 16
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(DataConfig)}
_KIND_OF_SETTING = {name: kind for kind, names in KIND_FIELDS.items() for name in names if name in _DEFAULTS}
_KEYS = {kind: [key for name in names if (key := _DEFAULTS.get(name, name))] for kind, names in KIND_FIELDS.items()}
"""Keys by which a kind of record is known."""


def with_kinds(config: DataConfig, datasets: Mapping[str, Any] | None = None) -> DataConfig:
    """Return settings in which `record` is no longer "auto"; `datasets` are Hugging Face's by source name. Raises
    `DataError` for records of no kind or of several, `ConfigError` where a setting has to choose."""
    parts = mixture_configs(config)
    if all(part.record != "auto" for part in parts):
        return config
    datasets = datasets or {}
    kinds = [_named_kind(one) or _found_kind(one, datasets) if one.record == "auto" else one.record for one in parts]
    if not config.mixture:
        return msgspec.structs.replace(config, record=kinds[0])
    mixture = tuple(map(lambda part, kind: msgspec.structs.replace(part, record=kind), config.mixture, kinds))
    # No part asks any more; "text" is what states of earlier runs have there.
    return msgspec.structs.replace(config, record="text" if config.record == "auto" else config.record, mixture=mixture)


def kinds_of(keys: Iterable[str]) -> list[str]:
    """Return the kinds of record that have all of their keys among these; messages come with prompts of their own."""
    kinds = [kind for kind, needed in _KEYS.items() if set(needed) <= set(keys)]
    return [kind for kind in kinds if kind != "prompt_completion" or "messages" not in kinds]


def _named_kind(config: DataConfig) -> str | None:
    named = {name: kind for name, kind in _KIND_OF_SETTING.items() if getattr(config, name) != _DEFAULTS[name]}
    if len(set(named.values())) > 1:
        settings = " and ".join(f"data.{name}" for name in named)
        raise ConfigError(f"{settings} name columns of different kinds of record; {_choice(named.values())}")
    return next(iter(named.values()), None)


def _found_kind(config: DataConfig, datasets: Mapping[str, Any]) -> str:
    dataset = next((datasets[source] for source in config.sources if source in datasets), None)
    listings = list_sources(config) if dataset is None else [SourceListing("", (dataset_file(dataset),))]
    files = [file for listing in listings for file in listing.files]
    first = {HELD[file.format][0]: file.name for file in files if file.format in HELD}
    asked = [(file, Future[tuple[str, str]]()) for file in files if file.format not in HELD]
    pairs, problem = iter(asked), ""

    def look() -> None:
        for file, result in pairs:
            try:
                result.set_result(_kind_of_file(open_reader(file, config, dataset, ())))
            except Exception as error:  # raised where the result is taken
                result.set_exception(error)

    for _ in asked[:_THREADS]:  # daemons: a source that hangs must not delay the end of the process
        threading.Thread(target=look, name="evenload-kinds", daemon=True).start()
    for file, result in asked:
        if not wait([result], config.stall_timeout_s).done:
            silent = f"the data source gave nothing for {config.stall_timeout_s:g} s, reading the first records of"
            raise DataError(f"{silent} {file.name}; check the storage, or raise data.stall_timeout_s")
        kind, wrong = result.result()
        problem = problem or wrong
        if kind:
            first.setdefault(kind, file.name)
    if len(first) > 1:
        (kind, name), (other, other_name) = list(first.items())[:2]
        raise ConfigError(
            f"{name} holds records of kind {kind}, {other_name} of kind {other}; make each kind a part of its own "
            "([[data.mixture]] with name, weight and sources), or leave one of them out (data.include)"
        )
    if problem and not first:
        raise DataError(problem)
    return next(iter(first), "text")  # where nothing can be read, as reading reports


def _kind_of_file(reader: RecordReader) -> tuple[str, str]:
    """Return the kind of a file's records, "" where none that can be read is of any, and what is wrong then."""
    places: dict[str, int] = {}
    problem = ""
    for offset, keys in _first_keys(reader):
        kinds, has = kinds_of(keys), f"has the keys {', '.join(keys) or 'of an empty object'}"
        if len(kinds) > 1:
            raise ConfigError(f"{reader.origin(offset)} {has}; {_choice(kinds)}")
        if kinds:
            places.setdefault(kinds[0], offset)
        elif not problem:
            known = "; ".join(f"{kind}: {', '.join(needed)}" for kind, needed in _KEYS.items())
            fix = "rename one, or name it in a configuration, as text_column under [data]"
            problem = f"{reader.origin(offset)} {has}, which no kind of record has ({known}); {fix}"
    if len(places) > 1:
        one, other = [f"{reader.origin(offset)} of kind {kind}" for kind, offset in places.items()][:2]
        fix = f"write each kind to a file of its own, as a part of [[data.mixture]], or {_choice(places)}"
        raise DataError(f"records of one file are of different kinds: {one}, {other}; {fix}")
    return next(iter(places), ""), problem


def _first_keys(reader: RecordReader) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield place and keys of the first records that can be read, of tables the columns alone."""
    is_json = reader.file.format.startswith("json")
    columns = () if is_json else reader.summary().columns
    if columns:
        yield 0, columns
    elif is_json or reader.file.format == "dataset":
        for record in islice(reader.records(FilePart()), _FIRST_RECORDS):
            if record.values is not None:
                yield record.offset, record.values[0]


def _choice(kinds: Iterable[str]) -> str:
    return f"set data.record = {' or '.join(map(json.dumps, dict.fromkeys(kinds)))} (evenload plan: --record)"
