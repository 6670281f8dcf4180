import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.data.lengths import profile_lengths
from evenload.errors import ConfigError
from evenload.types.run import HeaviestHalf

LENGTHS = np.array([1, 2, 3, 3, 4, 7, 8, 20], np.int64)


def test_totals_quantiles_and_halves_by_hand() -> None:
    result = profile_lengths(LENGTHS)
    assert (result.documents, result.tokens) == (8, 48)
    # n (n + 1) / 2: 1 + 3 + 6 + 6 + 10 + 28 + 36 + 210
    assert result.attention_pairs == 300
    assert (result.shortest, result.median, result.mean, result.longest) == (1, 3, 6.0, 20)
    # 90 % of 8 is 7.2, so 8 documents; a quantile is always a length that exists.
    assert (result.p90, result.p99) == (20, 20)
    assert profile_lengths(np.arange(1, 101)).p90 == 90
    # Half of 48 tokens: 20 and 8; half of 300 pairs: 210 alone. Of equal documents only as many as are needed.
    assert result.half_of_tokens == HeaviestHalf(documents=2, shortest=8)
    assert result.half_of_attention == HeaviestHalf(documents=1, shortest=20)
    assert profile_lengths(np.full(5, 7)).half_of_tokens == HeaviestHalf(documents=3, shortest=7)


def test_sums_beyond_int64_stay_exact() -> None:
    """Squares of long lengths leave int64; a wrapped sum would show as a plausible share."""
    length = 2**40
    result = profile_lengths(np.full(16, length))
    assert result.attention_pairs == 16 * (length * (length + 1) // 2) > 2**63
    assert result.windows[0].attention_pairs_across > 2**63


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 6000))
def test_profile_equals_counting_document_by_document(lengths: list[int], window: int) -> None:
    result = profile_lengths(np.array(lengths), [window])
    pairs = [n * (n + 1) // 2 for n in lengths]
    starts = [one.start for one in result.classes]
    assert starts == [2**k for k in range(min(lengths).bit_length() - 1, max(lengths).bit_length())]
    for one in result.classes:
        inside = [i for i, n in enumerate(lengths) if one.start <= n < one.stop]
        assert one.documents == len(inside)
        assert one.tokens == sum(lengths[i] for i in inside)
        assert one.attention_pairs == sum(pairs[i] for i in inside)
    assert sum(one.documents for one in result.classes) == len(lengths)
    assert result.p90 == np.quantile(lengths, 0.9, method="inverted_cdf")
    # Query k sees the keys of its own piece only; those before the piece are lost.
    across = sum(k // window * window for n in lengths for k in range(n))
    assert [one.window for one in profile_lengths(np.array(lengths), [8, 3, 8]).windows] == [3, 8]
    cut, longer = result.windows[0], [n for n in lengths if n > window]
    assert (cut.attention_pairs_across, cut.longer_documents, cut.longer_tokens) == (across, len(longer), sum(longer))
    assert cut.tokens_beyond == sum(n - window for n in longer)
    ordered = sorted(lengths, reverse=True)
    half = result.half_of_tokens.documents
    assert 2 * sum(ordered[:half]) >= sum(lengths) > 2 * sum(ordered[: half - 1])


@pytest.mark.parametrize(
    ("lengths", "windows", "why"), [([], [4], "at least"), ([3, 0], [4], "at least"), ([3], [4, 0], "window is 0")]
)
def test_lengths_and_windows_that_are_none_are_refused(lengths: list[int], windows: list[int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        profile_lengths(np.array(lengths, np.int64), windows)
