"""Record kind "tokens": ids, and perhaps labels, made by someone else's tokeniser. Taken as they are, without a copy.

Readers give them as int32 arrays (`formats.columns`). Price: 0.5 µs a document, 3 more with labels.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.data.encoding.document_encoder import IGNORE_INDEX, DocumentEncoder, EncodedDocument, RecordProblem
from evenload.data.formats.columns import NeighbourProblem

_INT32_VALUES = 1 << 31


class TokenIds(DocumentEncoder):
    """`DocumentEncoder` of kind "tokens".

    Args:
        columns: of ids, then of labels and masks, of which a record need not have any.
        masks: those of them that are masks.
        vocab_size: ids and labels are below it; None = not known.
    """

    def __init__(self, columns: tuple[str, ...], masks: Collection[str], vocab_size: int | None) -> None:
        self.columns = columns
        self.name = f"tokens of {columns}, masks {sorted(masks)}, vocabulary {vocab_size}"
        self._is_mask = [column in masks for column in columns]
        self._limit = _INT32_VALUES if vocab_size is None else vocab_size

    def encode(self, values: tuple[Any, ...]) -> EncodedDocument:
        tokens = values[0]
        if not self._knows(tokens):
            self._refuse(tokens, self.columns[0])
        labels: NDArray[np.int32] | None = None
        for column, is_mask, given in zip(self.columns[1:], self._is_mask[1:], values[1:], strict=False):
            if given is None:
                continue
            if len(given) != len(tokens):
                what = "numbers of a mask" if is_mask else "labels"
                raise RecordProblem(
                    f"column '{column}' holds {len(given)} {what} for {len(tokens)} tokens; they must be as many"
                )
            if is_mask:
                labels = np.where(given, tokens if labels is None else labels, np.int32(IGNORE_INDEX))
            else:
                labels = self._labels(given, tokens, column)
        if labels is not None:
            labels[:1] = IGNORE_INDEX
        return EncodedDocument(tokens, labels)

    def encode_many(self, records: Sequence[tuple[Any, ...]]) -> list[EncodedDocument]:
        # All of them checked in one pass, which for short documents is most of the price.
        is_plain = all(len(values) == 1 for values in records)
        if is_plain and records and self._knows(np.concatenate([values[0] for values in records])):
            return [EncodedDocument(values[0]) for values in records]
        return [self.encode(values) for values in records]

    def _knows(self, ids: NDArray[np.int32]) -> bool:
        # Seen as unsigned, negative ids are larger than any limit: one pass instead of two.
        return not len(ids) or int(np.maximum.reduce(ids.view(np.uint32))) < self._limit

    def _labels(self, given: NDArray[np.int32], tokens: NDArray[np.int32], column: str) -> NDArray[np.int32]:
        has_label = given != IGNORE_INDEX
        trained = given[has_label]
        if not self._knows(trained):
            self._refuse(trained, column)
        others = trained != tokens[has_label]
        if others.any():
            if has_label.all() and trained.max() <= 1:
                raise NeighbourProblem(
                    f"column '{column}' holds nothing but 0 and 1, as a mask does, which would be trained as ids; set "
                    "data.mask_column instead of data.labels_column"
                )
            if len(tokens) > 2 and _are_shifted(given, tokens):
                raise NeighbourProblem(
                    f"column '{column}' holds the next token at every place, and labels are not shifted here: each is "
                    "predicted at its own place; store the token itself, or -100"
                )
        return given.copy()

    def _refuse(self, ids: NDArray[np.int32], column: str) -> None:
        wrong = next(int(index) for index in ids if not 0 <= index < self._limit)
        known = f"the vocabulary's {self._limit}" if self._limit < _INT32_VALUES else "2**31"
        also = f", or {IGNORE_INDEX} for no loss" if column != self.columns[0] else ""
        raise RecordProblem(f"column '{column}' holds {wrong}, must be in 0 .. below {known}{also}")


def _are_shifted(labels: NDArray[np.int32], tokens: NDArray[np.int32]) -> bool:
    """Whether every label is the token after its own; the last one has none."""
    has_label = labels[:-1] != IGNORE_INDEX
    return bool(has_label.any() and (labels[:-1] == tokens[1:])[has_label].all())
