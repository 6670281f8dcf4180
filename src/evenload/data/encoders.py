"""Encode the values of a record as tokens and labels (`DocumentEncoder`): texts (`TextEncoder`) and ids (`TokenIds`).

A text is tokenised in one go; the characters to be predicted are mapped to tokens through the tokeniser's offsets. A
token with characters of a prompt and of what follows counts as prompt: at inference the prompt ends with other tokens
there. A token that touches a `{% generation %}` block counts, as in transformers (which leaves out all but the first of
several tokens that make up the last character). Price: the tokeniser, on several threads; offsets make a document of
150 tokens cost 94 µs instead of 52, so they are computed only where there is a mask.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenload.data.records import OtherColumnError, Record
from evenload.data.tokenize import DocumentTokenizer, TokensWithOffsets
from evenload.errors import DataError
from evenload.types.tree import Segment

IGNORE_INDEX = -100
"""Label of a token that is not to be predicted."""


class RecordProblem(DataError):
    """One record is wrong; its place, which the reader knows, is not in the message."""


class EncodedDocument(NamedTuple):
    """Tokens of a record, int32[num_tokens], none where it holds nothing. `labels[i]` is predicted from the tokens
    before token i; `IGNORE_INDEX`, as always at 0, = nothing is; None = all but the first are labels.

    `label_counts`, int32[num_tokens]: how many sequences train each label; None = one. `sequence_lengths`: tokens of
    each sequence of a tree. The others are those of `Document`.
    """

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32] | None = None
    label_counts: NDArray[np.int32] | None = None
    segments: tuple[Segment, ...] = ()
    sequence_lengths: tuple[int, ...] = ()
    num_recomputed_tokens: int = 0


class DocumentEncoder(ABC):
    """Turn the values of `columns`, in order, into documents; can be pickled. Equal names give equal documents."""

    columns: tuple[str, ...]
    name: str

    def encode(self, values: tuple[Any, ...]) -> EncodedDocument:
        """Encode a record; `RecordProblem` where the values are not what its kind holds."""
        return self.encode_many([values])[0]

    @abstractmethod
    def encode_many(self, records: Sequence[tuple[Any, ...]]) -> list[EncodedDocument]:
        """Encode records together, which is faster; `RecordProblem` where at least one is wrong."""

    def encode_records(self, records: Sequence[Record]) -> list[EncodedDocument | str]:
        """Return the document of every record, or what is wrong with it; a bad one spoils no other."""
        readable = [record.values for record in records if record.values is not None]
        try:
            encoded = iter(self.encode_many(readable))
        except RecordProblem as problem:
            if len(records) == 1:
                return [str(problem)]
            return [outcome for record in records for outcome in self.encode_records([record])]
        return [record.problem if record.values is None else next(encoded) for record in records]


CharSpan = tuple[int, int]

_Encoded = TypeVar("_Encoded")
_SURROGATE = re.compile("[\ud800-\udfff]")


class RenderedText(NamedTuple):
    """A record as text, "" = it holds nothing.

    Args:
        spans: characters to be predicted, ascending and disjoint; None = all, and so of every record of its kind.
        is_bare: no template surrounds it, so the tokens that begin and end a document are added, unless it spells them.
        counts_touching: a token that is only partly in a span is predicted.
    """

    text: str
    spans: tuple[CharSpan, ...] | None = None
    is_bare: bool = False
    counts_touching: bool = False


@dataclass(frozen=True)
class Renderer:
    """Render records of kind "text"; other kinds derive from it. `columns` and `name` as of `DocumentEncoder`."""

    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"text of '{self.columns[0]}'"

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        """Render a record; `RecordProblem` where the values are not what its kind holds."""
        return RenderedText(check_text(values[0], self.columns[0]), is_bare=True)


def check_text(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    held = "nothing" if value is None else f"a value of type {type(value).__name__}"
    raise RecordProblem(f"column '{column}' holds {held} instead of text")


class TextEncoder(DocumentEncoder):
    """`DocumentEncoder` of texts; bare ones begin with the ids `opening` and end with `end_id` (None = nothing)."""

    def __init__(
        self, renderer: Renderer, tokenizer: DocumentTokenizer, end_id: int | None, opening: tuple[int, ...] = ()
    ) -> None:
        self.columns = renderer.columns
        begins = f", begin {list(opening)}" if opening else ""
        self.name = f"{renderer.name}, tokenizer {tokenizer.name}, end {end_id}{begins}"
        self._renderer, self._tokenizer, self._opening = renderer, tokenizer, opening
        self._end = np.array([] if end_id is None else [end_id], dtype=np.int32)

    def encode_many(self, records: Sequence[tuple[Any, ...]]) -> list[EncodedDocument]:
        rendered = [self._renderer.render(values) for values in records]
        texts = [record.text for record in rendered]
        if any(record.spans is not None for record in rendered):
            located = _tokenize(self._tokenizer.encode_with_offsets, texts)
            return [self._labelled(record, tokens) for record, tokens in zip(rendered, located, strict=True)]
        encoded = _tokenize(self._tokenizer.encode_batch, texts)
        return [
            EncodedDocument(self._framed(tokens)[0] if record.is_bare else tokens)
            for record, tokens in zip(rendered, encoded, strict=True)
        ]

    def _labelled(self, record: RenderedText, located: TokensWithOffsets) -> EncodedDocument:
        mask = tokens_in(record.spans or (), located.offsets, touching=record.counts_touching)
        tokens, before = self._framed(located.tokens) if record.is_bare else (located.tokens, 0)
        mask = np.pad(np.pad(mask, (before, 0)), (0, len(tokens) - len(mask) - before), constant_values=True)
        labels = np.where(mask, tokens, np.int32(IGNORE_INDEX))
        labels[:1] = IGNORE_INDEX
        return EncodedDocument(tokens, labels)

    def _framed(self, tokens: NDArray[np.int32]) -> tuple[NDArray[np.int32], int]:
        """Add what begins and ends a document, unless it is there; also return how many ids were added before. An empty
        document stays empty."""
        framed, before = tokens, 0
        if len(tokens) and tuple(tokens[: len(self._opening)].tolist()) != self._opening:
            framed, before = np.concatenate((np.array(self._opening, dtype=np.int32), tokens)), len(self._opening)
        if len(tokens) and len(self._end) and tokens[-1] != self._end[0]:
            framed = np.concatenate((framed, self._end))
        return framed, before


def _tokenize(encode: Callable[[Sequence[str]], list[_Encoded]], texts: list[str]) -> list[_Encoded]:
    try:
        return encode(texts)
    except (TypeError, UnicodeEncodeError) as err:
        for text in texts:
            if half := _SURROGATE.search(text):
                problem = f"the text is not Unicode: half a surrogate pair at character {half.start()}"
                raise RecordProblem(problem) from err
        raise


def tokens_in(spans: Sequence[CharSpan], offsets: NDArray[np.int32], *, touching: bool) -> NDArray[np.bool_]:
    """Return bool[num_tokens]: the token's first character, or (touching) any of them, lies in a span. Spans ascend
    and are disjoint, offsets int32[num_tokens, 2]."""
    filled = np.array([span for span in spans if span[0] < span[1]], dtype=np.int32).reshape(-1, 2)
    last = np.maximum(offsets[:, 1] - 1, offsets[:, 0]) if touching else offsets[:, 0]
    stops = np.append(0, filled[:, 1])  # 0 = before the first span
    return offsets[:, 0] < stops[np.searchsorted(filled[:, 0], last, side="right")]


_INT32_VALUES = 1 << 31


class TokenIds(DocumentEncoder):
    """`DocumentEncoder` of kind "tokens": a column of ids, then of labels and `masks`, which a record may lack."""

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
                raise RecordProblem(f"column '{column}' holds {len(given)} {what} for {len(tokens)} tokens")
            if is_mask:
                labels = np.where(given, tokens if labels is None else labels, np.int32(IGNORE_INDEX))
            else:
                labels = self._labels(given, tokens, column)
        if labels is not None:
            labels[:1] = IGNORE_INDEX
        return EncodedDocument(tokens, labels)

    def encode_many(self, records: Sequence[tuple[Any, ...]]) -> list[EncodedDocument]:
        # One check for all of them: for short documents it is most of the price.
        is_plain = all(len(values) == 1 for values in records)
        if is_plain and records and self._knows(np.concatenate([values[0] for values in records])):
            return [EncodedDocument(values[0]) for values in records]
        return [self.encode(values) for values in records]

    def _knows(self, ids: NDArray[np.int32]) -> bool:
        # As unsigned numbers, negative ids are larger than any limit: one pass instead of two.
        return not len(ids) or int(np.maximum.reduce(ids.view(np.uint32))) < self._limit

    def _labels(self, given: NDArray[np.int32], tokens: NDArray[np.int32], column: str) -> NDArray[np.int32]:
        has_label = given != IGNORE_INDEX
        trained = given[has_label]
        if not self._knows(trained):
            self._refuse(trained, column)
        others = trained != tokens[has_label]
        if others.any():
            if has_label.all() and trained.max() <= 1:
                raise OtherColumnError(f"'{column}' holds nothing but 0 and 1, as a mask does; set data.mask_column")
            is_next = (given[:-1] == tokens[1:])[has_label[:-1]]
            if len(tokens) > 2 and len(is_next) and is_next.all():
                raise OtherColumnError(
                    f"column '{column}' holds the next token at every place, and labels are not shifted here; store "
                    "the token itself, or -100"
                )
        return given.copy()

    def _refuse(self, ids: NDArray[np.int32], column: str) -> None:
        wrong = next(int(index) for index in ids if not 0 <= index < self._limit)
        known = f"the vocabulary's {self._limit}" if self._limit < _INT32_VALUES else "2**31"
        also = f", or {IGNORE_INDEX} for no loss" if column != self.columns[0] else ""
        raise RecordProblem(f"column '{column}' holds {wrong}, must be in 0 .. below {known}{also}")
