"""Documents that are held out for validation: every one is trained or validates, whoever reads in whichever order."""

import hashlib
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_files import FORMATS, data_config, documents_of, naive_documents, plan_for, write_corpus
from evenload.data.blocks import HELD_OUT, HoldOut
from evenload.data.config import DataConfig
from evenload.data.lengths import count_documents
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import ConfigError
from rank_threads import run_ranks

TEXTS = [f"{'ab' * (number % 9)}{number}" for number in range(120)]


def read(config: DataConfig, num_ranks: int = 1) -> tuple[Counter, GlobalBatchLoader]:
    """All documents that loaders of so many ranks give, each once; the first rank's loader, its account checked."""

    def live(rank, peers):
        loader, result = GlobalBatchLoader(config, peers=peers), Counter()
        while (batch := loader.next_batch()) is not None:
            result.update(tuple(tokens.tolist()) for tokens in batch.tokens.values())
            loader.record_step(batch, plan_for(batch))
        loader.check_ledger()
        loader.close()
        return result, loader

    ranks = run_ranks(num_ranks, live)
    return sum((result for result, _ in ranks), Counter()), ranks[0][1]


def both_sides(source: str, share: float, num_ranks: int = 1, **changes) -> tuple[Counter, Counter]:
    configs = (data_config(source, held_out_share=share, reads=side, **changes) for side in ("training", "held_out"))
    trained, held_out = (read(config, num_ranks)[0] for config in configs)
    return trained, held_out


@pytest.mark.parametrize("format", FORMATS)
def test_every_document_is_trained_or_validates_and_the_ledger_has_both(tmp_path, format):
    root = write_corpus(tmp_path / "corpus", format, TEXTS)
    config = data_config(root, held_out_share=0.25)
    trained, loader = read(config)
    held_out, others = read(data_config(root, held_out_share=0.25, reads="held_out"))
    assert trained + held_out == Counter(naive_documents(TEXTS, 64, "error"))
    assert 15 < held_out.total() < 45
    dropped = loader.ledger.state.dropped
    assert set(dropped) == {HELD_OUT}
    assert dropped[HELD_OUT].documents == held_out.total()
    assert dropped[HELD_OUT].tokens == sum(len(document) * count for document, count in held_out.items())
    assert loader.ledger.state.read.documents == len(TEXTS)
    assert any(HELD_OUT in line for line in loader.summary())
    assert others.ledger.state.dropped == {}, "who validates has not read what is trained"
    assert others.ledger.state.read.documents == held_out.total()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 1000),
            "shuffle_window": st.sampled_from([1, 4, 64]),
            "batch_documents": st.integers(1, 9),
            "max_document_tokens": st.sampled_from([5, 64]),
            "overlong": st.just("split"),
        }
    ),
    num_ranks=st.integers(1, 3),
    format=st.sampled_from(FORMATS),
)
def test_the_choice_depends_on_nothing_but_the_data(tmp_path_factory, changes, num_ranks, format):
    root = write_corpus(tmp_path_factory.mktemp("corpus"), format, TEXTS)
    plain = both_sides(root, 0.2)
    trained, held_out = both_sides(root, 0.2, num_ranks, **changes)
    limit = changes["max_document_tokens"]
    for side, whole in zip((trained, held_out), plain, strict=True):
        assert side == Counter(text[at : at + limit] for text in whole for at in range(0, len(text), limit))


@pytest.mark.parametrize("format", FORMATS)
def test_it_moves_with_the_data_stays_over_epochs_and_grows_with_the_share(tmp_path, format):
    root = write_corpus(tmp_path / "corpus", format, TEXTS)
    trained, held_out = both_sides(root, 0.1)
    assert read(data_config(root, held_out_share=0.1, epochs=2))[0] == trained + trained
    shutil.move(root, tmp_path / "elsewhere")
    assert both_sides(str(tmp_path / "elsewhere"), 0.1) == (trained, held_out)
    assert held_out < both_sides(str(tmp_path / "elsewhere"), 0.3)[1]


def test_it_is_the_hash_that_the_docstring_says():
    chosen = HoldOut(0.5, takes=True)
    for key, offset in (("0/a.jsonl", 0), ("0/a.jsonl", 17), ("1/b/c.txt", 0)):
        hashed = int(hashlib.blake2b(f"{key}\n{offset}".encode(), digest_size=8).hexdigest(), 16)
        assert chosen.is_held_out(key, offset) == (hashed / 2**64 < 0.5)
    counted = sum(HoldOut(0.01, takes=True).is_held_out("0/a.jsonl", offset) for offset in range(100_000))
    assert 900 < counted < 1100, "three standard deviations are 94"


def test_files_of_one_document_are_not_opened_for_others(tmp_path):
    """Who validates a hundredth of a million text files opens a hundredth of them."""
    root = write_corpus(tmp_path / "corpus", "text", TEXTS)
    _, held_out = both_sides(root, 0.2)
    texts = {bytes(token for token in document if token < 256).decode() for document in held_out}
    for path in Path(root).iterdir():
        if path.read_text() not in texts:
            path.write_bytes(b"\xff" * path.stat().st_size)
    assert read(data_config(root, held_out_share=0.2, reads="held_out"))[0] == held_out


@pytest.mark.parametrize("reads", ["training", "held_out"])
def test_a_resumed_loader_goes_on_alike_and_refuses_another_share(tmp_path, reads):
    root = write_corpus(tmp_path / "corpus", "jsonl", TEXTS)
    config = data_config(root, held_out_share=0.4, reads=reads, batch_documents=5)
    whole, stopped = GlobalBatchLoader(config), GlobalBatchLoader(config)
    for _ in range(3):
        assert documents_of(whole.next_batch()) == documents_of(stopped.next_batch())
    again = GlobalBatchLoader(config)
    again.load_state(stopped.state())
    while (batch := whole.next_batch()) is not None:
        assert documents_of(again.next_batch()) == documents_of(batch)
    assert again.next_batch() is None
    for other in ({"held_out_share": 0.3}, {"held_out_share": 0.0, "reads": "training"}):
        loader = GlobalBatchLoader(data_config(root, **{"reads": reads} | other, batch_documents=5))
        with pytest.raises(ConfigError, match=r"data.held_out_share: saved with 0.4, now (0.3|None)"):
            loader.load_state(stopped.state())


@pytest.mark.parametrize("format", ["text", "jsonl", "parquet"])
def test_lengths_are_of_the_documents_that_are_read(tmp_path, format):
    root = write_corpus(tmp_path / "corpus", format, TEXTS)
    for reads, expected in zip(("training", "held_out"), both_sides(root, 0.3), strict=True):
        table = count_documents(data_config(root, held_out_share=0.3, reads=reads), root)
        assert sorted(table.lengths.tolist()) == sorted(len(document) for document in expected.elements())
