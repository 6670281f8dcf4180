"""Document lengths for planning: from a file of numbers, or counted in any text source.

Counting tokenises every document once, in file order, before anything is split, cut or dropped
(`evenload plan --overlong` decides about those). Price: one pass over the source; 8 bytes per document.
"""

import gzip
import io
from collections.abc import Iterator
from itertools import islice

import fsspec
import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.data.config import DataConfig
from evenload.data.encoding.open_encoder import open_encoder
from evenload.data.reading.encode_records import encode_records
from evenload.data.reading.part_files import open_part
from evenload.errors import ConfigError, DataError

_CHUNK_RECORDS = 64


def read_lengths(source: str, config: DataConfig | None = None) -> NDArray[np.int64]:
    """Lengths of documents in tokens.

    Args:
        source: a `.npy` or `.npy.gz` of integers, a `.txt` of one length a line, or a text source (file,
            directory, glob such as `docs/*.txt`, fsspec URL) whose documents are counted.
        config: how a text source is read (format, text column, tokeniser, end-of-document token, corrupt
            records); its `sources` are not used. Default: bytes with an end-of-document token.

    Returns:
        int64[num_documents], each at least 1. Empty documents have no length and are left out.

    Raises:
        ConfigError: the source does not exist.
        DataError: not integers, not one-dimensional, a length below 1, or no lengths at all.
    """
    if source.endswith((".npy", ".npy.gz")):
        lengths = _read_npy(source)
    elif source.endswith(".txt") and "*" not in source:
        lengths = _read_txt(source)
    else:
        base = config or DataConfig(sources=(source,), batch_documents=1, max_document_tokens=1)
        lengths = np.fromiter(_count(msgspec.structs.replace(base, sources=(source,))), dtype=np.int64)
    if not len(lengths):
        raise DataError(f"{source} holds no lengths; give at least one document")
    if lengths.min() < 1:
        at = int(np.argmin(lengths))
        raise DataError(
            f"{source}: length {lengths[at]} of document {at} is below 1; every document has at least 1 token"
        )
    return lengths


def _read_npy(source: str) -> NDArray[np.int64]:
    content = _read_bytes(source)
    try:
        if source.endswith(".gz"):
            content = gzip.decompress(content)
        values = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as err:
        raise DataError(f"{source} is not a numpy array file: {err}; write it with numpy.save") from err
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        shape = getattr(values, "shape", "no array")
        raise DataError(f"{source} has shape {shape}; lengths are a one-dimensional array, one entry per document")
    if values.dtype.kind not in "iu":
        raise DataError(f"{source} has dtype {values.dtype}; lengths are integers, so save it as int32 or int64")
    if len(values) and int(values.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{source}: length {values.max()} does not fit int64")
    return values.astype(np.int64)


def _read_txt(source: str) -> NDArray[np.int64]:
    lengths: list[int] = []
    for number, line in enumerate(_read_bytes(source).splitlines(), start=1):
        if line.isspace() or not line:
            continue
        try:
            lengths.append(int(line))
        except ValueError as err:
            shown = line[:40].decode("utf-8", errors="replace")
            raise DataError(
                f"{source}:{number}: '{shown}' is not a length; a .txt holds one integer per line "
                "(to count the tokens of text files, name their directory or a glob such as 'docs/*.txt')"
            ) from err
    return np.array(lengths, dtype=np.int64)


def _read_bytes(source: str) -> bytes:
    try:
        filesystem, path = fsspec.url_to_fs(source)
        return filesystem.cat_file(path)
    except FileNotFoundError as err:
        raise ConfigError(f"lengths file '{source}' does not exist") from err
    except ImportError as err:
        raise ConfigError(f"lengths file '{source}' needs a package that is not installed: {err}") from err
    except OSError as err:
        raise DataError(f"lengths file '{source}' cannot be read: {err}") from err


def _count(config: DataConfig) -> Iterator[int]:
    encoder = open_encoder(config)
    files = open_part(config)
    for segment in files.segments:
        file, reader = files.files[segment.file], files.readers[segment.file]
        records = reader.records(file, segment.part, encoder.columns)
        while chunk := list(islice(records, _CHUNK_RECORDS)):
            for record, outcome in zip(chunk, encode_records(encoder, chunk), strict=True):
                if not isinstance(outcome, str):
                    if len(outcome.tokens):
                        yield len(outcome.tokens)
                elif config.on_corrupt == "error":
                    origin = files.origin(segment.file, record.offset)
                    raise DataError(f'{origin}: {outcome}; repair it, or set data.on_corrupt = "skip"')
