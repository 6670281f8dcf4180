import itertools

import msgspec
import pytest

from corpus_files import FORMATS, all_batches, data_config, fingerprint_of, plan_for, train_steps, write_corpus
from evenload.data.batches import decode_state, encode_state
from evenload.data.loader import GlobalBatchLoader
from evenload.data.tokenize import train_byte_pair_tokenizer
from evenload.errors import ConfigError, DataError

TEXTS = [("abcdefg三"[number % 8] * (number * 7 % 50)) for number in range(17)]


@pytest.mark.parametrize("window", [1, 3, 1000])
@pytest.mark.parametrize("batching", [{"batch_documents": 4}, {"batch_tokens": 37}])
@pytest.mark.parametrize("format", FORMATS)
def test_batches_are_bit_identical_after_a_restart_at_every_step(tmp_path, format, batching, window):
    """Window, pending, deferred, split records and epoch borders all pass through the JSON of the state."""
    root = write_corpus(tmp_path, format, TEXTS)
    config = data_config(
        root, **batching, shuffle_window=window, epochs=2, overlong="split", max_document_tokens=20, seed=5
    )
    whole = GlobalBatchLoader(config)
    start = encode_state(whole.state())
    run = list(train_steps(whole))
    assert len(run) > 8
    states = [start, *(state for _, state, *_ in run)]
    for step, state in enumerate(states):
        resumed = GlobalBatchLoader(config)
        resumed.load_state(decode_state(state))
        assert encode_state(resumed.state()) == state
        # The whole rest at a few steps, the next batches at all of them.
        stop = None if step in (0, 1, len(run) // 2) else 3
        rest = list(train_steps(resumed, stop))
        assert rest == run[step:][: len(rest)]
        assert stop is not None or len(rest) == len(run) - step
        if stop is None:
            assert resumed.ledger.state == whole.ledger.state


def test_state_holds_no_text_and_does_not_grow(tmp_path):
    root = write_corpus(tmp_path, "jsonl", ["secret words " * 3] * 50)
    loader = GlobalBatchLoader(data_config(root, epochs=None, shuffle_window=8))
    for _ in range(200):
        batch = loader.next_batch()
        loader.record_step(batch, plan_for(batch))
        assert len(encode_state(loader.state())) < 3000
    assert b"secret" not in encode_state(loader.state())


def test_resume_reads_only_what_the_loader_held(tmp_path, monkeypatch):
    root = write_corpus(tmp_path, "jsonl", [f"text {number}" for number in range(400)], num_files=2)
    config = data_config(root, shuffle_window=5, batch_documents=10)
    loader = GlobalBatchLoader(config)
    for _ in range(30):
        loader.next_batch()
    resumed = GlobalBatchLoader(config)
    encoded = []
    original = resumed.tokenizer.encode_batch
    monkeypatch.setattr(resumed.tokenizer, "encode_batch", lambda texts: encoded.extend(texts) or original(texts))
    resumed.load_state(loader.state())
    resumed.next_batch()
    # The open block of the only stream and the next ones; 300 documents lie before them.
    assert len(encoded) <= 40


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "data.seed: saved with 0, now 1"),
        ({"shuffle_window": 7}, "data.shuffle_window"),
        ({"max_document_tokens": 63}, "data.max_document_tokens"),
        ({"overlong": "split"}, "data.overlong"),
        ({"append_eos": False}, "data.append_eos"),
        ({"batch_documents": None, "batch_tokens": 9}, "data.batch_tokens"),
        ({"include": ("0.*",)}, "files of sources"),
        ({"tokenizer": "own"}, "encoding of sources: saved with text of 'text', tokenizer bytes"),
        ({"version": 99}, "version 99"),
    ],
)
def test_other_data_settings_are_refused_by_name(tmp_path, change, name):
    root = write_corpus(tmp_path, "jsonl", TEXTS)
    config = data_config(root, include=("*.jsonl",))
    state = GlobalBatchLoader(config).state()
    if "version" in change:
        state, change = msgspec.structs.replace(state, **change), {}
    if "tokenizer" in change:
        train_byte_pair_tokenizer(["some text"], 260, tmp_path / "tokenizer.json")
        change = {"tokenizer": str(tmp_path / "tokenizer.json")}
    other = GlobalBatchLoader(msgspec.structs.replace(config, **change))
    with pytest.raises(ConfigError) as caught:
        other.load_state(state)
    assert name in str(caught.value)


def test_more_epochs_and_a_moved_data_set_may_go_on(tmp_path):
    texts = [f"text {number}" for number in range(7)]
    here = write_corpus(tmp_path / "here", "jsonl", texts)
    first = GlobalBatchLoader(data_config(here, epochs=1))
    before = all_batches(first)
    (tmp_path / "here").rename(tmp_path / "there")
    more = GlobalBatchLoader(data_config(str(tmp_path / "there"), epochs=2))
    more.load_state(first.state())
    after = all_batches(more)
    assert {batch.epoch for batch in after} == {1}
    reference = all_batches(GlobalBatchLoader(data_config(str(tmp_path / "there"), epochs=2)))
    assert list(map(fingerprint_of, itertools.chain(before, after))) == list(map(fingerprint_of, reference))


@pytest.mark.parametrize(("deferred", "why"), [(set(), "must not change"), ({2}, "deferred document 2 .* must not")])
def test_changed_content_of_the_same_size_is_noticed_where_it_matters(tmp_path, deferred, why):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(9)))
    config = data_config(str(tmp_path), batch_documents=4 if deferred else 3, shuffle_window=4, streams=1)
    loader = GlobalBatchLoader(config)
    batch = loader.next_batch()
    loader.record_step(batch, plan_for(batch, deferred=deferred))
    path.write_text(path.read_text().replace("2", "x"))
    resumed = GlobalBatchLoader(config)
    resumed.load_state(loader.state())
    with pytest.raises(DataError, match=why):
        resumed.next_batch()


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", b'{"version": 2}'])
def test_bytes_that_are_no_state_are_refused(data):
    with pytest.raises(ConfigError, match="not a loader state"):
        decode_state(data)
