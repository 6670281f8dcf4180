"""Records: which columns of a source a run reads, how values become what they have to be, and the interface of readers.

An *other column* is one that no setting names, but whose name says, in the field's libraries, that it decides what is
trained: it is used (labels, masks, tools), or checked record by record to change nothing (an attention mask of ones),
and a record in which it would change something is refused. `data.ignore_columns` passes over it.

A file is read in *parts*: part i of n holds a fixed share of its records, found without reading the others, so that
several readers share one large file. Inside a part an *offset* in the format's own terms (bytes, rows, documents) marks
where to go on. Nothing else is needed to resume.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.data.config import DataConfig
from evenload.data.sources import SourceFile, damaged_compression
from evenload.errors import DataError

ColumnKind = Literal[
    "text", "messages", "text_or_messages", "tokens", "mask", "any", "ones", "counting", "one", "equal", "empty"
]
"""The first six are read; what the others hold is only checked, and gives no value."""

_INT32 = np.iinfo(np.int32)
_CHECKED: tuple[ColumnKind, ...] = ("ones", "counting", "one", "equal", "empty")
KIND_WORDS: dict[ColumnKind, str] = {
    "text": "text",
    "messages": "a list of message objects",
    "text_or_messages": "text or a list of message objects",
    "tokens": "a list of token ids",
    "mask": "a list of 0 and 1",
}
_FIELDS: dict[str, dict[str, ColumnKind]] = {
    "text": {"text_column": "text"},
    "messages": {"messages_column": "messages"},
    "prompt_completion": {"prompt_column": "text_or_messages", "completion_column": "text_or_messages"},
    "tokens": {"tokens_column": "tokens", "labels_column": "tokens", "mask_column": "mask"},
}
"""Settings that name the required columns, by kind of record; those left empty name none."""
_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
_PACKED = "says that the record holds several documents, which would attend to each other; store them one a record"
_PADDED = "marks tokens as padding, which would be trained; leave them out of the record"
_WEIGHTED = "weighs the loss, which is not done; remove it"
_MEDIA = ("images image videos video audios audio", "empty", "is not empty, and only text is trained; remove it")
_CHAT: tuple[tuple[str, ColumnKind, str], ...] = (
    ("tools chat_template_kwargs", "any", ""),
    ("weight weights sample_weight loss_weight", "ones", _WEIGHTED),
    ("system system_prompt", "empty", "is no message of the conversation; make it the first one"),
    _MEDIA,
)
_OTHER_COLUMNS: dict[str, tuple[tuple[str, ColumnKind, str], ...]] = {
    "text": (),
    "messages": _CHAT,
    "prompt_completion": _CHAT,
    "tokens": (
        ("labels", "tokens", ""),
        (" ".join(_MASKS), "mask", ""),
        ("attention_mask", "ones", _PADDED),
        ("position_ids", "counting", _PACKED),
        ("seq_lengths", "one", _PACKED),
        ("seq_idx segment_ids document_ids", "equal", _PACKED),
        ("cu_seqlens cu_seq_lens", "empty", _PACKED),
        ("weight weights sample_weight loss_weight loss_weights token_weights", "ones", _WEIGHTED),
        _MEDIA,
    ),
}
"""Other columns by kind of record: names, what they have to hold, and what is wrong where they do not."""


class Column(NamedTuple):
    """A column that a run may read.

    Args:
        name: key (jsonl) or column.
        kind: "text" values are str; "messages" list[dict]; "tokens" int32[num_tokens]; "mask" bool[num_tokens].
        setting: name of the `DataConfig` field that holds `name`, or that passes over it.
        is_required: every record must have it; else an other column, which a record may lack.
        problem: of one that is only checked: what is wrong where it does not hold its kind.
    """

    name: str
    kind: ColumnKind
    setting: str
    is_required: bool = True
    problem: str = ""


def record_columns(config: DataConfig) -> tuple[Column, ...]:
    """The columns of a record of `config.record`: those required, then other ones."""
    fields = ((getattr(config, field), kind, f"data.{field}") for field, kind in _FIELDS[config.record].items())
    required = tuple(Column(*field) for field in fields if field[0])
    passed_over = {column.name for column in required} | set(config.ignore_columns)
    return required + tuple(
        _other_column(config, name, kind, problem)
        for names, kind, problem in _OTHER_COLUMNS[config.record]
        for name in names.split()
        if name not in passed_over
    )


def value_names(columns: Sequence[Column]) -> tuple[str, ...]:
    """Names of the columns whose values a record holds, in their order; trailing ones may be missing."""
    return tuple(column.name for column in columns if column.kind not in _CHECKED)


def _other_column(config: DataConfig, name: str, kind: ColumnKind, problem: str) -> Column:
    named = {"labels": config.labels_column} | dict.fromkeys(_MASKS, config.mask_column)
    if config.record == "tokens" and name in named and (named[name] or config.loss_on == "all"):
        instead = f'"{named[name]}" was named instead' if named[name] else 'data.loss_on is "all"'
        kind, problem = "empty", f"says where the loss is, and {instead}"
    return Column(name, kind, "data.ignore_columns", False, problem)


def other_values(columns: Sequence[Column], values: Sequence[Any], num_tokens: int | None = None) -> tuple[Any, ...]:
    """The values of other columns that are read, in the order of `value_names`, without `None` at the end.

    Args:
        values: one a column; None where a record has none.
        num_tokens: ids of the record, where it holds ids.

    Raises:
        OtherColumnError: one that is only checked would change what is trained. No damage of one record, so it always
            stops the run.
        ValueProblem: another value that is not what its column has to hold.
    """
    if all(value is None for value in values):
        return ()
    found = []
    for column, value in zip(columns, values, strict=True):
        if column.kind not in _CHECKED:
            found.append(None if value is None else convert_value(column, value))
        elif value is not None and not _holds(column.kind, value, num_tokens):
            raise OtherColumnError(
                f"'{column.name}' {column.problem}, or set data.ignore_columns = [\"{column.name}\"] to train as if it "
                "were not there"
            )
    while found and found[-1] is None:
        found.pop()
    return tuple(found)


def _holds(kind: ColumnKind, value: Any, num_tokens: int | None) -> bool:
    """Whether a value of a column that is only checked changes nothing."""
    if kind == "empty":
        return value in ("", [], {}) if isinstance(value, str | list | dict) else False
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
    """A value that is not what its column has to hold."""


class OtherColumnError(DataError):
    """A column would decide what is trained, and that is not done."""


@contextmanager
def naming(file: SourceFile) -> Iterator[None]:
    """Put the file's name before an `OtherColumnError`, which whoever raises it does not know."""
    try:
        yield
    except OtherColumnError as problem:
        raise DataError(f"{file.name}: {problem}") from problem


def convert_value(column: Column, value: Any) -> Any:
    """One Python value as its column holds it; a `ValueProblem` for another type and ids that int32 cannot hold."""
    kind = column.kind
    if kind == "any":
        return value
    if kind in ("tokens", "mask"):
        array = _plain_array(value)
        if array is not None and not array.size:
            return np.zeros(0, np.int32 if kind == "tokens" else bool)
        if array is not None and kind == "mask" and np.isin(array, (0, 1)).all():
            return array.astype(bool)
        if array is not None and kind == "tokens" and array.dtype.kind in "iu":
            narrowed, fits = narrow_ids(array)
            if fits is not None:
                raise ValueProblem(f"column '{column.name}': {beyond_int32(array)}")
            return narrowed
    else:
        is_messages = isinstance(value, list) and all(isinstance(message, dict) for message in value)
        if (type(value) is str and kind != "messages") or (is_messages and kind != "text"):
            return value
    text = repr(value)
    shown = "null" if value is None else f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
    raise ValueProblem(f"column '{column.name}': {shown} is not {KIND_WORDS[kind]}")


def _plain_array(value: Any) -> NDArray[Any] | None:
    """A list as an array of one dimension; None where it is none."""
    try:
        array = np.asarray(value) if isinstance(value, list | tuple | np.ndarray) else None
    except (ValueError, OverflowError):  # lists of unequal lengths, numbers beyond 64 bits
        return None
    return array if array is not None and (array.ndim == 1 or array.shape[:1] == (0,)) else None


def narrow_ids(values: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
    """Numbers as int32 (not copied where they are), and which of them int32 holds exactly; None = all."""
    if values.dtype == np.int32:
        return values, None
    if values.dtype.kind in "iu" and (values.dtype.itemsize < 4 or not len(values)):
        return values.astype(np.int32), None
    if values.dtype.kind in "iu":
        if _INT32.min <= values.min() and values.max() <= _INT32.max:
            return values.astype(np.int32), None
        fits = (values >= _INT32.min) & (values <= _INT32.max)
    else:
        fits = np.isfinite(values) & (values == np.trunc(values)) & (np.abs(values) <= _INT32.max)
    narrowed = np.where(fits, values, 0).astype(np.int32)
    return narrowed, None if fits.all() else fits


def beyond_int32(values: NDArray[Any]) -> str:
    _, fits = narrow_ids(values)
    worst = values[~fits][0] if fits is not None else values[0]
    return f"token id {worst} is no whole number of at most 2**31 - 1"


FILE_END = -1
"""`next_offset` after the last record of a part whose reader cannot or need not go on."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """The `index`-th of `count` shares of a file. Every record belongs to exactly one of them, in file order."""

    index: int = 0
    count: int = 1

    def range_of(self, size: int) -> range:
        """Which of so many bytes, rows or documents."""
        return range(size * self.index // self.count, size * (self.index + 1) // self.count)


class Record(NamedTuple):
    """A record of one file.

    Args:
        offset: where it begins, in the reader's terms.
        next_offset: where the next one of the part begins, or `FILE_END`.
        values: one value per wanted column, in their order; None where the record cannot be read.
        problem: why it cannot.
    """

    offset: int
    next_offset: int
    values: tuple[Any, ...] | None
    problem: str = ""


def make_records(
    offsets: Sequence[int], values: Sequence[tuple[Any, ...]], problems: Mapping[int, str]
) -> Iterator[Record]:
    """Records that lie one after the other, fast where there are many.

    Args:
        offsets: of every record, and behind the last.
        problems: of those that cannot be read, by index.
    """
    readable: Sequence[tuple[Any, ...] | None] = values
    reasons: Iterable[str] = repeat("")
    if problems:
        readable = [None if index in problems else row for index, row in enumerate(values)]
        reasons = [problems.get(index, "") for index in range(len(values))]
    return map(Record._make, zip(offsets, offsets[1:], readable, reasons, strict=False))


class FileSummary(NamedTuple):
    """What a file holds.

    Args:
        columns: names of its columns, or keys of its first records; none where records have no names.
        num_records: how many it holds; None = known only by reading it.
        is_exact: whether they were counted, not estimated.
    """

    columns: tuple[str, ...] = ()
    num_records: int | None = None
    is_exact: bool = True


class RecordReader(ABC):
    """One format's way to stream a file. Holds no open files between calls, so that it can go to another process."""

    def can_share(self, file: SourceFile) -> bool:
        """Whether parts of the file can be read without what lies before them."""
        return True

    holds_one = False
    """Every file is one record, at offset 0."""

    def num_parts(self, file: SourceFile, part_bytes: int) -> int:
        """Into how many parts of about that size the file can be read. Opens nothing; 1 where it cannot be shared."""
        return max(1, -(-(file.size_bytes or 0) // part_bytes)) if self.can_share(file) else 1

    def records(self, file: SourceFile, part: FilePart, offset: int | None = None) -> Iterator[Record]:
        """The part's records from an offset on; None = from the part's beginning. Bounded memory.

        Raises:
            DataError: the file or its index cannot be read, it has no such column or one of another type, an other
                column would change what is trained, or nothing marks where its documents end.
        """
        if offset == FILE_END or (part.index > 0 and not self.can_share(file)):
            return
        with naming(file):
            yield from self.read(file, part if self.can_share(file) else FilePart(), offset)

    @abstractmethod
    def summary(self, file: SourceFile) -> FileSummary:
        """What the file holds, as far as a short inspection shows; raises as `records`."""

    @abstractmethod
    def read(self, file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
        """What `records` gives where there is something to read: no `FILE_END`, one part where none can be shared."""

    def origin(self, file: SourceFile, offset: int) -> str:
        """How messages name a record: here by its row, from 1 on. May read the file up to there."""
        return f"{file.name}:row {offset + 1}"


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class TextReader(RecordReader):
    """Reader of format "text"; the offset of the document is 0."""

    holds_one = True

    def can_share(self, file: SourceFile) -> bool:
        return False

    def read(self, file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
        try:
            with file.open() as stream:
                content = stream.read()
            if content.startswith(_LFS_POINTER):
                yield Record(0, FILE_END, None, "it is a pointer of Git LFS, not the file; run git lfs pull")
            else:
                yield Record(0, FILE_END, (content.decode("utf-8"),))
        except UnicodeDecodeError as err:
            problem = f"it is not UTF-8: byte 0x{err.object[err.start]:02x} at offset {err.start}"
            yield Record(0, FILE_END, None, problem)
        except Exception as err:  # decompressors raise classes of their own
            yield Record(0, FILE_END, None, damaged_compression(file, err))

    def summary(self, file: SourceFile) -> FileSummary:
        return FileSummary(num_records=1)

    def origin(self, file: SourceFile, offset: int) -> str:
        return file.name
