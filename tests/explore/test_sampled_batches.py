import numpy as np
import pytest

from evenload.data.lengths import TreeLengths
from evenload.errors import ConfigError
from evenload.explore.batches import BatchRule
from evenload.types.tree import Segment

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


def test_a_tree_is_one_document_and_its_sequences_are_its_alone() -> None:
    segments = (Segment(60, -1), Segment(30, 0), Segment(20, 0))
    lengths, tree = np.array([110, 7, 95], np.int64), TreeLengths(segments, (90, 80, 60), 5)
    rule = BatchRule(num_documents=3, context=50, overlong="split")
    (batch,) = rule.sample(lengths, steps=1, seed=0, trees={0: tree})
    (document,) = (one for one in batch.documents if one.segments)
    assert (document.num_tokens, document.num_path_tokens, document.num_recomputed_tokens) == (110, 230, 5)
    assert document.num_label_tokens == 89 + 79 + 59
    # Others are cut, and stand in both.
    assert sorted(one.num_tokens for one in batch.documents) == [7, 45, 50, 110]
    assert sorted(one.num_tokens for one in batch.alone) == [7, 45, 50, 60, 80, 90]
    assert len({one.doc_id for one in batch.alone}) == 6
    (plain,) = rule.sample(lengths, steps=1, seed=0)
    assert plain.alone == ()


def test_a_table_of_nothing_but_trees_is_usable() -> None:
    tree = TreeLengths((Segment(60, -1), Segment(30, 0)), (90, 60), 0)
    rule = BatchRule(num_tokens=300, context=50, overlong="drop")
    (batch,) = rule.sample(np.array([90], np.int64), steps=1, seed=0, trees={0: tree})
    assert [one.num_tokens for one in batch.documents] == [90] * 4
