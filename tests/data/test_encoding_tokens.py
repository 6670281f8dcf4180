import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from chat_cases import encoder_config, train_chat_tokenizer
from evenload.data.chat_encoding import open_encoder
from evenload.data.encoders import RecordProblem, TokenIds, tokens_in
from evenload.data.records import Column, ValueProblem, convert_value

IDS = Column("input_ids", "tokens", "data.tokens_column")


def int32(values):
    return np.array(values, dtype=np.int32)


@given(hnp.arrays(np.int32, st.integers(0, 6)), st.sampled_from([None, 1, 100, 70_000]))
def test_ids_pass_where_every_one_is_in_the_vocabulary(ids, vocab_size):
    encoder = TokenIds(("input_ids",), (), vocab_size)
    limit = 2**31 if vocab_size is None else vocab_size
    wrong = [index for index in ids.tolist() if not 0 <= index < limit]
    if wrong:
        with pytest.raises(RecordProblem, match=rf"'input_ids' holds {wrong[0]}, must be in 0"):
            encoder.encode((ids,))
        return
    document = encoder.encode((ids,))
    assert (document.labels, document.tokens.tolist()) == (None, ids.tolist())


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("given_as", [np.asarray, np.ndarray.tolist])
def test_readers_give_ids_of_any_width_as_int32(dtype, given_as):
    """Read as int32 at once, 2**32 + 7 would be 7."""
    values = np.array([0, 7, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype=dtype)
    if np.iinfo(dtype).max < 2**31:
        read = convert_value(IDS, given_as(values))
        assert read.dtype == np.int32
        assert read.tolist() == values.tolist()
    else:
        with pytest.raises(ValueProblem, match=r"is no whole number of at most|is not a list of token ids"):
            convert_value(IDS, given_as(values))


@given(st.lists(hnp.arrays(np.int32, st.integers(0, 4), elements=st.integers(-1, 4)), max_size=5), st.integers(3, 6))
def test_many_records_together_are_what_each_is_alone(records, vocab_size):
    encoder = TokenIds(("input_ids",), (), vocab_size)
    try:
        alone = [encoder.encode((ids,)) for ids in records]
    except RecordProblem:
        with pytest.raises(RecordProblem):
            encoder.encode_many([(ids,) for ids in records])
    else:
        together = encoder.encode_many([(ids,) for ids in records])
        assert [document.tokens.tolist() for document in together] == [ids.tolist() for ids in records]
        assert all(document.labels is None for document in alone + together)


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from([-100, -99, -1, 0, 5, 99, 100])), max_size=6))
def test_labels_may_be_any_id_or_none(pairs):
    ids, labels = int32([index for index, _ in pairs]), [label for _, label in pairs]
    assume(not labels or not set(labels) <= {0, 1})  # a mask
    encoder = TokenIds(("input_ids", "labels"), (), 100)
    given_labels = int32(labels)
    if all(label == -100 or 0 <= label < 100 for label in labels):
        document = encoder.encode((ids, given_labels))
        assert document.labels.dtype == np.int32
        assert document.labels.tolist() == [-100, *labels[1:]][: len(labels)]
        assert np.array_equal(given_labels, labels)
    else:
        with pytest.raises(RecordProblem, match=r"'labels' holds .* or -100"):
            encoder.encode((ids, given_labels))


def test_int32_arrays_are_not_copied_and_not_written():
    ids, labels = np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32)
    ids.flags.writeable = labels.flags.writeable = False
    document = TokenIds(("input_ids", "labels"), (), 10).encode((ids, labels))
    assert np.shares_memory(document.tokens, ids)
    assert document.labels.tolist() == [-100, 1, 2, 3, 4]
    with pytest.raises(RecordProblem, match="'labels' holds 4 labels for 5 tokens"):
        TokenIds(("input_ids", "labels"), (), None).encode((ids, labels[:4]))


@pytest.mark.parametrize(
    "value", [None, "abc", [1.0], [True], [[1, 2]], [[1], [1, 2]], [1, None], [2**70], np.array([1.5])]
)
def test_values_that_are_no_ids_are_told_apart(value):
    with pytest.raises(ValueProblem, match=r"is not a list of token ids|no whole number"):
        convert_value(IDS, value)


def test_the_vocabulary_is_that_of_a_tokenizer_that_was_named(tmp_path):
    train_chat_tokenizer(tmp_path)
    anyone = open_encoder(encoder_config(record="tokens"))
    assert anyone.encode((int32([5000]),)).tokens.tolist() == [5000]
    known = open_encoder(encoder_config(record="tokens", tokenizer=str(tmp_path), labels_column="targets"))
    assert known.columns[:2] == ("input_ids", "targets")
    with pytest.raises(RecordProblem, match="below the vocabulary's"):
        known.encode((int32([5000]), int32([1])))
    assert anyone.name != known.name


def test_the_models_vocabulary_is_a_limit_of_ids_and_labels():
    encoder = open_encoder(encoder_config(record="tokens", labels_column="targets"), vocab_size=50)
    (document,) = encoder.encode_many([(int32([1, 49]), int32([-100, 49]))])
    assert document.tokens.tolist() == [1, 49]
    for record, column in ((([1, 50], [1, 1]), "input_ids"), (([1, 2], [1, 50]), "targets")):
        why = f"column '{column}' holds 50, must be in 0 .. below the vocabulary's 50"
        with pytest.raises(RecordProblem, match=why):
            encoder.encode(tuple(map(int32, record)))


spans_and_offsets = st.tuples(
    # Span borders ascend; equal ones make empty or adjacent spans.
    st.lists(st.integers(0, 20), max_size=8).map(lambda borders: list(zip(*[iter(sorted(borders))] * 2, strict=False))),
    # Starts and stops never descend; several tokens may stand for one character, and some for none.
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=12).map(
        lambda tokens: list(zip(sorted(at for at, _ in tokens), sorted(at + size for at, size in tokens), strict=True))
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
