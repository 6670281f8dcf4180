"""A slice of a tree costs what its rows see: counted one by one, the same in numpy and in the core."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import recurrent_model, sample_coefficients, sample_model
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.layer_counts import training_flops
from evenload.cost.memory import ReplicaPacks, pipeline_bytes
from evenload.cost.pack_cost import PackCosts, SliceFeatures, pairs_column, prefix_column
from evenload.cost.pack_pricing import pipeline_tasks, split_pack_seconds
from evenload.data.hub import model_from
from evenload.data.prefix_tree import build_trees
from evenload.errors import ConfigError, DataError
from evenload.types.cluster import cluster_of
from evenload.types.columns import SliceColumns
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.tree import Segment, TreeShape
from evenload.types.tree_columns import NO_TREES, TreeColumns
from reference import prices
from tree_samples import (
    documents_with_trees,
    group_of,
    keys_of_rows,
    plain_document,
    ranges_of,
    shape_of_document,
    tree_document,
)

WINDOWS = (0, 5, -4)
LAYERS = {"num_layers": 3, "sliding_windows": (0, 16, 16)}


def lengths_of(documents: tuple[Document, ...]) -> np.ndarray:
    return np.array([one.num_tokens for one in documents], np.int64)


@st.composite
def sliced(draw: st.DrawFn, documents: tuple[Document, ...], *, backward: bool) -> SliceColumns:
    """Documents cut anywhere, dealt into packs, slices of a document in order (backward: last first)."""
    packs: list[list[tuple[int, int, int]]] = [[]]
    for index, document in enumerate(documents):
        inner = draw(st.lists(st.integers(0, document.num_tokens), max_size=4))
        edges = sorted({0, document.num_tokens, *inner})
        pieces = [(index, start, stop) for start, stop in itertools.pairwise(edges)]
        for piece in reversed(pieces) if backward else pieces:
            if packs[-1] and (packs[-1][-1][0] == index or draw(st.booleans())):
                packs.append([])
            packs[-1].append(piece)
    return SliceColumns.from_ranges(packs)


def test_a_plain_step_has_no_columns_of_trees() -> None:
    assert TreeColumns.of((plain_document(0, 3),)) is NO_TREES
    slices = SliceColumns.from_ranges([[(0, 1, 3)]])
    assert NO_TREES.pieces(slices) is slices
    assert NO_TREES.taken(np.array([0])) is NO_TREES


@settings(deadline=None)
@given(st.data(), documents_with_trees())
def test_columns_hold_what_every_tree_says(data: st.DataObject, documents: tuple[Document, ...]) -> None:
    trees = TreeColumns.of(documents)
    taken = data.draw(st.lists(st.integers(0, len(documents) - 1), max_size=9))
    own = trees.taken(np.array(taken, np.int64))
    assert own.sums(np.diff(own.start).astype(np.float64)).tolist() == [documents[at].num_tokens for at in taken]
    for at, first, count in zip(taken, own.first, own.count, strict=True):
        ranges = ranges_of(documents[at], 0, documents[at].num_tokens)
        rows = own.start[first : first + count + 1] - own.start[first]
        assert list(itertools.pairwise(rows.tolist())) == ranges
        depths = [int(shape_of_document(documents[at]).positions(start, stop)[0]) for start, stop in ranges]
        assert own.depth[first : first + count].tolist() == depths


@given(st.lists(st.builds(Segment, st.integers(0, 3), st.integers(-2, 5)), min_size=1, max_size=6))
def test_segments_that_are_not_depth_first_are_refused_as_of_one_tree(segments: list[Segment]) -> None:
    segments[0] = Segment(1, -1)
    document = tree_document(1, tuple(segments))
    errors = []
    for of in (lambda: TreeShape(segments), lambda: TreeColumns.of((plain_document(0, 5), document))):
        try:
            of()
        except DataError as error:
            errors.append(str(error))
    assert len(errors) in (0, 2)
    assert len(set(errors)) < 2


@settings(deadline=None)
@given(st.data(), documents_with_trees(most_tokens=9))
def test_features_count_the_keys_that_rows_see(data: st.DataObject, documents: tuple[Document, ...]) -> None:
    columns = data.draw(sliced(documents, backward=False))
    trees = TreeColumns.of(documents)
    pieces = trees.pieces(columns)
    # They are what attention computes.
    computed = [
        (doc, one.position, one.position + one.rows.stop - one.rows.start)
        for doc, start, stop in zip(columns.doc.tolist(), columns.start.tolist(), columns.stop.tolist(), strict=True)
        for one in shape_of_document(documents[doc]).path_ranges(start, stop)
    ]
    assert list(zip(pieces.doc, pieces.start, pieces.stop, strict=True)) == computed
    features = SliceFeatures(windows=WINDOWS, tile=1, causal=True).of_packs(pieces)
    seen = {window: [keys_of_rows(document, window) for document in documents] for window in WINDOWS}
    for pack, (lo, hi) in enumerate(itertools.pairwise(columns.pack_offset)):
        slices = list(zip(columns.doc[lo:hi], columns.start[lo:hi], columns.stop[lo:hi], strict=True))
        assert features[pack, 0] == sum(stop - start for _, start, stop in slices)
        parts = [(doc, *rows) for doc, start, stop in slices for rows in ranges_of(documents[doc], start, stop)]
        assert features[pack, 1] == len(parts)
        for index, window in enumerate(WINDOWS):
            pairs = sum(len(seen[window][doc][row]) for doc, start, stop in slices for row in range(start, stop))
            assert features[pack, pairs_column(index)] == pairs
            if window >= 0:
                # Keys before a piece that a window may reach; a first row sees one fewer than a full window of them.
                before = [len(seen[0][doc][start]) - 1 for doc, start, _ in parts]
                assert features[pack, prefix_column(index)] == sum(min(n, window or n) for n in before)
    flops = training_flops(sample_model(**LAYERS), lengths_of(documents), trees)
    alone = [training_flops(sample_model(**LAYERS), lengths_of((one,)), TreeColumns.of((one,)))[0] for one in documents]
    np.testing.assert_array_equal(flops, alone)


def equal(one, other) -> None:
    for field in dataclasses.fields(one):
        if field.name not in ("held", "split"):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), field.name)


@settings(deadline=None)
@given(
    st.data(),
    documents_with_trees(),
    st.sampled_from([1, 8]),
    st.sampled_from([1, 3]),
    st.sampled_from([(), (0, 16, 16), (0, -8, 5)]),
    st.booleans(),
)
def test_the_core_prices_trees_as_numpy_does(
    data: st.DataObject, documents: tuple[Document, ...], tile: int, pp: int, windows: tuple[int, ...], has_policy: bool
) -> None:
    # An attention workspace, too: its keys and slices are those of pieces.
    kernels = {"attention_kernels": "varlen_cuda", "attention_workspace": True}
    model = sample_model(sliding_windows=windows, num_heads=4, num_kv_heads=2, **kernels)
    costs = PackCosts(model, sample_coefficients(attention_tile=tile), even_layout(3, pp=pp))
    forward, backward = (data.draw(sliced(documents, backward=way)) for way in (False, True))
    policy = np.arange(len(documents), dtype=np.int8) % 2 if has_policy else None
    packs = ReplicaPacks(forward, backward, lengths_of(documents), policy, trees=TreeColumns.of(documents))
    core, reference = (price(costs, packs, split=True) for price in (pipeline_tasks, prices.pipeline_tasks))
    for one, other in ((core, reference), (core.held, reference.held), (core.split, reference.split)):
        equal(one, other)
    equal(pipeline_bytes(model, costs.layout, packs), core.held)
    own = costs.document_seconds(packs.num_tokens, policy, trees=packs.trees)
    alone = [
        costs.document_seconds(
            lengths_of((one,)), None if policy is None else policy[at : at + 1], 1, TreeColumns.of((one,))
        )
        for at, one in enumerate(documents)
    ]
    np.testing.assert_allclose(own, np.concatenate(alone), rtol=1e-12)
    useful_s = costs.lower_bound_seconds(packs.num_tokens, packs.trees)
    assert useful_s <= (core.forward_s.sum() + core.backward_s.sum()) / pp * (1 + 1e-12)
    np.testing.assert_allclose(useful_s * pp, costs.useful_stage_seconds(packs.num_tokens, packs.trees).sum())
    causes = split_pack_seconds(costs, packs.trees.pieces(forward), "forward", policy)
    total_s = sum(getattr(causes, field.name) for field in dataclasses.fields(causes))
    np.testing.assert_allclose(total_s, core.forward_s, rtol=1e-12)


def test_a_chain_of_segments_has_the_pairs_of_a_plain_document() -> None:
    chain = tree_document(0, (Segment(40, -1), Segment(10, 0), Segment(50, 1)))
    trees, costs = TreeColumns.of((chain,)), PackCosts(sample_model(), sample_coefficients(), even_layout(3))
    tokens = np.array([100])
    assert costs.lower_bound_seconds(tokens, trees) == costs.lower_bound_seconds(tokens)
    assert trees.count.tolist() == [1]
    # Siblings see less than tokens behind each other would.
    group = TreeColumns.of((tree_document(0, group_of(40, [30, 30])),))
    assert costs.lower_bound_seconds(tokens, group) < costs.lower_bound_seconds(tokens)


def test_trees_are_refused_where_nothing_runs_them() -> None:
    trees = TreeColumns.of((tree_document(0, group_of(4, [2, 2])),))
    for model, layout, why in (
        (sample_model(), even_layout(3, cp=2), "use cp=1"),
        (recurrent_model(), even_layout(recurrent_model().num_layers), "causal attention; use another"),
        (sample_model(causal=False), even_layout(3), "causal attention; use another"),
    ):
        with pytest.raises(ConfigError, match=why):
            PackCosts(model, sample_coefficients(), layout).require_trees(trees)


def test_the_core_refuses_ranges_that_lie_outside_of_their_document() -> None:
    costs, whole = PackCosts(sample_model(), sample_coefficients(), even_layout(3)), [[(0, 0, 8)]]
    columns = SliceColumns.from_ranges(whole)
    for first, count, start, depth in (
        ([0], [2], [0, 8, 8], [0, 1]),
        ([0], [2], [0, 4, 8], [0, 5]),
        ([0], [2], [0, 4, 8], [0, -1]),
        ([0], [1], [1, 8], [0]),
        ([0], [1], [0, 9], [0]),
        ([0], [0], [0, 8], [0]),
        ([1], [1], [0, 8], [0]),
        ([-1], [1], [0, 8], [0]),
        ([0], [1], [0], [0]),
        ([0, 0], [1, 1], [0, 8], [0]),
        ([0], [1, 1], [0, 8], [0]),
    ):
        trees = TreeColumns(*(np.array(one, np.int64) for one in (first, count, start, depth)))
        with pytest.raises(ValueError, match="range"):
            pipeline_tasks(costs, ReplicaPacks(columns, columns, np.array([8]), trees=trees))
    padded = dataclasses.replace(columns, pad_to=np.array([9]))
    trees = TreeColumns.of((tree_document(0, group_of(4, [2, 2])),))
    with pytest.raises(ValueError, match="padded"):
        pipeline_tasks(costs, ReplicaPacks(padded, padded, np.array([8]), trees=trees))


def test_sharing_more_is_never_dearer() -> None:
    """A branch is one piece, like the sequence that it replaces, and reading a key is cheaper than computing it. So no
    prefix is too short to pay."""
    rng = np.random.default_rng(0)
    model = model_from("gemma3-4b")
    layout = even_layout(model.num_layers)
    costs = PackCosts(model, analytic_coefficients(model, cluster_of("h100", 1), layout), layout)
    for _ in range(40):
        prefix = rng.integers(0, 9, 90)
        cuts = rng.integers(1, 91, 6).tolist()
        sequences = [np.concatenate([prefix[:cut], rng.integers(9, 99, int(rng.integers(1, 200)))]) for cut in cuts]
        seconds = []
        for least in (1, 8, 32, 1000):
            trees = build_trees(sequences, [np.ones(len(one)) for one in sequences], min_shared_tokens=least)
            documents = [tree_document(at, tree.segments) for at, tree in enumerate(trees)]
            seconds.append(float(costs.document_seconds(lengths_of(documents), trees=TreeColumns.of(documents)).sum()))
        np.testing.assert_array_less(seconds[:-1], np.array(seconds[1:]) * (1 + 1e-12))
        assert seconds[0] < seconds[-1]
