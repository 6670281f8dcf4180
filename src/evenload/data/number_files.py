"""`read_numbers`: document lengths from files of numbers: .npy, .npz, .txt, .csv, .tsv, .json, .jsonl, also with .gz.

A table must have one column of whole numbers, or one by a usual name (`USUAL_NAMES`); anything else is refused, because
a table that is read as if it were a document gives one length that looks right. Only .jsonl may hold documents, too;
its first record decides. Price: a file of numbers is held in memory whole.
"""

import csv
import gzip
import io
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import fsspec
import msgspec
import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from evenload.errors import ConfigError, DataError

USUAL_NAMES = ("length", "lengths", "num_tokens", "tokens", "n_tokens", "token_count", "num_bytes", "bytes", "len")
"""Of a column of lengths; the first that a table has counts."""

_SUFFIXES = (".npy", ".npz", ".txt", ".csv", ".tsv", ".json", ".jsonl", ".ndjson")
_HOW = (
    'lengths are a list such as [512, 40], a column of whole numbers, or {"length": 512} in every line of a .jsonl '
    "(to count the tokens of documents, give them as .jsonl or .parquet, or name the directory of text files)"
)


def holds_numbers(source: str) -> bool:
    """Whether a source is one file of a kind that holds numbers, by its name. Globs never are."""
    return "*" not in source and source.removesuffix(".gz").endswith(_SUFFIXES)


def read_numbers(source: str) -> NDArray[np.int64] | None:
    """Read the lengths of a file of numbers; None of a .jsonl whose records are documents.

    Raises:
        ConfigError: the file does not exist.
        DataError: it cannot be read, or holds no list or column of whole numbers that is plainly meant.
    """
    name = source.removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")) and not _begins_with_numbers(source):
        return None
    with _named_failures(source):
        filesystem, path = fsspec.url_to_fs(source)
        content = filesystem.cat_file(path)
    if source.endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as err:
            raise DataError(f"{source} cannot be decompressed: {err}; write it again with gzip") from err
    if name.endswith(".npz"):
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                arrays = {each.removesuffix(".npy"): archive.read(each) for each in archive.namelist()}
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as err:
            raise DataError(f"{source} cannot be read as an .npz: {err}; write it again with numpy.savez") from err
        content = bytes(_meant_column(arrays, arrays, source))
    if name.endswith((".npy", ".npz")):
        values: Any = _npy_numbers(content, source)
    elif name.endswith(".txt"):
        values = list(_lines_of_numbers(content, source))
    elif name.endswith((".csv", ".tsv")):
        values = _table_numbers(content, source, "\t" if name.endswith(".tsv") else ",")
    elif name.endswith(".json"):
        values = _json_numbers(_decoded(content, source), source)
    else:
        values = _json_numbers([_decoded(line, source) for line in content.splitlines() if line.strip()], source)
    if len(values) and (longest := int(np.max(values))) > np.iinfo(np.int64).max:
        raise DataError(f"{source}: length {longest} does not fit int64")
    return np.array(values, dtype=np.int64)


@contextmanager
def _named_failures(source: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as err:
        raise ConfigError(f"lengths file '{source}' does not exist") from err
    except ImportError as err:
        raise ConfigError(f"lengths file '{source}' needs a package that is not installed: {err}") from err
    except OSError as err:
        raise DataError(f"lengths file '{source}' cannot be read: {err}") from err


def _begins_with_numbers(source: str) -> bool:
    """Whether the first record of a .jsonl is a number, or an object of nothing but numbers. Reads no further."""
    with _named_failures(source):
        filesystem, path = fsspec.url_to_fs(source)
        file = filesystem.open(path, "rb")
    try:
        with file, gzip.GzipFile(fileobj=file) if source.endswith(".gz") else file as stream:
            record = msgspec.json.decode(next((line for line in stream if line.strip()), b""))
    except (OSError, EOFError, zlib.error, msgspec.DecodeError):
        return False  # its reader reports what is wrong, and in which line
    values = list(record.values()) if isinstance(record, dict) else [record]
    return bool(values) and all(_is_whole(value) or isinstance(value, float) for value in values)


def _npy_numbers(content: bytes, source: str) -> NDArray[Any]:
    stream = io.BytesIO(content)
    try:
        version = npy_format.read_magic(stream)
        read_head = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, _, dtype = read_head(stream)
        stream.seek(0)
        values = np.load(stream, allow_pickle=False) if dtype.kind in "iu" else None
    except Exception as err:  # numpy parses the head as Python and raises whatever that raises
        raise DataError(
            f"{source} is not a numpy array file of numbers; write int32 or int64 with numpy.save(path, lengths)"
        ) from err
    if dtype.hasobject:
        raise DataError(
            f"{source} holds pickled Python objects, which could run code when they are read, and no numbers; save the "
            "lengths as an array of integers: numpy.save(path, numpy.array(lengths, numpy.int64))"
        )
    if values is None:
        raise DataError(f"{source} has dtype {dtype}; lengths are integers, so save it as int32 or int64")
    if values.ndim != 1:
        raise DataError(f"{source} has shape {shape}; lengths are a one-dimensional array, one entry per document")
    return values


def _lines_of_numbers(content: bytes, source: str) -> Iterator[int]:
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            if line.strip():
                yield int(line)
        except ValueError as err:
            raise DataError(
                f"{source}:{number}: '{line[:40].decode(errors='replace')}' is not a length; a .txt holds one integer "
                "per line (to count the tokens of text files, name their directory or a glob such as 'docs/*.txt')"
            ) from err


def _table_numbers(content: bytes, source: str, delimiter: str) -> Sequence[int]:
    try:
        rows = [row for row in csv.reader(io.StringIO(content.decode("utf-8-sig")), delimiter=delimiter) if row]
    except (UnicodeDecodeError, csv.Error) as err:
        raise DataError(f"{source} cannot be read as a table: {err}; save it as UTF-8") from err
    if not rows:
        return ()
    has_head = not any(_is_written_whole(cell) for cell in rows[0])
    head = [cell.strip() if has_head else f"column {i}" for i, cell in enumerate(rows[0], start=1)]
    body = rows[1:] if has_head else rows
    for number, row in enumerate(body, start=1 + has_head):
        if len(row) != len(head):
            raise DataError(f"{source}: row {number} has {len(row)} columns, the first has {len(head)}; repair it")
    columns = {name: [row[i] for row in body] for i, name in enumerate(head)}
    whole = {name: cells for name, cells in columns.items() if all(map(_is_written_whole, cells))}
    return [int(cell) for cell in _meant_column(whole, columns, source)]


def _json_numbers(value: Any, source: str) -> Sequence[int]:
    """A list of numbers or of objects with one, or an object with such a list."""
    if isinstance(value, list) and all(map(_is_whole, value)):
        return value
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        keys = dict.fromkeys(key for one in value for key in one)
        value = {key: [one.get(key) for one in value] for key in keys}
    if not isinstance(value, dict):
        raise DataError(f"{source} holds no list of whole numbers; {_HOW}")
    whole = {key: cells for key, cells in value.items() if isinstance(cells, list) and all(map(_is_whole, cells))}
    return _meant_column(whole, value, source)


def _meant_column(whole: Mapping[str, Any], columns: Iterable[str], source: str) -> Any:
    """The one column of whole numbers, or the one with a usual name among several."""
    if len(whole) == 1:
        return next(iter(whole.values()))
    by_name = {name.lower(): cells for name, cells in whole.items()}
    if usual := [name for name in USUAL_NAMES if name in by_name]:
        return by_name[usual[0]]
    if not whole:
        raise DataError(f"{source} has no column of whole numbers among {', '.join(map(repr, columns))}; {_HOW}")
    raise DataError(
        f"{source} has {len(whole)} columns of whole numbers: {', '.join(map(repr, whole))}; keep the one with the "
        f"lengths, or call it '{USUAL_NAMES[0]}'"
    )


def _decoded(content: bytes, source: str) -> Any:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError as err:
        raise DataError(f"{source} is not JSON: {err}; {_HOW}") from err


def _is_written_whole(cell: str) -> bool:
    return cell.strip().removeprefix("-").isdecimal()


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
