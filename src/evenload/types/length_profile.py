"""`LengthProfile`: what a set of document lengths looks like, as numbers.

One source for the terminal, `--json`, the page and the picture of `evenload lengths`, so that they agree.
Attention work counts the (query, key) pairs of causal attention, n (n + 1) / 2 for a document of n tokens.
"""

from evenload.types.base import Frozen


class LengthClass(Frozen):
    """Documents whose length lies in `[start, stop)`; `start` is a power of two and `stop` the next one."""

    start: int
    stop: int
    documents: int
    tokens: int
    attention_pairs: int


class LengthShare(Frozen):
    """Shares, between 0 and 1, of everything in documents of at most `length` tokens."""

    length: int
    documents: float
    tokens: float
    attention_pairs: float


class WindowCut(Frozen):
    """What a context window of `window` tokens would cut.

    Args:
        longer_documents: documents longer than the window.
        longer_tokens: all tokens of those documents.
        tokens_beyond: their tokens after the first `window`; lost where they are truncated.
        attention_pairs_across: pairs whose query and key lie in different pieces when the documents are split into
            pieces of `window` tokens; what the model then never sees.
    """

    window: int
    longer_documents: int
    longer_tokens: int
    tokens_beyond: int
    attention_pairs_across: int


class HeaviestHalf(Frozen):
    """The longest documents that together hold at least half of something.

    Args:
        documents: how many they are.
        shortest: tokens of the shortest among them.
    """

    documents: int
    shortest: int


class LengthProfile(Frozen):
    """A set of lengths.

    Args:
        documents, tokens, attention_pairs: totals.
        shortest, median, p90, p99, longest: tokens; a quantile q is the least length that at least q of the
            documents do not exceed.
        mean: tokens.
        half_of_tokens, half_of_attention: the longest documents that hold half of it.
        classes: ascending and without gaps, from the first to the last class that holds a document.
        cumulative: ascending; the last entry is the longest length with shares of 1.
        windows: ascending.
    """

    documents: int
    tokens: int
    attention_pairs: int
    shortest: int
    median: int
    mean: float
    p90: int
    p99: int
    longest: int
    half_of_tokens: HeaviestHalf
    half_of_attention: HeaviestHalf
    classes: tuple[LengthClass, ...]
    cumulative: tuple[LengthShare, ...]
    windows: tuple[WindowCut, ...]
