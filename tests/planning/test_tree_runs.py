"""Trees that are too large are split into runs of leaves, dealt evenly, and nothing else is computed twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.pack_cost import PackCosts
from evenload.data.prefix_tree import build_trees
from evenload.planning.tree_runs import TreeRun, fullest_seconds, runs_for_replicas, split_by_work
from evenload.types.layout import even_layout
from evenload.types.tree_columns import TreeColumns
from tree_samples import tree_document

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


def costs_of(dp: int = 1) -> PackCosts:
    return PackCosts(sample_model(), sample_coefficients(), even_layout(3, dp=dp))


def trees_of(sequences: list) -> list:
    return build_trees(sequences, [np.ones(len(one)) for one in sequences])


def seconds_of(sequences: list, costs: PackCosts) -> float:
    made = [tree_document(at, tree.segments) for at, tree in enumerate(trees_of(sequences))]
    lengths = np.array([one.num_tokens for one in made])
    return float(costs.document_seconds(lengths, trees=TreeColumns.of(made)).sum())


@settings(deadline=None)
@given(SEQUENCES, st.floats(10.0, 4000.0))
def test_runs_take_at_most_so_long_or_are_one_sequence(sequences: list[list[int]], most_s: float) -> None:
    costs = costs_of()
    runs = split_by_work(sequences, most_s, costs)
    assert sorted(place for run in runs for place in run) == list(range(len(sequences)))
    for run in runs:
        own = [sequences[place] for place in run]
        # A branch inside an earlier piece makes two of it, each with its constant and keys before it.
        more_s = len(own) * costs.piece_seconds(np.array([9]), np.array([10]))[0]
        assert seconds_of(own, costs) <= most_s + more_s or len(run) == 1


@settings(deadline=None)
@given(st.lists(SEQUENCES, min_size=1, max_size=3), st.integers(1, 3), st.none() | st.integers(9, 30))
def test_runs_count_unique_and_recomputed_tokens(groups: list, dp: int, most: int | None) -> None:
    runs = runs_for_replicas(groups, costs_of(dp), most)
    for group, sequences in enumerate(groups):
        mine = [run for run in runs if run.group == group]
        assert sorted(place for run in mine for place in run.places) == list(range(len(sequences)))
        unique = [
            sum(len(tree.tokens) for tree in trees_of([sequences[place] for place in run.places])) for run in mine
        ]
        assert unique == [run.num_unique for run in mine]
        assert most is None or all(run.num_unique <= most or len(run.places) == 1 for run in mine)
        whole = sum(len(tree.tokens) for tree in trees_of(sequences))
        assert sum(unique) == whole + sum(run.num_recomputed for run in mine)


def test_small_trees_stay_whole_and_large_ones_are_split() -> None:
    rng = np.random.default_rng(0)

    def group(prompt: int, responses: int, length: int) -> list[np.ndarray]:
        head = rng.integers(0, 1000, prompt)
        return [np.concatenate([head, rng.integers(0, 1000, length)]) for _ in range(responses)]

    many, one = [group(200, 8, 100) for _ in range(16)], [group(400, 32, 300)]
    costs = costs_of(dp=4)
    assert len(runs_for_replicas(many, costs)) == 16
    runs = runs_for_replicas(one, costs)
    # Of 32 leaves 8 each: a quarter of the tree, and the prompt on every rank.
    assert [len(run.places) for run in runs] == [8] * 4
    assert [run.num_recomputed for run in runs] == [0, 400, 400, 400]
    apart = TreeRun(0, [], 700, 0, costs.piece_seconds(np.array([0]), np.array([700]))[0])
    assert fullest_seconds(runs, 4) < 0.75 * fullest_seconds([apart] * 32, 4)
    whole_s = seconds_of(one[0], costs)
    assert fullest_seconds(runs, 4) >= whole_s / 4  # the bound
    assert fullest_seconds(runs, 4) == pytest.approx(whole_s / 4, rel=0.2)
