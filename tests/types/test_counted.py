"""Numbers in messages agree with what they count."""

import pytest

from evenload.types.text import counted


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (2, "batch", "2 batches"),
        (1, "batch", "1 batch"),
        (3, "process", "3 processes"),
        (2, "copy", "2 copies"),
        (2, "relay", "2 relays"),
        (12_345, "label token", "12,345 label tokens"),
    ],
)
def test_nouns_agree_with_their_number(number, noun, said) -> None:
    assert counted(number, noun) == said
