import pytest

from corpus_files import data_config
from evenload.data.config import MixturePart, shares_prefixes
from evenload.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_documents": None}, ["batch_documents", "batch_tokens", "exactly one"]),
        ({"batch_documents": 2, "batch_tokens": 5}, ["batch_documents is 2", "batch_tokens is 5", "exactly one"]),
        ({"batch_documents": 0}, ["batch_documents is 0", "at least 1"]),
        ({"shuffle_window": 0}, ["shuffle_window is 0", "at least 1"]),
        ({"epochs": 0}, ["epochs is 0"]),
        ({"max_document_tokens": -3}, ["max_document_tokens is -3"]),
        ({"seed": -1}, ["seed is -1"]),
        ({"sources": ()}, ["data.sources"]),
        ({"overlong": "cut"}, ["'cut'", "truncate"]),
        ({"format": "csv"}, ["'csv'", "parquet"]),
        ({"streams": 5, "shuffle_window": 4}, ["streams is 5", "shuffle_window of 4"]),
        ({"workers": -1}, ["workers is -1"]),
        ({"stall_timeout_s": 0.0}, ["stall_timeout_s is 0.0"]),
        ({"mixture": ({"name": "a"},)}, ["data.mixture", "exactly one"]),
        ({"mixture_end": "repeat"}, ["mixture_end", "mixture parts"]),
        ({"on_corrupt": "ignore"}, ["'ignore'", "skip"]),
        ({"text_column": ""}, ["text_column"]),
    ],
)
def test_bad_settings_name_value_and_fix(changes, words):
    with pytest.raises(ConfigError) as caught:
        data_config("x", **changes)
    for word in words:
        assert word in str(caught.value)


PART = MixturePart(name="a", weight=1.0, sources=("a",))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"record": "preference"}, True),
        ({"group_by": "uid"}, True),
        ({"group_by": "uid", "min_shared_tokens": 10, "max_document_tokens": 10}, True),
        ({"group_by": "uid", "min_shared_tokens": 11, "max_document_tokens": 10}, False),
        ({"sources": (), "mixture": (PART, MixturePart(name="b", weight=1.0, sources=("b",), group_by="uid"))}, True),
        ({"sources": (), "mixture": (PART,)}, False),
    ],
)
def test_settings_say_whether_sequences_share_prefixes(changes, expected):
    assert shares_prefixes(data_config("a", **changes)) == expected
