import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.data.encoders import masked_labels, tokens_in

spans_and_offsets = st.tuples(
    # Span borders ascend; equal ones make empty or adjacent spans.
    st.lists(st.integers(0, 20), max_size=8).map(lambda borders: list(zip(*[iter(sorted(borders))] * 2, strict=False))),
    # Starts and stops never descend; several tokens may stand for one character, and some for none.
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=12).map(
        lambda tokens: list(
            zip(sorted(start for start, _ in tokens), sorted(start + size for start, size in tokens), strict=True)
        )
    ),
)


@settings(deadline=None)
@given(spans_and_offsets)
def test_masks_are_those_of_looking_at_every_character(case):
    spans, tokens = case
    offsets = np.array(tokens, dtype=np.int32).reshape(-1, 2)
    trained = {character for start, stop in spans for character in range(start, stop)}
    assert tokens_in(spans, offsets, touching=False).tolist() == [start in trained for start, _ in tokens]
    assert tokens_in(spans, offsets, touching=True).tolist() == [
        # A token without characters is where the next character is.
        any(character in trained for character in range(start, max(stop, start + 1)))
        for start, stop in tokens
    ]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans())))
def test_labels_are_the_masked_tokens_but_never_the_first(pairs):
    tokens = np.array([token for token, _ in pairs], dtype=np.int32)
    labels = masked_labels(tokens, np.array([used for _, used in pairs], dtype=bool))
    assert labels.dtype == np.int32
    assert labels.tolist() == [t if used and i else -100 for i, (t, used) in enumerate(pairs)]
