import os

import fsspec
import pytest

from corpus_files import data_config
from evenload.data.source.files import file_format, files_digest, list_files
from evenload.errors import ConfigError


def make_tree(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def relative_paths(files):
    return [file.key.split(":", 1)[1] for file in files]


def test_directory_is_read_recursively_in_sorted_order_without_hidden_files(tmp_path):
    root = make_tree(tmp_path, "b.py", "a/z.py", "a/y.md", ".git/config", "c/.hidden")
    assert relative_paths(list_files(data_config(str(root)))) == ["a/y.md", "a/z.py", "b.py"]


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        (("*.py",), ["a/z.py", "b.py"]),
        (("*.md", "b.*"), ["a/y.md", "b.py"]),
        (("a/*",), ["a/y.md", "a/z.py"]),
    ],
)
def test_include_patterns_match_names_or_paths(tmp_path, include, expected):
    root = make_tree(tmp_path, "b.py", "a/z.py", "a/y.md")
    assert relative_paths(list_files(data_config(str(root), include=include))) == expected


def test_glob_and_several_sources_keep_source_order(tmp_path):
    make_tree(tmp_path, "two/b.txt", "two/a.txt", "two/c.md", "one/d.txt")
    files = list_files(data_config("", sources=(str(tmp_path / "two/*.txt"), str(tmp_path / "one"))))
    assert [os.path.basename(file.path) for file in files] == ["a.txt", "b.txt", "d.txt"]
    assert files[0].name == str(tmp_path / "two/a.txt")


def test_a_file_with_wildcard_signs_in_its_name_is_a_file(tmp_path):
    make_tree(tmp_path, "part[1].txt", "part1.txt")
    files = list_files(data_config(str(tmp_path / "part[1].txt")))
    assert [os.path.basename(file.path) for file in files] == ["part[1].txt"]


def test_a_file_named_twice_is_refused(tmp_path):
    """It would silently be trained twice an epoch."""
    make_tree(tmp_path, "a.txt")
    with pytest.raises(ConfigError, match="twice"):
        list_files(data_config("", sources=(str(tmp_path), str(tmp_path / "*.txt"))))


@pytest.mark.parametrize("source", ["nothing", "*.nothing", "zzz://bucket/a", "http://127.0.0.1:9/a.jsonl"])
def test_missing_sources_and_packages_are_named(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        list_files(data_config(source))
    assert source in str(caught.value)


def test_include_that_matches_nothing_is_named(tmp_path):
    make_tree(tmp_path, "a.txt")
    with pytest.raises(ConfigError, match=r"\*\.rs"):
        list_files(data_config(str(tmp_path), include=("*.rs",)))


@pytest.mark.parametrize(
    ("path", "format"),
    [
        ("a.jsonl", "jsonl"),
        ("a.JSONL.gz", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.py", "text"),
        ("README", "text"),
        ("a.json", "text"),
    ],
)
def test_format_goes_by_name_unless_set(path, format):
    assert file_format(path, "auto") == format
    assert file_format(path, "jsonl") == "jsonl"


def test_unreadable_compression_is_named_before_reading(tmp_path, monkeypatch):
    """Compressed bytes must never be trained as text."""
    make_tree(tmp_path, "a.jsonl.zst", "b.jsonl.lz4")
    monkeypatch.delitem(fsspec.compression.compr, "zstd", raising=False)
    with pytest.raises(ConfigError, match=r"a\.jsonl\.zst is compressed as \.zst; install evenload\[zstd\]"):
        list_files(data_config(str(tmp_path), include=("*.zst",)))
    monkeypatch.delitem(fsspec.utils.compressions, "lz4", raising=False)
    with pytest.raises(ConfigError, match=r"b\.jsonl\.lz4 is compressed as \.lz4, which fsspec cannot read here"):
        list_files(data_config(str(tmp_path), include=("*.lz4",)))


def test_zstandard_that_would_hide_a_truncated_file_is_refused(tmp_path, monkeypatch):
    def zstandard_file(infile, mode="rb"):
        raise AssertionError

    make_tree(tmp_path, "a.jsonl.zst")
    monkeypatch.setitem(fsspec.compression.compr, "zstd", zstandard_file)
    with pytest.raises(ConfigError, match=r"install evenload\[zstd\]"):
        list_files(data_config(str(tmp_path)))


def test_digest_ignores_where_files_lie_but_not_names_or_sizes(tmp_path):
    for place in ("here", "there"):
        make_tree(tmp_path / place, "a.txt", "b/c.txt")

    def digest(place):
        return files_digest(list_files(data_config(str(tmp_path / place))))

    assert digest("here") == digest("there")
    (tmp_path / "there/a.txt").write_text("longer than before")
    assert digest("here") != digest("there")
    (tmp_path / "here/a.txt").rename(tmp_path / "here/d.txt")
    assert digest("here") != digest("there")
