"""What an encoder of records promises: column values in, tokens and labels out.

An encoder is made once a run by `open_encoder`, goes to worker processes by pickling, and has no state: the same
values give the same document in any process, at any time.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.data.formats.record import Record
from evenload.errors import DataError

IGNORE_INDEX = -100
"""Label of a token that is not to be predicted."""


class RecordProblem(DataError):
    """What is wrong with one record, without its place, which the reader knows."""


class EncodedDocument(NamedTuple):
    """Tokens of a record and what is to be predicted.

    Args:
        tokens: int32[num_tokens]; empty where the record holds nothing. May share memory with the record.
        labels: int32[num_tokens], not shifted: `labels[i]` is predicted at the place of token i from the tokens before
            it, `IGNORE_INDEX` = nothing is; `labels[0]` always is that. None = the label of every token after the
            first is the token.
    """

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32] | None = None


class DocumentEncoder(ABC):
    """Turns records of one kind into documents. Can be pickled.

    Args:
        columns: those that a reader must fetch, in the order of `encode`'s values.
        name: identifies all that decides the tokens; equal names give equal documents.
    """

    columns: tuple[str, ...]
    name: str

    def encode(self, values: tuple[Any, ...]) -> EncodedDocument:
        """The document of a record; a `RecordProblem` where the values are not what one of this kind holds."""
        return self.encode_many([values])[0]

    @abstractmethod
    def encode_many(self, records: Sequence[tuple[Any, ...]]) -> list[EncodedDocument]:
        """What `encode` gives for each record, in less time, because the tokeniser shares them out to its threads.

        Raises:
            RecordProblem: at least one record has one; `encode` tells which.
        """

    def encode_records(self, records: Sequence[Record]) -> list[EncodedDocument | str]:
        """The document, or what is wrong, of every record; a bad one spoils no other."""
        readable = [record.values for record in records if record.values is not None]
        try:
            encoded: Iterator[EncodedDocument | str] = iter(self.encode_many(readable))
        except RecordProblem:
            encoded = iter([self._encode_or_problem(values) for values in readable])
        return [record.problem if record.values is None else next(encoded) for record in records]

    def _encode_or_problem(self, values: tuple[Any, ...]) -> EncodedDocument | str:
        try:
            return self.encode(values)
        except RecordProblem as problem:
            return str(problem)
