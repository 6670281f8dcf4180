"""Sequences that share prefixes are read as trees: every label is trained as often as in plain records, by any ranks,
after any interruption."""

import itertools
import json
from collections import Counter

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_files import all_batches, data_config, fingerprint_of, plan_for, train_steps
from evenload.data.batches import decode_state, encode_state
from evenload.data.config import DataConfig
from evenload.data.lengths import read_length_table
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import ConfigError, DataError
from evenload.feed.step_maker import exchange_tokens
from evenload.integrations.packed_loader import PackedLoader
from evenload.types.document import PART_IDS
from evenload.types.tree import Segment, TreeShape
from rank_threads import run_ranks

PROMPT = [7] * 6


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained_by(groups, labels="sum"):
    """How often each label is trained behind each sequence of tokens, where a sequence is (tokens, mask)."""
    total = Counter()
    for group in groups:
        own = Counter(tuple(tokens[: at + 1]) for tokens, mask in group for at in range(1, len(tokens)) if mask[at])
        total.update(own if labels == "sum" else dict.fromkeys(own, 1))
    return total


def trained_in(document, table):
    """The same of a document that was read, and its tokens, with the checks of its numbers."""
    doc_id = document.doc_id
    tokens, labels, counts = table[doc_id], table.labels_of(doc_id), table.label_counts_of(doc_id)
    shape = TreeShape(document.segments or (Segment(len(tokens), -1),))
    found = Counter()
    for row in range(len(tokens)):
        if labels[row] != -100:
            assert labels[row] == tokens[row]
            segment = int(np.searchsorted(shape.stops, row, side="right"))
            found[tuple(tokens[at] for at in shape.rows_of_path(segment) if at <= row)] += int(counts[row])
    assert sum(found.values()) == document.num_label_tokens
    assert (document.num_tokens, shape.num_rows) == (len(tokens), len(tokens))
    return found


def read_all(config, **others):
    loader = GlobalBatchLoader(config, **others)
    batches = all_batches(loader)
    found = Counter()
    for batch in batches:
        for document in batch.documents:
            found.update(trained_in(document, batch.tokens))
            assert document.num_tokens <= config.most_tree_tokens
    loader.close()
    return [document for batch in batches for document in batch.documents], found


def config_of(source, **changes):
    return data_config(source, **({"record": "tokens", "min_shared_tokens": 2} | changes))


SEQUENCE = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=9)
GROUPS = st.lists(st.lists(SEQUENCE, min_size=1, max_size=6), min_size=1, max_size=12)
SETTINGS = st.fixed_dictionaries(
    {
        "min_shared_tokens": st.integers(1, 4),
        "tree_labels": st.sampled_from(["sum", "once"]),
        "max_document_tokens": st.integers(9, 30),
        "shuffle_window": st.sampled_from([1, 3, 8]),
        "batch_documents": st.integers(1, 5),
    }
)


def rows_of(groups, form):
    """Records of groups: a list of sequences each, or sequences with the group's number."""
    if form == "lists":
        return [
            {
                "input_ids": [[t for t, _ in one] for one in group],
                "loss_mask": [[int(m) for _, m in one] for one in group],
            }
            for group in groups
        ]
    return [
        {"input_ids": [t for t, _ in one], "loss_mask": [int(m) for _, m in one], "prompt_id": f"p{number}"}
        for number, group in enumerate(groups)
        for one in group
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), groups=GROUPS, changes=SETTINGS, form=st.sampled_from(["lists", "group_by"]))
def test_every_label_is_trained_as_often_as_plain_records_would_whatever_stops_the_run(
    tmp_path_factory, data, groups, changes, form
):
    source = write(tmp_path_factory.mktemp("trees") / "a.jsonl", rows_of(groups, form))
    config = config_of(source, **changes, **({"group_by": "prompt_id"} if form == "group_by" else {}))
    expected = trained_by(
        [[tuple(zip(*one, strict=True)) for one in group] for group in groups], changes["tree_labels"]
    )
    documents, found = read_all(config)
    assert found == expected
    assert all(document.num_tokens <= changes["max_document_tokens"] for document in documents)
    paths = sum(len(one) for group in groups for one in group)
    assert sum(document.num_tokens + document.num_shared_tokens for document in documents) == paths

    whole = list(train_steps(GlobalBatchLoader(config)))
    state, steps = None, []
    while len(steps) < len(whole):
        loader = GlobalBatchLoader(config)
        if state is not None:
            loader.load_state(decode_state(state))
        for step in train_steps(loader, data.draw(st.integers(1, 4)), ahead=data.draw(st.integers(0, 2))):
            steps.append(step)
            state = step[1]
        loader.close()
    assert [step[:3] for step in steps] == [step[:3] for step in whole]


@pytest.mark.parametrize("are_cut", [False, True], ids=["", "in parts"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_several_ranks_read_and_exchange_the_same_trees(tmp_path, num_ranks, are_cut):
    rng = np.random.default_rng(1)
    groups = [
        [[(int(t), bool(m)) for t, m in zip(rng.integers(0, 2, n), rng.integers(0, 2, n), strict=True)]
         for n in rng.integers(1, 12, rng.integers(1, 6))]
        for _ in range(40)
    ]  # fmt: skip
    sources = tuple(write(tmp_path / f"{n}.jsonl", rows_of(groups[n::4], "lists")) for n in range(4))
    most = 99 if are_cut else 16  # recomputed tokens are then of steps' cuts alone
    changes = {"max_document_tokens": 16, "max_tree_tokens": most, "shuffle_window": 8, "batch_documents": 7}
    config = config_of(str(tmp_path), **changes)
    assert len(sources) == 4

    def live(rank, peers):
        loader, found = GlobalBatchLoader(config, peers=peers), Counter()
        for batch in itertools.islice(iter(loader.next_batch, None), None):
            shapes = {d.doc_id: TreeShape(d.segments) for d in batch.documents if d.segments and d.doc_id % 4 != 1}
            cuts = {doc_id: [*range(1, len(shape.leaves), 2)] for doc_id, shape in shapes.items() if are_cut}
            before, batch = batch, loader.cut_trees(batch, {doc_id: at for doc_id, at in cuts.items() if at})
            for document in batch.documents:
                assert batch.place(document.doc_id) == before.place(document.doc_id % PART_IDS)
            both = batch.documents + batch.carried
            wanted = [[d.doc_id for d in both if d.doc_id % num_ranks == r] for r in range(num_ranks)]
            table = exchange_tokens(batch, wanted, peers)
            deferred = set() if batch.is_last else {d.doc_id for d in batch.documents if d.doc_id % 4 == 1}
            loader.record_step(batch, plan_for(batch, deferred=deferred))
            loader.check_ledger()
            for document in both:
                if document.doc_id in table and document.doc_id not in deferred:
                    found.update(trained_in(document, table))
        return found, loader.ledger.state, encode_state(loader.state())

    results = run_ranks(num_ranks, live)
    total = sum((found for found, *_ in results), Counter())
    assert total == trained_by([[tuple(zip(*one, strict=True)) for one in group] for group in groups])
    assert all(one[1:] == results[0][1:] for one in results)
    trained = results[0][1].trained
    assert trained.tokens + trained.shared_tokens == sum(len(one) for group in groups for one in group)
    assert trained.recomputed_tokens > 0


def test_worker_processes_give_the_same_trees(tmp_path):
    rows = [{"input_ids": [[*PROMPT, n, m] for m in range(n % 5 + 1)]} for n in range(60)]
    source = write(tmp_path / "a.jsonl", rows)
    batches = {}
    for workers in (0, 1):
        loader = GlobalBatchLoader(config_of(source, workers=workers, batch_documents=9))
        batches[workers] = [fingerprint_of(batch) for batch in all_batches(loader)]
        loader.close()
    assert batches[0] == batches[1]


def test_texts_chats_and_completions_in_one_record_share_what_they_begin_with(tmp_path):
    def bytes_of(text):
        return list(text.encode())

    shared = "the same beginning of all "
    texts = [f"{shared}{word}" for word in ("a", "bb", "ccc")]
    source = write(tmp_path / "texts.jsonl", [{"text": texts}])
    (document,), found = read_all(data_config(source, max_document_tokens=99, min_shared_tokens=4))
    assert found == trained_by([[([*one.encode(), 256], [True] * 99) for one in texts]])
    assert (document.num_tokens, document.num_path_tokens) == (len(shared) + 1 + 2 + 3 + 3, 3 * len(shared) + 9)

    rows = [{"prompt": shared, "completion": ["x", "yy"]}, {"prompt": [shared, "other"], "completion": ["x", "y"]}]
    source = write(tmp_path / "completions.jsonl", rows)
    documents, found = read_all(data_config(source, max_document_tokens=99, min_shared_tokens=4, shuffle_window=1))
    pairs = [[(shared, "x"), (shared, "yy")], [(shared, "x")], [("other", "y")]]
    assert found == sum(
        (
            trained_by([[(bytes_of(a) + bytes_of(b) + [256], [False] * len(a) + [True] * 9) for a, b in group]])
            for group in pairs
        ),
        Counter(),
    )
    assert [len(document.segments) for document in documents] == [3, 0, 0]

    asked = [{"role": "user", "content": shared}, {"role": "assistant", "content": "yes"}]
    more = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    chats = {"chat_template": "chatml", "max_document_tokens": 400, "min_shared_tokens": 4, "record": "messages"}
    source = write(tmp_path / "chats.jsonl", [{"messages": [asked, asked + more, asked + more[:1] + asked[1:]]}])
    (document,), found = read_all(data_config(source, **chats))
    plain = [{"messages": chat} for chat in (asked, asked + more, asked + more[:1] + asked[1:])]
    _, expected = read_all(data_config(write(tmp_path / "plain.jsonl", plain), **chats))
    assert found == expected
    assert len(document.segments) > 2


def test_both_answers_of_a_preference_pair_are_trained_behind_one_prompt(tmp_path):
    prompt = [{"role": "user", "content": "which one is the better answer"}]
    good, bad = [{"role": "assistant", "content": "good"}], [{"role": "assistant", "content": "bad"}]
    forms = [
        {"prompt": prompt, "chosen": good, "rejected": bad, "score": 1},
        {"chosen": prompt + good, "rejected": prompt + bad},
    ]
    changes = {"chat_template": "chatml", "max_document_tokens": 400, "min_shared_tokens": 4}
    plain = write(tmp_path / "plain.jsonl", [{"messages": prompt + good}, {"messages": prompt + bad}])
    _, expected = read_all(data_config(plain, **changes))
    for number, form in enumerate(forms):
        source = write(tmp_path / f"{number}.jsonl", [form])
        with pytest.raises(DataError, match=r'set data\.record = "preference"; DPO needs a loop'):
            GlobalBatchLoader(data_config(source, **changes))
        (document,), found = read_all(data_config(source, record="preference", **changes))
        assert (found, len(document.segments)) == (expected, 3)
    texts = [
        {"prompt": "p" * 9, "chosen": "a", "rejected": "b", "id": 1},
        {"prompt": "p" * 9, "chosen": "c", "rejected": "d"},
    ]
    source = write(tmp_path / "texts.jsonl", texts)
    documents, found = read_all(data_config(source, record="preference", group_by="prompt", **changes))
    assert found == trained_by([[([*b"p" * 9, letter, 256], [False] * 9 + [True, True]) for letter in b"abcd"]])
    assert [len(document.segments) for document in documents] == [5]


@pytest.mark.parametrize("form", ["lists", "group_by"])
def test_tables_and_data_sets_hold_the_same_trees_as_lines(tmp_path, form):
    datasets = pytest.importorskip("datasets")
    groups = [[[(7, False)] * 5 + [(n, True), (m, True)] for m in range(n % 3 + 1)] for n in range(20)]
    rows = rows_of(groups, form)
    changes = {"group_by": "prompt_id"} if form == "group_by" else {}
    expected = trained_by([[tuple(zip(*one, strict=True)) for one in group] for group in groups])
    lines, found = read_all(config_of(write(tmp_path / "a.jsonl", rows), **changes))
    assert found == expected
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=3)
    table = datasets.Dataset.from_list(rows)
    for source, dataset in (
        (str(tmp_path / "a.parquet"), None), ("rows", table), ("rows", table.to_iterable_dataset(num_shards=2)),
    ):  # fmt: skip
        documents, found = read_all(
            config_of(source, **changes), datasets=None if dataset is None else {"rows": dataset}
        )
        assert found == expected
        assert sorted(d.segments for d in documents) == sorted(d.segments for d in lines)


def test_tables_hold_chats_texts_and_pairs_of_several_sequences_as_lines_do(tmp_path):
    asked = [{"role": "user", "content": "a question of some length"}, {"role": "assistant", "content": "yes"}]
    more = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    forms = {
        "messages": [{"messages": [asked, asked + more]}, {"messages": [asked]}],
        "text": [{"text": ["the same beginning, once", "the same beginning, twice"]}, {"text": ["other"]}],
        "prompt_completion": [{"prompt": "the same prompt", "completion": ["a", "bb"]}],
        "preference": [
            {"prompt": asked[:1], "chosen": asked[1:], "rejected": more[1:]},
            {"prompt": None, "chosen": asked, "rejected": asked[:1] + more[1:]},
        ],
    }
    for kind, rows in forms.items():
        changes = {"record": kind, "chat_template": "chatml", "max_document_tokens": 400, "min_shared_tokens": 4}
        lines, expected = read_all(data_config(write(tmp_path / f"{kind}.jsonl", rows), **changes))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{kind}.parquet")
        table, found = read_all(data_config(str(tmp_path / f"{kind}.parquet"), **changes))
        assert (found, table) == (expected, lines)
        assert max(len(document.segments) for document in table) >= 2


def test_parts_of_a_mixture_are_grouped_by_fields_of_their_own(tmp_path):
    parts = [
        {"name": name, "weight": 1.0, "sources": (write(tmp_path / f"{name}.jsonl", rows),), "group_by": field}
        for name, field, rows in (
            ("plain", None, [{"input_ids": [*PROMPT, n]} for n in range(6)]),
            ("groups", "uid", [{"input_ids": [*PROMPT, n], "uid": n // 3} for n in range(6)]),
        )
    ]
    settings = {"record": "tokens", "mixture": parts, "batch_documents": 3, "max_document_tokens": 16, "epochs": 1}
    config = msgspec.convert(settings | {"workers": 0, "min_shared_tokens": 2}, DataConfig)
    documents, found = read_all(config)
    assert sorted(document.num_tokens for document in documents) == [7] * 6 + [9] * 2
    assert found == trained_by([[([*PROMPT, n], [True] * 7) for n in range(6)]] * 2)


def test_a_tree_that_is_too_large_is_cut_into_runs_of_leaves_and_what_is_computed_again_is_told(tmp_path):
    rows = [{"input_ids": [[*PROMPT, 10 + leaf, 20, 30] for leaf in range(6)]}]
    config = config_of(write(tmp_path / "a.jsonl", rows), max_document_tokens=12, shuffle_window=1)
    loader = GlobalBatchLoader(config)
    for _ in train_steps(loader):
        pass
    trained = loader.ledger.state.trained
    assert (trained.documents, trained.tokens, trained.shared_tokens) == (3, 3 * 12, 3 * 6)
    assert trained.recomputed_tokens == 2 * 6
    lines = loader.summary()
    assert lines[1].endswith(" 36 tokens, 12 of which are computed again, where a tree was too large")
    assert lines[2].strip() == (
        "for 54 tokens of sequences that share prefixes  (6 of them masked: no loss of their own)"
    )
    _, found = read_all(config)
    assert found == trained_by([[([*one], [True] * 9) for one in rows[0]["input_ids"]]])


def test_trees_have_a_limit_of_their_own(tmp_path):
    rows = [{"input_ids": [[*PROMPT, 10 + leaf, 20, 30] for leaf in range(leaves)]} for leaves in (3, 4)]
    source = write(tmp_path / "a.jsonl", rows)
    documents, found = read_all(config_of(source, max_document_tokens=9, max_tree_tokens=15, shuffle_window=1))
    assert [one.num_tokens for one in documents] == [15, 15, 9]
    assert found == trained_by([[([*one], [True] * 9) for one in row["input_ids"]] for row in rows])
    with pytest.raises(DataError, match=r"a\.jsonl:1 has 9 tokens, more than max_document_tokens \(8\)"):
        read_all(config_of(source, max_document_tokens=8, max_tree_tokens=15))
    with pytest.raises(ConfigError, match=r"max_tree_tokens is 8, must be at least data.max_document_tokens \(9\)"):
        config_of(source, max_document_tokens=9, max_tree_tokens=8)


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_a_sequence_beyond_the_limit_follows_the_rule_for_long_documents(tmp_path, overlong):
    long, short = [*PROMPT, *range(10, 20)], [*PROMPT, 3]
    config = config_of(write(tmp_path / "a.jsonl", [{"input_ids": [short, long]}]), max_document_tokens=10)
    with pytest.raises(DataError, match=r"a\.jsonl:1 has 16 tokens, more than max_document_tokens \(10\)"):
        read_all(config)
    config = config_of(config.sources[0], max_document_tokens=10, overlong=overlong, epochs=2)
    kept = {"split": [long[:10], long[10:]], "truncate": [long[:10]], "drop": []}[overlong]
    _, found = read_all(config)
    assert found == trained_by([[(one, [True] * 10) for one in (short, *kept)]] * 2)


def test_the_same_value_further_on_is_another_group_and_a_record_that_cannot_be_read_ends_one(tmp_path):
    ids = ["a", "a", "b", "a", "c", None, "c"]
    rows = [{"input_ids": [*PROMPT, number], "prompt_id": one} for number, one in enumerate(ids)]
    config = config_of(write(tmp_path / "a.jsonl", rows), group_by="prompt_id", shuffle_window=1, on_corrupt="skip")
    loader = GlobalBatchLoader(config)
    documents = [document for batch in all_batches(loader) for document in batch.documents]
    assert [document.num_tokens for document in documents] == [8, 7, 7, 7, 7]
    assert loader.ledger.state.dropped["corrupt"].documents == 1
    assert any("used as tokens: input_ids, prompt_id" in line for line in loader.source_lines())
    with pytest.raises(DataError, match=r"a\.jsonl:6: column 'prompt_id': null is not a value of data\.group_by"):
        read_all(config_of(config.sources[0], group_by="prompt_id"))


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        (
            {"input_ids": [[1, 2], [3]], "loss_mask": [[1, 1]]},
            {},
            "'input_ids' holds a list of 2 sequences, 'loss_mask' of 1",
        ),
        ({"input_ids": [[1, 2], ["x"]]}, {}, "column 'input_ids': list ['x'] is not a list of token ids"),
        ({"input_ids": [[1, 2], [1, 3]], "labels": [[-100, 2], [-100, 4]]}, {}, "is 3 and has the label 4"),
        ({"input_ids": [[1, 2, 0]], "attention_mask": [[1, 1, 0]]}, {}, "'attention_mask' marks tokens as padding"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, {"group_by": "labels"}, "which has a meaning of its own"),
        ({"input_ids": [1, 2]}, {"group_by": ""}, "data.group_by is empty"),
        ({"input_ids": [1, 2]}, {"min_shared_tokens": 0}, "min_shared_tokens is 0, must be at least 1"),
        ({"input_ids": [1, 2]}, {"tree_labels": "twice"}, "tree_labels is 'twice'"),
    ],
)
def test_what_cannot_be_a_tree_is_refused_with_its_value(tmp_path, row, changes, message):
    source = write(tmp_path / "a.jsonl", [row])
    with pytest.raises((ConfigError, DataError)) as caught:
        read_all(config_of(source, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2], [1, 3]]], ids=["of one sequence", "of lists"])
def test_a_misspelt_group_is_told_with_the_keys_before_anything_is_read(tmp_path, ids):
    source = write(tmp_path / "a.jsonl", [{"input_ids": ids, "prompt_id": 3}])
    message = (
        rf"{source} has no key 'promptid', which data\.group_by names; did you mean 'prompt_id'\? its keys are "
        "input_ids, prompt_id"
    )
    with pytest.raises(ConfigError, match=message):
        GlobalBatchLoader(config_of(source, group_by="promptid"))


def test_a_record_of_lists_that_lacks_its_group_is_told_what_it_lacks(tmp_path):
    rows = [{"input_ids": [[1, 2], [1, 3]], "uid": 3}, {"input_ids": [[1, 2], [1, 3]]}]
    with pytest.raises(DataError, match=r":2: no value of data\.group_by under key 'uid' \(its keys are input_ids\)"):
        read_all(config_of(write(tmp_path / "a.jsonl", rows), group_by="uid"))


def test_files_without_fields_cannot_be_grouped(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    np.save(tmp_path / "a.npy", np.array([1, 2, 0], np.int32))
    for name, changes, message in (
        ("a.txt", {"record": "text"}, "is one record, and data.group_by is 'uid'"),
        ("a.npy", {"document_end_id": 0}, "holds nothing but ids, and data.group_by is 'uid'"),
    ):
        with pytest.raises(ConfigError, match=message):
            GlobalBatchLoader(config_of(str(tmp_path / name), group_by="uid", **changes))


def test_a_held_out_group_is_held_out_whole(tmp_path):
    rows = [{"input_ids": [*PROMPT, n, m], "prompt_id": n} for n in range(40) for m in range(3)]
    source = write(tmp_path / "a.jsonl", rows)
    shares = {
        reads: read_all(config_of(source, group_by="prompt_id", held_out_share=0.3, reads=reads))
        for reads in ("training", "held_out")
    }
    kept = {reads: {key[6] for key in found if len(key) == 8} for reads, (_, found) in shares.items()}
    assert kept["training"] | kept["held_out"] == set(range(40))
    assert not kept["training"] & kept["held_out"]
    assert all(document.num_tokens == 6 + 1 + 3 for documents, _ in shares.values() for document in documents)


def test_lengths_of_trees_are_unique_tokens_and_those_of_all_sequences_are_told(tmp_path):
    rows = [{"input_ids": [[*PROMPT, n, m] for m in range(3)]} for n in range(4)] + [{"input_ids": [1, 2]}]
    source = write(tmp_path / "a.jsonl", rows)
    table = read_length_table(source, config_of(source))
    assert table.lengths.tolist() == [10] * 4 + [2]
    assert table.records == "records are read as tokens; 96 tokens of sequences that share prefixes are 40 unique ones"
    assert [*table.trees] == [0, 1, 2, 3]
    assert all(tree.sequences == (8, 8, 8) and tree.num_recomputed == 0 for tree in table.trees.values())
    assert table.sequence_lengths.tolist() == [2] + [8] * 12


def test_lengths_of_trees_are_those_of_sequences_that_fit(tmp_path):
    groups = [{"input_ids": [[*PROMPT, 7, m, m, m] for m in range(3)]}]
    source = write(tmp_path / "a.jsonl", [*groups, {"input_ids": [1] * 30}])
    limited = {"max_document_tokens": 8, "overlong": "truncate"}
    table = read_length_table(source, config_of(source, **limited))
    documents, _ = read_all(config_of(source, **limited))
    # Other documents are whole: what becomes of them is not the table's to say.
    assert sorted(table.lengths) == sorted([*(one.num_tokens for one in documents if one.segments), 30])
    trained = [(one.segments, one.num_path_tokens, one.num_recomputed_tokens) for one in documents if one.segments]
    counted = [(tree.segments, sum(tree.sequences), tree.num_recomputed) for tree in table.trees.values()]
    assert sorted(counted) == sorted(trained)
    assert sum(again for *_, again in trained) == 14, "seven of each tree but the first"


def test_estimated_tokens_of_trees_are_those_of_their_segments(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"text": ["a" * 100 + "b" * n for n in (30, 41)]}])
    table = read_length_table(source, config_of(source, record="text", max_document_tokens=40), estimated=True)
    (tree,) = table.trees.values()
    assert table.unit == "tokens"
    assert sorted(tree.sequences) == [33, 36]
    assert table.lengths.tolist() == [sum(one.num_tokens for one in tree.segments)]


def test_packed_batches_refuse_trees(tmp_path):
    rows = [{"input_ids": [[*PROMPT, m] for m in range(3)]}]
    config = config_of(write(tmp_path / "a.jsonl", rows))
    with (
        PackedLoader(config, max_tokens=64) as loader,
        pytest.raises(ConfigError, match="tree of sequences of 21 tokens"),
    ):
        next(iter(loader))
