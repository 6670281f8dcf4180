"""Open what one part of the mixture is read from: files, their readers, and segments that streams share (`PartFiles`);
and find out what records hold, where `data.record` is "auto" (`with_kinds`).

Segments are shares of files, assigned to streams anew in every epoch. Files are cut by size before anything is opened,
so a data set of any size is ready after one listing, and one large file feeds all streams. Permutations are
counter-based (Philox), so any rank can make any of them again; numpy keeps the raw Philox stream stable over versions,
its distributions not. Price: O(segments) per epoch; at most 64 MiB a segment, so 10 TB are 160,000 of them.

The first records of every file decide on their kind, of tables their columns, unless a setting names a column. Nothing
is guessed: records that could be of two kinds, and files of different kinds, are errors. All ranks find the same.
Price: every file is opened once, several at a time, but those of text or of ids alone.
"""

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from evenload.data.arrow_records import (
    ArrowReader,
    DatasetReader,
    IterableDatasetReader,
    ParquetReader,
    dataset_bytes,
    is_iterable_dataset,
)
from evenload.data.config import DataConfig, mixture_configs
from evenload.data.encoders import IGNORE_INDEX, DocumentEncoder, EncodedDocument
from evenload.data.groups import GroupReader, PairReader
from evenload.data.json_records import JsonlReader, JsonReader
from evenload.data.records import KIND_FIELDS, Column, FilePart, RecordReader, TextReader, record_columns, value_names
from evenload.data.sources import SourceFile, SourceListing, list_sources
from evenload.data.token_files import MegatronReader, NpyReader
from evenload.errors import ConfigError, DataError, did_you_mean
from evenload.types.text import counted

_OWN_COMPRESSION = ("parquet", "arrow", "memmap")
_COLUMN_READERS = {"jsonl": JsonlReader, "json": JsonReader, "parquet": ParquetReader, "arrow": ArrowReader}
HELD = {"text": ("text", "data.format or data.include"), "memmap": ("tokens", 'data.record = "tokens"')}
"""Kind of the records of formats without columns, and the setting to change for others."""


def open_reader(
    file: SourceFile, config: DataConfig, dataset: Any = None, columns: tuple[Column, ...] | None = None
) -> RecordReader:
    """Make the reader of a file or data set, unopened; `ConfigError` for a format without records of this kind. A
    reader of no `columns` (default: those of the settings) gives the keys of JSON objects and examples."""
    reader = _open_plain_reader(file, config, dataset, columns)
    if columns is None and config.group_by:
        own = record_columns(config)
        at = [column.name for column in own].index(config.group_by)
        reader = GroupReader(file, reader, config.group_by, at, is_read=config.group_by in value_names(own))
    return PairReader(file, reader) if columns is None and config.record == "preference" else reader


def _open_plain_reader(
    file: SourceFile, config: DataConfig, dataset: Any, columns: tuple[Column, ...] | None
) -> RecordReader:
    if file.format in _OWN_COMPRESSION and file.compression is not None:
        raise ConfigError(f"{file.name} is a {file.format} file inside {file.compression}; decompress it")
    columns = record_columns(config) if columns is None else columns
    if file.format == "dataset":
        return (IterableDatasetReader if is_iterable_dataset(dataset) else DatasetReader)(file, dataset, columns)
    if file.format in _COLUMN_READERS:
        return _COLUMN_READERS[file.format](file, columns)
    holds, fix = HELD[file.format]
    if config.record != holds:
        raise ConfigError(
            f'{file.name} is read as {file.format}, which holds records of kind "{holds}", and data.record is '
            f'"{config.record}"; set {fix}'
        )
    if config.group_by:
        what = "is one record" if file.format == "text" else "holds nothing but ids"
        raise ConfigError(f"{file.name} {what}, and data.group_by is '{config.group_by}'; leave it out")
    if file.format == "text":
        return TextReader(file)
    for setting in ("labels_column", "mask_column"):
        if column := getattr(config, setting):
            raise ConfigError(f"{file.name} holds nothing but ids, and data.{setting} is '{column}'; leave it out")
    return NpyReader(file, config.document_end_id) if file.path.endswith(".npy") else MegatronReader(file)


def dataset_file(dataset: Any, name: str = "dataset") -> SourceFile:
    size_bytes, rows = None, ""
    if not is_iterable_dataset(dataset):
        size_bytes, rows = dataset_bytes(dataset), f" of {len(dataset)} rows"
    return SourceFile(name, "", f"0:{name}{rows}", size_bytes, "dataset", None, LocalFileSystem())


SEGMENTS, BLOCKS = 1, 2


def permutation(size: int, seed: int, epoch: int, purpose: int, user: int, index: int) -> list[int]:
    """Return permutation number `index` of `range(size)` for one of several users (below 2**64) of the purpose."""
    key = np.array([seed, epoch], dtype=np.uint64)
    # Philox counts up the first word; the others separate users.
    counter = np.array([0, index, purpose, user], dtype=np.uint64)
    numbers = np.atleast_1d(np.random.Philox(key=key, counter=counter).random_raw(size))
    return np.argsort(numbers, kind="stable").tolist()


# A stream gets several segments of a small data set, and opening a file at an offset stays rare.
_SEGMENTS_PER_STREAM = 4
_SMALLEST_BYTES, _LARGEST_BYTES = 1 << 18, 1 << 26


class Segment(NamedTuple):
    """A share of a file."""

    reader: RecordReader
    part: FilePart


@dataclass(frozen=True, eq=False, kw_only=True)
class PartFiles:
    """Readers of the files of one part of the mixture, and their segments, in file order."""

    listings: tuple[SourceListing, ...]
    readers: tuple[RecordReader, ...]
    segments: tuple[Segment, ...]

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(reader.file for reader in self.readers)

    def by_source(self) -> Iterator[tuple[SourceListing, list[RecordReader]]]:
        readers = iter(self.readers)
        for listing in self.listings:
            yield listing, list(islice(readers, len(listing.files)))


def open_part(config: DataConfig, dataset: Any = None) -> PartFiles:
    if dataset is None:
        listings = list_sources(config)
    else:
        listings = (SourceListing(config.sources[0], (dataset_file(dataset),)),)
    readers = tuple(open_reader(file, config, dataset) for listing in listings for file in listing.files)
    if config.group_by and readers and (keys := readers[0].summary().columns) and config.group_by not in keys:
        raise ConfigError(
            f"{readers[0].file.name} has no key '{config.group_by}', which data.group_by names; "
            f"{did_you_mean(config.group_by, keys)}its keys are {', '.join(keys)}"
        )
    total_bytes = sum(reader.file.size_bytes or 0 for reader in readers)
    part_bytes = min(max(total_bytes // (_SEGMENTS_PER_STREAM * config.num_streams), _SMALLEST_BYTES), _LARGEST_BYTES)
    counts = [reader.num_parts(part_bytes) for reader in readers]
    segments = tuple(
        Segment(reader, FilePart(part, count))
        for reader, count in zip(readers, counts, strict=True)
        for part in range(count)
    )
    return PartFiles(listings=listings, readers=readers, segments=segments)


_INSPECTED_FILES = 16
_NAMED = 8
_SAMPLED = 64


def source_lines(config: DataConfig, part: PartFiles) -> Iterator[str]:
    """Report, a line each, what is read of every source and what is not; records are estimated where files are many."""
    columns = record_columns(config)
    known, values = {column.name for column in columns}, (*value_names(columns), config.group_by)
    for listing, readers in part.by_source():
        formats, step = Counter(reader.file.format for reader in readers), -(-len(readers) // _INSPECTED_FILES)
        summaries = [reader.summary() for reader in readers[::step]]
        counts = [summary.num_records for summary in summaries if summary.num_records is not None]
        records = ""
        if len(counts) == len(summaries) and set(formats) != {"text"}:  # of which every file is one
            is_exact = step == 1 and all(summary.is_exact for summary in summaries)
            number = round(sum(counts) * len(readers) / len(summaries))
            records = f", {'' if is_exact else 'about '}{counted(number, 'record')}"
        pieces = [f"{listing.source}: {', '.join(counted(n, f'{kind} file') for kind, n in formats.items())}{records}"]
        if present := list(dict.fromkeys(column for summary in summaries for column in summary.columns)):
            pieces.append(f"used as {config.record}: {_names([name for name in present if name in values])}")
            if checked := [name for name in present if name in known and name not in values]:
                pieces.append(f"checked to change nothing: {_names(checked)}")
            if unused := [name for name in present if name not in known]:
                pieces.append(f"not used: {_names(unused)}")
        elif set(formats) - HELD.keys():
            pieces.append(f"read as {config.record}")
        if listing.left_out:
            pieces.append(f"files left out: {_names(listing.left_out)}")
        yield " | ".join(pieces)


def label_warnings(config: DataConfig, part: PartFiles, encoder: DocumentEncoder) -> Iterator[str]:
    """Warn of token records whose labels are other ids than their tokens, by the first records of every source."""
    for listing, (reader, *_) in part.by_source() if config.record == "tokens" else ():
        documents = encoder.encode_records(list(islice(reader.records(FilePart()), _SAMPLED)))
        labelled = [one for one in documents if isinstance(one, EncodedDocument) and one.labels is not None]
        if others := sum(np.any((one.labels != one.tokens) & (one.labels != IGNORE_INDEX)) for one in labelled):
            yield (
                f"{listing.source}: in {others} of its first {counted(len(documents), 'record')} some labels are "
                f"neither {IGNORE_INDEX} nor the token at their place, and are trained as they are"
            )


def _names(names: list[str] | tuple[str, ...]) -> str:
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown or "nothing"


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
    """Return the kinds of record that have all of their keys among these; messages come with prompts of their own, and
    nothing trains rejected answers unasked."""
    kinds = [kind for kind, needed in _KEYS.items() if set(needed) <= set(keys) and kind != "preference"]
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
            known = "; ".join(f"{kind}: {', '.join(_KEYS[kind])}" for kind in _KEYS if kind != "preference")
            fix = "rename one, or name the one with the text: --text-column KEY (data.text_column in a config.toml)"
            if set(_KEYS["preference"]) <= set(keys):
                fix = (
                    'to train both answers of these preference pairs, set data.record = "preference"; DPO needs a loop '
                    "of your own, in which TreePacker shares the prompts"
                )
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
