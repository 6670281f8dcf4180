"""`TextEncoder`: records that become text first, then tokens: texts, prompts with completions, chats.

What differs between these kinds is a `Renderer`: values → text, and which of its characters are to be predicted. Each
text is tokenised in one go, never in pieces, because pieces give other tokens at their borders than generation and
other trainers see; the characters are mapped to tokens through the tokeniser's offsets. A token may hold characters
from both sides of a border; whether it is a label then depends on who drew the border:

- between a prompt and what follows it, a token that begins in the prompt counts as prompt: at inference the prompt ends
  with other tokens there, so predicting this one would teach a sequence that never comes.
- at `{% generation %}` blocks of a chat template, a token that touches one counts, as transformers does it, so that
  masks agree. (transformers leaves out all but the first of several tokens that make up the last character.)

Price: the tokeniser. A block of records is given to it at once, because its threads then share the work: 2.1 times as
fast on 2 cores at any length of text, 1.2 times on one. A mask needs offsets, which makes a document of 150 tokens cost
94 µs instead of 52; so they are asked for only where there is a mask. A mask costs a binary search per token.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenload.data.encoding.document_encoder import IGNORE_INDEX, DocumentEncoder, EncodedDocument, RecordProblem
from evenload.data.encoding.tokenize import DocumentTokenizer, TokensWithOffsets

CharSpan = tuple[int, int]
"""Characters `[start, stop)` of a text."""

_Encoded = TypeVar("_Encoded")
_SURROGATE = re.compile("[\ud800-\udfff]")


class RenderedText(NamedTuple):
    """A record as text.

    Args:
        text: what is tokenised; "" = the record holds nothing.
        spans: characters to be predicted, ascending and disjoint; None = all, and so of every record of its kind.
        is_bare: it stands between no tokens of a template, so what begins and ends a document is put around it, unless
            it spells that itself; the end then is predicted.
        counts_touching: whether a token that is only partly in a span is predicted.
    """

    text: str
    spans: tuple[CharSpan, ...] | None = None
    is_bare: bool = False
    counts_touching: bool = False


class Renderer(Protocol):
    """Column values of one kind of record → text.

    Args:
        columns: as of `DocumentEncoder`.
        name: identifies all that decides text and spans.
    """

    columns: tuple[str, ...]
    name: str

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        """The text of a record; a `RecordProblem` where the values are not what one of this kind holds."""
        ...


class PlainText:
    """`Renderer` of kind "text": every token after the first is predicted, and the end-of-document token."""

    def __init__(self, column: str) -> None:
        self.columns: tuple[str, ...] = (column,)
        self.name = f"text of '{column}'"

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        return RenderedText(check_text(values[0], self.columns[0]), is_bare=True)


def check_text(value: Any, column: str) -> str:
    """The value, which must be a string; a `RecordProblem` where it is none."""
    if isinstance(value, str):
        return value
    held = "nothing" if value is None else f"a value of type {type(value).__name__}"
    raise RecordProblem(f"column '{column}' holds {held} instead of text")


class TextEncoder(DocumentEncoder):
    """`DocumentEncoder` of everything that is text.

    Args:
        end_id: the end-of-document token to append to bare texts; None = none is appended.
        opening: ids that bare texts begin with.
    """

    def __init__(
        self, renderer: Renderer, tokenizer: DocumentTokenizer, end_id: int | None, opening: tuple[int, ...] = ()
    ) -> None:
        self.columns = renderer.columns
        begins = f", begin {list(opening)}" if opening else ""
        self.name = f"{renderer.name}, tokenizer {tokenizer.name}, end {end_id}{begins}"
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._end = np.array([] if end_id is None else [end_id], dtype=np.int32)
        self._opening = opening

    def encode_many(self, records: Sequence[tuple[Any, ...]]) -> list[EncodedDocument]:
        rendered = [self._renderer.render(values) for values in records]
        texts = [record.text for record in rendered]
        if any(record.spans is not None for record in rendered):
            located = _tokenize(self._tokenizer.encode_with_offsets, texts)
            return [self._labelled(record, found) for record, found in zip(rendered, located, strict=True)]
        encoded = _tokenize(self._tokenizer.encode_batch, texts)
        return [
            EncodedDocument(self._framed(tokens, record.is_bare)[0])
            for record, tokens in zip(rendered, encoded, strict=True)
        ]

    def _labelled(self, record: RenderedText, found: TokensWithOffsets) -> EncodedDocument:
        mask = tokens_in(record.spans or (), found.offsets, touching=record.counts_touching)
        tokens, before = self._framed(found.tokens, record.is_bare)
        mask = np.pad(mask, (before, 0))
        mask = np.pad(mask, (0, len(tokens) - len(mask)), constant_values=True)
        return EncodedDocument(tokens, masked_labels(tokens, mask))

    def _framed(self, tokens: NDArray[np.int32], is_bare: bool) -> tuple[NDArray[np.int32], int]:
        """The tokens between what begins and what ends a document, each unless it is there; and how many came first."""
        # An empty text stays empty: an end-of-document token alone teaches nothing.
        if not len(tokens) or not is_bare:
            return tokens, 0
        framed = with_opening(tokens, self._opening)
        before = len(framed) - len(tokens)
        if len(self._end) and tokens[-1] != self._end[0]:
            framed = np.concatenate((framed, self._end))
        return framed, before


def with_opening(tokens: NDArray[np.int32], opening: tuple[int, ...]) -> NDArray[np.int32]:
    """The tokens after these, unless they begin with them; none at all stay none."""
    if not opening or not len(tokens) or tuple(tokens[: len(opening)].tolist()) == opening:
        return tokens
    return np.concatenate((np.array(opening, dtype=np.int32), tokens))


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
    """bool[num_tokens]: the token's first character lies in a span, or (touching) at least one of its characters does.

    Args:
        spans: ascending and disjoint.
        offsets: int32[num_tokens, 2], as of `TokensWithOffsets`.
    """
    filled = np.array([span for span in spans if span[0] < span[1]], dtype=np.int32).reshape(-1, 2)
    last = np.maximum(offsets[:, 1] - 1, offsets[:, 0]) if touching else offsets[:, 0]
    # The 0 stands for "before the first span".
    stops = np.concatenate([np.zeros(1, dtype=np.int32), filled[:, 1]])
    return offsets[:, 0] < stops[np.searchsorted(filled[:, 0], last, side="right")]


def masked_labels(tokens: NDArray[np.int32], mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    """int32[num_tokens]: the token where the mask is set, nothing elsewhere and at the first token."""
    labels = np.where(mask, tokens, np.int32(IGNORE_INDEX))
    labels[:1] = IGNORE_INDEX
    return labels
