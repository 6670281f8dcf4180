"""`DocumentStream`: records to tokenised documents within the length limit, one epoch at a time.

Source and tokenise, the first two stages of the loader. An over-long record becomes an error, several
documents, its head, or nothing. The cursor names the next document to come: file, record in it, and
how many documents of that record are out already; so a stop inside a split record resumes exactly.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.data.config import DataConfig
from evenload.data.ledger import Ledger
from evenload.data.record import FILE_END, Record, RecordPosition
from evenload.data.sources import DocumentSource
from evenload.data.tokenize import DocumentTokenizer, required_eos
from evenload.data.window import file_order
from evenload.errors import DataError
from evenload.types.base import Frozen


class DocumentPosition(Frozen, array_like=True):
    """Where a document's tokens come from: a record, and which of the documents made from it."""

    record: RecordPosition
    part: int = 0


class StreamCursor(Frozen):
    """The next document to come.

    Args:
        file_rank: position in this epoch's file order; the number of files = end of the epoch.
        offset, record: as in `RecordPosition`.
        part: documents of that record that came already.
    """

    file_rank: int = 0
    offset: int = 0
    record: int = 0
    part: int = 0


@dataclass(frozen=True, slots=True)
class LoadedDocument:
    """A document with its tokens, int32[num_tokens]."""

    position: DocumentPosition
    tokens: NDArray[np.int32]


class DocumentStream:
    """All documents of the sources, epoch by epoch.

    Args:
        ledger: told of every document read and dropped.

    Raises:
        ConfigError: `append_eos` with a tokeniser that has no end-of-document token.
    """

    def __init__(
        self, config: DataConfig, source: DocumentSource, tokenizer: DocumentTokenizer, ledger: Ledger
    ) -> None:
        self.ledger = ledger
        self.cursor = StreamCursor()
        self._config = config
        self._source = source
        self._tokenizer = tokenizer
        self._eos = np.array([required_eos(tokenizer)] if config.append_eos else [], dtype=np.int32)
        self._order: list[int] = []
        self._records: Iterator[Record] | None = None
        self._parts: deque[LoadedDocument] = deque()
        self._after = StreamCursor()
        self.restart(0)

    def restart(self, epoch: int, cursor: StreamCursor | None = None) -> None:
        """Begin an epoch, or go on in one at a saved cursor."""
        num_files = len(self._source.files)
        keep_order = self._config.shuffle_window == 1
        self._order = list(range(num_files)) if keep_order else file_order(num_files, self._config.seed, epoch)
        self.cursor = cursor or StreamCursor()
        self._records = None
        self._parts.clear()

    def next_document(self) -> LoadedDocument | None:
        """The next document, or None at the end of the epoch.

        Raises:
            DataError: a file that cannot be read; a corrupt or over-long record where that is an error.
                Asked again, it raises the same again.
        """
        try:
            while not self._parts:
                if not self._load_record():
                    return None
        except Exception:
            self._records = None
            raise
        document = self._parts.popleft()
        self.ledger.note_read(len(document.tokens))
        if self._parts:
            position = document.position
            self.cursor = StreamCursor(
                file_rank=self.cursor.file_rank,
                offset=position.record.offset,
                record=position.record.record,
                part=position.part + 1,
            )
        else:
            self.cursor = self._after
        return document

    def reload(self, positions: Sequence[DocumentPosition]) -> list[LoadedDocument]:
        """Documents that came before, read again; changes neither cursor nor ledger.

        Raises:
            DataError: the sources changed.
        """
        texts = self._source.reread([position.record for position in positions])
        tokens = {record: self._encode(text) for record, text in texts.items()}
        documents = []
        for position in positions:
            parts = self._cut(tokens[position.record])
            if position.part >= len(parts):
                raise DataError(
                    f"{self._source.origin(position.record)} had at least {position.part + 1} documents and has "
                    f"{len(parts)} now; the sources must not change between save and resume"
                )
            documents.append(LoadedDocument(position, parts[position.part]))
        return documents

    def _load_record(self) -> bool:
        """Read one record and make its documents (maybe none); False at the end of the epoch."""
        cursor = self.cursor
        if cursor.file_rank >= len(self._order):
            return False
        file = self._order[cursor.file_rank]
        next_file = StreamCursor(file_rank=cursor.file_rank + 1)
        if self._records is None:
            self._records = self._source.records(file, cursor.offset, cursor.record)
        record = next(self._records, None)
        if record is None:
            self.cursor, self._records = next_file, None
            return True
        if record.next_offset == FILE_END:
            after, reader = next_file, None
        else:
            after = StreamCursor(file_rank=cursor.file_rank, offset=record.next_offset, record=record.record + 1)
            reader = self._records
        position = RecordPosition(file=file, offset=record.offset, record=record.record)
        # A cursor inside a split record always names the record itself: blank lines lie before it.
        skip = cursor.part if record.offset == cursor.offset else 0
        parts = self._documents(record, position)
        self._parts.extend(
            LoadedDocument(DocumentPosition(record=position, part=part), tokens)
            for part, tokens in enumerate(parts)
            if part >= skip
        )
        self._records, self._after = reader, after
        if not self._parts:
            self.cursor = after
        return True

    def _documents(self, record: Record, position: RecordPosition) -> list[NDArray[np.int32]]:
        """The documents of a record; what is dropped goes to the ledger."""
        ledger = self.ledger
        if record.text is None:
            if self._config.on_corrupt == "error":
                raise DataError(
                    f'{self._source.origin(position)}: {record.problem}; repair it, or set data.on_corrupt = "skip"'
                )
            ledger.note_read(0)
            ledger.note_dropped("corrupt", 1, 0)
            return []
        tokens = self._encode(record.text)
        if not len(tokens):
            ledger.note_read(0)
            ledger.note_dropped("empty", 1, 0)
            return []
        limit = self._config.max_document_tokens
        if len(tokens) <= limit:
            return [tokens]
        match self._config.overlong:
            case "error":
                raise DataError(
                    f"{self._source.origin(position)} has {len(tokens)} tokens, more than max_document_tokens "
                    f'({limit}); raise it, or set data.overlong to "split" (consecutive documents of at most '
                    f'{limit} tokens), "truncate" (keep the first {limit}), "drop" (leave the document out) '
                    'instead of "error"'
                )
            case "drop":
                ledger.note_read(len(tokens))
                ledger.note_dropped("overlong", 1, len(tokens))
                return []
            case "truncate":
                # The kept head counts as read when it leaves the stream; its tail is read and dropped here.
                ledger.note_read(len(tokens) - limit, documents=0)
                ledger.note_dropped("truncated", 0, len(tokens) - limit)
        return self._cut(tokens)

    def _encode(self, text: str) -> NDArray[np.int32]:
        tokens = self._tokenizer.encode(text)
        # An empty text stays empty: an end-of-document token alone teaches nothing.
        return np.concatenate([tokens, self._eos]) if len(tokens) and len(self._eos) else tokens

    def _cut(self, tokens: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        """Pieces of at most the limit; only the first with `truncate`."""
        limit = self._config.max_document_tokens
        if len(tokens) <= limit:
            return [tokens]
        stop = limit if self._config.overlong == "truncate" else len(tokens)
        # Copies: a view in the window would keep the whole record in memory.
        return [tokens[start : start + limit].copy() for start in range(0, stop, limit)]
