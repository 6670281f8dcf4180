from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_files import all_batches, data_config, write_corpus
from evenload.data.loader import GlobalBatchLoader
from evenload.feed.step_maker import documents_by_replica, exchange_tokens
from evenload.types.document import Slice
from rank_threads import run_ranks


def test_each_replica_wants_the_documents_of_its_packs():
    """Replica 0: document 5 cut in two, and 3; replica 1: document 4 and a part of 5 (DP-Merge)."""

    def pack(*slices):
        return SimpleNamespace(slices=[Slice(doc_id=doc, start=start, stop=stop) for doc, start, stop in slices])

    first = SimpleNamespace(forward=(pack((5, 0, 2)), pack((5, 2, 5), (3, 0, 3))), backward=(pack((5, 0, 5)),))
    second = SimpleNamespace(forward=(pack((5, 2, 5)),), backward=(pack((5, 2, 5), (4, 0, 4)),))
    assert documents_by_replica(SimpleNamespace(pack_plans=(first, second))) == ((3, 5), (4, 5))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_rank_gets_exactly_the_documents_it_wants(tmp_path_factory, data):
    """Whoever read them, however many want them; with labels that differ from tokens, too."""
    with_labels = data.draw(st.booleans())
    size = data.draw(st.sampled_from([1, 2, 3, 4]))
    texts = [f"{number}" * (1 + number % 7) for number in range(data.draw(st.integers(1, 20)))]
    root = write_corpus(tmp_path_factory.mktemp("corpus"), "prompts" if with_labels else "jsonl", texts)
    config = data_config(
        root, record="prompt_completion" if with_labels else "text", batch_documents=7, shuffle_window=12, streams=3
    )
    alone = all_batches(GlobalBatchLoader(config))
    assert any(batch.tokens.labels is not None for batch in alone) == with_labels
    wishes = data.draw(st.lists(st.lists(st.integers(0, 6), unique=True), min_size=size, max_size=size))

    def run(rank, peers):
        loader = GlobalBatchLoader(config, peers=peers)
        tables = []
        while (batch := loader.next_batch()) is not None:
            ids = [document.doc_id for document in batch.documents]
            wanted = [[ids[index] for index in wish if index < len(ids)] for wish in wishes]
            table = exchange_tokens(batch, wanted, peers)
            assert sorted(table) == sorted(wanted[rank])
            tables.append(table)
        return tables

    for tables in run_ranks(size, run):
        for table, batch in zip(tables, alone, strict=True):
            for doc_id in table:
                assert table[doc_id].tolist() == batch.tokens[doc_id].tolist()
                assert table.labels_of(doc_id).tolist() == batch.tokens.labels_of(doc_id).tolist()
