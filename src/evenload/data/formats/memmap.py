"""Token files: documents as ids of someone else's tokeniser, one after the other in one large array.

Two kinds: Megatron's `.bin` with its `.idx` (`megatron_tokens`), and a one-dimensional `.npy` (`npy_tokens`). Local
files are mapped into memory, remote ones read by ranges. Ids become int32 in runs of about 4 MB and documents are
slices of a run; int32 files are not copied at all. Price: one run in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from evenload.data.formats.megatron_tokens import read_megatron
from evenload.data.formats.npy_tokens import npy_origin, read_npy
from evenload.data.formats.record import FILE_END, FilePart, Record, RecordReader
from evenload.data.source.files import SourceFile
from evenload.errors import DataError


@dataclass(frozen=True)
class MemmapReader(RecordReader):
    """Reader of format "memmap". Offsets are documents, or tokens in an `.npy` without a file of edges.

    Args:
        document_end_id: id that ends a document of such an `.npy`.
    """

    document_end_id: int | None = None

    def records(
        self, file: SourceFile, part: FilePart, columns: tuple[str, ...], offset: int | None = None
    ) -> Iterator[Record]:
        """The part's documents from an offset on."""
        if len(columns) != 1:
            raise DataError(f"{file.name} is a token file and has one column, not {', '.join(columns)}")
        if offset == FILE_END:
            return iter(())
        if file.path.endswith(".npy"):
            return read_npy(file, part, self.document_end_id, offset)
        return read_megatron(file, part, offset)

    def origin(self, file: SourceFile, offset: int) -> str:
        """File and 1-based document. May read the file up to there."""
        if file.path.endswith(".npy"):
            return npy_origin(file, self.document_end_id, offset)
        return f"{file.name}:document {offset + 1}"
