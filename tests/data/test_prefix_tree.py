"""Trees of shared prefixes hold every sequence, and every label as often as sequences have it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.data.prefix_tree import build_trees, labels_once, split_into_runs
from evenload.errors import DataError
from evenload.types.tree import RowRun, Segment, TreeShape

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)


def ones(sequences):
    return [np.ones(len(one)) for one in sequences]


def path_rows(shape, leaf):
    rows = np.zeros(0, np.int64)
    while leaf >= 0:
        rows, leaf = np.append(np.arange(shape.starts[leaf], shape.stops[leaf]), rows), shape.parents[leaf]
    return rows


def test_the_picture_of_the_module():
    sequences = [[0, 1, 2, 3], [0, 1, 2, 5], [0, 1, 4]]
    (tree,) = build_trees(sequences, ones(sequences))
    shape = TreeShape(tree.segments)
    assert tree.tokens.tolist() == [0, 1, 2, 3, 5, 4]
    assert tree.segments == ((2, -1), (1, 0), (1, 1), (1, 1), (1, 0))
    assert tree.leaves == ((2, 4), (0, 2), (1, 3)) or dict(tree.leaves) == {0: 2, 1: 3, 2: 4}
    assert shape.positions(0, 6).tolist() == [0, 1, 2, 3, 3, 2]
    assert shape.paths[4] == [RowRun(0, 2), RowRun(5, 6)]
    assert shape.paths[3] == [RowRun(0, 3), RowRun(4, 5)]
    assert shape.path_ranges(1, 5) == [((1, 4), 1, [(0, 4)]), ((4, 5), 3, [(0, 3), (4, 5)])]
    assert tree.weights.tolist() == [0, 3, 2, 1, 1, 1]
    rows, labelled = shape.edges(0, 6)
    assert list(zip(rows.tolist(), labelled.tolist(), strict=True)) == [(0, 1), (1, 2), (1, 5), (2, 3), (2, 4)]
    assert tree.num_path_tokens == 11


@given(SEQUENCES, st.integers(1, 4), st.sampled_from(["sum", "once"]))
@settings(max_examples=200)
def test_every_sequence_is_a_path_with_its_labels(sequences, least, labels):
    weights = ones(sequences)
    counted = labels_once(sequences, weights) if labels == "once" else weights
    trees = build_trees(sequences, counted, min_shared_tokens=least)
    places = []
    for tree in trees:
        shape = TreeShape(tree.segments)
        assert shape.num_rows == len(tree.tokens)
        for place, leaf in tree.leaves:
            rows = path_rows(shape, leaf)
            assert tree.tokens[rows].tolist() == sequences[place]
            assert np.concatenate([shape.positions(a, a + 1) for a in rows]).tolist() == list(range(len(rows)))
            assert shape.rows_of_path(leaf).tolist() == rows.tolist()
            places.append(place)
        for row, token in zip(*shape.edges(0, shape.num_rows), strict=True):
            assert shape.positions(row, row + 1)[0] + 1 == shape.positions(token, token + 1)[0]
    assert sorted(places) == list(range(len(sequences)))
    if labels == "sum":
        assert sum(tree.weights.sum() for tree in trees) == sum(len(one) - 1 for one in sequences)
    else:
        distinct = {tuple(one[: n + 1]) for one in sequences for n in range(1, len(one))}
        assert sum(tree.weights.sum() for tree in trees) == len(distinct)
    if least == 1:
        assert sum(len(tree.tokens) for tree in trees) == len(
            {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
        )


@given(SEQUENCES)
def test_a_row_sees_few_runs(sequences):
    for tree in build_trees(sequences, ones(sequences)):
        shape = TreeShape(tree.segments)
        most = max(map(len, shape.paths))
        assert most <= 1 + np.log2(shape.num_rows) + 1e-9 or most == 1


@given(SEQUENCES, st.data())
@settings(max_examples=200)
def test_any_rows_have_their_edges_and_ranges_of_paths(sequences, data):
    """Against every row by itself: the token before each on its path predicts it, and it sees its path up to itself."""
    for tree in build_trees(sequences, ones(sequences)):
        shape = TreeShape(tree.segments)
        start = data.draw(st.integers(0, shape.num_rows - 1))
        stop = data.draw(st.integers(start + 1, shape.num_rows))
        paths = {row: path for _, leaf in tree.leaves for path in [path_rows(shape, leaf).tolist()] for row in path}
        seen = {row: path[: path.index(row) + 1] for row, path in paths.items()}
        edges = [(path[-2], row) for row, path in seen.items() if len(path) > 1 and start <= path[-2] < stop]
        assert list(zip(*(one.tolist() for one in shape.edges(start, stop)), strict=True)) == sorted(edges)
        covered = []
        for own, position, runs in shape.path_ranges(start, stop):
            rows = list(range(*own))
            keys = [row for run in runs for row in range(*run)]
            assert [keys[: position + at + 1] for at in range(len(rows))] == [seen[row] for row in rows]
            assert keys == seen[rows[-1]]
            covered += rows
        assert covered == list(range(start, stop))
        assert len(shape.path_ranges(start, stop)) <= len(tree.leaves)


def test_a_short_prefix_is_computed_by_each():
    sequences = [[1, 2, 3], [1, 2, 4]]
    assert len(build_trees(sequences, ones(sequences), min_shared_tokens=3)) == 2
    assert len(build_trees(sequences, ones(sequences), min_shared_tokens=2)) == 1


def test_what_cannot_be_a_tree_is_refused():
    with pytest.raises(
        DataError, match="token 1 of sequence 1 has weight 2 and, in another sequence that shares it, 1"
    ):
        labels_once([[1, 2], [1, 2]], [[0, 1.0], [0, 2.0]])
    with pytest.raises(DataError, match=r"sequence 1 has tokens of shape \(0,\)"):
        build_trees([[1], []], [[1.0], []])
    with pytest.raises(DataError, match=r"sequence 1 has float64 tokens, the least 1\.5; token ids are whole"):
        build_trees([[1, 2], [1.5, 2]], [[0, 1], [0, 1]])
    with pytest.raises(DataError, match="sequence 0 has int64 tokens, the least -1"):
        build_trees([[1, -1]], [[0, 1]])
    with pytest.raises(DataError, match="sequence 0 has weight nan at token 1"):
        build_trees([[1, 2]], [[1.0, np.nan]])
    with pytest.raises(DataError, match="sequence 0 has weights of <U1; give numbers, or true and false"):
        build_trees([[1, 2]], [["0", "1"]])
    with pytest.raises(DataError, match="sequence 1 has -100 among whole weights, as labels have; give labels != -100"):
        build_trees([[1, 2], [1, 3]], [[0, -1], [-100, 3]])
    (tree,) = build_trees([[1, 2]], [[0.0, -100.0]])  # a weight, of policy gradient
    assert tree.weights.tolist() == [0, -100]
    for segments in ([(2, -1), (1, -1)], [(1, -1), (1, 0), (1, 0), (1, 1)], [(0, -1)], [(1, 3)]):
        with pytest.raises(DataError, match="of a tree has"):
            TreeShape([Segment(*one) for one in segments])


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8), st.integers(1, 14))
def test_runs_of_leaves_hold_at_most_so_many_unique_tokens(sequences: list[list[int]], most: int) -> None:
    runs = split_into_runs(sequences, most)
    assert sorted(place for run in runs for place in run) == list(range(len(sequences)))

    def num_unique(places: list[int]) -> int:
        return len({tuple(sequences[at][: stop + 1]) for at in places for stop in range(len(sequences[at]))})

    assert all(num_unique(run) <= most or len(run) == 1 for run in runs)
    # The first of the next run did not fit.
    for run, following in itertools.pairwise(runs):
        assert num_unique([*run, following[0]]) > most
    in_order = [sequences[place] for run in runs for place in run]
    assert in_order == sorted(in_order)
