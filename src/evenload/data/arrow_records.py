"""Read Arrow tables as records: Arrow IPC files and streams (`datasets` caches, Feather), and parquet files.

A batch of a column is converted at once and cut: a record's ids are a slice of them. Arrow gives every struct all keys
of all structs, so a key that is null, at any depth, is left out; values of `arrow.json` keep their nulls.

Arrow IPC: an offset is a record batch and a row in it; a part of a file is a share of its batches. Of a stream, a batch
belongs to the part in whose bytes it begins, and those before it are skipped (some 10 µs each). Buffers are checked
before they are used, so damaged offsets cannot lead outside them. Price: one batch in memory, or its mapped pages.

Parquet: offsets are rows of the file, part i of n holds consecutive row groups. Damage ends the part it lies in. Price:
one batch, and a page of every column that is read; starting inside a row group decodes it up to there.

Hugging Face data sets that are passed in Python: a `Dataset` is read in Arrow batches, in the order of its `select` or
`shuffle`; one with a transform is read through that, row by row. Offsets are rows. An `IterableDataset` is read shard
by shard; offsets are shard and example, and a start inside a shard generates and skips its examples up to there. Both
are pickled for worker processes, so a generator must be a function that can be imported. Price: one batch in memory; a
shuffled `Dataset` gathers its rows one by one.
"""

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenload.data.records import (
    FILE_END,
    KIND_WORDS,
    Column,
    ColumnKind,
    FilePart,
    FileSummary,
    Record,
    RecordReader,
    ValueProblem,
    convert_value,
    cut_ids,
    make_record,
    make_records,
    other_values,
    rows_at,
)
from evenload.data.sources import SourceFile, refuse_storage_failure
from evenload.errors import ConfigError, DataError, EvenloadError

BATCH_BYTES = 1 << 22
"""About how large a batch is, whatever the size of a record: small, so that long documents do not pile up."""

_MOST_ROWS = 4096
_JSON = "arrow.json"
_KNOWN_EXTENSIONS = (_JSON, "arrow.bool8", "arrow.uuid")
_ALSO_HOLD: dict[ColumnKind, tuple[ColumnKind, ...]] = {"text_or_messages": ("text", "messages"), "mask": ("tokens",)}


def batch_rows(num_rows: int, num_bytes: int) -> int:
    return max(1, min(_MOST_ROWS, BATCH_BYTES * num_rows // max(1, num_bytes)))


def check_schema(schema: pa.Schema, columns: Sequence[Column], name: str) -> list[str]:
    """Return the names of the columns that a schema has; `DataError` for lack of a required one, or a wrong type."""
    present = []
    for column in columns:
        if column.name not in schema.names:
            if not column.is_required:
                continue
            raise DataError(
                f"{name} has no column '{column.name}', only {', '.join(schema.names)}; set {column.setting}"
            )
        if len(schema.get_all_field_indices(column.name)) > 1:
            raise DataError(f"{name} has several columns '{column.name}'; rename all but one")
        field, where = schema.field(column.name), f"{name}: column '{column.name}'"
        if column.is_required and not (_can_hold(field.type, column.kind) or _is_several(field.type, column.kind)):
            raise DataError(f"{where} is {field.type}, not {KIND_WORDS[column.kind]}; set {column.setting}")
        if unknown := next(_unknown_extensions(field), None):
            raise DataError(f"{where} holds values of the extension type '{unknown}'; write plain ones")
        present.append(column.name)
    return present


def _unknown_extensions(field: pa.Field) -> Iterator[str]:
    kind = field.type
    name = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
    if isinstance(kind, pa.BaseExtensionType):
        name = "" if kind.extension_name in _KNOWN_EXTENSIONS else kind.extension_name
    if name:
        yield name
    for index in range(kind.num_fields):
        yield from _unknown_extensions(kind.field(index))


def arrow_records(arrays: Mapping[str, pa.Array], columns: Sequence[Column], first_row: int) -> Iterator[Record]:
    """Make records of the rows of a batch; `arrays` by column name are of types as `check_schema` allows."""
    num_rows = len(next(iter(arrays.values())))
    if not num_rows:
        return iter(())
    if any(column.is_required and _is_several(arrays[column.name].type, column.kind) for column in columns):
        return _records_of_several(arrays, columns, first_row)
    problems: dict[int, str] = {}
    required, others = [], [column for column in columns if not column.is_required]
    for column in columns[: len(columns) - len(others)]:
        converted, wrong = _values(arrays[column.name], column)
        required.append(converted)
        problems = wrong | problems
    values = list(zip(*required, strict=True))
    if any(column.name in arrays for column in others):
        is_ids = columns[0].kind == "tokens"
        lengths = np.array([0 if ids is None else len(ids) for ids in required[0]]) if is_ids else None
        further = []
        for column in others:
            converted, wrong = [None] * num_rows, {}
            if column.name in arrays and not (column.kind == "ones" and _holds_ones(arrays[column.name], lengths)):
                converted, wrong = _plain_values(arrays[column.name], column)
            further.append(converted)
            problems = wrong | problems
        for row, row_values in enumerate(zip(*further, strict=True)):
            try:
                values[row] += other_values(others, row_values, None if lengths is None else int(lengths[row]))
            except ValueProblem as problem:
                problems.setdefault(row, str(problem))
    return make_records(range(first_row, first_row + num_rows + 1), values, problems)


def _records_of_several(arrays: Mapping[str, pa.Array], columns: Sequence[Column], first_row: int) -> Iterator[Record]:
    """Make records in which a required column holds lists of what it may hold; row by row, as Python values."""
    none = [None] * len(next(iter(arrays.values())))
    read = [_plain_values(arrays[column.name], column) if column.name in arrays else (none, {}) for column in columns]
    problems = {row: problem for _, wrong in reversed(read) for row, problem in wrong.items()}
    for row, given in enumerate(zip(*(values for values, _ in read), strict=True)):
        at = first_row + row
        wrong = row in problems
        yield Record(at, at + 1, None, problems[row]) if wrong else make_record(columns, given, at, at + 1)


def _can_hold(kind: pa.DataType, column: ColumnKind) -> bool:
    return column in ("any", "group") or _held_by(kind) in (column, "any", *_ALSO_HOLD.get(column, ()))


def _is_several(kind: pa.DataType, column: ColumnKind) -> bool:
    """Tell whether an Arrow type holds lists of what a column may hold, each a sequence."""
    if _can_hold(kind, column) or not is_list(kind):
        return False
    return _held_by(kind.value_type) not in (None, "any") and _can_hold(kind.value_type, column)


def _held_by(kind: pa.DataType) -> ColumnKind | None:
    """Return the kind of column that an Arrow type can hold; "any" = only its values show it."""
    if pa.types.is_dictionary(kind):
        return "text" if _held_by(kind.value_type) == "text" else None
    if isinstance(kind, pa.BaseExtensionType):
        return "any" if kind.extension_name == _JSON else None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    if not is_list(kind):
        return None
    item = kind.value_type
    if pa.types.is_integer(item):
        return "tokens"
    if pa.types.is_boolean(item):
        return "mask"
    return "messages" if pa.types.is_struct(item) else "any" if _held_by(item) == "any" else None


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _values(array: pa.Array, column: Column) -> tuple[Sequence[Any], dict[int, str]]:
    """Return the value of every row of a required column, and what is wrong by row."""
    held = _held_by(array.type)
    null = f"column '{column.name}' is null"
    if held == "tokens" and column.kind == "tokens":
        flat, edges = _flat_lists(array)
        null_ids: dict[int, str] = {}
        if flat.null_count:
            rows = rows_at(np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False)), edges)
            null_ids = dict.fromkeys(rows, f"a token id in '{column.name}' is null")
            flat = flat.fill_null(0)
        tokens, problems = cut_ids(flat.to_numpy(), edges)
        missing: list[int] = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist()
        return tokens, problems | null_ids | dict.fromkeys(missing, null)
    values, problems = _plain_values(array, column)
    for index, value in enumerate(values if held != "text" else ()):
        if isinstance(value, list) and None in value:
            problems[index] = f"an item of '{column.name}' is null"
        elif value is not None:
            try:
                values[index] = convert_value(column, value)
            except ValueProblem as problem:
                problems[index] = str(problem)
    return values, {index: null for index, value in enumerate(values) if value is None} | problems


def _plain_values(array: pa.Array, column: Column) -> tuple[list[Any], dict[int, str]]:
    """Return the rows as Python values without null keys of structs, and what is wrong by row."""
    if _held_by(array.type) in ("tokens", "mask"):
        flat, edges = _flat_lists(array)
        numbers = flat.to_numpy(zero_copy_only=False)
        spans = zip(pairwise(edges.tolist()), array.is_null().to_pylist(), strict=True)
        return [None if null else numbers[start:stop] for (start, stop), null in spans], {}
    decode = _decoder(array.type)

    def rows(part: pa.Array) -> list[Any]:
        values = part.to_pylist()
        return values if decode is None else [None if value is None else decode(value) for value in values]

    try:
        return rows(array), {}
    except (UnicodeDecodeError, msgspec.DecodeError):
        values, problems = [], {}
    for index in range(len(array)):
        try:
            values += rows(array.slice(index, 1))
        except UnicodeDecodeError as err:
            values.append(None)
            problems[index] = f"the text in '{column.name}' is not UTF-8: {err}"
        except msgspec.DecodeError as err:
            values.append(None)
            problems[index] = f"the JSON in '{column.name}' is not JSON: {err}"
    return values, problems


def _holds_ones(array: pa.Array, lengths: NDArray[np.int64] | None) -> bool:
    """Check for lists of `lengths` ones, as attention masks mostly are: a hundredth of the time row by row."""
    if _held_by(array.type) not in ("tokens", "mask") or lengths is None:
        return False
    flat, edges = _flat_lists(array)
    numbers = flat.to_numpy(zero_copy_only=False)
    return not flat.null_count and np.array_equal(np.diff(edges), lengths) and bool((numbers == 1).all())


def _flat_lists(array: Any) -> tuple[pa.Array, NDArray[Any]]:
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    edges: NDArray[Any] = array.offsets.to_numpy()
    # `values` and `offsets` are those of the whole buffer, of which the array may be a slice.
    return array.values.slice(edges[0], edges[-1] - edges[0]), edges - edges[0]


def _decoder(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return what turns pyarrow's value into the one that is meant; None = they are the same."""
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == _JSON:
        return msgspec.json.decode
    if is_list(kind):
        item = _decoder(kind.value_type)
        return item and (lambda values: [None if value is None else item(value) for value in values])
    if pa.types.is_map(kind):
        item = _decoder(kind.item_type) or (lambda value: value)
        return lambda pairs: {key: None if value is None else item(value) for key, value in pairs}
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        changes = {field.name: change for field in fields if (change := _decoder(field.type)) is not None}

        def decode(value: dict[str, Any]) -> dict[str, Any]:
            if None in value.values():
                value = {key: item for key, item in value.items() if item is not None}
            decoded = {key: change(value[key]) for key, change in changes.items() if key in value}
            return value | decoded if decoded else value

        return decode
    return None


_FILE_MAGIC, _FEATHER_1_MAGIC = b"ARROW1", b"FEA1"
_DAMAGE = (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError)
_ROW_BITS = 40
# Mapped pages count as memory of the process until they are given back; arrays on them stay valid.
_RELEASE_BYTES = 1 << 23


@dataclass(frozen=True)
class ArrowReader(RecordReader):
    """Read files of format "arrow"."""

    columns: tuple[Column, ...]

    def can_share(self) -> bool:
        return self.file.is_local

    def summary(self) -> FileSummary:
        names: tuple[str, ...] = ()
        with _open_source(self.file) as (source, _):
            try:
                names = tuple(_open_reader(source).schema.names)
                if not self.file.is_local:  # whose bodies would be read
                    return FileSummary(names)
                return FileSummary(names, sum(len(batch) for _, batch in _Batches(source, [0]).of_part(FilePart(), 0)))
            except _DAMAGE:
                return FileSummary(names)  # `read` reports the damage

    def origin(self, offset: int) -> str:
        number, row = _place(offset)
        try:
            with _open_source(self.file) as (source, _):
                for at, batch in _Batches(source, [0]).of_part(FilePart(), 0):
                    if at == number:
                        break
                    row += len(batch)
        except _DAMAGE:
            return f"{self.file.name}:batch {number + 1}, row {row + 1}"
        return f"{self.file.name}:row {row + 1}"

    def read(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        at, used_bytes = offset or 0, 0
        with _open_source(self.file) as (source, mapped):
            batches: _Batches | None = None
            try:
                schema = _open_reader(source).schema
                fields = [schema.get_field_index(name) for name in check_schema(schema, self.columns, self.file.name)]
                batches = _Batches(source, fields)
                for number, batch in batches.of_part(part, at >> _ROW_BITS):
                    at = max(at, number << _ROW_BITS)
                    for arrays in _slices(batch, at - (number << _ROW_BITS)):
                        yield from arrow_records(arrays, self.columns, at)
                        at += len(next(iter(arrays.values())))
                        used_bytes += sum(array.nbytes for array in arrays.values())
                        if mapped is not None and used_bytes > _RELEASE_BYTES:
                            mapped.madvise(mmap.MADV_DONTNEED)
                            used_bytes = 0
                    at = (number + 1) << _ROW_BITS
            except _DAMAGE as err:
                refuse_storage_failure(self.file, err)
                if part.index == 0 if batches is None else batches.is_in_part:
                    damaged = f"the Arrow file is damaged from batch {1 + (at >> _ROW_BITS)} on: {err}"
                    yield Record(at, FILE_END, None, damaged)


def _slices(batch: pa.RecordBatch, first: int) -> Iterator[dict[str, pa.Array]]:
    """Yield the columns of a batch from a row on, checked, in slices of about `BATCH_BYTES`."""
    arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
    # A slice of a nested array cannot be checked without checking all of its items. Of others the ends of the offsets
    # are enough here; unchecked, even the size of an array is read outside of its buffers.
    nested = {
        name for name, array in arrays.items() if pa.types.is_nested(array.type) and _held_by(array.type) != "tokens"
    }
    for name, array in arrays.items():
        if name in nested:
            check_values(array)
        else:
            array.validate()
    size = batch_rows(len(batch), sum(array.nbytes for array in arrays.values()))
    for begin in range(first, len(batch), size):
        sliced = {name: array.slice(begin, size) for name, array in arrays.items()}
        for name in sliced.keys() - nested:
            check_values(sliced[name])
        yield sliced


def check_values(array: pa.Array) -> None:
    """Raise `ArrowInvalid` for a mapped array whose offsets lead outside of its buffers."""
    # Bytes that are not UTF-8 are no damage of the array but a problem of their record.
    if pa.types.is_string(array.type):
        array = array.view(pa.binary())
    elif pa.types.is_large_string(array.type):
        array = array.view(pa.large_binary())
    array.validate(full=True)


class _Batches:
    """The record batches of an open file or stream; `is_in_part` = the next one belongs to the part."""

    def __init__(self, source: pa.NativeFile, fields: list[int]) -> None:
        self._source, self._reader = source, _open_reader(source, fields)
        self.is_in_part = False

    def of_part(self, part: FilePart, first: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield number and content of the part's batches, from number `first` on."""
        if isinstance(self._reader, pa.ipc.RecordBatchFileReader):
            span = part.range_of(self._reader.num_record_batches)
            self.is_in_part = True
            for number in range(max(first, span.start), span.stop):
                yield number, self._reader.get_batch(number)
            return
        span = part.range_of(self._source.size()) if part.count > 1 else None
        number = -1
        while span is None or self._source.tell() < span.stop:
            self.is_in_part = span is None or self._source.tell() >= span.start
            try:
                batch = self._reader.read_next_batch()
            except StopIteration:
                return
            number += 1
            if self.is_in_part and number >= first:
                yield number, batch


def _open_reader(source: pa.NativeFile, fields: Sequence[int] = ()) -> Any:
    source.seek(0)
    begin = source.read(len(_FILE_MAGIC))
    source.seek(0)
    if begin.startswith(_FEATHER_1_MAGIC):
        raise pa.ArrowInvalid("it is a Feather file of version 1, which is no Arrow file; write it anew")
    options = pa.ipc.IpcReadOptions(included_fields=list(fields), use_threads=False)
    return (pa.ipc.open_file if begin == _FILE_MAGIC else pa.ipc.open_stream)(source, options=options)


@contextmanager
def _open_source(file: SourceFile) -> Iterator[tuple[pa.NativeFile, mmap.mmap | None]]:
    """Open the bytes of a file for pyarrow, with the map that they are in where the file is local."""
    with file.open() as stream:
        if not file.is_local:
            yield pa.PythonFile(stream, mode="r"), None
        elif not stream.seek(0, 2):
            yield pa.BufferReader(b""), None  # which cannot be mapped
        else:
            # The map is closed by its last array.
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            yield pa.BufferReader(pa.py_buffer(mapped)), mapped


_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class ParquetReader(RecordReader):
    """Read files of format "parquet"."""

    columns: tuple[Column, ...]

    def summary(self) -> FileSummary:
        try:
            with _open_parquet(self.file) as parquet:
                return FileSummary(tuple(parquet.schema_arrow.names), parquet.metadata.num_rows)
        except pa.ArrowException:
            return FileSummary()  # `read` reports the damage

    def read(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        row, opened = offset or 0, False
        try:
            with _open_parquet(self.file) as parquet:
                names = check_schema(parquet.schema_arrow, self.columns, self.file.name)
                groups = [parquet.metadata.row_group(at) for at in range(parquet.metadata.num_row_groups)]
                edges = list(accumulate((group.num_rows for group in groups), initial=0))
                opened = True
                span = part.range_of(len(groups))
                row = max(row, edges[span.start])
                for at in range(max(span.start, bisect_right(edges, row) - 1), span.stop):
                    skip, size = row - edges[at], _rows_at_once(groups[at], names)
                    for batch in parquet.iter_batches(size, row_groups=[at], columns=names, use_threads=False):
                        left = batch.slice(min(skip, len(batch)))
                        skip = max(0, skip - len(batch))
                        yield from arrow_records({name: left.column(name) for name in names}, self.columns, row)
                        row += len(left)
                    if row != edges[at + 1]:
                        raise pa.ArrowInvalid(f"row group {at} ends at row {row} instead of {edges[at + 1]}")
        except (pa.ArrowException, OSError, UnicodeDecodeError) as err:
            refuse_storage_failure(self.file, err)
            if opened or part.index == 0:
                yield Record(row, FILE_END, None, f"the parquet file is damaged from here on: {err}")


@contextmanager
def _open_parquet(file: SourceFile) -> Iterator[pq.ParquetFile]:
    # Arrow reads local files faster itself. By default all chunks of a row group are read at once.
    source: Any = nullcontext(file.path) if file.is_local else file.open()
    with source as place, pq.ParquetFile(place, buffer_size=_BUFFER_BYTES, pre_buffer=False) as parquet:
        yield parquet


def _rows_at_once(group: Any, columns: Sequence[str]) -> int:
    chunks = (group.column(index) for index in range(group.num_columns))
    prefixes = tuple(f"{name}." for name in columns)
    sizes = (each.total_uncompressed_size for each in chunks if f"{each.path_in_schema}.".startswith(prefixes))
    return batch_rows(group.num_rows, sum(sizes))


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_TRANSFORMED_ROWS = 32


def is_iterable_dataset(dataset: Any) -> bool:
    """Tell an `IterableDataset` (True) from a `Dataset` (False); raise `ConfigError` for anything else."""
    kind = type(dataset).__name__
    try:
        from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
    except ImportError as err:
        raise ConfigError(f"the data set is a {kind}, which needs the package datasets; install evenload[hf]") from err
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        raise ConfigError(f"the data set handed over has splits {', '.join(map(str, dataset))}; hand over one of them")
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ConfigError(f"the data set handed over is a {kind}; hand over a datasets.Dataset or IterableDataset")
    return isinstance(dataset, IterableDataset)


class _DatasetReader(RecordReader):
    def read(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        try:
            yield from self.examples(part, offset)
        except EvenloadError:
            raise
        except Exception as err:  # generators and transforms of users raise anything
            raise DataError(f"{self.file.name} cannot be read: {type(err).__name__}: {err}") from err

    def examples(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class DatasetReader(_DatasetReader):
    """Read a `datasets.Dataset` of any format; of formats only a transform changes what is read."""

    dataset: "Dataset"
    columns: tuple[Column, ...]

    def num_parts(self, part_bytes: int) -> int:
        return min(len(self.dataset) or 1, super().num_parts(part_bytes))

    def summary(self) -> FileSummary:
        # A transform may give other columns.
        names = () if self.dataset.format["type"] == "custom" else tuple(self.dataset.column_names)
        return FileSummary(names, len(self.dataset))

    def examples(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        span = part.range_of(len(self.dataset))
        rows = range(max(offset or 0, span.start), span.stop)
        if self.dataset.format["type"] == "custom":
            for start in rows[::_TRANSFORMED_ROWS]:
                columns: Any = self.dataset[start : min(rows.stop, start + _TRANSFORMED_ROWS)]
                for index in range(start, min(rows.stop, start + _TRANSFORMED_ROWS)):
                    example = {key: values[index - start] for key, values in columns.items()}
                    yield _make_record(self.columns, self.file.name, example, index)
            return
        names = check_schema(self.dataset.features.arrow_schema, self.columns, self.file.name)
        table = self.dataset.data
        size = batch_rows(table.num_rows, sum(table.column(column).nbytes for column in names))
        dataset = self.dataset.with_format("arrow", columns=names)
        for start in range(rows.start, rows.stop, size):
            selected: Any = dataset[start : min(rows.stop, start + size)]
            for batch in selected.to_batches():
                yield from arrow_records({each: batch.column(each) for each in names}, self.columns, start)
                start += len(batch)


@dataclass(frozen=True, eq=False)
class IterableDatasetReader(_DatasetReader):
    """Read a `datasets.IterableDataset`, which must give the same examples in the same order every time."""

    dataset: "IterableDataset"
    columns: tuple[Column, ...]

    def num_parts(self, part_bytes: int) -> int:
        return self.dataset.num_shards

    def summary(self) -> FileSummary:
        return FileSummary(tuple(self.dataset.column_names or ()))

    def origin(self, offset: int) -> str:
        shard, example = _place(offset)
        return f"{self.file.name}:shard {shard}, example {example + 1}"

    def examples(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        dataset, num_shards = self.dataset.with_format(None), self.dataset.num_shards
        shards, features = part.range_of(num_shards), self.dataset.features
        types = {} if features is None else {field.name: field.type for field in features.arrow_schema}
        first_shard, skipped = (shards.start, 0) if offset is None else _place(offset)
        for shard in range(first_shard, shards.stop):
            examples: Any = dataset.shard(num_shards=num_shards, index=shard)
            if skipped:
                examples = examples.skip(skipped)
            for at, example in enumerate(examples, (shard << _ROW_BITS) + skipped):
                yield _make_record(self.columns, self.file.name, example, at, types)
            skipped = 0


def _make_record(
    columns: Sequence[Column],
    name: str,
    example: Mapping[str, Any],
    offset: int,
    types: Mapping[str, pa.DataType] = MappingProxyType({}),
) -> Record:
    if not columns:
        return Record(offset, offset + 1, (tuple(key for key, value in example.items() if value is not None),))
    given = []
    for column in columns:
        if column.is_required and column.name not in example:
            raise DataError(f"{name} has no column '{column.name}', only {', '.join(example)}; set {column.setting}")
        given.append(_without_nulls(example.get(column.name), types.get(column.name)))
    return make_record(columns, given, offset, offset + 1)


def _without_nulls(value: Any, kind: pa.DataType | None) -> Any:
    """Leave out keys of objects that are None, at any depth: Arrow, unlike `arrow.json`, gives them to rows without."""
    if isinstance(value, dict):
        types = {field.name: field.type for field in kind} if kind is not None and pa.types.is_struct(kind) else {}
        if kind is not None and not types:
            return value
        return {key: _without_nulls(item, types.get(key)) for key, item in value.items() if item is not None}
    if isinstance(value, list) and isinstance(next((item for item in value if item is not None), None), dict | list):
        if kind is not None and not is_list(kind):
            return value
        return [_without_nulls(item, None if kind is None else kind.value_type) for item in value]
    return value


def _place(offset: int) -> tuple[int, int]:
    return offset >> _ROW_BITS, offset & ((1 << _ROW_BITS) - 1)


def dataset_bytes(dataset: "Dataset") -> int:
    table: pa.Table = dataset.data.table
    return table.nbytes * len(dataset) // max(1, table.num_rows)
