import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.data.lengths import profile_lengths
from evenload.errors import ConfigError
from evenload.types.length_profile import HeaviestHalf, LengthClass, WindowCut

LENGTHS = np.array([1, 2, 3, 3, 4, 7, 8, 20], np.int64)


def test_totals_and_quantiles_by_hand() -> None:
    found = profile_lengths(LENGTHS)
    assert (found.documents, found.tokens) == (8, 48)
    # n (n + 1) / 2: 1 + 3 + 6 + 6 + 10 + 28 + 36 + 210
    assert found.attention_pairs == 300
    assert (found.shortest, found.median, found.mean, found.longest) == (1, 3, 6.0, 20)
    # 90 % of 8 is 7.2, so 8 documents; a quantile is always a length that exists.
    assert (found.p90, found.p99) == (20, 20)
    assert profile_lengths(np.arange(1, 101)).p90 == 90


def test_classes_by_hand_also_empty_ones() -> None:
    classes = profile_lengths(np.array([1, 2, 3, 3, 9, 16])).classes
    assert classes == (
        LengthClass(start=1, stop=2, documents=1, tokens=1, attention_pairs=1),
        LengthClass(start=2, stop=4, documents=3, tokens=8, attention_pairs=15),
        LengthClass(start=4, stop=8, documents=0, tokens=0, attention_pairs=0),
        LengthClass(start=8, stop=16, documents=1, tokens=9, attention_pairs=45),
        LengthClass(start=16, stop=32, documents=1, tokens=16, attention_pairs=136),
    )


def test_window_cuts_by_hand() -> None:
    cuts = profile_lengths(LENGTHS, [8, 3, 8, 20]).windows
    # Of 20 tokens, pieces of 8, 8 and 4 keep 36 + 36 + 10 of 210 pairs.
    assert cuts[1] == WindowCut(
        window=8, longer_documents=1, longer_tokens=20, tokens_beyond=12, attention_pairs_across=128
    )
    # 4 = 3 + 1 keeps 7 of 10; 7 = 3 + 3 + 1 keeps 13 of 28; 8 = 3 + 3 + 2 keeps 15 of 36; 20 keeps 6 * 6 + 3 of 210.
    assert cuts[0] == WindowCut(
        window=3, longer_documents=4, longer_tokens=39, tokens_beyond=27, attention_pairs_across=3 + 15 + 21 + 171
    )
    assert cuts[2].longer_documents == cuts[2].tokens_beyond == cuts[2].attention_pairs_across == 0
    assert len(cuts) == 3


def test_heaviest_half_by_hand() -> None:
    # Half of 48 tokens: 20 and 8; half of 300 pairs: 210 alone.
    found = profile_lengths(LENGTHS)
    assert found.half_of_tokens == HeaviestHalf(documents=2, shortest=8)
    assert found.half_of_attention == HeaviestHalf(documents=1, shortest=20)
    # Of equal documents only as many as are needed.
    assert profile_lengths(np.full(5, 7)).half_of_tokens == HeaviestHalf(documents=3, shortest=7)


def test_sums_beyond_int64_stay_exact() -> None:
    """Squares of long lengths leave int64; a wrapped sum would show as a plausible share."""
    length = 2**40
    found = profile_lengths(np.full(16, length))
    assert found.attention_pairs == 16 * (length * (length + 1) // 2) > 2**63
    assert found.windows[0].attention_pairs_across > 2**63


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 6000))
def test_profile_equals_counting_document_by_document(lengths: list[int], window: int) -> None:
    found = profile_lengths(np.array(lengths), [window])
    pairs = [n * (n + 1) // 2 for n in lengths]
    for one in found.classes:
        inside = [i for i, n in enumerate(lengths) if one.start <= n < one.stop]
        assert one.documents == len(inside)
        assert one.tokens == sum(lengths[i] for i in inside)
        assert one.attention_pairs == sum(pairs[i] for i in inside)
    assert sum(one.documents for one in found.classes) == len(lengths)
    for point in found.cumulative:
        inside = [i for i, n in enumerate(lengths) if n <= point.length]
        assert point.documents == pytest.approx(len(inside) / len(lengths))
        assert point.attention_pairs == pytest.approx(sum(pairs[i] for i in inside) / sum(pairs))
    assert found.cumulative[-1].tokens == 1
    assert found.p90 == np.quantile(lengths, 0.9, method="inverted_cdf")
    # Query k sees the keys of its own piece only; those before the piece are lost.
    across = sum(k // window * window for n in lengths for k in range(n))
    assert found.windows[0].attention_pairs_across == across
    ordered = sorted(lengths, reverse=True)
    half = found.half_of_tokens.documents
    assert 2 * sum(ordered[:half]) >= sum(lengths) > 2 * sum(ordered[: half - 1])


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1]])
def test_lengths_that_are_none_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ConfigError, match="at least"):
        profile_lengths(np.array(lengths, np.int64))


def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="window is 0"):
        profile_lengths(LENGTHS, [4, 0])
