import gzip
import io
import pickle

import numpy as np
import pytest

from corpus_files import FORMATS, data_config, write_corpus
from evenload.data.config import DataConfig, MixturePart
from evenload.data.lengths import count_documents, read_length_table
from evenload.data.tokenize import train_byte_pair_tokenizer
from evenload.errors import ConfigError, DataError


def npy(values):
    stream = io.BytesIO()
    np.save(stream, np.asarray(values))
    return stream.getvalue()


@pytest.mark.parametrize("format", FORMATS)
def test_documents_of_a_source_are_counted_as_the_loader_would_read_them(tmp_path, format):
    texts = ["abc", "三", "", "x" * 500]
    root = write_corpus(tmp_path, format, texts, num_files=1)
    assert read_length_table(root).lengths.tolist() == [4, 4, 501]
    config = data_config("elsewhere", append_eos=False, max_document_tokens=5)
    assert read_length_table(root, config).lengths.tolist() == [3, 3, 500]


def test_a_glob_of_text_files_is_a_text_source(tmp_path):
    write_corpus(tmp_path, "text", ["abc", "de"])
    assert read_length_table(str(tmp_path / "*.txt")).lengths.tolist() == [4, 3]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.npy", npy([1.5, 2.0]), "dtype float64"),
        ("a.npy", npy([[1, 2]]), r"shape \(1, 2\)"),
        ("a.npy", npy([5, 0, 3]), "length 0 of document 1 is below 1"),
        ("a.npy", npy([5, -2]), "length -2 of document 1"),
        ("a.npy", npy(np.array([], np.int64)), "no lengths"),
        ("a.npy", npy([True]), "dtype bool"),
        ("a.npy", b"not numpy", "not a numpy array file"),
        ("a.npy.gz", npy([1]), "cannot be decompressed"),
        ("a.npy", npy(np.array([2**63], np.uint64)), "does not fit int64"),
        ("a.txt", b"12\nseven\n", r"a\.txt:2: 'seven' is not a length"),
        ("a.csv", b"a,b\n1,2\n3,4\n", "2 columns of whole numbers: 'a', 'b'; keep the one"),
        ("a.csv", b"name,note\nx,y\n", "no column of whole numbers among 'name', 'note'"),
        ("a.csv", b"Some prose, with a comma.\nAnd more.\n", "row 2 has 1 columns, the first has 2"),
        ("a.json", b'{"title": "x", "pages": ["a"]}', "no column of whole numbers among 'title', 'pages'"),
        ("a.json", b'"a text"', "holds no list of whole numbers"),
        ("a.json", b"[1.5, 2]", "holds no list of whole numbers"),
        ("a.json", b"[1, 2", "is not JSON"),
        ("a.jsonl", b"12\n1.5\n", "holds no list of whole numbers"),
        ("a.json", b"[99999999999999999999]", "does not fit int64"),
        ("a.txt", b"99999999999999999999", "does not fit int64"),
        ("a.txt", b"", "no lengths"),
        ("a.txt", b"3\n0\n", "length 0 of document 1"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', r"a\.jsonl:2: the line is not JSON"),
        ("b.jsonl", b'{"text": ""}\n', "no lengths"),
    ],
)
def test_files_that_hold_no_lengths_say_why(tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=why):
        read_length_table(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"length\n3\n1\n4000\n"),
        ("a.csv", b"3\n1\n4000\n"),
        ("a.csv", b"\xef\xbb\xbfname,size\r\nx,3\r\ny,1\r\nz,4000\r\n"),
        ("a.csv", b"id,num_tokens,year\n1,3,2020\n2,1,2021\n3,4000,2022\n"),
        ("a.tsv", b"name\tlength\nx, y\t3\nz\t1\nz\t4000\n"),
        ("a.csv.gz", gzip.compress(b"length\n3\n1\n4000\n")),
        ("a.json", b"[3, 1, 4000]"),
        ("a.json", b'{"corpus": "x", "lengths": [3, 1, 4000]}'),
        ("a.json", b'[{"name": "x", "length": 3}, {"name": "y", "length": 1}, {"name": "z", "length": 4000}]'),
        ("a.jsonl", b"3\n1\n\n4000\n"),
        ("a.jsonl", b'{"id": 7, "length": 3}\n{"id": 8, "length": 1}\n{"id": 9, "length": 4000}\n'),
        ("a.jsonl.gz", gzip.compress(b"3\n1\n4000\n")),
        ("a.txt.gz", gzip.compress(b"3\n1\n4000\n")),
        ("a.txt", b"3\n 1 \n\n4000"),
        ("a.npy", npy(np.array([3, 1, 4000], np.int32))),
        ("a.npy", npy(np.array([3, 1, 4000], np.uint16))),
        ("a.npy.gz", gzip.compress(npy(np.array([3, 1, 4000], np.int64)))),
    ],
    ids=[f"table{i}" for i in range(17)],  # contents are no ids: gzip writes the time into its bytes
)
def test_tables_of_numbers_are_lengths_and_no_documents(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    table = read_length_table(str(tmp_path / name))
    assert (table.lengths.dtype, table.lengths.tolist()) == (np.int64, [3, 1, 4000])
    assert table.unit == "tokens"


def test_pickled_arrays_are_refused_without_advice_to_unpickle(tmp_path):
    (tmp_path / "a.npy").write_bytes(npy(np.array([1, "a", None], object)))
    (tmp_path / "b.npy").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(DataError, match="pickled Python objects, which could run code") as error:
        read_length_table(str(tmp_path / "a.npy"))
    assert "allow_pickle" not in str(error.value)
    with pytest.raises(DataError, match=r"not a numpy array file; save int32 or int64 with numpy\.save$"):
        read_length_table(str(tmp_path / "b.npy"))


def test_documents_say_whether_bytes_or_tokens_were_counted(tmp_path):
    root = write_corpus(tmp_path / "corpus", "jsonl", ["abc abc", "abc"], num_files=1)
    assert read_length_table(root).unit == "bytes"
    tokenizer = train_byte_pair_tokenizer(["abc abc abc"] * 9, 300, tmp_path / "tokenizer.json")
    config = data_config("elsewhere", tokenizer=str(tmp_path))
    table = read_length_table(root, config)
    assert table.unit == "tokens"
    assert table.lengths.tolist() == [len(tokenizer.encode_batch([text])[0]) + 1 for text in ("abc abc", "abc")]
    assert str(tmp_path / "tokenizer.json") in table.tokenizer
    (tmp_path / "n.txt").write_text("5\n")
    with pytest.raises(ConfigError, match="holds lengths, which no tokeniser is needed for"):
        read_length_table(str(tmp_path / "n.txt"), config)


def test_npy_files_of_token_ids_are_documents_where_the_settings_say_so(tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 6, 1, 7, 1], np.int32))
    config = data_config("elsewhere", record="tokens", document_end_id=1)
    table = read_length_table(str(tmp_path / "a.npy"), config)
    assert (table.lengths.tolist(), table.unit) == ([3, 2], "tokens")


def test_a_mixture_is_counted_whole_or_refused(tmp_path):
    for name, texts in (("a", ["abc"]), ("b", ["de", "f"])):
        write_corpus(tmp_path / name, "jsonl", texts, num_files=1)
    parts = tuple(MixturePart(name=name, weight=1, sources=(str(tmp_path / name),)) for name in "ab")
    settings = {"mixture": parts, "batch_documents": 2, "max_document_tokens": 9}
    assert count_documents(DataConfig(**settings), "mixed").lengths.tolist() == [4, 3, 2]
    with pytest.raises(ConfigError, match="mixed repeats the parts of its mixture by weight"):
        count_documents(DataConfig(**settings, mixture_end="repeat"), "mixed")


@pytest.mark.parametrize("name", ["none.npy", "none.txt", "none"])
def test_missing_files_are_named(tmp_path, name):
    with pytest.raises(ConfigError, match=name):
        read_length_table(str(tmp_path / name))


def test_corrupt_records_are_left_out_if_asked(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text"\n{"text": "bcd"}\n')
    config = data_config("elsewhere", on_corrupt="skip")
    assert read_length_table(str(tmp_path), config).lengths.tolist() == [2, 4]
