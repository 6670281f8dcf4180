"""Interim (being replaced): the previous readers behind the new contract."""

from evenload.data.formats.record import Record
from evenload.data.source_jsonl import JsonlReader
from evenload.data.source_parquet import ParquetReader
from evenload.data.source_text import TextReader


class _Old:
    def __init__(self, reader):
        self._reader = reader

    def num_parts(self, file, part_bytes):
        return 1

    def records(self, file, part, columns, offset=None):
        for r in self._reader.records(file, offset or 0, 0):
            yield Record(r.offset, r.next_offset, None if r.text is None else (r.text,), r.problem)

    def origin(self, file, offset):
        return self._reader.origin(file, 0)


def open_reader(file, config, dataset=None):
    """Interim."""
    readers = {"text": TextReader(), "jsonl": JsonlReader(config.text_column), "parquet": ParquetReader(config.text_column)}
    return _Old(readers[file.format])


def dataset_file(dataset):
    """Interim."""
    raise NotImplementedError
