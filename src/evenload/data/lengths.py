"""Document lengths for planning: from a file of numbers, or counted in any text source.

Counting tokenises every document once, in file order, before anything is split, cut or dropped
(`evenload plan --overlong` decides about those). Price: one pass over the source; 8 bytes per document.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.data.config import DataConfig, mixture_configs, trains_given_ids
from evenload.data.encoding.open_encoder import open_encoder
from evenload.data.encoding.tokenize import ByteTokenizer, DocumentTokenizer, describe_tokenizer, open_tokenizer
from evenload.data.formats.columns import NeighbourProblem
from evenload.data.number_files import holds_numbers, read_numbers
from evenload.data.reading.held_out import HoldOut
from evenload.data.reading.part_files import open_part
from evenload.errors import ConfigError, DataError
from evenload.types.length_unit import LengthUnit

_CHUNK_RECORDS = 64
TOKEN_IDS = "none: the records hold token ids"


@dataclass(frozen=True, eq=False, kw_only=True)
class LengthTable:
    """Lengths of documents, and what they count.

    Args:
        lengths: int64[num_documents], each at least 1.
        unit: "bytes" where documents were counted without a tokeniser, end of document included.
        tokenizer: which, in words; None of a file of numbers, which does not say.
    """

    lengths: NDArray[np.int64]
    unit: LengthUnit
    tokenizer: str | None


def read_lengths(source: str, config: DataConfig | None = None) -> NDArray[np.int64]:
    """int64[num_documents] of `read_length_table`."""
    return read_length_table(source, config).lengths


def read_length_table(source: str, config: DataConfig | None = None) -> LengthTable:
    """Lengths of documents.

    Args:
        source: a file of numbers (`data.number_files`: .npy, .txt of one length a line, .csv, .json, ...), or a text
            source (file, directory, glob such as `docs/*.txt`, fsspec URL) whose documents are counted.
        config: how a text source is read (format, text column, tokeniser, end-of-document token, corrupt
            records); its `sources` are not used. Default: bytes with an end-of-document token.

    Returns:
        Empty documents have no length and are left out.

    Raises:
        ConfigError: the source does not exist; a tokeniser for a file of numbers.
        DataError: not integers, not one-dimensional, a length below 1, or no lengths at all.
    """
    base = config or DataConfig(sources=(source,), batch_documents=1, max_document_tokens=1)
    # A .npy of token ids, and a file whose format is named, are documents.
    if holds_numbers(source) and base.format == "auto" and base.record == "text":
        lengths = read_numbers(source)
        if lengths is not None:
            if base.tokenizer is not None:
                raise ConfigError(
                    f"{source} holds lengths, which no tokeniser is needed for, and the tokeniser is "
                    f"'{base.tokenizer}'; leave --tokenizer out, or name the documents themselves"
                )
            return LengthTable(lengths=checked_lengths(lengths, source), unit="tokens", tokenizer=None)
    return count_documents(msgspec.structs.replace(base, sources=(source,)), source)


def count_documents(config: DataConfig, origin: str) -> LengthTable:
    """Lengths of the documents that a run with these data settings reads in an epoch.

    Args:
        origin: names the data in messages.

    Raises:
        ConfigError: parts of a mixture that are repeated by weight, so that there is no such thing as all documents;
            sources without files, a tokeniser that cannot be used.
        DataError: a record that cannot be read, or no documents.
    """
    if config.mixture_end == "repeat":
        raise ConfigError(
            f'{origin} repeats the parts of its mixture by weight (data.mixture_end = "repeat"), so its lengths are no '
            'table of documents; give one part as LENGTHS, or set data.mixture_end = "once"'
        )
    tokenizer = open_tokenizer(config.tokenizer, config.eos_token)
    parts = mixture_configs(config)
    lengths = np.fromiter((length for part in parts for length in _count(part, tokenizer)), dtype=np.int64)
    if trains_given_ids(config):
        return LengthTable(lengths=checked_lengths(lengths, origin), unit="tokens", tokenizer=TOKEN_IDS)
    unit: LengthUnit = "bytes" if isinstance(tokenizer, ByteTokenizer) else "tokens"
    return LengthTable(lengths=checked_lengths(lengths, origin), unit=unit, tokenizer=describe_tokenizer(tokenizer))


def checked_lengths(lengths: NDArray[np.int64], source: str) -> NDArray[np.int64]:
    """The same; `DataError` where there are none, or one is below 1."""
    if not len(lengths):
        raise DataError(f"{source} holds no lengths; give at least one document")
    if lengths.min() < 1:
        at = int(np.argmin(lengths))
        raise DataError(
            f"{source}: length {lengths[at]} of document {at} is below 1; every document has at least 1 token"
        )
    return lengths


def _count(config: DataConfig, tokenizer: DocumentTokenizer) -> Iterator[int]:
    encoder = open_encoder(config, tokenizer)
    files, hold_out = open_part(config), HoldOut.of(config)
    for segment in files.segments:
        file, reader = files.files[segment.file], files.readers[segment.file]
        records = reader.records(file, segment.part)
        if hold_out is not None:
            records = (one for one in records if hold_out.is_held_out(file.key, one.offset) == hold_out.takes)
        while chunk := list(islice(records, _CHUNK_RECORDS)):
            try:
                outcomes = encoder.encode_records(chunk)
            except NeighbourProblem as problem:
                raise DataError(f"{file.name}: {problem}") from problem
            for record, outcome in zip(chunk, outcomes, strict=True):
                if not isinstance(outcome, str):
                    if len(outcome.tokens):
                        yield len(outcome.tokens)
                elif config.on_corrupt == "error":
                    origin = files.origin(segment.file, record.offset)
                    raise DataError(f'{origin}: {outcome}; repair it, or set data.on_corrupt = "skip"')
