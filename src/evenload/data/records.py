"""Define the columns that a run reads, the conversion of their values, and the interface of readers (`RecordReader`).

An *other column* is named by no setting, but in the field's libraries its name decides what is trained: it is used
(labels, masks, tools), or checked record by record to change nothing, else refused, unless `data.ignore_columns` skips
it.

A file is read in *parts*: part i of n holds a fixed share of its records, reachable without reading the others. An
*offset* in the format's own terms (bytes, rows, documents) is all it takes to resume inside a part.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.data.config import DataConfig
from evenload.data.sources import SourceFile, damaged_compression
from evenload.errors import ConfigError, DataError
from evenload.types.text import counted

ColumnKind = Literal[
    "text", "messages", "text_or_messages", "tokens", "mask", "any", "group", "ones", "counting", "one", "equal",
    "empty",
]  # fmt: skip
"""The first six are read, and "group" tells which records share prefixes; the others are only checked, and give no
value."""

_CHECKED: tuple[ColumnKind, ...] = ("ones", "counting", "one", "equal", "empty")
KIND_WORDS: dict[ColumnKind, str] = {
    "text": "text",
    "messages": "a list of message objects",
    "text_or_messages": "text or a list of message objects",
    "tokens": "a list of token ids",
    "mask": "a list of 0 and 1",
    "any": "a value",
    "group": "a value of data.group_by",
}
KIND_FIELDS: dict[str, dict[str, ColumnKind]] = {
    "text": {"text_column": "text"},
    "messages": {"messages_column": "messages"},
    "conversations": {"conversations": "messages"},
    "instruction": {"instruction": "text", "output": "text"},
    "prompt_completion": {"prompt_column": "text_or_messages", "completion_column": "text_or_messages"},
    "preference": {"chosen": "text_or_messages", "rejected": "text_or_messages"},
    "tokens": {"tokens_column": "tokens", "labels_column": "tokens", "mask_column": "mask"},
}
"""Settings that name the required columns, by kind of record; an empty one names none, and what is no setting is the
name itself."""
_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
_PACKED = "says that the record holds several documents, which would attend to each other; store them one a record"
_PADDED = "marks tokens as padding, which would be trained; leave them out of the record"
_WEIGHTED = "weighs the loss, which is not done; remove it"
_MEDIA = ("images image videos video audios audio", "empty", "is not empty, and only text is trained; remove it")
_WEIGHT_NAMES = "weight weights sample_weight loss_weight"
_CHAT: tuple[tuple[str, ColumnKind, str], ...] = (
    ("tools chat_template_kwargs", "any", ""),
    (_WEIGHT_NAMES, "ones", _WEIGHTED),
    ("system system_prompt", "empty", "is no message of the conversation; make it the first one"),
    _MEDIA,
)
_OTHER_COLUMNS: dict[str, tuple[tuple[str, ColumnKind, str], ...]] = {
    "text": (),
    "messages": _CHAT,
    "conversations": _CHAT,
    "instruction": (
        ("input", "any", ""),
        *_CHAT,
        ("history", "empty", "holds earlier turns; write the records as messages"),
    ),
    "prompt_completion": _CHAT,
    "preference": (("prompt", "any", ""), *_CHAT),
    "tokens": (
        ("labels", "tokens", ""),
        (" ".join(_MASKS), "mask", ""),
        ("attention_mask", "ones", _PADDED),
        ("position_ids", "counting", _PACKED),
        ("seq_lengths", "one", _PACKED),
        ("seq_idx segment_ids document_ids", "equal", _PACKED),
        ("cu_seqlens cu_seq_lens", "empty", _PACKED),
        (f"{_WEIGHT_NAMES} loss_weights token_weights", "ones", _WEIGHTED),
        _MEDIA,
    ),
}
"""Other columns by kind of record: names, what they must hold, and what is wrong where they do not."""


class Column(NamedTuple):
    """A column that a run may read; `setting` is the `DataConfig` field that names it, or that skips it. One that is
    not required may be lacking; `problem` is what is wrong where one that is only checked does not hold its kind."""

    name: str
    kind: ColumnKind
    setting: str
    is_required: bool = True
    problem: str = ""


def record_columns(config: DataConfig) -> tuple[Column, ...]:
    """Return the columns of a record of `config.record`, which is not "auto": the required ones, that of
    `data.group_by` last of them unless it is read anyway, then other ones."""
    columns = [
        Column(name, kind, f"data.{field if hasattr(config, field) else 'record'}")
        for field, kind in KIND_FIELDS[config.record].items()
        if (name := getattr(config, field, field))
    ]
    if (group := config.group_by) and group not in {column.name for column in columns}:
        kinds = {name: kind for names, kind, _ in _OTHER_COLUMNS[config.record] for name in names.split()}
        is_first = kinds.get(group) == "any" and next(iter(kinds)) == group
        if group in kinds and not is_first and group not in config.ignore_columns:
            raise ConfigError(f"data.group_by is '{group}', which has a meaning of its own; name another key or column")
        columns.append(Column(group, "any" if is_first else "group", "data.group_by"))
    skipped = {column.name for column in columns} | set(config.ignore_columns)
    named = {"labels": config.labels_column} | dict.fromkeys(_MASKS, config.mask_column)
    for names, kind, problem in _OTHER_COLUMNS[config.record]:
        for name in names.split():
            if name in skipped:
                continue
            column = Column(name, kind, "data.ignore_columns", False, problem)
            if config.record == "tokens" and name in named and (named[name] or config.loss_on == "all"):
                instead = f'"{named[name]}" was named instead' if named[name] else 'data.loss_on is "all"'
                column = column._replace(kind="empty", problem=f"says where the loss is, and {instead}")
            columns.append(column)
    return tuple(columns)


def value_names(columns: Sequence[Column]) -> tuple[str, ...]:
    """Return the names of the columns whose values a record holds, in order; trailing values may be missing."""
    return tuple(column.name for column in columns if column.kind not in (*_CHECKED, "group"))


def other_values(columns: Sequence[Column], values: Sequence[Any], num_tokens: int | None = None) -> tuple[Any, ...]:
    """Convert the values of other columns that are read (None where a record has none), in the order of `value_names`,
    without `None` at the end; `num_tokens` is set where the record holds ids. Raises `ValueProblem`, or
    `OtherColumnError` where a column would change what is trained, which is no damage of one record, so it always stops
    the run."""
    if all(value is None for value in values):
        return ()
    converted = []
    for column, value in zip(columns, values, strict=True):
        if column.kind not in _CHECKED:
            converted.append(None if value is None else convert_value(column, value))
        elif value is not None and not _holds(column.kind, value, num_tokens):
            ignore = f'set data.ignore_columns = ["{column.name}"] to train as if it were not there'
            raise OtherColumnError(f"'{column.name}' {column.problem}, or {ignore}")
    while converted and converted[-1] is None:
        converted.pop()
    return tuple(converted)


def _holds(kind: ColumnKind, value: Any, num_tokens: int | None) -> bool:
    if kind == "empty":
        return isinstance(value, str | list | dict) and not value
    try:
        array = np.asarray(value)
    except ValueError:
        return False
    if array.dtype.kind not in "biuf" or array.ndim > 1:
        return False
    if kind == "one":
        return array.size == 1 and int(array.flat[0]) == num_tokens
    if kind == "ones" and not array.ndim:
        return value == 1
    if num_tokens is not None and array.shape != (num_tokens,):
        return False
    if kind == "counting":
        return np.array_equal(array, np.arange(array.size))
    return not array.size or bool((array == (1 if kind == "ones" else array.flat[0])).all())


class ValueProblem(ValueError):
    """A value is not what its column must hold."""


class OtherColumnError(DataError):
    """A column would decide what is trained, and Evenload does not follow it."""


@contextmanager
def naming(file: SourceFile) -> Iterator[None]:
    """Put the file's name before an `OtherColumnError`."""
    try:
        yield
    except OtherColumnError as problem:
        raise DataError(f"{file.name}: {problem}") from problem


def convert_value(column: Column, value: Any) -> Any:
    """Convert a Python value to what its column holds; raise `ValueProblem` for another type or ids beyond int32."""
    kind = column.kind
    if kind == "any" or (kind == "group" and value is not None):
        return value
    if kind in ("tokens", "mask"):
        array = _plain_array(value)
        if array is not None and not array.size:
            return np.zeros(0, np.int32 if kind == "tokens" else bool)
        if array is not None and kind == "mask" and np.isin(array, (0, 1)).all():
            return array.astype(bool)
        if array is not None and kind == "tokens" and array.dtype.kind in "iu":
            (tokens,), problems = cut_ids(array, np.array([0, len(array)]))
            if problems:
                raise ValueProblem(f"column '{column.name}': {problems[0]}")
            return tokens
    else:
        is_messages = isinstance(value, list) and all(isinstance(message, dict) for message in value)
        if (type(value) is str and kind != "messages") or (is_messages and kind != "text"):
            return value
    text = repr(value)
    shown = "null" if value is None else f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
    raise ValueProblem(f"column '{column.name}': {shown} is not {KIND_WORDS[kind]}")


def _plain_array(value: Any) -> NDArray[Any] | None:
    try:
        array = np.asarray(value) if isinstance(value, list | tuple | np.ndarray) else None
    except (ValueError, OverflowError):  # lists of unequal lengths, numbers beyond 64 bits
        return None
    return array if array is not None and (array.ndim == 1 or array.shape[:1] == (0,)) else None


def cut_ids(ids: NDArray[Any], edges: NDArray[Any]) -> tuple[list[NDArray[np.int32]], dict[int, str]]:
    """Cut token ids [N] into rows of int32, as views where they are int32 already; row i has ids `[edges[i], edges[i +
    1])`. Also returns, by row, the problem of those with an id that int32 does not hold exactly."""
    tokens, problems = ids, {}
    if ids.dtype != np.int32:
        with np.errstate(invalid="ignore"):
            tokens = ids.astype(np.int32)
        wrong = np.flatnonzero(tokens != ids)[::-1]  # so that the first id of a row counts
        problems = {
            row: f"token id {worst} is no whole number of at most 2**31 - 1"
            for row, worst in zip(rows_at(wrong, edges), ids[wrong], strict=True)
        }
    return [tokens[start:stop] for start, stop in pairwise(edges.tolist())], problems


def rows_at(places: NDArray[Any], edges: NDArray[Any]) -> list[int]:
    """Return the rows, as of `cut_ids`, in which places lie."""
    return (np.searchsorted(edges, places, side="right") - 1).tolist()


FILE_END = -1
"""`next_offset` of the last record of a part whose reader cannot or need not go on."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """The `index`-th of `count` shares of a file. Every record belongs to exactly one of them, in file order."""

    index: int = 0
    count: int = 1

    def range_of(self, size: int) -> range:
        return range(size * self.index // self.count, size * (self.index + 1) // self.count)


class Member(NamedTuple):
    """One of several sequences of a record, or of records that form a group: where that begins, and its values."""

    offset: int
    values: tuple[Any, ...]


class Record(NamedTuple):
    """A record of one file, and where it and the next one of the part begin, in the reader's terms (or `FILE_END`); one
    value per column that is read, None and a problem where the record cannot be read. Of several sequences, which may
    share prefixes, every one has values of its own."""

    offset: int
    next_offset: int
    values: tuple[Any, ...] | None
    problem: str = ""
    sequences: tuple[Member, ...] = ()


def make_record(columns: Sequence[Column], given: Sequence[Any], offset: int, next_offset: int) -> Record:
    """Make a record of Python values, one a column, None where it has none. Where a required column holds a list of
    what it may hold, each item is a sequence; values that are no such list belong to every one."""
    num_required = sum(column.is_required for column in columns)
    sequences: list[Member] = []
    try:
        rows = _rows_of(columns, given)
        for row in rows:
            values = [convert_value(column, value) for column, value in zip(columns[:num_required], row, strict=False)]
            num_tokens = len(values[0]) if columns[0].kind == "tokens" else None
            others = other_values(columns[num_required:], row[num_required:], num_tokens)
            sequences.append(Member(offset, (*values, *others)))
    except ValueProblem as problem:
        return Record(offset, next_offset, None, str(problem))
    if rows[0] is given:
        return Record(offset, next_offset, sequences[0].values)
    return Record(offset, next_offset, None, sequences=tuple(sequences))


def holds_several(kind: ColumnKind, value: Any) -> bool:
    """Tell whether a value is a list of what a column of this kind may hold."""
    if not isinstance(value, list | tuple | np.ndarray) or not len(value):
        return False
    lists = all(isinstance(one, list | tuple | np.ndarray) for one in value)
    if kind in ("text", "text_or_messages"):
        return all(isinstance(one, str) for one in value) or (lists and kind == "text_or_messages")
    return lists and kind in ("tokens", "mask", "messages", "ones", "counting", "equal")


def _rows_of(columns: Sequence[Column], given: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the values of every sequence; those given where they are of one."""
    sizes = {one.name: len(value) for one, value in zip(columns, given, strict=True) if holds_several(one.kind, value)}
    if not any(one.is_required and one.name in sizes for one in columns):
        return [given]
    (first, count), *others = sizes.items()
    if wrong := next((f"'{name}' of {size}" for name, size in others if size != count), ""):
        raise ValueProblem(f"column '{first}' holds a list of {counted(count, 'sequence')}, {wrong}")
    lists = [value if one.name in sizes else [value] * count for one, value in zip(columns, given, strict=True)]
    return list(zip(*lists, strict=True))


def make_records(
    offsets: Sequence[int], values: Sequence[tuple[Any, ...]], problems: Mapping[int, str]
) -> Iterator[Record]:
    """Make many records quickly; `offsets` are of every record and after the last, `problems` by index."""
    readable: Sequence[tuple[Any, ...] | None] = values
    reasons: Iterable[str] = repeat("")
    if problems:
        readable = [None if index in problems else row for index, row in enumerate(values)]
        reasons = [problems.get(index, "") for index in range(len(values))]
    return map(Record._make, zip(offsets, offsets[1:], readable, reasons, repeat(()), strict=False))


class FileSummary(NamedTuple):
    """What a short inspection shows of a file: columns or keys, and records (None = unknown), counted or estimated."""

    columns: tuple[str, ...] = ()
    num_records: int | None = None
    is_exact: bool = True


@dataclass(frozen=True, eq=False)
class RecordReader(ABC):
    """Stream a file of one format. Holds nothing open between calls and can be pickled."""

    file: SourceFile
    holds_one: ClassVar[bool] = False
    """Every file is one record, at offset 0."""

    def can_share(self) -> bool:
        """Return whether parts of the file can be read without what lies before them."""
        return not self.holds_one

    def num_parts(self, part_bytes: int) -> int:
        return max(1, -(-(self.file.size_bytes or 0) // part_bytes)) if self.can_share() else 1

    def records(self, part: FilePart, offset: int | None = None) -> Iterator[Record]:
        """Yield the part's records from an offset on (None = its beginning), in bounded memory. Raises `DataError`: the
        file cannot be read, lacks a column, or has one of another type or that would change what is trained."""
        if offset == FILE_END or (part.index > 0 and not self.can_share()):
            return
        with naming(self.file):
            yield from self.read(part if self.can_share() else FilePart(), offset)

    @abstractmethod
    def summary(self) -> FileSummary:
        """Summarise the file by a short inspection; raises as `records`."""

    @abstractmethod
    def read(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        """Yield what `records` does; is not called at `FILE_END`, nor for parts of a file that cannot be shared."""

    def origin(self, offset: int) -> str:
        """Name a record in messages: here by its row, from 1 on. May read the file up to there."""
        return f"{self.file.name}:row {offset + 1}"


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class TextReader(RecordReader):
    """Read files of format "text": one document each, at offset 0."""

    holds_one = True

    def read(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        values, problem = None, ""
        try:
            with self.file.open() as stream:
                content = stream.read()
            if content.startswith(_LFS_POINTER):
                problem = "it is a pointer of Git LFS, not the file; run git lfs pull"
            else:
                values = (content.decode("utf-8"),)
        except UnicodeDecodeError as err:
            problem = f"it is not UTF-8: byte 0x{err.object[err.start]:02x} at offset {err.start}"
        except Exception as err:  # decompressors raise classes of their own
            problem = damaged_compression(self.file, err)
        yield Record(0, FILE_END, values, problem)

    def summary(self) -> FileSummary:
        return FileSummary(num_records=1)

    def origin(self, offset: int) -> str:
        return self.file.name
