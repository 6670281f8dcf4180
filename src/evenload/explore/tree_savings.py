"""Say what computing shared prefixes once saves, and what it costs in memory (`tree_savings`)."""

from collections.abc import Sequence

import numpy as np

from evenload.data.prefix_tree import PrefixTree
from evenload.planning.planner import StepPlanner
from evenload.types.base import Frozen
from evenload.types.document import Document
from evenload.types.plan import Prediction
from evenload.types.tree import TreeShape


class TreeSavings(Frozen):
    """Hold a step of trees of shared prefixes beside the same step with every sequence alone.

    Args:
        unique_tokens, path_tokens: of the trees, and of all their sequences.
        shared, alone: what the plan of each predicts. A tree holds the activations of all its unique tokens until its
            backward, a sequence only its own, so trees may need more memory.
    """

    unique_tokens: int
    path_tokens: int
    shared: Prediction
    alone: Prediction


def tree_savings(planner: StepPlanner, trees: Sequence[PrefixTree], strategy: str) -> TreeSavings:
    """Plan trees as one step, and every sequence of theirs alone; `InfeasiblePlanError` where one does not fit."""
    shared: list[Document] = []
    alone: list[Document] = []
    for tree in trees:
        labels, shape = int(np.count_nonzero(tree.weights)), TreeShape(tree.segments)
        size = {"num_tokens": shape.num_rows, "num_label_tokens": labels}
        shared.append(Document(doc_id=len(shared), segments=tree.segments, **size))
        lengths = shape.depths + shape.stops - shape.starts
        for _, leaf in tree.leaves:
            length = int(lengths[leaf])
            alone.append(Document(doc_id=len(alone), num_tokens=length, num_label_tokens=length - 1))
    plans = [planner.plan(0, tuple(documents), strategy).predicted for documents in (shared, alone)]
    unique, path = (sum(document.num_tokens for document in documents) for documents in (shared, alone))
    return TreeSavings(unique_tokens=unique, path_tokens=path, shared=plans[0], alone=plans[1])
