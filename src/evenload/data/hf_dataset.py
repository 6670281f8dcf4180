"""Read Hugging Face data sets that are passed in Python: a `Dataset` by rows, an `IterableDataset` by shards.

A `Dataset` is read in Arrow batches, in the order of its `select` or `shuffle`; one with a transform is read through
that, row by row. Offsets are rows. An `IterableDataset` is read shard by shard; offsets are shard and example, and a
start inside a shard generates and skips its examples up to there. Both are pickled for worker processes, so a generator
must be a function that can be imported. Price: one batch in memory; a shuffled `Dataset` gathers its rows one by one.
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
from evenload.errors import ConfigError, DataError, EvenloadError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_EXAMPLE_BITS = 40
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
            yield from self._transformed(rows)
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

    def _transformed(self, rows: range) -> Iterator[Record]:
        for start in range(rows.start, rows.stop, _TRANSFORMED_ROWS):
            columns: Any = self.dataset[start : min(rows.stop, start + _TRANSFORMED_ROWS)]
            for index in range(start, min(rows.stop, start + _TRANSFORMED_ROWS)):
                example = {key: values[index - start] for key, values in columns.items()}
                yield _make_record(self.columns, self.file.name, example, index)


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
            for at, example in enumerate(examples, (shard << _EXAMPLE_BITS) + skipped):
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
    num_required = sum(column.is_required for column in columns)
    try:
        values = [convert_value(column, value) for column, value in zip(columns[:num_required], given, strict=False)]
        num_tokens = len(values[0]) if columns[0].kind == "tokens" else None
        others = other_values(columns[num_required:], given[num_required:], num_tokens)
    except ValueProblem as problem:
        return Record(offset, offset + 1, None, str(problem))
    return Record(offset, offset + 1, (*values, *others))


def _without_nulls(value: Any, kind: pa.DataType | None) -> Any:
    """Leave out keys of objects that are None, at any depth: Arrow gives them to rows that lack them; `arrow.json` does
    not."""
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
    return offset >> _EXAMPLE_BITS, offset & ((1 << _EXAMPLE_BITS) - 1)


def dataset_bytes(dataset: "Dataset") -> int:
    table: pa.Table = dataset.data.table
    return table.nbytes * len(dataset) // max(1, table.num_rows)
