"""Expand sources (files, directories, globs, fsspec URLs) into one sorted list of files.

The list does not depend on the order in which a file system answers: files are sorted by their path
below the source, sources keep the order in which they were given. A file is known by that relative
path and its size, not by where the source stands, so a data set may move between save and resume.
What reading it may raise means damaged content (a problem of a record) or failing storage (an error).
Price: one listing per source.
"""

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import IO, Any, Literal

import fsspec
from fsspec import AbstractFileSystem
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from evenload.data.config import DataConfig, Format
from evenload.data.source.remote import RemoteStream, call_with_retries
from evenload.errors import ConfigError, DataError, EvenloadError

FileFormat = Literal["text", "jsonl", "parquet", "arrow", "memmap", "dataset"]
"""`DataConfig.format` resolved; "dataset" = no file but a Hugging Face data set handed over in Python."""

_SUFFIX_FORMATS: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".bin": "memmap",
    ".idx": "memmap",
    ".npy": "memmap",
}
# An index is read with the token file it belongs to and is no source of its own.
_INDEX_SUFFIXES = {".idx.npy": ".npy", ".idx": ".bin"}
_Entry = tuple[str, str, int | None]  # path below the source, path, size
_BUFFER_BYTES = 1 << 18
_DECOMPRESSORS: dict[Any, Any] = compr
_COMPRESSION_SUFFIXES = (".gz", ".bz2", ".xz", ".lzma", ".zst", ".zstd", ".lz4", ".snappy")


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source.

    Args:
        name: how messages call it: the source as given, and the path below it.
        path: in the terms of `filesystem`; "" of a data set.
        key: source index and path below the source: what stays equal when the data set moves.
        size_bytes: None where the file system does not say.
        compression: fsspec's name of it; None = plain.
    """

    name: str
    path: str
    key: str
    size_bytes: int | None
    format: FileFormat
    compression: str | None
    filesystem: AbstractFileSystem

    @property
    def is_local(self) -> bool:
        """Whether `path` is one of this machine, so that the file can be mapped into memory."""
        return isinstance(self.filesystem, LocalFileSystem)

    def beside(self, suffix: str, other_suffix: str) -> "SourceFile | None":
        """The file of the same name with another suffix, such as a token file's index; None = there is none.

        Raises:
            DataError: the storage does not answer.
        """
        path = self.path.removesuffix(suffix) + other_suffix
        name = self.name.removesuffix(suffix) + other_suffix

        def find() -> SourceFile | None:
            try:
                size_bytes = self.filesystem.info(path).get("size")
            except FileNotFoundError:
                return None
            return replace(self, name=name, path=path, size_bytes=size_bytes)

        return call_with_retries(find, name, lambda: f"{name} cannot be looked up")

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The decompressed bytes, seekable. Remote files are read on after a failure, see `RemoteStream`.

        Raises:
            DataError: the file cannot be opened; when read: a remote file failed for good. Damaged compression raises
                what its library has for it (`damaged_compression`).
        """
        with self._open_raw() as raw:
            if self.compression is None:
                yield raw
            else:
                stream = _DECOMPRESSORS[self.compression](raw, mode="rb")
                with io.BufferedReader(stream, _BUFFER_BYTES) as buffered:
                    yield buffered

    def _open_raw(self) -> IO[bytes]:
        if not self.is_local:
            remote = RemoteStream(self.filesystem, self.path, self.name, self.size_bytes)
            return io.BufferedReader(remote, _BUFFER_BYTES)
        try:
            return open(self.path, "rb")
        except OSError as err:
            raise DataError(f"{self.name} cannot be opened: {err}; check the path and its permissions") from err


def damaged_compression(file: SourceFile, err: Exception) -> str:
    """The problem of a file whose reading raised this.

    Decompressors raise classes of their own, some of them kinds of OSError.

    Raises:
        DataError: it was not the compression but the storage that failed.
    """
    if isinstance(err, OSError) and (file.compression is None or is_storage_failure(err)):
        raise unreadable(file, err) from err
    if file.compression is None or isinstance(err, EvenloadError):
        raise err
    return f"its {file.compression} compression is damaged: {err}"


def unreadable(file: SourceFile, err: OSError) -> DataError:
    return DataError(f"{file.name} cannot be read: {err}; check the storage it lies on")


def is_storage_failure(err: OSError) -> bool:
    """Whether the operating system failed; libraries raise OSError without a number where bytes are damaged."""
    return err.errno is not None


def list_files(config: DataConfig) -> tuple[SourceFile, ...]:
    """All files of the sources, in their fixed order.

    Raises:
        ConfigError: a source without files, a file named twice, a protocol or compression that needs
            a package that is not installed.
    """
    files: list[SourceFile] = []
    seen: dict[str, str] = {}
    for index, source in enumerate(config.sources):
        filesystem, root, entries = _expand(source, config.include)
        entries = _without_indexes(entries, source, config.format)
        if not entries:
            among = f" with a name like {' or '.join(config.include)}" if config.include else ""
            raise ConfigError(f"data source '{source}' has no files{among}; check data.sources and data.include")
        for relative, path, size_bytes in sorted(entries):
            name = os.path.join(root, relative) if relative else source
            unique = filesystem.unstrip_protocol(path)
            if unique in seen:
                raise ConfigError(
                    f"{name} is named by data sources '{seen[unique]}' and '{source}' and would be trained twice "
                    "an epoch; remove one of them"
                )
            seen[unique] = source
            files.append(
                SourceFile(
                    name=name,
                    path=path,
                    key=f"{index}:{relative or os.path.basename(path)}",
                    size_bytes=size_bytes,
                    format=file_format(path, config.format),
                    compression=_compression(path, name),
                    filesystem=filesystem,
                )
            )
    return tuple(files)


def file_format(path: str, format: Format) -> FileFormat:
    """The format of a file by its name, unless the settings name one."""
    if format != "auto":
        return format
    base, suffix = os.path.splitext(path.lower())
    if suffix in _COMPRESSION_SUFFIXES:
        suffix = os.path.splitext(base)[1]
    return _SUFFIX_FORMATS.get(suffix, "text")


def files_digest(files: Sequence[SourceFile]) -> str:
    """Number of files, bytes, and a hash of their relative paths and sizes, to notice that they changed."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.key}\0{file.size_bytes}\0".encode())
    total_bytes = sum(file.size_bytes or 0 for file in files)
    return f"{len(files)} files of {total_bytes} bytes, {digest.hexdigest()[:16]}"


def _expand(source: str, include: Sequence[str]) -> tuple[AbstractFileSystem, str, list[_Entry]]:
    """The directory as the user wrote it, and its files; "" below a source of one."""
    shown = source
    try:
        filesystem, root = fsspec.url_to_fs(source)
        # A web server has no directories (fsspec would take a page with links for one), and "?" is no wildcard.
        is_page = source.startswith(("http://", "https://")) and "*" not in source and not source.endswith("/")
        if not is_page and filesystem.isdir(root):
            found, base = filesystem.find(root, detail=True), root
        elif is_page or filesystem.exists(root):
            return filesystem, source, [("", root, filesystem.info(root).get("size"))]
        elif any(mark in source for mark in "*?["):
            found, base = filesystem.glob(root, detail=True), _magic_root(root)
            shown, include = _magic_root(source), ()
        else:
            raise ConfigError(f"data source '{source}' does not exist; check its path")
    except ImportError as err:
        raise ConfigError(f"data source '{source}' needs a package that is not installed: {err}") from err
    except OSError as err:
        raise ConfigError(f"data source '{source}' cannot be listed: {err}; check data.sources") from err
    except ConfigError:
        raise
    except ValueError as err:
        raise ConfigError(f"data source '{source}' is not a path or fsspec URL: {err}") from err
    entries: list[_Entry] = []
    for path, info in dict(found).items():
        relative = path[len(base) :].lstrip("/") if path.startswith(base) else path
        hidden = any(part.startswith(".") for part in relative.split("/"))
        if info.get("type") == "file" and not hidden and _included(relative, include):
            entries.append((relative, path, info.get("size")))
    return filesystem, shown, entries


def _without_indexes(entries: list[_Entry], source: str, format: Format) -> list[_Entry]:
    """The entries but for indexes of token files, which are read with those."""
    paths = {path for _, path, _ in entries}
    kept = []
    for entry in entries:
        path = entry[1]
        suffix = next((suffix for suffix in _INDEX_SUFFIXES if path.endswith(suffix)), None)
        if suffix is None or file_format(path, format) != "memmap":
            kept.append(entry)
            continue
        tokens = path.removesuffix(suffix) + _INDEX_SUFFIXES[suffix]
        if tokens not in paths:
            raise ConfigError(
                f"data source '{source}' names {os.path.basename(path)}, the index of a token file, without "
                f"{os.path.basename(tokens)}; name that one instead"
            )
    return kept


def _included(relative: str, include: Sequence[str]) -> bool:
    name = relative.rsplit("/", 1)[-1]
    return not include or any(fnmatch(relative if "/" in pattern else name, pattern) for pattern in include)


def _magic_root(pattern: str) -> str:
    """The directory above the first part of a glob pattern that has a wildcard."""
    first = min(at for at in (pattern.find(mark) for mark in "*?[") if at >= 0)
    return pattern[: pattern.rfind("/", 0, first) + 1]


def _compression(path: str, name: str) -> str | None:
    found = infer_compression(path)
    suffix = os.path.splitext(path.lower())[1]
    # The package zstandard takes the end of a truncated file for the end of the data.
    if suffix in (".zst", ".zstd") and getattr(_DECOMPRESSORS.get("zstd"), "__name__", "") != "ZstdFile":
        raise ConfigError(f"{name} is compressed as {suffix}; install evenload[zstd], or decompress the file")
    if suffix == ".zstd":
        found = "zstd"
    if found is None and suffix in _COMPRESSION_SUFFIXES:
        raise ConfigError(
            f"{name} is compressed as {suffix}, which fsspec cannot read here; install the package for it "
            "(lz4 for .lz4) or decompress the file"
        )
    return None if found == "zip" else found
