"""Find the prefixes that token sequences share, and lay each tree of them out as one document (`build_trees`).

Sequences in lexicographic order lie beside those with which they share most, so one pass over common prefixes of
neighbours gives the trie. A label is of a token: the weight with which the loss of predicting it counts, added up over
the sequences through it. Price: about a comparison a token, and sorting.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.errors import DataError
from evenload.types.tree import Segment, TreeShape

TreeLabels = Literal["sum", "once"]
"""Whether a token that sequences share is trained as often as they are, or once."""


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Holds sequences that share a first token as a tree of n unique tokens in rows, depth first.

    Args:
        segments: with the parent of each.
        tokens: int32[n].
        weights: float64[n], of the loss of predicting each token, added up over sequences; 0 = no label. A root's first
            token has none.
        counts: int64[n], how many sequences go through each row.
        leaves: of every sequence, its place among those given, and the segment that it ends with.
    """

    segments: tuple[Segment, ...]
    tokens: NDArray[np.int32]
    weights: NDArray[np.float64]
    counts: NDArray[np.int64]
    leaves: tuple[tuple[int, int], ...]

    @property
    def num_path_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.counts.sum())

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of every sequence, in order of `leaves`."""
        shape = TreeShape(self.segments)
        lengths = shape.depths + shape.stops - shape.starts
        return tuple(int(lengths[leaf]) for _, leaf in self.leaves)


def build_trees(
    sequences: Sequence[ArrayLike], weights: Sequence[ArrayLike], *, min_shared_tokens: int = 1
) -> list[PrefixTree]:
    """Return the trees of sequences, each of at least one token; their order does not depend on that of equal ones.

    Args:
        sequences: int[n_i] token ids.
        weights: float[n_i], of the loss of predicting each token; 0 = no label, and a first token has none.
        min_shared_tokens: a segment is shared only where it has as many; else every sequence computes its own.

    `DataError`: an empty sequence, other than one weight a token, or a weight that is not finite.
    """
    own = as_token_ids(sequences)
    counted = checked_weights(own, weights)
    order, shared = sequences_in_order(own)
    nodes = _nodes([len(own[place]) for place in order], shared, min_shared_tokens)
    return list(_lay_out(nodes, [own[place] for place in order], [counted[place] for place in order], order))


def labels_once(sequences: Sequence[ArrayLike], weights: Sequence[ArrayLike]) -> list[NDArray[np.float64]]:
    """Return weights in which the label of a shared token counts once, of whichever sequences have one; `DataError`
    also: shared tokens of different weights."""
    own = [np.asarray(one, np.int32) for one in sequences]
    counted = checked_weights(own, weights)
    count_once(own, counted, *sequences_in_order(own))
    return counted


def sequences_in_order(sequences: Sequence[ArrayLike]) -> tuple[list[int], NDArray[np.int64]]:
    """Return places of sequences in lexicographic order, and how many first tokens each shares with the one before."""
    own = as_token_ids(sequences)
    # Big-endian bytes of ids without a sign sort as the ids do; equal sequences keep their order.
    keys = [one.astype(">u4").tobytes() for one in own]
    order = sorted(range(len(own)), key=keys.__getitem__)
    shared = [_num_common(own[before], own[after]) for before, after in itertools.pairwise(order)]
    return order, np.array([0, *shared], np.int64)[: len(order)]


def as_token_ids(sequences: Sequence[ArrayLike]) -> list[NDArray[np.int32]]:
    """Return sequences as int32[n_i]; `DataError` for what are no token ids."""
    found = [np.asarray(one) for one in sequences]
    for place, one in enumerate(found):
        if len(one) and (one.dtype.kind not in "iu" or one.min() < 0):
            raise DataError(
                f"sequence {place} has {one.dtype} tokens, the least {one.min()}; token ids are whole, from 0"
            )
    return [one.astype(np.int32) for one in found]


@dataclass(eq=False)
class _Node:
    """Tokens `[start, stop)` that members of the order share, behind those of the node `parent`; -1 = a root."""

    parent: int
    members: range
    start: int
    stop: int
    ends: list[int]
    num_rows: int


def checked_weights(sequences: Sequence[NDArray[np.int32]], weights: Sequence[ArrayLike]) -> list[NDArray[np.float64]]:
    """Return copies of weights, without those of first tokens; `DataError` as `build_trees`."""
    if len(sequences) != len(weights):
        raise DataError(f"{len(sequences)} sequences have {len(weights)} lists of weights; give one each")
    found = []
    for place, (tokens, given) in enumerate(zip(sequences, weights, strict=True)):
        as_given = np.asarray(given)
        if as_given.dtype.kind not in "biuf":
            raise DataError(f"sequence {place} has weights of {as_given.dtype}; give numbers, or true and false")
        if as_given.dtype.kind == "i" and (as_given == -100).any():
            raise DataError(f"sequence {place} has -100 among whole weights, as labels have; give labels != -100")
        own = as_given.astype(np.float64)
        if tokens.ndim != 1 or not len(tokens) or own.shape != tokens.shape:
            raise DataError(
                f"sequence {place} has tokens of shape {tokens.shape} and weights of shape {own.shape}; give at least "
                "one token, and one weight for each"
            )
        if not np.isfinite(own).all():
            at = int(np.flatnonzero(~np.isfinite(own))[0])
            raise DataError(f"sequence {place} has weight {own[at]} at token {at}; weights are finite")
        own[0] = 0.0
        found.append(own)
    return found


def _num_common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def count_once(
    sequences: Sequence[NDArray[np.int32]],
    weights: list[NDArray[np.float64]],
    order: Sequence[int],
    shared: NDArray[np.int64],
) -> None:
    """Set to 0 the weights of labels that a sequence before has, in place; `DataError`: shared tokens of different
    weights.

    Args:
        sequences, weights: also others than those of the order.
        order, shared: places of some sequences in lexicographic order, and what each shares with the one before.
    """
    counted = np.zeros(0)
    for place, size in zip(order, shared.tolist(), strict=True):
        own, before = weights[place], counted[:size]
        both = (before != 0) & (own[:size] != 0)
        if (differs := np.flatnonzero(before[both] != own[:size][both])).size:
            at = int(np.flatnonzero(both)[differs[0]])
            raise DataError(
                f"token {at} of sequence {place} has weight {own[at]:g} and, in another sequence that shares it, "
                f'{before[at]:g}, so it cannot count once; use tree_labels = "sum", or give shared tokens one weight'
            )
        counted = np.concatenate([np.where(before != 0, before, own[:size]), own[size:]])
        own[:size][both] = 0.0


def _nodes(lengths: Sequence[int], shared: NDArray[np.int64], min_shared: int) -> list[_Node]:
    """Return the nodes of the trees of sequences in order, parents first."""
    nodes: list[_Node] = []
    waiting = [(range(len(lengths)), 0, -1)]
    while waiting:
        members, depth, parent = waiting.pop()
        for run in _runs(shared, members, depth + max(1, min_shared)):
            stop = lengths[run.start]
            if len(run) > 1:
                stop = min(stop, int(shared[run.start + 1 : run.stop].min()))
                waiting.append((run, stop, len(nodes)))
            elif stop == depth:
                nodes[parent].ends.append(run.start)
                continue
            ends = [run.start] if len(run) == 1 else []
            nodes.append(_Node(parent, run, depth, stop, ends, stop - depth))
    for node in reversed(nodes):
        if node.parent >= 0:
            nodes[node.parent].num_rows += node.num_rows
    return nodes


def _runs(shared: NDArray[np.int64], members: range, least: int) -> Iterator[range]:
    """Divide members of the order into runs whose neighbours share at least so many tokens."""
    if not members:
        return
    cuts = np.flatnonzero(shared[members.start + 1 : members.stop] < least) + members.start + 1
    for start, stop in itertools.pairwise([members.start, *cuts.tolist(), members.stop]):
        yield range(start, stop)


def _lay_out(
    nodes: Sequence[_Node],
    sequences: Sequence[NDArray[np.int32]],
    weights: Sequence[NDArray[np.float64]],
    order: Sequence[int],
) -> Iterator[PrefixTree]:
    """Yield the trees, that of the most rows first; sequences and weights are in order."""
    children: dict[int, list[int]] = {}
    for at, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(at)
    for siblings in children.values():
        siblings.sort(key=lambda at: -nodes[at].num_rows)
    for root in children.get(-1, ()):
        segments: list[Segment] = []
        columns: list[tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.int64]]] = []
        leaves: list[tuple[int, int]] = []
        waiting = [(root, -1)]
        while waiting:
            at, parent = waiting.pop()
            node, size = nodes[at], nodes[at].stop - nodes[at].start
            leaves += [(order[end], len(segments)) for end in node.ends]
            waiting += [(child, len(segments)) for child in reversed(children.get(at, ()))]
            segments.append(Segment(size, parent))
            total = np.sum([weights[member][node.start : node.stop] for member in node.members], axis=0)
            tokens = sequences[node.members.start][node.start : node.stop]
            columns.append((tokens, total, np.full(size, len(node.members), np.int64)))
        tokens, totals, counts = (np.concatenate(column) for column in zip(*columns, strict=True))
        yield PrefixTree(tuple(segments), tokens, totals, counts, tuple(leaves))
