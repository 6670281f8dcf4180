"""JSON lines beyond what all formats have in common."""

import json

import numpy as np
import pytest

from evenload.data import json_records
from evenload.data.records import FILE_END, FilePart
from format_files import open_source, read_all, values_of


def write(tmp_path, content, name="docs.jsonl"):
    (tmp_path / name).write_bytes(content)
    return str(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": "cut of', "not JSON"),
        (b"just words", "not JSON"),
        (b'{"text": "a"} trailing', "not JSON"),
        (b'{"text": "a", "n": NaN}', "not JSON"),
        (b'{"n": ' + b"[" * 100_000, "not JSON"),
        (b'{"body": "a", "n": 1}', "no text under key 'text'.*its keys are body, n"),
        (b"{}", "no text under key 'text'.*its keys are none"),
        (b'{"text": null}', "no text under key 'text'.*got `null`"),
        (b'{"text": 3}', "no text under key 'text'.*got `int`"),
        (b'["text"]', "no text under key 'text'.*got `array`"),
        (b'{"text": "\xff\xfe"}', "not UTF-8"),
    ],
)
def test_a_broken_line_names_file_and_line_and_the_others_are_read(tmp_path, line, why):
    reader = open_source(write(tmp_path, b'{"text": "ok"}\n\n' + line + b'\n{"text": "after"}\n'))
    first, broken, last = read_all(reader)
    assert (first.values, broken.values, last.values) == (("ok",), None, ("after",))
    assert reader.origin(broken.offset) == f"{reader.file.name}:3"
    with pytest.raises(AssertionError, match=why):
        values_of([broken])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"input_ids": [1, 2.5]}', "got `float`"),
        (b'{"input_ids": [1, true]}', "got `bool`"),
        (b'{"input_ids": "12"}', "no list of token ids under key 'input_ids'"),
        (b'{"input_ids": [2147483648]}', "beyond 32 bits"),
        (b'{"input_ids": [123456789012345678901234567890]}', "beyond 32 bits"),
        (b'{"messages": "hello"}', "Expected `array`, got `str`"),
        (b'{"messages": ["hello"]}', "Expected `object`, got `str`"),
    ],
)
def test_ids_and_chats_that_are_none_are_problems_and_ids_never_rounded(tmp_path, line, why):
    record = "tokens" if b"input_ids" in line else "messages"
    (record,) = read_all(open_source(write(tmp_path, line), record=record))
    assert record.values is None
    assert why in record.problem


def test_prompts_may_be_text_or_messages_and_messages_hold_any_json(tmp_path):
    content = b'{"prompt": [{"role": "user", "content": ["a", {"n": 1.5}]}], "completion": "c"}\n{"prompt":"p"}\n'
    first, second = read_all(open_source(write(tmp_path, content), record="prompt_completion"))
    assert first.values == ([{"role": "user", "content": ["a", {"n": 1.5}]}], "c")
    assert second.problem == "no text or a list of message objects under key 'completion' (its keys are prompt)"


def test_keys_with_any_name_are_found(tmp_path):
    source = write(tmp_path, '{"my text-é.$": "a", "x": 1}'.encode())
    assert values_of(read_all(open_source(source, text_column="my text-é.$"))) == ["a"]


def test_a_byte_order_mark_and_windows_line_ends_are_no_text(tmp_path):
    source = write(tmp_path, b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    assert values_of(read_all(open_source(source), 2)) == ["a", "b"]


def test_a_line_without_end_is_a_problem_and_not_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_records, "MAX_LINE_BYTES", 64)
    source = write(tmp_path, b'{"text": "a"}\n' + b"x" * 1000 + b'\n{"text": "b"}\n{"text": "' + b"y" * 100 + b'"}')
    for count in (1, 2, 7):
        records = read_all(open_source(source), count)
        assert [record.values for record in records] == [("a",), None, ("b",), None]
        assert "longer than 64 bytes" in records[1].problem
    reader = open_source(source)
    left = list(reader.records(FilePart(), records[1].next_offset))
    assert [record.values for record in left] == [("b",), None]


@pytest.fixture(params=["gz", "bz2", "xz", "zst", "lz4"])
def packed(request):
    packages = {"gz": "gzip", "bz2": "bz2", "xz": "lzma", "zst": "backports.zstd", "lz4": "lz4.frame"}
    return request.param, pytest.importorskip(packages[request.param]).compress


def test_compressed_lines_are_read_from_every_offset(tmp_path, packed):
    suffix, compress = packed
    lines = b"".join(b'{"text": "line %d"}\n' % line for line in range(50))
    reader = open_source(write(tmp_path, compress(lines), f"a.jsonl.{suffix}"))
    records = read_all(reader, 3)
    assert values_of(records) == [f"line {line}" for line in range(50)]
    for at in (0, 1, 30, 49):
        assert list(reader.records(FilePart(), records[at].next_offset)) == records[at + 1 :]


def test_lines_before_damaged_compression_are_read_and_the_damage_is_named(tmp_path, packed):
    suffix, compress = packed
    random = np.random.default_rng(0)
    texts = ["".join(map(chr, row)) for row in random.integers(97, 123, (4000, 100)).tolist()]
    content = compress(b"".join(b'{"text": "%s"}\n' % text.encode() for text in texts))
    flipped = bytearray(content)
    flipped[len(content) * 3 // 4] ^= 255
    # What is damaged and has no checksum may give wrong letters, but must not raise anything.
    read_all(open_source(write(tmp_path, bytes(flipped), f"a.jsonl.{suffix}")))
    for damaged in (content[: len(content) * 3 // 4], content[:-1]):
        reader = open_source(write(tmp_path, damaged, f"a.jsonl.{suffix}"))
        records = read_all(reader)
        good = [record for record in records if record.values is not None]
        assert values_of(good) == texts[: len(good)]
        assert f"{reader.file.compression} compression is damaged" in records[-1].problem
        assert records[-1].next_offset == FILE_END
        if len(good) > 99:
            assert reader.origin(good[99].offset) == f"{reader.file.name}:100"
    (tmp_path / f"b.txt.{suffix}").write_bytes(content[:-1])
    reader = open_source(str(tmp_path / f"b.txt.{suffix}"))
    (record,) = reader.records(FilePart())
    assert f"{reader.file.compression} compression is damaged" in record.problem


def test_a_large_list_is_not_parsed_for_its_summary(tmp_path, monkeypatch):
    monkeypatch.setattr(json_records, "_COUNT_BYTES", 1000)
    rows = [{"text": "}" * (number % 7), "meta": {"n": number}} for number in range(1000)]
    reader = open_source(write(tmp_path, json.dumps(rows).encode(), "docs.json"))
    summary = reader.summary()
    assert summary.columns == ("text", "meta")
    assert not summary.is_exact
    assert summary.num_records == pytest.approx(1000, rel=0.15)
    assert len(read_all(reader)) == 1000
