"""Which tokens are labels, from the characters that are: a mask over tokens, labels from the mask.

A token may hold characters from both sides of a border. Whether it is a label then depends on who drew the border:

- `tokens_beginning_in`: between a prompt and what follows it. A token that begins in the prompt counts as prompt: at
  inference the prompt ends with other tokens there, so predicting this one would teach a sequence that never comes.
- `tokens_touching`: `{% generation %}` blocks of a chat template. Such a token counts, as transformers does it, so
  that masks agree. (transformers leaves out all but the first of several tokens that make up the last character.)

Price: a binary search per token.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenload.data.encoding.document_encoder import IGNORE_INDEX

CharSpan = tuple[int, int]
"""Characters `[start, stop)` of a text."""


def tokens_beginning_in(spans: Sequence[CharSpan], offsets: NDArray[np.int32]) -> NDArray[np.bool_]:
    """bool[num_tokens]: the token's first character lies in a span.

    Args:
        spans: ascending and disjoint.
        offsets: int32[num_tokens, 2], as of `TokensWithOffsets`.
    """
    starts, stops = _columns(spans)
    nearest = np.searchsorted(starts, offsets[:, 0], side="right")
    return offsets[:, 0] < stops[nearest]


def tokens_touching(spans: Sequence[CharSpan], offsets: NDArray[np.int32]) -> NDArray[np.bool_]:
    """bool[num_tokens]: at least one of the token's characters lies in a span. Arguments as above."""
    starts, stops = _columns(spans)
    nearest = np.searchsorted(starts, np.maximum(offsets[:, 1], offsets[:, 0] + 1), side="left")
    return offsets[:, 0] < stops[nearest]


def masked_labels(tokens: NDArray[np.int32], mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    """int32[num_tokens]: the token where the mask is set, nothing elsewhere and at the first token."""
    labels = np.where(mask, tokens, np.int32(IGNORE_INDEX))
    labels[:1] = IGNORE_INDEX
    return labels


def _columns(spans: Sequence[CharSpan]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Starts, and stops behind a 0 that stands for "before the first span"."""
    filled = np.array([span for span in spans if span[0] < span[1]], dtype=np.int32).reshape(-1, 2)
    return filled[:, 0], np.concatenate([np.zeros(1, dtype=np.int32), filled[:, 1]])
