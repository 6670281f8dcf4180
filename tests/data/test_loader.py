import gzip
import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_files import FORMATS, all_batches, data_config, documents_of, naive_documents, plan_for, write_corpus
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import DataError, InvalidPlanError

texts_of = st.lists(st.text("abä三", max_size=30), min_size=1, max_size=14)
batchings = st.one_of(
    st.fixed_dictionaries({"batch_documents": st.integers(1, 6)}),
    st.fixed_dictionaries({"batch_tokens": st.integers(1, 80)}),
)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_token_of_every_epoch_comes_exactly_once(tmp_path_factory, format, data):
    texts, overlong = data.draw(texts_of), data.draw(st.sampled_from(["split", "truncate", "drop"]))
    limit, epochs = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    changes = data.draw(batchings) | {
        "overlong": overlong,
        "max_document_tokens": limit,
        "shuffle_window": data.draw(st.sampled_from([1, 2, 5, 1000])),
        "seed": data.draw(st.integers(0, 2**63 - 1)),
        "epochs": epochs,
    }
    root = write_corpus(tmp_path_factory.mktemp("corpus"), format, texts, num_files=data.draw(st.integers(1, 3)))
    expected = Counter(naive_documents(texts, limit, overlong))
    loader = GlobalBatchLoader(data_config(root, **changes))
    if not expected:
        with pytest.raises(DataError, match="no document to train"):
            loader.next_batch()
        return

    batches = all_batches(loader)
    for epoch in range(epochs):
        seen = Counter(document for batch in batches if batch.epoch == epoch for document in documents_of(batch))
        assert seen == expected
    ids = [document.doc_id for batch in batches for document in batch.documents]
    assert ids == list(range(sum(expected.values()) * epochs))
    assert [batch.step for batch in batches] == list(range(len(batches)))
    for batch in batches:
        for document in batch.documents:
            assert document.num_tokens == len(batch.tokens[document.doc_id]) <= limit
            assert document.num_label_tokens == document.num_tokens - 1
    loader.check_ledger()
    # All that was read: every byte of every text and an end token, in every epoch.
    raw_tokens = sum(len(text.encode()) + 1 for text in texts if text)
    assert loader.ledger.state.read.tokens == epochs * raw_tokens
    assert loader.ledger.state.in_flight.tokens == epochs * sum(map(len, expected.elements()))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20), budget=st.integers(1, 70))
def test_token_batches_take_documents_in_order_until_the_next_would_exceed(tmp_path_factory, sizes, budget):
    root = write_corpus(tmp_path_factory.mktemp("corpus"), "jsonl", ["x" * size for size in sizes], num_files=1)
    loader = GlobalBatchLoader(data_config(root, batch_tokens=budget, append_eos=False, shuffle_window=1))
    batches = [[document.num_tokens for document in batch.documents] for batch in all_batches(loader)]
    assert [size for batch in batches for size in batch] == sizes
    for batch, after in zip(batches, [*batches[1:], [budget]], strict=True):
        assert sum(batch) <= budget or len(batch) == 1
        assert sum(batch) + after[0] > budget


def test_batches_end_with_the_epoch_which_may_repeat_for_ever(tmp_path):
    root = write_corpus(tmp_path, "jsonl", list("abcdefg"), num_files=1)
    loader = GlobalBatchLoader(data_config(root, batch_documents=3, epochs=2))
    assert [len(batch.documents) for batch in all_batches(loader)] == [3, 3, 1, 3, 3, 1]
    assert loader.next_batch() is None
    endless = GlobalBatchLoader(data_config(root, batch_documents=7, epochs=None))
    assert [endless.next_batch().epoch for _ in range(50)] == list(range(50))


def order_of(root, **changes):
    loader = GlobalBatchLoader(data_config(root, **changes))
    epochs: dict[int, list] = {}
    for batch in all_batches(loader):
        epochs.setdefault(batch.epoch, []).extend(documents_of(batch))
    return epochs


@pytest.mark.parametrize("format", ["jsonl", "text"])
def test_order_depends_on_seed_and_epoch(tmp_path, format):
    texts = [f"document {number}" for number in range(40)]
    root = write_corpus(tmp_path, format, texts, num_files=3)
    orders = {}
    for seed in (0, 1):
        for epoch, order in order_of(root, epochs=2, seed=seed, shuffle_window=8).items():
            orders[seed, epoch] = tuple(order)
    assert len(set(orders.values())) == 4
    assert order_of(root, epochs=2, seed=1, shuffle_window=8)[1] == list(orders[1, 1])
    # A window over sorted files would show all of file 0 first, in every epoch.
    assert len({order[0] for order in orders.values()}) > 1
    for order in orders.values():
        assert sum(a < b for a, b in itertools.pairwise(order)) < 35, "hardly shuffled"


def test_window_of_one_keeps_files_and_lines_in_order(tmp_path):
    texts = [f"document {number:02}" for number in range(20)]
    root = write_corpus(tmp_path, "text", texts)
    expected = naive_documents(texts, 64, "error")
    assert order_of(root, epochs=2, shuffle_window=1) == {0: expected, 1: expected}


def test_overlong_error_names_place_length_limit_and_all_ways_out(tmp_path):
    (tmp_path / "docs.jsonl").write_text('{"text": "short"}\n{"text": "' + "x" * 100 + '"}\n')
    with pytest.raises(DataError) as caught:
        GlobalBatchLoader(data_config(str(tmp_path), max_document_tokens=50)).next_batch()
    for word in ("docs.jsonl:2", "101 tokens", "(50)", '"split"', '"truncate"', '"drop"', '"error"'):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overlong", "documents", "dropped"),
    [
        ("split", ["abcd", "efgh", "ij", "kl"], {}),
        ("truncate", ["abcd", "kl"], {"truncated": (0, 6)}),
        ("drop", ["kl"], {"overlong": (1, 10)}),
    ],
)
def test_overlong_documents_are_accounted(tmp_path, overlong, documents, dropped):
    root = write_corpus(tmp_path, "text", ["abcdefghij", "kl"])
    loader = GlobalBatchLoader(
        data_config(root, max_document_tokens=4, overlong=overlong, append_eos=False, shuffle_window=1)
    )
    batches = all_batches(loader)
    assert [bytes(document).decode() for batch in batches for document in documents_of(batch)] == documents
    assert {reason: (t.documents, t.tokens) for reason, t in loader.ledger.state.dropped.items()} == dropped
    for batch in batches:
        loader.record_step(batch, plan_for(batch))
    loader.check_ledger()
    assert loader.ledger.state.trained.tokens == sum(map(len, documents))
    assert loader.ledger.state.read.tokens == 12


def test_deferred_documents_come_again_until_they_are_trained(tmp_path):
    root = write_corpus(tmp_path, "jsonl", list("abcdef"), num_files=1)
    loader = GlobalBatchLoader(data_config(root, batch_documents=3, shuffle_window=1))
    first = loader.next_batch()
    loader.record_step(first, plan_for(first, deferred={1, 2}))
    second = loader.next_batch()
    assert [document.doc_id for document in second.carried] == [1, 2]
    assert second.tokens[1].tolist() == [98, 256]
    assert [document.doc_id for document in second.documents] == [3, 4, 5]
    loader.record_step(second, plan_for(second, deferred={2, 5}, dropped={1}))
    loader.check_ledger()
    assert loader.ledger.state.deferred.documents == 2
    last = loader.next_batch()
    assert (last.is_last, last.documents) == (True, ())
    assert [document.doc_id for document in last.carried] == [2, 5]
    with pytest.raises(InvalidPlanError, match="last batch"):
        loader.record_step(last, plan_for(last, deferred={5}))
    loader.record_step(last, plan_for(last))
    assert loader.next_batch() is None
    loader.check_ledger()
    assert (loader.ledger.state.trained.documents, loader.ledger.state.deferred.documents) == (5, 0)
    assert loader.ledger.state.dropped["too_long"].documents == 1


def test_a_plan_for_another_batch_is_refused(tmp_path):
    root = write_corpus(tmp_path, "jsonl", list("abcdef"), num_files=1)
    loader = GlobalBatchLoader(data_config(root))
    first, second = loader.next_batch(), loader.next_batch()
    with pytest.raises(InvalidPlanError, match=r"missing \[0, 1, 2\], unknown \[3, 4, 5\]"):
        loader.record_step(first, plan_for(second))
    plan = plan_for(first)
    longer = msgspec.structs.replace(plan.documents[0], num_tokens=9)
    with pytest.raises(InvalidPlanError, match="gives document 0 9 tokens, the batch 2"):
        loader.record_step(first, msgspec.structs.replace(plan, documents=(longer, *plan.documents[1:])))


def test_a_failing_record_loses_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    good = b"".join(b'{"text": "%d"}\n' % number for number in range(5))
    path.write_bytes(good + b'{"text"; "5"}\n')
    loader = GlobalBatchLoader(data_config(str(tmp_path), batch_documents=6, shuffle_window=2))
    with pytest.raises(DataError):
        loader.next_batch()
    loader.check_ledger()
    state = loader.state()
    path.write_bytes(good + b'{"text": "5"}\n')
    resumed = GlobalBatchLoader(loader.config)
    resumed.load_state(state)
    for candidate in (loader, resumed):
        (batch,) = all_batches(candidate)
        assert sorted(documents_of(batch)) == naive_documents(list("012345"), 64, "error")
        candidate.check_ledger()


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
    for name, content in (("a.txt", ""), ("b.txt", "b"), ("c.jsonl", '{"text": ""}\n'), ("d.jsonl", "")):
        (tmp_path / name).write_text(content)
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
