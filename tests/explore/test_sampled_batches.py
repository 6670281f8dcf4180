import numpy as np
import pytest

from evenload.errors import ConfigError, DataError
from evenload.explore.batches import BatchRule

LENGTHS = np.arange(1, 101, dtype=np.int64)


def test_table_is_used_up_before_it_repeats() -> None:
    batches = BatchRule(num_documents=25, context=1000).sample(LENGTHS, steps=4, seed=1)
    drawn = [document.num_tokens for batch in batches for document in batch.documents]
    assert sorted(drawn) == LENGTHS.tolist()
    ids = [document.doc_id for batch in batches for document in batch.documents]
    assert ids == list(range(100))


def test_step_does_not_depend_on_how_many_follow() -> None:
    two = BatchRule(num_documents=7, context=1000).sample(LENGTHS, steps=2, seed=3)
    five = BatchRule(num_documents=7, context=1000).sample(LENGTHS, steps=5, seed=3)
    assert five[:2] == two
    assert BatchRule(num_documents=7, context=1000).sample(LENGTHS, steps=2, seed=4) != two


def test_batch_by_tokens_stops_with_the_document_that_reaches_them() -> None:
    (batch,) = BatchRule(num_tokens=500, context=1000).sample(LENGTHS, steps=1, seed=0)
    lengths = [document.num_tokens for document in batch.documents]
    assert sum(lengths) >= 500 > sum(lengths[:-1])


def test_overlong_error_names_the_document() -> None:
    with pytest.raises(DataError, match=r"document 90 has 91 tokens, context is 90 \(10 of 100"):
        BatchRule(num_documents=5, context=90).sample(LENGTHS, steps=1, seed=0)


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_every_token_is_trained_or_dropped(overlong) -> None:
    (batch,) = BatchRule(num_documents=100, context=30, overlong=overlong).sample(LENGTHS, steps=1, seed=0)
    trained = sum(document.num_tokens for document in batch.documents)
    assert trained + batch.dropped_tokens == LENGTHS.sum()
    assert max(document.num_tokens for document in batch.documents) == 30
    assert len(batch.left_out) == (70 if overlong == "drop" else 0)
    assert (batch.dropped_tokens == 0) == (overlong == "split")


def test_dropping_everything_does_not_loop() -> None:
    with pytest.raises(DataError, match="no document"):
        BatchRule(num_tokens=5, context=3, overlong="drop").sample(LENGTHS + 10, steps=1, seed=0)


@pytest.mark.parametrize(
    "changes", [{"num_documents": None}, {"num_tokens": 3}, {"context": 0}, {"num_documents": 0}], ids=str
)
def test_unusable_sizes_are_refused(changes) -> None:
    with pytest.raises(ConfigError, match="global batch: "):
        BatchRule(**{"num_documents": 5, "context": 1000, **changes})


@pytest.mark.parametrize(("steps", "seed"), [(0, 0), (1, -1)])
def test_unusable_runs_of_steps_are_refused(steps, seed) -> None:
    with pytest.raises(ConfigError, match="must be"):
        BatchRule(num_documents=5, context=1000).sample(LENGTHS, steps=steps, seed=seed)
