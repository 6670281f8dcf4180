"""Say what computing shared prefixes once saves, and what it costs in memory (`tree_savings`)."""

from collections.abc import Sequence

import numpy as np

from evenload.data.prefix_tree import PrefixTree
from evenload.planning.planner import StepPlanner
from evenload.types.base import Frozen
from evenload.types.document import Document
from evenload.types.text import format_bytes
from evenload.types.tree import TreeShape
from evenload.types.tree_columns import TreeColumns


class TreeSavings(Frozen):
    """Hold a step of trees of shared prefixes beside the same step with every sequence alone.

    Args:
        unique_tokens, path_tokens: of the trees, and of all their sequences.
        step_time_s, path_step_time_s: predicted of each; the least that any plan takes on these devices is
            `lower_bound_s` with trees.
        peak_memory_bytes, path_peak_memory_bytes: on the fullest device. A tree holds the activations of all of its
            unique tokens until its backward, a sequence only its own, so trees may need more.
    """

    unique_tokens: int
    path_tokens: int
    step_time_s: float
    path_step_time_s: float
    lower_bound_s: float
    peak_memory_bytes: int
    path_peak_memory_bytes: int

    def describe(self) -> str:
        """Return the comparison in two sentences."""
        more = self.peak_memory_bytes - self.path_peak_memory_bytes
        return (
            f"{self.path_tokens:,} tokens of sequences are {self.unique_tokens:,} unique ones "
            f"({self.path_tokens / self.unique_tokens:.2f}x): a step takes {self.step_time_s:.3g} s and not "
            f"{self.path_step_time_s:.3g} s ({self.path_step_time_s / self.step_time_s:.2f}x). The fullest device "
            f"holds {format_bytes(self.peak_memory_bytes)}, {format_bytes(abs(more))} {'more' if more > 0 else 'less'}."
        )


def tree_savings(planner: StepPlanner, trees: Sequence[PrefixTree], strategy: str) -> TreeSavings:
    """Plan trees as one step, and every sequence of theirs alone.

    Raises:
        InfeasiblePlanError: a step fits memory with neither plan, or in packs of the token limit.
    """
    shared = tuple(_tree_document(at, tree) for at, tree in enumerate(trees))
    lengths = [length for tree in trees for length in path_lengths(tree)]
    alone = tuple(
        Document(doc_id=at, num_tokens=length, num_label_tokens=length - 1) for at, length in enumerate(lengths)
    )
    plans = [planner.plan(0, documents, strategy).predicted for documents in (shared, alone)]
    unique = np.array([document.num_tokens for document in shared], np.int64)
    return TreeSavings(
        unique_tokens=int(unique.sum()),
        path_tokens=sum(lengths),
        step_time_s=plans[0].step_time_s,
        path_step_time_s=plans[1].step_time_s,
        lower_bound_s=planner.costs.lower_bound_seconds(unique, TreeColumns.of(shared)),
        peak_memory_bytes=plans[0].peak_memory_bytes,
        path_peak_memory_bytes=plans[1].peak_memory_bytes,
    )


def path_lengths(tree: PrefixTree) -> list[int]:
    """Return the tokens of every sequence of a tree."""
    shape = TreeShape(tree.segments)
    ends = shape.depths + shape.stops - shape.starts
    return [int(ends[segment]) for _, segment in tree.leaves]


def _tree_document(doc_id: int, tree: PrefixTree) -> Document:
    labels = int(np.count_nonzero(tree.weights))
    return Document(doc_id=doc_id, num_tokens=len(tree.tokens), num_label_tokens=labels, segments=tree.segments)
