"""Trees that replicas cannot share evenly are cut into runs of leaves, and only where that makes a step shorter."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.pack_cost import PackCosts
from evenload.cost.units import layout_bound_seconds, physical_bound_seconds
from evenload.planning.packing import longest_first
from evenload.planning.planner import RunPlanner, StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.tree_runs import GAIN, tree_cuts
from evenload.stepplan.validate import validate_plan
from evenload.types.document import PART_IDS, Document, parts_of
from evenload.types.layout import even_layout
from evenload.types.tree import TreeShape, shape_of
from evenload.types.tree_columns import lengths_of
from tree_samples import documents_with_trees, group_of, plain_document, segments_of_trees, tree_document


def costs_of(dp: int, pp: int = 1) -> PackCosts:
    return PackCosts(sample_model(), sample_coefficients(attention_tile=4), even_layout(3, dp=dp, pp=pp))


def cut(documents: tuple[Document, ...], cuts: dict[int, list[int]]) -> list[Document]:
    made: list[Document] = []
    for one in documents:
        if one.doc_id not in cuts:
            made.append(one)
            continue
        parts = shape_of(one.segments).parts(cuts[one.doc_id])
        made += parts_of(one, parts, [segment.num_tokens for segment in one.segments])
    return made


def fullest_s(documents: list[Document] | tuple[Document, ...], costs: PackCosts) -> float:
    lengths, trees = lengths_of(documents)
    seconds = costs.document_seconds(lengths, trees=trees)
    return max(float(seconds[members].sum()) for members in longest_first(seconds, costs.layout.dp))


def every_cut(documents: tuple[Document, ...]) -> list[dict[int, list[int]]]:
    """All ways to cut all trees into runs of leaves."""
    ways = []
    for one in documents:
        leaves = range(1, len(shape_of(one.segments).leaves)) if one.segments else ()
        ways.append([(one.doc_id, [*at]) for n in range(len(leaves) + 1) for at in itertools.combinations(leaves, n)])
    return [{doc_id: at for doc_id, at in way if at} for way in itertools.product(*ways)]


@settings(deadline=None)
@given(segments_of_trees(), st.data())
def test_parts_are_the_paths_to_their_leaves_and_each_row_is_first_in_one(segments: tuple, data: st.DataObject) -> None:
    shape = TreeShape(segments)
    leaves = shape.leaves.tolist()
    assert leaves == [at for at in range(len(segments)) if all(one.parent != at for one in segments)]
    cuts = sorted(data.draw(st.sets(st.sampled_from(range(1, len(leaves))))) if len(leaves) > 1 else [])
    parts, seen = shape.parts(cuts), set()
    # Sequences of seven tokens that end on the way.
    whole = Document(doc_id=3, num_tokens=shape.num_rows, num_label_tokens=0, segments=segments)
    paths = sum(len(shape.rows_of_path(leaf)) for leaf in leaves)
    whole = msgspec.structs.replace(whole, num_path_tokens=paths + 7)
    made = parts_of(whole, parts, [0] * len(segments))
    assert sum(one.num_path_tokens for one in made) == paths + 7
    assert len({one.doc_id for one in made}) == len(parts)
    for number, (part, (start, stop)) in enumerate(
        zip(parts, itertools.pairwise([0, *cuts, len(leaves)]), strict=True)
    ):
        wanted = [shape.rows_of_path(leaf) for leaf in leaves[start:stop]]
        assert part.rows.tolist() == sorted(set(np.concatenate(wanted).tolist()))
        # Paths lead through the same rows.
        own = TreeShape(part.segments)
        assert own.num_rows == len(part.rows)
        assert [part.rows[own.rows_of_path(leaf)].tolist() for leaf in own.leaves.tolist()] == [
            one.tolist() for one in wanted
        ]
        assert part.path_lengths == tuple(map(len, wanted))
        assert made[number].num_path_tokens == sum(part.path_lengths) + 7 * (number == 0)
        again = [int(row) in seen for row in part.rows]
        assert again == sorted(again, reverse=True)
        assert sum(again) == part.num_recomputed
        rows_of_own = [row for one in part.own for row in range(shape.starts[one], shape.stops[one])]
        assert rows_of_own == part.rows[part.num_recomputed :].tolist()
        seen.update(part.rows.tolist())
    assert len(seen) == shape.num_rows


@settings(deadline=None, max_examples=150)
@given(documents_with_trees(most_tokens=40, most=5), st.integers(1, 4), st.sampled_from([1, 3]))
def test_no_replica_gets_more_than_by_whole_trees(documents: tuple[Document, ...], dp: int, pp: int) -> None:
    costs = costs_of(dp, pp)
    lengths, trees = lengths_of(documents)
    whole_s = costs.document_seconds(lengths, trees=trees)
    np.testing.assert_allclose(trees.sums(costs.piece_seconds(trees.depth, trees.depth_stop)), whole_s)
    cuts = tree_cuts(documents, costs)
    parts = cut(documents, cuts)
    assert sum(one.num_label_tokens for one in parts) == sum(
        one.num_label_tokens + (one.doc_id in cuts)
        for one in documents  # these count the roots' first tokens, too
    )
    if cuts:
        assert dp > 1
        assert fullest_s(parts, costs) < fullest_s(documents, costs) / GAIN
        assert fullest_s(parts, costs) > whole_s.sum() / dp
    else:
        assert parts == list(documents)


def small_step(seed: int) -> tuple[Document, ...]:
    rng = np.random.default_rng(seed)
    trees = [tree_document(at, group_of(int(rng.integers(1, 60)), rng.integers(5, 80, 5).tolist())) for at in range(2)]
    return (*trees, *(plain_document(10 + at, int(n)) for at, n in enumerate(rng.integers(20, 200, rng.integers(3)))))


@pytest.mark.parametrize("dp", [2, 3])
def test_cuts_are_nearly_the_best_of_all(dp: int) -> None:
    costs, above = costs_of(dp), []
    for seed in range(25):
        documents = small_step(seed)
        best_s = min(fullest_s(cut(documents, cuts), costs) for cuts in every_cut(documents))
        found_s = fullest_s(cut(documents, tree_cuts(documents, costs)), costs)
        above.append(found_s / best_s)
    assert max(above) < 1.15
    assert np.mean(above) < 1.02


def test_one_large_tree_is_shared_out_and_trees_that_are_even_stay_whole() -> None:
    costs = costs_of(4)
    (one,) = documents = (tree_document(0, group_of(400, [300] * 32)),)
    assert tree_cuts(documents, costs) == {0: [8, 16, 24]}
    parts = cut(documents, {0: [8, 16, 24]})
    assert [part.num_recomputed_tokens for part in parts] == [0, 400, 400, 400]
    assert [part.doc_id for part in parts] == [at * PART_IDS for at in range(4)]
    # Cut again, the first part still has what another part computes.
    again = msgspec.structs.replace(one, num_recomputed_tokens=9)
    assert [part.num_recomputed_tokens for part in cut((again,), {0: [8]})] == [9, 400]
    assert tree_cuts(documents, costs_of(1)) == {}
    assert tree_cuts([msgspec.structs.replace(one, doc_id=at) for at in range(16)], costs) == {}
    # What is gained behind a long prompt must be worth a cut.
    little, enough = (tree_document(0, group_of(4000, [size] * 4)) for size in (1, 30))
    assert tree_cuts([little], costs_of(2)) == {}
    assert tree_cuts([enough], costs_of(2)) == {0: [2]}


@pytest.mark.parametrize("strategy", ["slimpack", "balanced"])
def test_plans_of_parts_hold_and_are_shorter_but_no_shorter_than_the_bounds_of_whole_trees(strategy: str) -> None:
    documents = (tree_document(0, group_of(400, [300] * 32)), *(plain_document(1 + at, 500) for at in range(4)))
    options = PlanOptions(max_pack_tokens=12_000)
    layout = even_layout(3, dp=4, pp=3 if strategy == "slimpack" else 1)
    planner = StepPlanner(sample_model(), sample_coefficients(), layout, None, options, host="unlimited")
    run = RunPlanner(planner, strategy)
    parts = tuple(cut(documents, run.cuts(documents)))
    assert len(parts) > len(documents)
    whole, plan = (planner.plan(0, one, strategy) for one in (documents, parts))
    validate_plan(plan, max_pack_tokens=12_000)
    assert plan.predicted.step_time_s < 0.6 * whole.predicted.step_time_s
    for bound in (layout_bound_seconds, physical_bound_seconds):
        assert bound(planner.costs, *lengths_of(documents)) <= plan.predicted.step_time_s
    assert layout_bound_seconds(planner.costs, *lengths_of(documents)) > 0.5 * plan.predicted.step_time_s
    assert RunPlanner(planner, strategy, may_cut=False).cuts(documents) == {}
    assert RunPlanner(planner, "wlb").cuts(documents) == {}  # its documents may wait


def test_one_replica_computes_the_longest_path() -> None:
    costs = costs_of(4, pp=3)
    lengths, trees = lengths_of([tree_document(0, group_of(400, [20, 300]))])
    path_s = float(costs.useful_stage_seconds(np.array([700])).max())
    assert layout_bound_seconds(costs, lengths, trees) == path_s + costs.optimizer_seconds()
    many = lengths_of([tree_document(0, group_of(400, [300] * 32))])
    assert layout_bound_seconds(costs, *many) > path_s + costs.optimizer_seconds()
