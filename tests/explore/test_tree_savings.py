"""What sharing prefixes saves is what two plans of the same sequences differ by."""

import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.data.prefix_tree import build_trees
from evenload.explore.tree_savings import tree_savings
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.types.document import Document
from evenload.types.layout import even_layout


def test_savings_of_groups() -> None:
    rng = np.random.default_rng(0)
    heads = [rng.integers(0, 50, 300) for _ in range(6)]
    sequences = [np.concatenate([head, rng.integers(0, 50, int(n))]) for head in heads for n in rng.integers(10, 90, 8)]
    trees = build_trees(sequences, [np.ones(len(one)) for one in sequences])
    planner = StepPlanner(
        sample_model(), sample_coefficients(), even_layout(3, dp=2), None, PlanOptions(), host="unlimited"
    )
    found = tree_savings(planner, trees, "slimpack")
    assert found.path_tokens == sum(map(len, sequences))
    assert found.unique_tokens == sum(len(tree.tokens) for tree in trees)
    # In the order of the trees' leaves, which decides between equals.
    order = [place for tree in trees for place, _ in tree.leaves]
    lengths = [len(sequences[place]) for place in order]
    alone = tuple(Document(doc_id=at, num_tokens=n, num_label_tokens=n - 1) for at, n in enumerate(lengths))
    assert found.alone == planner.plan(0, alone, "slimpack").predicted
    # Seven of eight prompts are saved.
    assert found.shared.step_time_s < 0.4 * found.alone.step_time_s
    assert found.shared.peak_memory_bytes != found.alone.peak_memory_bytes


def test_sequences_that_share_nothing_are_as_they_were() -> None:
    sequences = [np.full(50, token) for token in range(6)]
    trees = build_trees(sequences, [np.ones(50)] * 6)
    planner = StepPlanner(sample_model(), sample_coefficients(), even_layout(3), None, PlanOptions(), host="unlimited")
    found = tree_savings(planner, trees, "balanced")
    assert found.shared.step_time_s == pytest.approx(found.alone.step_time_s)
    assert found.unique_tokens == found.path_tokens
