"""Columns of Arrow batches to record values; shared by parquet, arrow and data set readers.

A batch of a column is converted at once and then cut: token ids stay one array per batch, and a record's ids are a
slice of it (0.2 µs) without a copy where the column holds int32. Values of a wrong type are found per record; a column
of a wrong type is found in the schema. Price: O(values); one Python object a record, more for texts and messages.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evenload.data.formats.columns import KIND_WORDS, Column, beyond_int32, narrow_ids
from evenload.data.formats.record import Record, make_records
from evenload.errors import DataError

BATCH_BYTES = 1 << 22
"""Batches are about so large, whatever the size of a record: small, so that long documents do not pile up."""

_MOST_ROWS = 4096


def batch_rows(num_rows: int, num_bytes: int) -> int:
    """Rows of a batch of about `BATCH_BYTES`, where so many rows take so many bytes."""
    return max(1, min(_MOST_ROWS, BATCH_BYTES * num_rows // max(1, num_bytes)))


def check_schema(schema: pa.Schema, wanted: Sequence[Column], name: str) -> None:
    """Refuse a schema without these columns or with types that cannot hold their kind: a `DataError` that names it."""
    for column in wanted:
        if column.name not in schema.names:
            raise DataError(
                f"{name} has no column '{column.name}', only {', '.join(schema.names)}; set {column.setting}"
            )
        if len(schema.get_all_field_indices(column.name)) > 1:
            raise DataError(f"{name} has several columns '{column.name}'; rename all but one")
        kind = schema.field(column.name).type
        held = _held_by(kind)
        fits = held == column.kind or (column.kind == "text_or_messages" and held in ("text", "messages"))
        if not fits:
            raise DataError(
                f"{name}: column '{column.name}' is {kind}, not {KIND_WORDS[column.kind]}; set {column.setting}"
            )


def is_nested(kind: pa.DataType) -> bool:
    """Whether it is the type of a column of messages."""
    return _held_by(kind) == "messages"


def check_values(array: pa.Array) -> None:
    """Refuse an array, mapped and not decoded, whose offsets lead outside of its buffers: an `ArrowInvalid`."""
    kind = array.type
    # Bytes that are not UTF-8 are no damage of the array but a problem of their record.
    if pa.types.is_string(kind):
        array = array.view(pa.binary())
    elif pa.types.is_large_string(kind):
        array = array.view(pa.large_binary())
    array.validate(full=True)


def arrow_records(arrays: Sequence[pa.Array], wanted: Sequence[Column], first_row: int) -> Iterator[Record]:
    """The rows of a batch.

    Args:
        arrays: one per wanted column, of equal length; types as `check_schema` allows.
        first_row: offset of the first; every row is one further.
    """
    if not len(arrays[0]):
        return iter(())
    problems: dict[int, str] = {}
    values = []
    for array, column in zip(arrays, wanted, strict=True):
        found, wrong = _values(array, column)
        values.append(found)
        problems = wrong | problems
    return make_records(range(first_row, first_row + len(arrays[0]) + 1), list(zip(*values, strict=True)), problems)


def _held_by(kind: pa.DataType) -> str:
    """The kind of column that an Arrow type can hold; "" = none."""
    if pa.types.is_dictionary(kind):
        return "text" if _held_by(kind.value_type) == "text" else ""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if pa.types.is_integer(kind.value_type):
            return "tokens"
        if pa.types.is_struct(kind.value_type):
            return "messages"
    return ""


def _values(array: pa.Array, column: Column) -> tuple[Sequence[Any], dict[int, str]]:
    """Value of every row, and what is wrong by row."""
    held = _held_by(array.type)
    if held == "tokens":
        return _token_values(array, column)
    problems: dict[int, str] = {}
    try:
        values = array.to_pylist()
    except UnicodeDecodeError:
        values = []
        for index, scalar in enumerate(array):
            try:
                values.append(scalar.as_py())
            except UnicodeDecodeError as err:
                values.append(None)
                problems[index] = f"the text in '{column.name}' is not UTF-8: {err}"
    if array.null_count:
        problems = {index: _null(column) for index, value in enumerate(values) if value is None} | problems
    if held == "messages":
        values = _messages(values, column, problems)
    return values, problems


def _messages(values: list[Any], column: Column, problems: dict[int, str]) -> list[Any]:
    """Without the keys that are null: Arrow cannot leave a key out, so that is how it is told."""
    for index, messages in enumerate(values):
        if messages is None:
            continue
        if None in messages:
            problems[index] = f"a message in '{column.name}' is null"
            continue
        values[index] = [
            {key: value for key, value in message.items() if value is not None} if None in message.values() else message
            for message in messages
        ]
    return values


def _token_values(array: Any, column: Column) -> tuple[list[NDArray[np.int32]], dict[int, str]]:
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    edges: NDArray[Any] = array.offsets.to_numpy()
    # `values` and `offsets` are those of the whole buffer, of which the array may be a slice.
    flat = array.values.slice(edges[0], edges[-1] - edges[0])
    edges = edges - edges[0]
    problems: dict[int, str] = {}
    if flat.null_count:
        is_null = flat.is_null().to_numpy(zero_copy_only=False)
        problems = dict.fromkeys(_rows_with(is_null, edges), f"a token id in '{column.name}' is null")
        flat = flat.fill_null(0)
    ids = flat.to_numpy()
    tokens, fits = narrow_ids(ids)
    if fits is not None:
        for row in _rows_with(~fits, edges):
            problems.setdefault(row, beyond_int32(ids[edges[row] : edges[row + 1]]))
    if array.null_count:
        missing = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
        problems |= dict.fromkeys(missing.tolist(), _null(column))
    bounds = edges.tolist()
    return [tokens[start:stop] for start, stop in pairwise(bounds)], problems


def _rows_with(marked: NDArray[np.bool_], edges: NDArray[Any]) -> list[int]:
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(marked)])
    return np.flatnonzero(before[edges[1:]] > before[edges[:-1]]).tolist()


def _null(column: Column) -> str:
    return f"column '{column.name}' is null"
