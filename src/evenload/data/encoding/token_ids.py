"""Record kind "tokens": ids, and perhaps labels, made by someone else's tokeniser. Taken as they are, without a copy.

Readers give them as int32 arrays (`formats.columns`). Price: 0.5 µs a document, 3 more with labels.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.data.encoding.document_encoder import IGNORE_INDEX, DocumentEncoder, EncodedDocument, RecordProblem

_INT32_VALUES = 1 << 31


class TokenIds(DocumentEncoder):
    """`DocumentEncoder` of kind "tokens".

    Args:
        labels_column: "" = every token after the first is a label.
        vocab_size: ids and labels are below it; None = not known.
    """

    def __init__(self, tokens_column: str, labels_column: str, vocab_size: int | None) -> None:
        self.columns: tuple[str, ...] = (tokens_column, labels_column) if labels_column else (tokens_column,)
        self.name = f"tokens of '{tokens_column}', labels of '{labels_column}', vocabulary {vocab_size}"
        self._limit = _INT32_VALUES if vocab_size is None else vocab_size

    def encode(self, values: tuple[Any, ...]) -> EncodedDocument:
        tokens = values[0]
        if not self._knows(tokens):
            self._refuse(tokens, self.columns[0])
        return EncodedDocument(tokens, self._labels(values[1], len(tokens)) if len(values) > 1 else None)

    def encode_many(self, records: Sequence[tuple[Any, ...]]) -> list[EncodedDocument]:
        # All of them checked in one pass, which for short documents is most of the price.
        if len(self.columns) == 1 and records and self._knows(np.concatenate([values[0] for values in records])):
            return [EncodedDocument(values[0]) for values in records]
        return [self.encode(values) for values in records]

    def _knows(self, ids: NDArray[np.int32]) -> bool:
        # Seen as unsigned, negative ids are larger than any limit: one pass instead of two.
        return not len(ids) or int(np.maximum.reduce(ids.view(np.uint32))) < self._limit

    def _labels(self, given: NDArray[np.int32], num_tokens: int) -> NDArray[np.int32]:
        column = self.columns[1]
        if len(given) != num_tokens:
            raise RecordProblem(
                f"column '{column}' holds {len(given)} labels for {num_tokens} tokens; they must be as many"
            )
        trained = given[given != IGNORE_INDEX]
        if not self._knows(trained):
            self._refuse(trained, column)
        labels = given.copy()
        labels[:1] = IGNORE_INDEX
        return labels

    def _refuse(self, ids: NDArray[np.int32], column: str) -> None:
        wrong = next(int(index) for index in ids if not 0 <= index < self._limit)
        known = f"the vocabulary's {self._limit}" if self._limit < _INT32_VALUES else "2**31"
        also = f", or {IGNORE_INDEX} for no loss" if column != self.columns[0] else ""
        raise RecordProblem(f"column '{column}' holds {wrong}, must be in 0 .. below {known}{also}")
