"""`source_lines`, `label_warnings`: what is read of every source and what is not, for the start of a run.

Whatever a reader does not use is told here, so that nothing is passed over without a word: formats, numbers of files
and records, columns or keys that are used and those that are not, files that are left out. Price: a short look at
`_LOOKED_AT` files a source, spread over it; the number of records is an estimate where that is not all of them.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np

from evenload.data.config import DataConfig
from evenload.data.encoding.document_encoder import IGNORE_INDEX, DocumentEncoder, EncodedDocument
from evenload.data.formats.columns import record_columns, value_names
from evenload.data.formats.record import FileFacts, FilePart, RecordReader
from evenload.data.reading.part_files import PartFiles
from evenload.data.source.listing import SourceListing
from evenload.types.counted import counted

_LOOKED_AT = 16
_NAMED = 8
_SAMPLED = 64


def source_lines(config: DataConfig, part: PartFiles) -> Iterator[str]:
    """One line a source of a part of the mixture (see `mixture_configs`).

    Raises:
        DataError: a file that cannot be opened.
    """
    for listing, readers in _by_source(part):
        step = -(-len(readers) // _LOOKED_AT)
        looked_at = list(zip(listing.files, readers, strict=True))[::step]
        yield _source_line(config, listing, [reader.look(file) for file, reader in looked_at], step)


def _by_source(part: PartFiles) -> Iterator[tuple[SourceListing, tuple[RecordReader, ...]]]:
    start = 0
    for listing in part.listings:
        yield listing, part.readers[start : start + len(listing.files)]
        start += len(listing.files)


def _source_line(config: DataConfig, listing: SourceListing, facts: list[FileFacts], step: int) -> str:
    files, formats = listing.files, Counter(file.format for file in listing.files)
    counts = [fact.num_records for fact in facts if fact.num_records is not None]
    records = ""
    if len(counts) == len(facts) and set(formats) != {"text"}:  # of which every file is one
        is_exact = step == 1 and all(fact.is_exact for fact in facts)
        number = round(sum(counts) * len(files) / len(facts))
        records = f", {'' if is_exact else 'about '}{counted(number, 'record')}"
    pieces = [f"{listing.source}: {', '.join(counted(n, f'{kind} file') for kind, n in formats.items())}{records}"]
    columns = dict.fromkeys(column for fact in facts for column in fact.columns)
    if columns:
        read = record_columns(config)
        known, values = {column.name for column in read}, value_names(read)
        pieces.append(f"used: {_names([name for name in columns if name in values])}")
        if checked := [name for name in columns if name in known and name not in values]:
            pieces.append(f"checked to change nothing: {_names(checked)}")
        if unused := [name for name in columns if name not in known]:
            pieces.append(f"not used: {_names(unused)}")
    if listing.left_out:
        pieces.append(f"files left out: {_names(listing.left_out)}")
    return " | ".join(pieces)


def label_warnings(config: DataConfig, part: PartFiles, encoder: DocumentEncoder) -> Iterator[str]:
    """What to say of token records whose labels are other ids than their tokens, by the first records of every source.

    Raises:
        DataError: a file that cannot be read, or a column that would change what is trained.
    """
    for listing, readers in _by_source(part) if config.record == "tokens" else ():
        records = readers[0].records(listing.files[0], FilePart())
        found = encoder.encode_records(list(islice(records, _SAMPLED)))
        if others := sum(isinstance(one, EncodedDocument) and _has_other_labels(one) for one in found):
            yield (
                f"{listing.source}: in {others} of its first {counted(len(found), 'record')} some labels are neither "
                f"{IGNORE_INDEX} nor the token at their place, and are trained as they are"
            )


def _has_other_labels(document: EncodedDocument) -> bool:
    tokens, labels = document
    return labels is not None and bool(np.any((labels != tokens) & (labels != IGNORE_INDEX)))


def _names(names: list[str] | tuple[str, ...]) -> str:
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown or "nothing"
