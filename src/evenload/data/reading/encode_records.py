"""Documents of a few records at a time: the tokeniser shares them out to its threads; a bad one spoils no other."""

from collections.abc import Iterator, Sequence

from evenload.data.encoding.document_encoder import DocumentEncoder, EncodedDocument, RecordProblem
from evenload.data.formats.record import Record


def encode_records(encoder: DocumentEncoder, records: Sequence[Record]) -> list[EncodedDocument | str]:
    """The document, or what is wrong, of every record."""
    readable = [record.values for record in records if record.values is not None]
    try:
        encoded: Iterator[EncodedDocument | str] = iter(encoder.encode_many(readable))
    except RecordProblem:
        encoded = iter([_encode_one(encoder, values) for values in readable])
    return [record.problem if record.values is None else next(encoded) for record in records]


def _encode_one(encoder: DocumentEncoder, values: tuple) -> EncodedDocument | str:
    try:
        return encoder.encode(values)
    except RecordProblem as problem:
        return str(problem)
