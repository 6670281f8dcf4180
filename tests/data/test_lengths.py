import gzip
import io

import numpy as np
import pytest
from corpus_files import FORMATS, data_config, write_corpus

from evenload.data.lengths import read_lengths
from evenload.errors import ConfigError, DataError


def npy(values):
    stream = io.BytesIO()
    np.save(stream, np.asarray(values))
    return stream.getvalue()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_numpy_files_plain_and_compressed(tmp_path, dtype):
    lengths = np.array([3, 1, 4000], dtype=dtype)
    (tmp_path / "a.npy").write_bytes(npy(lengths))
    (tmp_path / "a.npy.gz").write_bytes(gzip.compress(npy(lengths)))
    for name in ("a.npy", "a.npy.gz"):
        read = read_lengths(str(tmp_path / name))
        assert read.dtype == np.int64
        assert read.tolist() == [3, 1, 4000]


def test_text_of_one_length_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("12\n 7 \n\n300")
    assert read_lengths(str(tmp_path / "a.txt")).tolist() == [12, 7, 300]


@pytest.mark.parametrize("format", FORMATS)
def test_documents_of_a_source_are_counted_as_the_loader_would_read_them(tmp_path, format):
    texts = ["abc", "三", "", "x" * 500]
    root = write_corpus(tmp_path, format, texts, num_files=1)
    assert read_lengths(root).tolist() == [4, 4, 501]
    config = data_config("elsewhere", append_eos=False, max_document_tokens=5)
    assert read_lengths(root, config).tolist() == [3, 3, 500]


def test_a_glob_of_text_files_is_a_text_source(tmp_path):
    """The error about a .txt that holds no numbers sends users here."""
    write_corpus(tmp_path, "text", ["abc", "de"])
    assert read_lengths(str(tmp_path / "*.txt")).tolist() == [4, 3]


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
        ("a.npy.gz", npy([1]), "not a numpy array file"),
        ("a.npy", npy(np.array([2**63], np.uint64)), "does not fit int64"),
        ("a.txt", b"12\nseven\n", r"a\.txt:2: 'seven' is not a length"),
        ("a.txt", b"", "no lengths"),
        ("a.txt", b"3\n0\n", "length 0 of document 1"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', r"a\.jsonl:2: the line is not JSON"),
        ("b.jsonl", b'{"text": ""}\n', "no lengths"),
    ],
)
def test_files_that_hold_no_lengths_say_why(tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=why):
        read_lengths(str(tmp_path / name))


@pytest.mark.parametrize("name", ["none.npy", "none.txt", "none"])
def test_missing_files_are_named(tmp_path, name):
    with pytest.raises(ConfigError, match=name):
        read_lengths(str(tmp_path / name))


def test_corrupt_records_are_left_out_if_asked(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text"\n{"text": "bcd"}\n')
    config = data_config("elsewhere", on_corrupt="skip")
    assert read_lengths(str(tmp_path), config).tolist() == [2, 4]
