import os

import datasets
import fsspec
import pytest

from corpus_files import data_config
from evenload.data.loader import GlobalBatchLoader
from evenload.data.sources import file_format, files_digest, list_sources
from evenload.errors import ConfigError, DataError
from format_files import list_files


def make_tree(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def relative_paths(files):
    return [file.key.split(":", 1)[1] for file in files]


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ((), ["a/y.md", "a/z.py", "b.py"]),
        (("*.py",), ["a/z.py", "b.py"]),
        (("*.md", "b.*"), ["a/y.md", "b.py"]),
        (("a/*",), ["a/y.md", "a/z.py"]),
    ],
)
def test_directories_are_read_recursively_in_order_without_hidden_files(tmp_path, include, expected):
    root = make_tree(tmp_path, "b.py", "a/z.py", "a/y.md", ".git/config.py", "c/.hidden.py")
    assert relative_paths(list_files(data_config(str(root), include=include))) == expected


def test_glob_and_several_sources_keep_source_order(tmp_path):
    make_tree(tmp_path, "two/b.txt", "two/a.txt", "two/c.md", "one/d.txt")
    files = list_files(data_config("", sources=(str(tmp_path / "two/*.txt"), str(tmp_path / "one"))))
    assert [os.path.basename(file.path) for file in files] == ["a.txt", "b.txt", "d.txt"]
    assert files[0].name == str(tmp_path / "two/a.txt")
    make_tree(tmp_path, "part[1].txt", "part1.txt")  # wildcard signs in a name
    assert relative_paths(list_files(data_config(str(tmp_path / "part[1].txt")))) == ["part[1].txt"]


@pytest.mark.parametrize("source", ["nothing", "*.nothing", "zzz://bucket/a", "http://127.0.0.1:9/a.jsonl"])
def test_missing_sources_and_packages_are_named(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        list_files(data_config(source))
    assert source in str(caught.value)
    make_tree(tmp_path, "a.txt")
    with pytest.raises(ConfigError, match=r"\*\.rs"):
        list_files(data_config(str(tmp_path), include=("*.rs",)))


JSONL = dict.fromkeys(("a.jsonl", "a.JSONL.gz", "a.ndjson"), "jsonl")


@pytest.mark.parametrize(
    ("path", "format"), (JSONL | {"a.parquet": "parquet", "a.py": "text", "README": "text", "a.json": "json"}).items()
)
def test_format_goes_by_name_unless_set(path, format):
    assert file_format(path, "auto") == format
    assert file_format(path, "jsonl") == "jsonl"


def test_unreadable_compression_is_named_before_reading(tmp_path, monkeypatch):
    make_tree(tmp_path, "a.jsonl.zst", "b.jsonl.lz4")
    monkeypatch.delitem(fsspec.compression.compr, "zstd", raising=False)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"a\.jsonl\.zst is compressed as \.zst; install evenload\[zstd\]"):
            list_files(data_config(str(tmp_path), include=("*.zst",)))
        # Another package, which takes the end of a truncated file for the end of the data.
        monkeypatch.setitem(fsspec.compression.compr, "zstd", lambda infile, mode="rb": infile)
    monkeypatch.delitem(fsspec.utils.compressions, "lz4", raising=False)
    with pytest.raises(ConfigError, match=r"b\.jsonl\.lz4 is compressed as \.lz4, which fsspec cannot read here"):
        list_files(data_config(str(tmp_path), include=("*.lz4",)))


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


def test_links_to_files_and_directories_are_followed(tmp_path):
    """The Hub's cache holds nothing but links, to files whose names say nothing."""
    blobs = make_tree(tmp_path / "blobs", "0a1b", "2c3d")
    more = make_tree(tmp_path / "elsewhere", "b.jsonl", "c/d.jsonl")
    root = make_tree(tmp_path / "snapshot", "plain.jsonl")
    (root / "a.jsonl").symlink_to(blobs / "0a1b")
    (root / "z.jsonl").symlink_to("../blobs/2c3d")
    (root / "more").symlink_to(more, target_is_directory=True)
    expected = ["a.jsonl", "more/b.jsonl", "more/c/d.jsonl", "plain.jsonl", "z.jsonl"]
    files = list_files(data_config(str(root)))
    assert relative_paths(files) == expected
    assert {file.format for file in files} == {"jsonl"}
    assert [file.size_bytes for file in files] == [os.path.getsize(root / path) for path in expected]
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    assert relative_paths(list_files(data_config(str(tmp_path / "link")))) == expected
    assert relative_paths(list_files(data_config(str(root / "*.jsonl")))) == ["a.jsonl", "plain.jsonl", "z.jsonl"]


def test_a_directory_that_contains_itself_is_read_once(tmp_path):
    root = make_tree(tmp_path, "a.txt", "below/b.txt")
    (root / "below/again").symlink_to(root, target_is_directory=True)
    (root / "self").symlink_to(".", target_is_directory=True)
    assert relative_paths(list_files(data_config(str(root)))) == ["a.txt", "below/b.txt"]


def test_a_file_named_twice_or_reached_by_two_links_is_refused(tmp_path):
    root = make_tree(tmp_path, "a.txt", "below/b.txt")
    with pytest.raises(ConfigError, match="twice"):
        list_files(data_config("", sources=(str(root), str(root / "*.txt"))))
    (root / "latest.txt").symlink_to("a.txt")
    with pytest.raises(ConfigError, match=r"latest\.txt and .*a\.txt are the same file, .*twice"):
        list_files(data_config(str(root)))
    (root / "latest.txt").unlink()
    (root / "copy").symlink_to("below", target_is_directory=True)
    with pytest.raises(ConfigError, match=r"b\.txt and .*b\.txt are the same file"):
        list_files(data_config(str(root)))


@pytest.mark.parametrize("source", ["", "a.txt", "*.txt"])
@pytest.mark.parametrize("target", ["gone", "a.txt"], ids=["dangling", "looping"])
def test_a_link_to_nothing_is_named(tmp_path, source, target):
    (tmp_path / "a.txt").symlink_to(target)
    with pytest.raises(ConfigError, match=r"a\.txt") as caught:
        list_files(data_config(str(tmp_path / source)))
    assert "is not there" in str(caught.value) or "levels of symbolic links" in str(caught.value)


def test_what_is_neither_file_nor_directory_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ConfigError, match=r"pipe\.txt is neither a file nor a directory"):
        list_files(data_config(str(tmp_path)))


def test_a_pattern_reads_directories_that_it_matches_as_a_shell_would(tmp_path):
    make_tree(tmp_path, "en/a.txt", "en/deep/b.txt", "de/c.txt", "d.txt")
    listed = list_files(data_config(str(tmp_path / "*")))
    assert relative_paths(listed) == ["d.txt", "de/c.txt", "en/a.txt", "en/deep/b.txt"]
    assert relative_paths(list_files(data_config(str(tmp_path / "**")))) == relative_paths(listed)
    assert relative_paths(list_files(data_config(str(tmp_path / "e*")))) == ["en/a.txt", "en/deep/b.txt"]


@pytest.mark.parametrize(
    "beside", ["README.md", "LICENSE", "dataset_info.json", "state.json", "cache-1f.arrow", "_SUCCESS", "config.toml"]
)
def test_what_only_describes_data_is_left_out_and_told(tmp_path, beside):
    make_tree(tmp_path, "train/a.parquet", beside)
    (listing,) = list_sources(data_config(str(tmp_path)))
    assert relative_paths(listing.files) == ["train/a.parquet"]
    assert listing.left_out == (beside,)
    if beside == "README.md":
        (request,) = list_sources(data_config(str(tmp_path), include=("*.md",)))
        assert relative_paths(request.files) == [beside]


def test_other_files_beside_data_are_text_only_if_asked_for(tmp_path):
    (listing,) = list_sources(data_config(str(make_tree(tmp_path / "texts", "README.md", "a.txt"))))
    assert (relative_paths(listing.files), listing.left_out) == (["README.md", "a.txt"], ())
    (tmp_path / "texts" / "a.txt").rename(tmp_path / "notes.txt")
    (tmp_path / "texts" / "README.md").unlink()
    make_tree(tmp_path, "a.jsonl", "loader.py")
    with pytest.raises(ConfigError, match=r"1 data file, and next to them loader\.py, notes\.txt.*\[\"\*\.jsonl\"\]"):
        list_files(data_config(str(tmp_path)))
    assert relative_paths(list_files(data_config(str(tmp_path), include=("*.jsonl",)))) == ["a.jsonl"]
    both = list_files(data_config(str(tmp_path), include=("*.jsonl", "*.txt")))
    assert [file.format for file in both] == ["jsonl", "text"]
    texts = list_files(data_config(str(tmp_path), format="text"))
    assert [file.format for file in texts] == ["text"] * 3


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "b/a.xlsx", "a.zip", "a.npz", "a.PKL"])
def test_tables_and_archives_are_refused(tmp_path, name):
    make_tree(tmp_path, name, "b.txt")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(ConfigError, match=r"of which no records are read; write them as \.jsonl or \.parquet"):
            list_files(data_config(str(source)))
    assert len(list_files(data_config(str(tmp_path), include=("*.txt",)))) == 1


def test_what_lies_below_a_matched_directory_was_not_asked_for_by_its_name(tmp_path):
    make_tree(tmp_path, "corpusA/a.jsonl", "corpusA/README.md", "corpusB/b.jsonl", "corpusB/LICENSE")
    (listing,) = list_sources(data_config(str(tmp_path / "corpus*")))
    assert relative_paths(listing.files) == ["corpusA/a.jsonl", "corpusB/b.jsonl"]
    assert listing.left_out == ("corpusA/README.md", "corpusB/LICENSE")


@pytest.mark.parametrize("changes", [{}, {"include": ("*.arrow",)}, {"format": "arrow"}])
def test_files_that_a_saved_data_set_does_not_name_are_copies(tmp_path, changes):
    dataset = datasets.Dataset.from_dict({"text": ["a", "b"]})
    dataset.save_to_disk(tmp_path / "saved", num_shards=2)
    dataset.save_to_disk(tmp_path / "saved", num_shards=1)
    loaded = datasets.load_from_disk(tmp_path / "saved")
    loaded.map(lambda row: {"text": row["text"] + "!"}, cache_file_name=str(tmp_path / "saved/mapped.arrow"))
    (tmp_path / "saved/cache-0123.arrow").write_bytes(b"")
    (listing,) = list_sources(data_config(str(tmp_path / "saved"), **changes))
    assert relative_paths(listing.files) == ["data-00000-of-00001.arrow"]
    assert {"mapped.arrow", "cache-0123.arrow"} <= set(listing.left_out)
    by_glob = list_files(data_config(str(tmp_path / "saved/*.arrow")))
    assert relative_paths(by_glob) == ["data-00000-of-00001.arrow"]


@pytest.mark.parametrize("names", [("train-0.parquet", "test-0.parquet"), ("train/a.jsonl", "validation/a.jsonl")])
def test_several_splits_are_refused_and_one_is_read(tmp_path, names):
    make_tree(tmp_path / "data", *names)
    for changes in ({}, {"include": ("*.parquet", "*.jsonl")}):
        with pytest.raises(ConfigError, match=r"holds the splits (test, train|train, validation) of a data set"):
            list_files(data_config(str(tmp_path), **changes))
    assert len(list_files(data_config(str(tmp_path / "data/train*")))) == 1
    make_tree(tmp_path / "saved", "dataset_dict.json", "test/data.arrow", "train/data.arrow", "train/state.json")
    with pytest.raises(ConfigError, match=r"holds the splits test, train of a data set"):
        list_files(data_config(str(tmp_path / "saved")))
    assert relative_paths(list_files(data_config(str(tmp_path / "saved/train")))) == ["data.arrow"]
    make_tree(tmp_path / "code", "train.py", "test.py", "eval.py")
    assert len(list_files(data_config(str(tmp_path / "code")))) == 3


def test_pointers_of_git_lfs_are_not_trained_as_texts(tmp_path):
    (tmp_path / "a.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(DataError, match="pointer of Git LFS, not the file"):
        GlobalBatchLoader(data_config(str(tmp_path))).next_batch()


def test_names_that_are_not_utf8_are_files_like_others_and_their_problems_are_told(tmp_path):
    with open(os.path.join(os.fsencode(tmp_path), b"a\xff.jsonl"), "w") as file:
        file.write("{broken\n")
    (listed,) = list_files(data_config(str(tmp_path)))
    assert os.fsencode(listed.path).endswith(b"a\xff.jsonl")
    assert files_digest([listed]).startswith("1 files of 8 bytes")
    with pytest.raises(DataError, match=r"a\\udcff\.jsonl:1: the line is not JSON"):
        GlobalBatchLoader(data_config(str(tmp_path))).next_batch()
