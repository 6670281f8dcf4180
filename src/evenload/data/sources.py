"""List sources (files, directories, globs, fsspec URLs) as sorted files (`list_sources`), and open them (`SourceFile`).

Files are sorted by their path below the source, sources keep their order. A directory that contains itself through a
link is entered once. What only describes data files next to it (`README.md`, `dataset_info.json`) is left out and
reported; another file without the name of a data file is refused there: it would be trained as a text. A file is known
by its path below the source and its size, so a data set may move between save and resume.
"""

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import IO, Any, Literal, NamedTuple, TypeVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from evenload.data.config import DataConfig, Format
from evenload.errors import ConfigError, DataError, EvenloadError
from evenload.types.text import counted

FileFormat = Literal["text", "jsonl", "json", "parquet", "arrow", "memmap", "dataset"]
"""`DataConfig.format` resolved; "dataset" = no file but a Hugging Face data set passed in Python."""

RETRY_WAITS_S = (0.1, 0.5, 2.0)

T = TypeVar("T")
_BUFFER_BYTES = 1 << 18
# Trying again cannot help these; in Python both are kinds of OSError.
_FINAL_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError)
_DECOMPRESSORS: dict[Any, Any] = compr


@dataclass(frozen=True)
class SourceFile:
    """One file of a source: `name` is for messages, `path` in the terms of `filesystem` ("" for a data set), `key` the
    source's index and the path below it; `size_bytes` and `compression` are None where unknown or none."""

    name: str
    path: str
    key: str
    size_bytes: int | None
    format: FileFormat
    compression: str | None
    filesystem: AbstractFileSystem

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, LocalFileSystem)

    def sibling(self, suffix: str, other_suffix: str) -> "SourceFile | None":
        """Return the file of the same name with another suffix, such as an index, or None."""
        path = self.path.removesuffix(suffix) + other_suffix
        name = self.name.removesuffix(suffix) + other_suffix

        def find() -> SourceFile | None:
            try:
                size_bytes = self.filesystem.info(path).get("size")
            except FileNotFoundError:
                return None
            return replace(self, name=name, path=path, size_bytes=size_bytes)

        return _with_retries(find, name, "looked up")

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the decompressed bytes, seekable; failed reads of a remote file are repeated, then raise `DataError`."""
        if self.is_local:
            try:
                stream: IO[bytes] = open(self.path, "rb")  # noqa: SIM115 (closed below)
            except OSError as err:
                raise DataError(f"{self.name} cannot be opened: {err}; check the path and its permissions") from err
        else:
            stream = io.BufferedReader(_RemoteStream(self), _BUFFER_BYTES)
        with stream:
            if self.compression is None:
                yield stream
            else:
                with io.BufferedReader(_DECOMPRESSORS[self.compression](stream, mode="rb"), _BUFFER_BYTES) as plain:
                    yield plain


class _RemoteStream(io.RawIOBase):
    """Bytes of a remote file. Not all of fsspec's file systems try again (HTTP does not), and a read that ends early
    looks like the end of the data: a read that fails, or ends before the file does, opens it again at the same byte."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._stream: Any = None
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self._file.size_bytes is None:
            raise DataError(f"{self._file.name}: its storage does not know how large it is; copy the file first")
        self._position = offset + (0, self._position, self._file.size_bytes or 0)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        what = f"read at byte {self._position}"
        data = _with_retries(lambda: self._read(len(view)), self._file.name, what, self._close)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._close()
        super().close()

    def _read(self, count: int) -> bytes:
        left = None if self._file.size_bytes is None else max(0, self._file.size_bytes - self._position)
        if left == 0:
            return b""
        if self._stream is None:
            # The default of HTTP puts bytes at the wrong place where a server sends too few.
            settings = {"cache_type": "readahead"} if "http" in self._file.filesystem.protocol else {}
            self._stream = self._file.filesystem.open(self._file.path, "rb", **settings)
        if self._stream.tell() != self._position:
            self._stream.seek(self._position)
        data: Any = self._stream.read(count if left is None else min(count, left))
        if not data and left:
            raise EOFError(f"it ends there, {left} bytes too early")
        return data

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _with_retries(call: Callable[[], T], name: str, what: str, clean_up: Callable[[], object] = lambda: None) -> T:
    """Call with the pauses of `RETRY_WAITS_S`, after every failure `clean_up`; then raise: `name` cannot be `what`."""
    waits_s = iter(RETRY_WAITS_S)
    while True:
        try:
            return call()
        except _FINAL_ERRORS as err:
            raise DataError(f"{name} cannot be opened: {err}; check the path and its permissions") from err
        except Exception as err:  # every file system raises classes of its own client library
            clean_up()
            if (wait_s := next(waits_s, None)) is None:
                tried = f"tried {1 + len(RETRY_WAITS_S)} times. Check its storage; the run can be resumed"
                raise DataError(f"{name} cannot be {what}: {err or type(err).__name__}; {tried}") from err
            time.sleep(wait_s)


def damaged_compression(file: SourceFile, err: Exception) -> str:
    """Return the problem of a file whose reading raised this; `DataError` where not the compression is damaged."""
    refuse_storage_failure(file, err)
    if file.compression is None or isinstance(err, EvenloadError):
        raise err
    return f"its {file.compression} compression is damaged: {err}"


def refuse_storage_failure(file: SourceFile, err: Exception) -> None:
    """Raise a `DataError` where the operating system failed; libraries raise OSError without a number for damage."""
    if isinstance(err, OSError) and err.errno is not None:
        raise DataError(f"{file.name} cannot be read: {err}; check the storage it lies on") from err


def files_digest(files: Sequence[SourceFile]) -> str:
    """Return number, bytes, and a hash of relative paths and sizes of files, to notice a change."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.key}\0{file.size_bytes}\0".encode(errors="surrogateescape"))
    total_bytes = sum(file.size_bytes or 0 for file in files)
    return f"{len(files)} files of {total_bytes} bytes, {digest.hexdigest()[:16]}"


_SUFFIXES: dict[FileFormat, str] = {
    "jsonl": ".jsonl .ndjson", "json": ".json", "parquet": ".parquet", "arrow": ".arrow .feather",
    "memmap": ".bin .idx .npy",
}  # fmt: skip
_SUFFIX_FORMATS = {suffix: format for format, suffixes in _SUFFIXES.items() for suffix in suffixes.split()}
_COMPRESSION_SUFFIXES = (".gz", ".bz2", ".xz", ".lzma", ".zst", ".zstd", ".lz4", ".snappy")
# They hold records or archives, which nobody means as one text a file.
_UNREAD_SUFFIXES = (
    ".csv", ".tsv", ".xls", ".xlsx", ".ods", ".orc", ".avro", ".pkl", ".pickle", ".npz", ".h5", ".hdf5", ".msgpack",
    ".tfrecord", ".sqlite", ".db", ".tar", ".tgz", ".zip", ".7z", ".rar", ".pt", ".pth", ".safetensors", ".gguf",
)  # fmt: skip
# Files next to data, in lower case: cards, licences, settings, checksums, what `datasets` and Spark write.
_DESCRIBING = (
    "readme*", "license*", "licence*", "notice*", "citation*", "changelog*", "*.toml", "*.yaml", "*.yml", "*.lock",
    "*.md5", "*.sha256", "sha256sums*", "_success",
)  # fmt: skip
_DESCRIBING_DATA = ("dataset_info.json", "dataset_infos.json", "state.json", "_metadata", "_common_metadata")
_CACHES = "cache-*.arrow"
_SPLIT_NAMES = {name: name for name in ("train", "test")} | dict.fromkeys(
    ("validation", "valid", "val", "dev", "eval"), "validation"
)
_SPLIT = re.compile(rf"(?:^|[/])({'|'.join(_SPLIT_NAMES)})(?=[-_./])")
_DICT = "dataset_dict.json"
_NAMED = 5  # in a message, of many files


class SourceListing(NamedTuple):
    """The files of one source, sorted by path; `left_out` are paths below it of files that only describe the data."""

    source: str
    files: tuple[SourceFile, ...]
    left_out: tuple[str, ...] = ()


class _Entry(NamedTuple):
    """A file below a source: `relative` is "" where the source is the file; `pattern` matched its name."""

    relative: str
    path: str
    size_bytes: int | None
    pattern: str = ""


def list_sources(config: DataConfig) -> tuple[SourceListing, ...]:
    """List all files of every source, in order; `ConfigError`: one without files, named twice, or that is no data."""
    listings: list[SourceListing] = []
    seen: dict[str, str] = {}
    for index, source in enumerate(config.sources):
        filesystem, root, below = _expand(source, config.include)
        entries, left_out = _data_files(filesystem, below, source, config.format)
        entries = _without_indexes(entries, source, config.format)
        if not entries:
            among = f" with a name like {' or '.join(config.include)}" if config.include else ""
            only = f" but {', '.join(left_out[:_NAMED])}, which describe data" if left_out else ""
            raise ConfigError(f"data source '{source}' has no files{among}{only}; check data.sources and data.include")
        files: list[SourceFile] = []
        for relative, path, size_bytes, _ in entries:
            name = os.path.join(root, relative) if relative else source
            is_local = isinstance(filesystem, LocalFileSystem)
            unique = os.path.realpath(path) if is_local else filesystem.unstrip_protocol(path)
            if unique in seen:
                raise ConfigError(
                    f"{name} and {seen[unique]} are the same file, which would be trained twice an epoch; name it once "
                    "in data.sources, or leave one out by data.include"
                )
            seen[unique] = name
            key, format = f"{index}:{relative or os.path.basename(path)}", file_format(path, config.format)
            files.append(SourceFile(name, path, key, size_bytes, format, _compression(path, name), filesystem))
        listings.append(SourceListing(source, tuple(files), left_out))
    return tuple(listings)


def file_format(path: str, format: Format) -> FileFormat:
    return _SUFFIX_FORMATS.get(_suffix(path), "text") if format == "auto" else format


def _suffix(path: str) -> str:
    base, suffix = os.path.splitext(path.lower())
    return os.path.splitext(base)[1] if suffix in _COMPRESSION_SUFFIXES else suffix


def _expand(source: str, include: Sequence[str]) -> tuple[AbstractFileSystem, str, list[_Entry]]:
    try:
        filesystem, root = fsspec.url_to_fs(source)
        # A web server has no directories (fsspec would take a page with links for one), and "?" is no wildcard.
        is_page = source.startswith(("http://", "https://")) and "*" not in source and not source.endswith("/")
        if not is_page and filesystem.isdir(root):
            return filesystem, source, sorted(_chosen(_below(filesystem, root, root), include))
        if is_page or filesystem.exists(root):
            return filesystem, source, [_Entry("", root, filesystem.info(root).get("size"), source)]
        if any(mark in source for mark in "*?["):
            return filesystem, _magic_root(source), sorted(set(_matching(filesystem, root)))
        if os.path.islink(root):
            raise _dangling(root, f"data source '{source}'")
        raise ConfigError(f"data source '{source}' does not exist; check its path")
    except ImportError as err:
        raise ConfigError(f"data source '{source}' needs a package that is not installed: {err}") from err
    except OSError as err:
        raise ConfigError(f"data source '{source}' cannot be listed: {err}; check data.sources") from err
    except ConfigError:
        raise
    except ValueError as err:
        raise ConfigError(f"data source '{source}' is not a path or fsspec URL: {err}") from err


def _below(filesystem: AbstractFileSystem, directory: str, base: str) -> Iterator[_Entry]:
    """Yield every file below a directory except hidden ones, with its path relative to `base`."""
    if isinstance(filesystem, LocalFileSystem):
        files = _local_files(directory)
    else:
        listed: Any = filesystem.find(directory, detail=True)
        files = ((path, info.get("size")) for path, info in listed.items() if info.get("type") != "directory")
    for path, size_bytes in files:
        relative = path[len(base) :].lstrip("/") if path.startswith(base) else path
        if not any(part.startswith(".") for part in relative.split("/")):
            yield _Entry(relative, path, size_bytes)


def _local_files(directory: str) -> Iterator[tuple[str, int]]:
    pending: list[tuple[str, tuple[str, ...]]] = [(directory, (os.path.realpath(directory),))]
    while pending:
        place, above = pending.pop()
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    real = os.path.realpath(entry.path)
                    if real not in above:  # else a link to a directory that it lies in
                        pending.append((entry.path, (*above, real)))
                elif entry.is_file():
                    yield entry.path, entry.stat().st_size
                elif entry.is_symlink():
                    raise _dangling(entry.path, entry.path)
                else:
                    raise ConfigError(f"{entry.path} is neither a file nor a directory; remove it from the data")


def _dangling(path: str, name: str) -> ConfigError:
    return ConfigError(f"{name} is a link to {os.readlink(path)}, which is not there; repair or remove the link")


def _matching(filesystem: AbstractFileSystem, pattern: str) -> Iterator[_Entry]:
    """Yield files that match, and those below directories that match, as if a shell had expanded the pattern."""
    base, name = _magic_root(pattern), os.path.basename(pattern)
    for path, info in dict(filesystem.glob(pattern, detail=True)).items():
        relative = path[len(base) :].lstrip("/") if path.startswith(base) else path
        if any(part.startswith(".") for part in relative.split("/")):
            continue
        if isinstance(filesystem, LocalFileSystem):
            if not os.path.exists(path):
                raise _dangling(path, path)
            info = filesystem.info(path)  # of what a link leads to
        if info.get("type") != "directory":
            yield _Entry(relative, path, info.get("size"), "" if name in ("*", "**", "") else name)
        elif "**" not in pattern:  # which matches what is in there, too
            yield from _below(filesystem, path, base)


def _data_files(
    filesystem: AbstractFileSystem, entries: list[_Entry], source: str, format: Format
) -> tuple[list[_Entry], tuple[str, ...]]:
    """Return the entries that are read, and paths of those that only describe them or are copies of them."""
    if format == "auto":
        for entry in entries:
            if (suffix := _suffix(entry.path)) in _UNREAD_SUFFIXES:
                raise ConfigError(
                    f"data source '{source}'{f' holds {entry.relative}, which' if entry.relative else ''} is a "
                    f"{suffix} file, of which no records are read; write them as .jsonl or .parquet, leave it out by "
                    'data.include, or set data.format = "text" to train it as one text'
                )
    if format == "text" or (len(entries) == 1 and not entries[0].relative):
        return entries, ()
    _refuse_splits(entries, source, format)
    copies = _copies(filesystem, entries)
    data, left_out = [], []
    is_text = {entry.path: file_format(entry.path, format) == "text" for entry in entries}
    for entry in entries:
        name = os.path.basename(entry.relative).lower()
        patterns = _DESCRIBING_DATA + (_DESCRIBING if is_text[entry.path] or format != "auto" else ())
        describes = not entry.pattern and any(fnmatch(name, pattern) for pattern in patterns)
        (left_out if describes or entry.path in copies else data).append(entry)
    if all(is_text[entry.path] for entry in data):
        # Next to texts a README is one, too.
        data += [entry for entry in left_out if is_text[entry.path]]
    elif texts := [entry.relative for entry in data if not entry.pattern and is_text[entry.path]]:
        others = f"{', '.join(texts[:_NAMED])}{', ...' if len(texts) > _NAMED else ''}"
        wanted = next(os.path.splitext(entry.path)[1] for entry in data if entry.relative not in texts)
        raise ConfigError(
            f"data source '{source}' has {counted(len(data) - len(texts), 'data file')}, and next to them {others}, "
            f'which would be trained as one text a file; name what is meant by data.include (such as ["*{wanted}"]), '
            'or set data.format = "text" to train everything as texts'
        )
    return sorted(data), tuple(entry.relative for entry in left_out if entry not in data)


def _refuse_splits(entries: Sequence[_Entry], source: str, format: Format) -> None:
    splits: dict[str, str] = {}
    for entry in entries:
        directory, name = os.path.split(entry.relative)
        if name == _DICT:
            below = [one.relative.removeprefix(directory).lstrip("/") for one in entries]
            splits |= {path.split("/")[0]: path for path in below if "/" in path}
        match = _SPLIT.search(entry.relative)
        if match and not _SPLIT.search(entry.pattern) and file_format(entry.path, format) != "text":
            splits.setdefault(_SPLIT_NAMES[match[1]], entry.relative)
    if len(splits) > 1:
        raise ConfigError(
            f"data source '{source}' holds the splits {', '.join(sorted(splits))} of a data set; name one of them in "
            f"data.sources, or its files ({next(iter(splits.values()))}, ...) by a pattern in data.include"
        )


def _copies(filesystem: AbstractFileSystem, entries: Sequence[_Entry]) -> set[str]:
    """Return paths of Arrow files that are copies: a directory's `state.json` names those that are its data."""
    arrow = [entry for entry in entries if _suffix(entry.path) == ".arrow" and not entry.pattern.startswith("cache")]
    copies = {entry.path for entry in arrow if fnmatch(os.path.basename(entry.path), _CACHES)}
    for directory in {os.path.dirname(entry.path) for entry in arrow}:
        state = f"{directory}/state.json"
        if not filesystem.exists(state):
            continue
        try:
            named = {file["filename"] for file in json.loads(filesystem.cat_file(state))["_data_files"]}
        except (ValueError, KeyError, TypeError):  # of another program
            continue
        here = (entry.path for entry in arrow if os.path.dirname(entry.path) == directory)
        copies |= {path for path in here if os.path.basename(path) not in named}
    return copies


def _without_indexes(entries: list[_Entry], source: str, format: Format) -> list[_Entry]:
    paths = {entry.path for entry in entries}
    kept = []
    for entry in entries:
        if not entry.path.endswith(".idx") or file_format(entry.path, format) != "memmap":
            kept.append(entry)
        elif (tokens := f"{entry.path.removesuffix('.idx')}.bin") not in paths:
            raise ConfigError(
                f"data source '{source}' names {os.path.basename(entry.path)}, the index of a token file, without "
                f"{os.path.basename(tokens)}; name that one instead"
            )
    return kept


def _chosen(entries: Iterator[_Entry], include: Sequence[str]) -> Iterator[_Entry]:
    for entry in entries:
        name = entry.relative.rsplit("/", 1)[-1]
        pattern = next((each for each in include if fnmatch(entry.relative if "/" in each else name, each)), "")
        if pattern or not include:
            yield entry._replace(pattern=pattern)


def _magic_root(pattern: str) -> str:
    """Return the directory above the first part of a glob pattern that has a wildcard."""
    plain = re.split("[*?[]", pattern, maxsplit=1)[0]
    return plain[: plain.rfind("/") + 1]


def _compression(path: str, name: str) -> str | None:
    inferred, suffix = infer_compression(path), os.path.splitext(path.lower())[1]
    # The package zstandard takes the end of a truncated file for the end of the data.
    if suffix in (".zst", ".zstd") and getattr(_DECOMPRESSORS.get("zstd"), "__name__", "") != "ZstdFile":
        raise ConfigError(f"{name} is compressed as {suffix}; install evenload[zstd], or decompress the file")
    if suffix == ".zstd":
        inferred = "zstd"
    if inferred is None and suffix in _COMPRESSION_SUFFIXES:
        raise ConfigError(
            f"{name} is compressed as {suffix}, which fsspec cannot read here; install its package or decompress it"
        )
    return None if inferred == "zip" else inferred
