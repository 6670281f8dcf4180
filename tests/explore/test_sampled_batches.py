import numpy as np
import pytest

from evenload.errors import ConfigError
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


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_every_token_is_trained_or_dropped(overlong) -> None:
    (batch,) = BatchRule(num_documents=100, context=30, overlong=overlong).sample(LENGTHS, steps=1, seed=0)
    trained = sum(document.num_tokens for document in batch.documents)
    assert trained + batch.dropped_tokens == LENGTHS.sum()
    assert max(document.num_tokens for document in batch.documents) == 30
    assert len(batch.left_out) == (70 if overlong == "drop" else 0)
    assert (batch.dropped_tokens == 0) == (overlong == "split")


@pytest.mark.parametrize(
    "changes", [{"num_documents": None}, {"num_tokens": 3}, {"context": 0}, {"num_documents": 0}], ids=str
)
def test_unusable_sizes_are_refused(changes) -> None:
    with pytest.raises(ConfigError, match="global batch: "):
        BatchRule(**{"num_documents": 5, "context": 1000, **changes})
