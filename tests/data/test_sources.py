import gzip

import pytest

from corpus_files import all_batches, data_config, documents_of, naive_documents, write_corpus
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import DataError

TEXTS = ["one", "zwei äöü", "三", "line\nbreak\r\n", "five", "six", "seven", "😀 eight"]


def test_broken_jsonl_line_names_file_and_line(tmp_path):
    (tmp_path / "docs.jsonl").write_bytes(b'{"text": "ok"}\n\njust words\n{"text": "after"}\n')
    loader = GlobalBatchLoader(data_config(str(tmp_path)))
    for _ in range(2):  # asked again, it must not go on behind the broken line
        with pytest.raises(DataError, match=r"docs\.jsonl:3: .*not JSON.*on_corrupt"):
            loader.next_batch()
    skipping = GlobalBatchLoader(data_config(str(tmp_path), on_corrupt="skip", shuffle_window=1))
    (batch,) = all_batches(skipping)
    assert documents_of(batch) == naive_documents(["ok", "after"], 64, "error")
    assert skipping.ledger.state.dropped["corrupt"].documents == 1
    skipping.check_ledger()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("b.txt", b"latin \xe4 text", r"not UTF-8: byte 0xe4 at offset 6"),
        ("b.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:-9], "compression is damaged"),
        ("b.jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 3, mtime=0)[:-9], "compression is damaged"),
        ("b.jsonl.gz", b"no gzip at all", "compression is damaged"),
        ("b.parquet", b"PAR1 is not enough PAR1", "parquet file is damaged"),
    ],
    ids=["latin text", "cut text.gz", "cut jsonl.gz", "no gzip", "no parquet"],
)
def test_undecodable_file_is_named_or_skipped_into_the_ledger(tmp_path, name, content, why):
    (tmp_path / "a.txt").write_text("before")
    (tmp_path / name).write_bytes(content)
    (tmp_path / "c.txt").write_text("after")
    with pytest.raises(DataError, match=why) as caught:
        all_batches(GlobalBatchLoader(data_config(str(tmp_path), include=("*",))))
    assert name in str(caught.value)

    skipping = GlobalBatchLoader(data_config(str(tmp_path), include=("*",), on_corrupt="skip"))
    documents = [document for batch in all_batches(skipping) for document in documents_of(batch)]
    assert set(naive_documents(["before", "after"], 64, "error")) <= set(documents)
    assert skipping.ledger.state.dropped["corrupt"].documents == 1
    skipping.check_ledger()


def test_empty_texts_are_dropped_by_name(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "d.jsonl").write_text("")
    loader = GlobalBatchLoader(data_config(str(tmp_path), include=("*",)))
    (batch,) = all_batches(loader)
    assert documents_of(batch) == [(98, 256)]
    assert loader.ledger.state.dropped["empty"].documents == 2
    loader.check_ledger()


def test_an_epoch_without_documents_is_an_error_and_no_endless_loop(tmp_path):
    (tmp_path / "a.txt").write_text("")
    loader = GlobalBatchLoader(data_config(str(tmp_path), epochs=None))
    with pytest.raises(DataError, match=r"no document to train.*dropped \(empty\)"):
        loader.next_batch()


def test_a_file_that_vanishes_is_an_error_also_when_skipping(tmp_path):
    """A storage failure is no corrupt record: skipping it would lose data without a trace in the files."""
    source = write_corpus(tmp_path, "jsonl", TEXTS)
    loader = GlobalBatchLoader(data_config(source, on_corrupt="skip"))
    (tmp_path / "0.jsonl").unlink()
    with pytest.raises(DataError, match=r"0\.jsonl cannot be opened"):
        all_batches(loader)
