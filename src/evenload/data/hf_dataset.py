"""Hugging Face data sets handed over in Python: `Dataset` by rows, `IterableDataset` by shards.

A `Dataset` is read in Arrow batches, in the order that its `select` or `shuffle` gave it; offsets are rows. One with a
transform of its own (`set_transform`) is read through that, row by row. An `IterableDataset` is read shard by shard;
offsets are shard and example, and to begin inside a shard its examples are generated and passed over up to there. Both
go to other processes by pickling, so a generator has to be a function that can be imported.

Price: one batch in memory. A `Dataset` that was shuffled gathers its rows one by one (some µs each).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from evenload.data.arrow_records import arrow_records, batch_rows, check_schema, is_list
from evenload.data.records import (
    Column,
    FilePart,
    FileSummary,
    Record,
    RecordReader,
    ValueProblem,
    convert_value,
    other_values,
)
from evenload.data.sources import SourceFile
from evenload.errors import ConfigError, DataError, EvenloadError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_EXAMPLE_BITS = 40
_TRANSFORMED_ROWS = 32


def is_iterable_dataset(dataset: Any) -> bool:
    """An `IterableDataset` (True) or a `Dataset` (False); a `ConfigError` where it is neither."""
    try:
        from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
    except ImportError as err:
        raise ConfigError(
            f"the data set handed over is a {type(dataset).__name__}, which needs the package datasets; "
            "install evenload[hf]"
        ) from err
    if isinstance(dataset, Dataset | IterableDataset):
        return isinstance(dataset, IterableDataset)
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        raise ConfigError(f"the data set handed over has splits {', '.join(map(str, dataset))}; hand over one of them")
    raise ConfigError(
        f"the data set handed over is a {type(dataset).__name__}; hand over a datasets.Dataset or IterableDataset"
    )


@dataclass(frozen=True, eq=False)
class DatasetReader(RecordReader):
    """Reader of a `datasets.Dataset`.

    Args:
        dataset: with any format; what it is read as does not depend on it, except for a transform.
    """

    dataset: "Dataset"
    columns: tuple[Column, ...]

    def num_parts(self, file: SourceFile, part_bytes: int) -> int:
        return max(1, min(len(self.dataset), -(-(file.size_bytes or 0) // part_bytes)))

    def read(self, file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
        whole = part.range_of(len(self.dataset))
        rows = range(max(offset or 0, whole.start), whole.stop)
        is_transformed = self.dataset.format["type"] == "custom"
        records = self._transformed if is_transformed else self._batches
        return _guarded(records(file.name, rows), file.name)

    def summary(self, file: SourceFile) -> FileSummary:
        # A transform may give other columns.
        names = () if self.dataset.format["type"] == "custom" else tuple(self.dataset.column_names)
        return FileSummary(names, len(self.dataset))

    def _batches(self, name: str, rows: range) -> Iterator[Record]:
        names = [each.name for each in check_schema(self.dataset.features.arrow_schema, self.columns, name)]
        table = self.dataset.data
        size = batch_rows(table.num_rows, sum(table.column(column).nbytes for column in names))
        dataset = self.dataset.with_format("arrow", columns=names)
        for start in range(rows.start, rows.stop, size):
            found: Any = dataset[start : min(rows.stop, start + size)]
            for batch in found.to_batches():
                yield from arrow_records({each: batch.column(each) for each in names}, self.columns, start)
                start += len(batch)

    def _transformed(self, name: str, rows: range) -> Iterator[Record]:
        for start in range(rows.start, rows.stop, _TRANSFORMED_ROWS):
            found: Any = self.dataset[start : min(rows.stop, start + _TRANSFORMED_ROWS)]
            columns = {column.name: found[column.name] for column in self.columns if column.name in found}
            if not columns:
                _make_record(self.columns, name, found, start)  # raises what is missing
            for index, values in enumerate(zip(*columns.values(), strict=True), start):
                yield _make_record(self.columns, name, dict(zip(columns, values, strict=True)), index)


@dataclass(frozen=True, eq=False)
class IterableDatasetReader(RecordReader):
    """Reader of a `datasets.IterableDataset`.

    Args:
        dataset: the same examples in the same order every time; an epoch of its own shuffling does not change.
    """

    dataset: "IterableDataset"
    columns: tuple[Column, ...]

    def num_parts(self, file: SourceFile, part_bytes: int) -> int:
        return self.dataset.num_shards

    def read(self, file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
        return _guarded(self._examples(file.name, part, offset), file.name)

    def summary(self, file: SourceFile) -> FileSummary:
        return FileSummary(tuple(self.dataset.column_names or ()))

    def origin(self, file: SourceFile, offset: int) -> str:
        shard, example = _place(offset)
        return f"{file.name}:shard {shard}, example {example + 1}"

    def _examples(self, name: str, part: FilePart, offset: int | None) -> Iterator[Record]:
        dataset, num_shards = self.dataset.with_format(None), self.dataset.num_shards
        shards, features = part.range_of(num_shards), self.dataset.features
        kinds = {} if features is None else {field.name: field.type for field in features.arrow_schema}
        first_shard, skipped = (shards.start, 0) if offset is None else _place(offset)
        for shard in range(first_shard, shards.stop):
            examples: Any = dataset.shard(num_shards=num_shards, index=shard)
            if skipped:
                examples = examples.skip(skipped)
            for at, example in enumerate(examples, (shard << _EXAMPLE_BITS) + skipped):
                yield _make_record(self.columns, name, example, at, kinds)
            skipped = 0


def _make_record(
    columns: Sequence[Column],
    name: str,
    example: Mapping[str, Any],
    offset: int,
    kinds: Mapping[str, pa.DataType] = MappingProxyType({}),
) -> Record:
    """The record of an example; `kinds` = types of its columns where they are known."""
    found = []
    for column in columns:
        if column.is_required and column.name not in example:
            raise DataError(f"{name} has no column '{column.name}', only {', '.join(example)}; set {column.setting}")
        found.append(_without_nulls(example.get(column.name), kinds.get(column.name)))
    needed = sum(column.is_required for column in columns)
    try:
        values = [convert_value(column, value) for column, value in zip(columns[:needed], found, strict=False)]
        num_tokens = len(values[0]) if columns[0].kind == "tokens" else None
        further = other_values(columns[needed:], found[needed:], num_tokens)
    except ValueProblem as problem:
        return Record(offset, offset + 1, None, str(problem))
    return Record(offset, offset + 1, (*values, *further))


def _without_nulls(value: Any, kind: pa.DataType | None) -> Any:
    """The value without keys of objects that are None, at any depth, which Arrow gives to rows that lack them.

    Args:
        kind: its type where that is known; JSON has the keys that it spells.
    """
    if isinstance(value, dict):
        kinds = {field.name: field.type for field in kind} if kind is not None and pa.types.is_struct(kind) else {}
        if kind is not None and not kinds:
            return value
        return {key: _without_nulls(item, kinds.get(key)) for key, item in value.items() if item is not None}
    if isinstance(value, list) and isinstance(next((item for item in value if item is not None), None), dict | list):
        if kind is not None and not is_list(kind):
            return value
        return [_without_nulls(item, None if kind is None else kind.value_type) for item in value]
    return value


def _place(offset: int) -> tuple[int, int]:
    return offset >> _EXAMPLE_BITS, offset & ((1 << _EXAMPLE_BITS) - 1)


def _guarded(records: Iterator[Record], name: str) -> Iterator[Record]:
    """The records; what the data set's own code raises, as an error that names it."""
    try:
        yield from records
    except EvenloadError:
        raise
    except Exception as err:  # generators and transforms of users raise anything
        raise DataError(f"{name} cannot be read: {type(err).__name__}: {err}") from err


def dataset_bytes(dataset: "Dataset") -> int:
    """Bytes of its rows in Arrow's layout, about."""
    table: pa.Table = dataset.data.table
    return table.nbytes * len(dataset) // max(1, table.num_rows)
