"""Of every format: parts are a partition of the file in order, and every offset is a place to go on."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from format_files import (
    END_ID,
    ROW_FORMATS,
    TOKEN_FORMATS,
    check_parts_and_offsets,
    open_source,
    plain,
    read_all,
    tokens_source,
    write_rows,
    write_table,
    write_tokens,
)

TEXTS = st.lists(st.text(alphabet=st.sampled_from('a "\\\n\r é😀'), max_size=12), max_size=20)
DOCUMENTS = st.lists(st.lists(st.integers(1, 65_535), max_size=9), max_size=20)


@pytest.mark.parametrize("format", ROW_FORMATS)
@settings(max_examples=25, deadline=None)
@given(texts=TEXTS, count=st.integers(1, 9))
def test_parts_of_any_number_give_all_texts_in_order_from_every_offset(tmp_path_factory, format, texts, count):
    source = write_rows(tmp_path_factory.mktemp("rows"), format, [{"id": 7, "text": text} for text in texts] or [])
    check_parts_and_offsets(open_source(source), count, texts)


@pytest.mark.parametrize("format", TOKEN_FORMATS)
@settings(max_examples=25, deadline=None)
@given(documents=DOCUMENTS, count=st.integers(1, 9), is_ended=st.booleans())
def test_parts_of_any_number_give_all_tokens_in_order_from_every_offset(
    tmp_path_factory, format, documents, count, is_ended
):
    if format == "ends.npy":
        documents = [[*document, END_ID] for document in documents]
        if documents and not is_ended and len(documents[-1]) > 1:
            documents[-1].pop()
    source = write_tokens(tmp_path_factory.mktemp("tokens"), format, documents)
    check_parts_and_offsets(tokens_source(source), count, documents)


@pytest.mark.parametrize("count", [1, 3])
def test_a_text_file_is_one_record_of_the_first_part(tmp_path, count):
    (tmp_path / "a.txt").write_bytes("ä\r\n".encode())
    check_parts_and_offsets(open_source(str(tmp_path)), count, ["ä\r\n"])


@pytest.mark.parametrize("format", ROW_FORMATS)
def test_chats_keep_their_messages_and_null_keys_are_left_out(tmp_path, format):
    """Arrow cannot leave a key out of one message: a null there must not reach a template as the word None."""
    chats = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "name": "x"}],
        [],
        [{"role": "user", "content": ""}],
    ]
    path = tmp_path / f"rows.{format}"
    if format.startswith("jsonl"):
        write_rows(tmp_path, format, [{"messages": chat} for chat in chats])
    else:
        kind = pa.list_(pa.struct([(key, pa.string()) for key in ("content", "name", "role")]))
        write_table(path, format, pa.table({"messages": pa.array(chats, kind)}))
    check_parts_and_offsets(open_source(str(path), record="messages"), 2, chats)


@pytest.mark.parametrize("format", ROW_FORMATS)
def test_several_columns_come_in_the_order_asked_for(tmp_path, format):
    rows = [{"completion": f"c{row}", "other": row, "prompt": f"p{row}"} for row in range(7)]
    reader = open_source(write_rows(tmp_path, format, rows), record="prompt_completion")
    result = read_all(reader, 2)
    assert [record.values for record in result] == [(f"p{row}", f"c{row}") for row in range(7)]


@pytest.mark.parametrize("format", ROW_FORMATS)
def test_labels_may_be_negative_and_are_as_long_as_their_tokens(tmp_path, format):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}, {"input_ids": [4], "labels": [4]}]
    reader = open_source(write_rows(tmp_path, format, rows), record="tokens", labels_column="labels")
    result = [plain(record)[2] for record in read_all(reader)]
    assert result == [(("int32", 1, 2, 3), ("int32", -100, -100, 3)), (("int32", 4), ("int32", 4))]


@pytest.mark.parametrize("format", TOKEN_FORMATS)
def test_number_of_parts_follows_the_size_and_opens_nothing(tmp_path, format):
    reader = tokens_source(write_tokens(tmp_path, format, [[1, 2, END_ID]] * 40))
    for path in tmp_path.iterdir():
        path.unlink()
    expected = 1 if format == "jsonl.gz" else -(-reader.file.size_bytes // 10)
    assert reader.num_parts(10) == expected
    assert reader.num_parts(10**9) == 1
