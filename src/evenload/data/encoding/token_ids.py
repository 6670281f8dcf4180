"""Record kind "tokens": ids, and perhaps labels, made by someone else's tokeniser. Taken as they are.

Price: 0.5 µs a document whose ids are an int32 array and 2 µs for other arrays, 3 more with labels, and a pass over
ids that are lists. An int32 array is not kept as a copy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.data.encoding.document_encoder import IGNORE_INDEX, EncodedDocument, RecordProblem

_INT32_VALUES = 1 << 31
_INT32 = np.dtype(np.int32)
_INT32_BYTES = 4


class TokenIds:
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
        """As of `DocumentEncoder`."""
        ids = values[0]
        if type(ids) is not np.ndarray or ids.dtype.kind not in "iu" or ids.ndim != 1:
            ids = _integers(ids, self.columns[0])
        if len(ids) and _largest(ids) >= self._limit:
            self._refuse(ids, self.columns[0])
        tokens = ids.astype(np.int32, copy=False)
        if len(values) == 1:
            return EncodedDocument(tokens)
        return EncodedDocument(tokens, self._labels(values[1], len(tokens)))

    def encode_many(self, records: Sequence[tuple[Any, ...]]) -> list[EncodedDocument]:
        """As of `DocumentEncoder`."""
        if len(self.columns) == 1 and records:
            arrays = [values[0] for values in records]
            # All of them checked in one pass, which for short documents is most of the price.
            if all(type(ids) is np.ndarray and ids.dtype is _INT32 and ids.ndim == 1 for ids in arrays):
                together = np.concatenate(arrays)
                if not len(together) or _largest(together) < self._limit:
                    return [EncodedDocument(ids) for ids in arrays]
        return [self.encode(values) for values in records]

    def _labels(self, value: Any, num_tokens: int) -> NDArray[np.int32]:
        column = self.columns[1]
        given = _integers(value, column)
        if len(given) != num_tokens:
            raise RecordProblem(
                f"column '{column}' holds {len(given)} labels for {num_tokens} tokens; they must be as many"
            )
        trained = given[given != IGNORE_INDEX] if given.dtype.kind == "i" else given
        if len(trained) and _largest(trained) >= self._limit:
            self._refuse(trained, column)
        labels = given.astype(np.int32)
        labels[:1] = IGNORE_INDEX
        return labels

    def _refuse(self, ids: NDArray[np.integer], column: str) -> None:
        wrong = next(int(index) for index in ids if not 0 <= index < self._limit)
        known = f"the vocabulary's {self._limit}" if self._limit < _INT32_VALUES else "2**31"
        also = f", or {IGNORE_INDEX} for no loss" if column != self.columns[0] else ""
        raise RecordProblem(f"column '{column}' holds {wrong}, must be in 0 .. below {known}{also}")


def _largest(ids: NDArray[np.integer]) -> int:
    # Seen as unsigned, negative ids are larger than any limit (if they have 32 bits): one pass instead of two.
    if ids.dtype.kind == "i":
        ids = ids.astype(np.int32) if ids.dtype.itemsize < _INT32_BYTES else ids
        ids = ids.view(np.uint32 if ids.dtype.itemsize == _INT32_BYTES else np.uint64)
    return int(np.maximum.reduce(ids))


def _integers(value: Any, column: str) -> NDArray[np.integer]:
    """One-dimensional array of integers of any width.

    Raises:
        RecordProblem: the value is none.
    """
    if not isinstance(value, np.ndarray):
        if not isinstance(value, list | tuple):
            held = "nothing" if value is None else f"a value of type {type(value).__name__}"
            raise RecordProblem(f"column '{column}' holds {held} instead of a list of integers")
        try:
            value = np.array(value) if len(value) else np.zeros(0, dtype=np.int32)
        except ValueError as err:  # lists of unequal length inside
            raise RecordProblem(f"column '{column}' is not a plain list of integers: {err}") from err
    if value.dtype.kind not in "iu" or value.ndim != 1:
        raise RecordProblem(
            f"column '{column}' holds {value.dtype} values in {value.ndim} dimensions, must be a plain list of integers"
        )
    return value
