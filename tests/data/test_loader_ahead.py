"""Batches drawn ahead because a planner wants to know their lengths: nothing else may differ."""

import gc
import weakref

import pytest

from corpus_files import data_config, plan_for, train_steps, write_corpus
from evenload.data.batches import decode_state
from evenload.data.loader import GlobalBatchLoader, StreamSampler
from evenload.errors import DataError
from rank_threads import run_ranks

TEXTS = [("abcdefg"[number % 7] * (number * 7 % 50)) for number in range(17)]


@pytest.mark.parametrize("batching", [{"batch_documents": 4}, {"batch_tokens": 60}])
@pytest.mark.parametrize("ahead", [1, 3, 50])
def test_batches_states_and_account_are_as_without_looking_ahead(tmp_path, batching, ahead):
    """Across epochs and the end of the data, with empty records dropped on the way."""
    root = write_corpus(tmp_path, "jsonl", TEXTS)
    config = data_config(root, **batching, epochs=2, overlong="truncate", max_document_tokens=20, seed=5)
    plain = list(train_steps(GlobalBatchLoader(config)))
    peeked = list(train_steps(GlobalBatchLoader(config), ahead=ahead))
    assert [one[:3] for one in peeked] == [one[:3] for one in plain]
    assert len(plain) > 8
    # What was announced is what came, ids included.
    documents = [one[0][2] for one in plain]
    for step, (_, _, _, known) in enumerate(peeked):
        come = [batch for batch in documents[step + 1 :][:ahead] if batch]
        assert list(known) == come


def test_a_run_resumed_behind_batches_drawn_ahead_repeats_none(tmp_path):
    root = write_corpus(tmp_path, "jsonl", TEXTS)
    config = data_config(root, batch_documents=4, epochs=2, overlong="truncate", max_document_tokens=20)
    whole = list(train_steps(GlobalBatchLoader(config), ahead=3))
    for step, (_, state, _, _) in enumerate(whole[:-1]):
        resumed = GlobalBatchLoader(config)
        resumed.load_state(decode_state(state))
        assert next(train_steps(resumed, ahead=2))[:3] == whole[step + 1][:3]


def test_several_ranks_draw_alike(tmp_path):
    root = write_corpus(tmp_path, "jsonl", TEXTS)
    config = data_config(root, batch_documents=5, epochs=2, streams=2)

    def rank_run(rank, peers):
        return [(one[1], one[3]) for one in train_steps(GlobalBatchLoader(config, peers=peers), ahead=2)]

    alone = [(one[1], one[3]) for one in train_steps(GlobalBatchLoader(config), ahead=2)]
    assert run_ranks(2, rank_run) == [alone, alone]


@pytest.fixture
def damaged(tmp_path):
    rows = [f'{{"text": "{number}"}}\n' for number in range(400)]
    rows[333] = '{"text": 3}\n'
    (tmp_path / "a.jsonl").write_text("".join(rows))
    return data_config(str(tmp_path), batch_documents=3, shuffle_window=1, streams=1, on_corrupt="error")


def test_a_record_that_cannot_be_read_stops_its_own_batch_not_those_before(damaged):
    def trained(ahead):
        """Batches before the error, what was known behind each, and the loader afterwards."""
        loader, known = GlobalBatchLoader(damaged), []

        def train():
            while (batch := loader.next_batch()) is not None:
                known.append(len(loader.coming(ahead)))
                loader.record_step(batch, plan_for(batch))

        with pytest.raises(DataError, match="no text under key"):
            train()
        return known, loader

    plain, _ = trained(0)
    peeked, loader = trained(4)
    assert len(peeked) == len(plain) >= 5
    assert peeked == [min(4, left) for left in range(len(plain) - 1, -1, -1)]
    loader.check_ledger()
    assert loader.state().step == len(plain)
    with pytest.raises(DataError, match="no text under key"):
        loader.next_batch()


def test_a_record_that_cannot_be_read_is_read_again_only_when_its_batch_is_asked_for(damaged, monkeypatch):
    drawn, sample = [], StreamSampler.sample

    def counted(self, *arguments, **names):
        drawn.append(arguments)
        return sample(self, *arguments, **names)

    monkeypatch.setattr(StreamSampler, "sample", counted)
    loader, request = GlobalBatchLoader(damaged), []

    def train():
        while (batch := loader.next_batch()) is not None:
            loader.coming(200)
            loader.record_step(batch, plan_for(batch))
            request.append(len(drawn))

    with pytest.raises(DataError, match="no text under key"):
        train()
    assert len(request) >= 3
    assert len(set(request)) == 1, "once it failed, nothing is drawn until its batch is asked for"
    assert len(drawn) > request[-1]


def test_a_dropped_loader_is_gone_at_once(tmp_path):
    loader = GlobalBatchLoader(data_config(write_corpus(tmp_path, "jsonl", TEXTS), batch_documents=2))
    loader.next_batch()
    loader.coming(2)
    alive = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert alive() is None
    finally:
        gc.enable()
