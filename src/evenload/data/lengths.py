"""Read document lengths from a file of numbers, or count them in any text source; profile them (`profile_lengths`).

Files of numbers are .npy, .npz, .txt, .csv, .tsv, .json, .jsonl, also with .gz. A table must have one column of whole
numbers, or one by a usual name (`USUAL_NAMES`); anything else is refused: read as a document, it would give one length
that looks right. Only .jsonl and .json may hold documents, too; the first record decides. Sums of squares leave int64
soon, so a profile sums over the different lengths in Python's integers.
"""

import csv
import gzip
import io
import re
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import fsspec
import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.data.blocks import HoldOut, fit_record
from evenload.data.chat_encoding import CHATML, open_encoder
from evenload.data.config import DataConfig, mixture_configs, reads_token_ids
from evenload.data.encoders import EncodedDocument
from evenload.data.groups import encode_groups
from evenload.data.part_files import kinds_of, open_part, with_kinds
from evenload.data.records import naming
from evenload.data.tokenize import BYTES, ByteTokenizer, DocumentTokenizer, describe_tokenizer, open_tokenizer
from evenload.errors import ConfigError, DataError
from evenload.types.run import HeaviestHalf, LengthClass, LengthProfile, WindowCut
from evenload.types.text import LengthUnit
from evenload.types.tree import Segment

_CHUNK_RECORDS = 64
_BYTES_OF_TOKEN = 4
TOKEN_IDS = "none: the records hold token ids"
ESTIMATED = "none: a token for every 4 bytes"


class TreeLengths(NamedTuple):
    """Lengths of a tree of sequences that share prefixes.

    Args:
        segments: depth first; () = a document of a group that shares nothing.
        sequences: tokens of each.
        num_recomputed: of its tokens, those that another part of a larger tree has, too.
        num_dropped: tokens of its group that were cut off or left out.
    """

    segments: tuple[Segment, ...]
    sequences: tuple[int, ...]
    num_recomputed: int
    num_dropped: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class LengthTable:
    """Lengths of documents, int64[num_documents], each at least 1, and what they count: "bytes" where documents were
    counted without a tokeniser. `tokenizer` is described, None for a file of numbers, as is how `records` are read.
    `trees` are those of the documents that are trees, by place, of whose unique tokens `lengths` are."""

    lengths: NDArray[np.int64]
    unit: LengthUnit
    tokenizer: str | None
    records: str = ""
    trees: Mapping[int, TreeLengths] = field(default_factory=dict)

    @property
    def sequence_lengths(self) -> NDArray[np.int64]:
        """Lengths of the documents and, in the place of trees, behind them, of the sequences; int64[num_sequences]."""
        sequences = [length for tree in self.trees.values() for length in tree.sequences]
        return np.concatenate([np.delete(self.lengths, [*self.trees]), np.array(sequences, np.int64)])


def read_length_table(source: str, config: DataConfig | None = None, *, estimated: bool = False) -> LengthTable:
    """Read the lengths of documents that are not empty; `ConfigError` or `DataError` where `source` holds none.

    Args:
        source: a file of numbers, or a text source (file, directory, glob, fsspec URL) whose documents are counted, as
            `count_documents` does.
        config: how a text source is read; its `sources` are not used. Default: bytes with an end-of-document token.
        estimated: as `count_documents` takes it.
    """
    base = config or DataConfig(sources=(source,), batch_documents=1, max_document_tokens=sys.maxsize)
    if not may_be_numbers(source, base) or (lengths := read_numbers(source)) is None:
        config = with_counted_chats(msgspec.structs.replace(base, sources=(source,)))
        return count_documents(config, source, estimated=estimated)
    if base.tokenizer is not None:
        raise ConfigError(
            f"{source} holds lengths, which no tokeniser is needed for, and the tokeniser is '{base.tokenizer}'; leave "
            "--tokenizer out, or name the documents themselves"
        )
    return LengthTable(lengths=checked_lengths(lengths, source), unit="tokens", tokenizer=None)


def count_documents(config: DataConfig, origin: str, *, estimated: bool = False) -> LengthTable:
    """Count the lengths of the documents that a run reads in an epoch; `origin` names the data in messages. Settings of
    longer documents hold for sequences that may share prefixes, and for their trees; other documents are whole.
    `estimated`: four bytes are told as a token, as of English text; code has more tokens."""
    if config.mixture_end == "repeat":
        raise ConfigError(
            f'{origin} repeats the parts of its mixture by weight (data.mixture_end = "repeat"), so its lengths are no '
            'table of documents; give one part as LENGTHS, or set data.mixture_end = "once"'
        )
    config = with_kinds(config)
    tokenizer = open_tokenizer(config.tokenizer, config.eos_token)
    is_ids = reads_token_ids(config)
    unit: LengthUnit = "bytes" if isinstance(tokenizer, ByteTokenizer) and not is_ids else "tokens"
    described, size = TOKEN_IDS if is_ids else describe_tokenizer(tokenizer), 1
    if estimated and unit == "bytes":
        described, unit, size = ESTIMATED, "tokens", _BYTES_OF_TOKEN
        limit = min(sys.maxsize, size * config.max_document_tokens)
        config = msgspec.structs.replace(config, max_document_tokens=limit)
    parts = mixture_configs(config)
    trees: dict[int, TreeLengths] = {}

    def told(length: int) -> int:
        return -(-length // size)

    def measured() -> Iterator[int]:
        documents = (document for part in parts for document in _documents(part, tokenizer))
        for at, (one, num_dropped) in enumerate(documents):
            segments = tuple(segment._replace(num_tokens=told(segment.num_tokens)) for segment in one.segments)
            if segments or num_dropped:
                sequences = tuple(map(told, one.sequence_lengths or (len(one.tokens),)))
                trees[at] = TreeLengths(segments, sequences, told(one.num_recomputed_tokens), told(num_dropped))
            yield sum(segment.num_tokens for segment in segments) or told(len(one.tokens))

    lengths = np.fromiter(measured(), np.int64)
    shared = ""
    if any(tree.segments for tree in trees.values()):
        again = sum(tree.num_recomputed for tree in trees.values())
        unique, paths = lengths[[*trees]].sum() - again, sum(sum(tree.sequences) for tree in trees.values())
        shared = f"; {paths:,} {unit} of sequences that share prefixes are {unique:,} unique ones"
        shared += f", and {again:,} again because trees were cut (data.max_tree_tokens)" if again else ""
    template = f", written by chat template {config.chat_template}" if config.chat_template else ""
    return LengthTable(
        lengths=checked_lengths(lengths, origin),
        unit=unit,
        tokenizer=described,
        records=f"records are read as {', '.join(dict.fromkeys(part.record for part in parts))}{template}{shared}",
        trees=trees,
    )


def with_counted_chats(config: DataConfig) -> DataConfig:
    """Return settings with kinds of record that are known, and a plain template for chats that are counted in bytes."""
    config = with_kinds(config)
    is_plain = config.chat_template is None and config.tokenizer in (None, BYTES)
    is_chat = config.record not in ("text", "tokens")
    return msgspec.structs.replace(config, chat_template=CHATML) if is_plain and is_chat else config


def checked_lengths(lengths: NDArray[np.int64], source: str) -> NDArray[np.int64]:
    if not len(lengths):
        raise DataError(f"{source} holds no lengths; give at least one document")
    if lengths.min() < 1:
        at = int(np.argmin(lengths))
        raise DataError(f"{source}: length {lengths[at]} of document {at} is below 1; leave empty documents out")
    return lengths


def _documents(config: DataConfig, tokenizer: DocumentTokenizer) -> Iterator[tuple[EncodedDocument, int]]:
    """Yield documents and, with the first of a group, the tokens that were cut off or left out of it."""
    encoder = open_encoder(config, tokenizer)
    hold_out, num_dropped = HoldOut.of(config), 0
    whole = msgspec.structs.replace(config, max_document_tokens=sys.maxsize, max_tree_tokens=None)
    for reader, part in open_part(config).segments:
        file, records = reader.file, reader.records(part)
        if hold_out is not None:
            records = (one for one in records if hold_out.is_held_out(file.key, one.offset) == hold_out.takes)
        while chunk := list(islice(records, _CHUNK_RECORDS)):
            with naming(file):
                outcomes = encode_groups(encoder, chunk)
            for record, outcome in zip(chunk, outcomes, strict=True):
                is_group = isinstance(outcome, list)
                pieces = fit_record(reader, record, outcome, config if is_group else whole)
                if is_group:  # all of one may be left out, which is told with the next
                    num_dropped += sum(dropped[2] for _, dropped in pieces if dropped is not None)
                for document in (one for one, _ in pieces if one is not None):
                    yield document, is_group * num_dropped
                    num_dropped *= not is_group


USUAL_NAMES = ("length", "lengths", "num_tokens", "tokens", "n_tokens", "token_count", "num_bytes", "bytes", "len")
"""Names of a column of lengths; the first that a table has counts."""

_SUFFIXES = (".npy", ".npz", ".txt", ".csv", ".tsv", ".json", ".jsonl", ".ndjson")
_HOW = (
    'lengths are a list such as [512, 40], a column of whole numbers, or {"length": 512} in every line of a .jsonl '
    "(to count the tokens of documents, give them as .jsonl or .parquet, or name the directory of text files)"
)


def may_be_numbers(source: str, config: DataConfig) -> bool:
    """Tell by name and settings whether a source may be one file of numbers; a glob never is, nor is a file whose
    format or kind of record is named, such as a .npy of token ids."""
    is_named = config.format != "auto" or config.record not in ("auto", "text")
    return not is_named and "*" not in source and source.removesuffix(".gz").endswith(_SUFFIXES)


def read_numbers(source: str) -> NDArray[np.int64] | None:
    """Read the lengths of a file of numbers; None of JSON documents, `DataError` where no list or column is meant."""
    name = source.removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")) and not _begins_with_numbers(source):
        return None
    with open_numbers(source) as stream:
        content = stream.read()
    if name.endswith((".npy", ".npz")):
        values: Any = _npy_numbers(content, source)
    elif name.endswith(".txt"):
        values = list(_lines_of_numbers(content, source))
    elif name.endswith((".csv", ".tsv")):
        values = _whole_numbers(_table(content, source, "\t" if name.endswith(".tsv") else ","), source)
    elif name.endswith(".json"):
        if _are_documents(decoded := _decoded(content, source)):
            return None
        values = _whole_numbers(decoded, source)
    else:
        values = _whole_numbers([_decoded(line, source) for line in content.splitlines() if line.strip()], source)
    if len(values) and (longest := int(np.max(values))) > np.iinfo(np.int64).max:
        raise DataError(f"{source}: length {longest} does not fit int64")
    return np.array(values, dtype=np.int64)


@contextmanager
def open_numbers(source: str) -> Iterator[Any]:
    """Open a file of numbers, here or at a URL, for bytes that are no longer compressed; errors name the file."""
    try:
        filesystem, path = fsspec.url_to_fs(source)
        is_gzip = source.endswith(".gz")
        with filesystem.open(path, "rb") as file, gzip.open(file) if is_gzip else nullcontext(file) as stream:
            yield stream
    except FileNotFoundError as err:
        raise ConfigError(f"lengths file '{source}' does not exist") from err
    except ImportError as err:
        raise ConfigError(f"lengths file '{source}' needs a package that is not installed: {err}") from err
    except (gzip.BadGzipFile, EOFError, zlib.error) as err:
        raise DataError(f"{source} cannot be decompressed: {err}; write it again with gzip") from err
    except OSError as err:
        raise DataError(f"lengths file '{source}' cannot be read: {err}") from err


def _begins_with_numbers(source: str) -> bool:
    try:
        with open_numbers(source) as stream:
            record = msgspec.json.decode(next((line for line in stream if line.strip()), b""))
    except msgspec.DecodeError:
        return False  # the reader of documents reports what is wrong, and in which line
    values = list(record.values()) if isinstance(record, dict) else [record]
    return bool(values) and all(_is_whole(value) or isinstance(value, float) for value in values)


def _are_documents(items: Any) -> bool:
    """Tell whether a JSON list holds records of a known kind, of which no key is a usual name of a length."""
    first = items[0] if isinstance(items, list) and items else None
    return isinstance(first, dict) and bool(kinds_of(tuple(first))) and first.keys().isdisjoint(USUAL_NAMES)


def _npy_numbers(content: bytes, source: str) -> NDArray[Any]:
    try:
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        if not isinstance(loaded, np.ndarray):
            loaded = loaded[_meant_column(dict(zip(loaded.files, loaded.files, strict=True)), loaded.files, source)]
    except DataError:
        raise
    except zipfile.BadZipFile as err:
        raise DataError(f"{source} cannot be read as an .npz: {err}; write it again with numpy.savez") from err
    except Exception as err:  # numpy parses the head as Python and raises whatever that raises
        if "Object arrays" in str(err):
            raise DataError(
                f"{source} holds pickled Python objects, which could run code when they are read; save them as int64"
            ) from err
        raise DataError(f"{source} is not a numpy array file; save int32 or int64 with numpy.save") from err
    if loaded.dtype.kind not in "iu":
        raise DataError(f"{source} has dtype {loaded.dtype}; lengths are integers, so save it as int32 or int64")
    if loaded.ndim != 1:
        raise DataError(f"{source} has shape {loaded.shape}; lengths are a one-dimensional array, one a document")
    return loaded


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


def _table(content: bytes, source: str, delimiter: str) -> dict[str, list[Any]] | list[int]:
    """Return the columns of a table by name, whole numbers as such; an empty list where it has no rows."""
    try:
        rows = [row for row in csv.reader(io.StringIO(content.decode("utf-8-sig")), delimiter=delimiter) if row]
    except (UnicodeDecodeError, csv.Error) as err:
        raise DataError(f"{source} cannot be read as a table: {err}; save it as UTF-8") from err
    if not rows:
        return []
    whole = re.compile(r"\s*-?\d+\s*", re.ASCII)
    rows = [[int(cell) if whole.fullmatch(cell) else cell.strip() for cell in row] for row in rows]
    has_head = not any(map(_is_whole, rows[0]))
    head = [str(cell) if has_head else f"column {i}" for i, cell in enumerate(rows[0], start=1)]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(head):
            raise DataError(f"{source}: row {number} has {len(row)} columns, the first has {len(head)}; repair it")
    return {name: [row[i] for row in rows[has_head:]] for i, name in enumerate(head)}


def _whole_numbers(value: Any, source: str) -> Sequence[int]:
    """Return the numbers in a list of numbers or of objects with one, or in an object with such a list."""
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


def _is_whole(value: Any) -> bool:
    return type(value) is int


DEFAULT_WINDOWS = tuple(2**k for k in range(12, 21))


def profile_lengths(lengths: NDArray[np.int64], windows: Sequence[int] = DEFAULT_WINDOWS) -> LengthProfile:
    """Compute quantiles, length classes and window cuts of lengths, int64[n], at least 1 each and at least one of them.
    `windows` are context windows in tokens, in any order. Raises `ConfigError`: a window below 1, or other lengths."""
    require_windows(windows)
    if not len(lengths) or lengths.min() < 1:
        raise ConfigError("a length profile needs at least one document, and every document at least 1 token")
    values, counts = np.unique(lengths, return_counts=True)
    length, count = values.astype(object), counts.astype(object)
    totals = np.stack([count, length * count, _pairs(length) * count], axis=1)
    # Documents, tokens and pairs of the lengths before each, and at the end in all.
    running = np.concatenate([np.zeros((1, 3), object), np.cumsum(totals, axis=0)])
    documents, tokens, pairs = running[-1]
    return LengthProfile(
        documents=documents,
        tokens=tokens,
        attention_pairs=pairs,
        shortest=length[0],
        median=_quantile(length, running, 1, 2),
        mean=tokens / documents,
        p90=_quantile(length, running, 9, 10),
        p99=_quantile(length, running, 99, 100),
        longest=length[-1],
        half_of_tokens=_heaviest_half(length, count, length),
        half_of_attention=_heaviest_half(length, count, _pairs(length)),
        classes=_classes(values, running),
        windows=tuple(_window_cut(window, length, count) for window in sorted(set(windows))),
    )


def require_windows(windows: Sequence[int]) -> None:
    for window in windows:
        if window < 1:
            raise ConfigError(f"window is {window}, must be at least 1 token")


def _pairs(num_tokens: Any) -> Any:
    return num_tokens * (num_tokens + 1) // 2


def _quantile(length: NDArray[Any], running: NDArray[Any], numerator: int, denominator: int) -> int:
    """Return the least length that at least numerator/denominator of all documents do not exceed."""
    return length[np.argmax(running[1:, 0] * denominator >= running[-1, 0] * numerator)]


def _heaviest_half(length: NDArray[Any], count: NDArray[Any], each: NDArray[Any]) -> HeaviestHalf:
    heaviest = np.cumsum((each * count)[::-1])
    half = heaviest[-1] - heaviest[-1] // 2
    at = int(np.argmax(heaviest >= half))
    row = len(length) - 1 - at
    beyond = (heaviest[at] - half) // each[row]  # documents of this length that are not needed
    return HeaviestHalf(documents=count[row:].sum() - beyond, shortest=length[row])


def _classes(values: NDArray[np.int64], running: NDArray[Any]) -> tuple[LengthClass, ...]:
    edges = [2**k for k in range(int(values[0]).bit_length() - 1, int(values[-1]).bit_length() + 1)]
    inside = np.diff(running[np.searchsorted(values, edges)], axis=0)
    return tuple(
        LengthClass(start=start, stop=2 * start, documents=documents, tokens=tokens, attention_pairs=pairs)
        for start, (documents, tokens, pairs) in zip(edges, inside, strict=False)
    )


def _window_cut(window: int, length: NDArray[Any], count: NDArray[Any]) -> WindowCut:
    is_longer = length > window
    length, count = length[is_longer], count[is_longer]
    across = _pairs(length) - length // window * _pairs(window) - _pairs(length % window)
    return WindowCut(
        window=window,
        longer_documents=count.sum(),
        longer_tokens=(length * count).sum(),
        tokens_beyond=((length - window) * count).sum(),
        attention_pairs_across=(across * count).sum(),
    )
