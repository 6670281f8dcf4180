"""Split trees of shared prefixes that are too large for a replica into runs of leaves (`runs_for_replicas`).

Sequences in lexicographic order that follow each other share most. So a run of them is a tree of its own, and a cut
recomputes one path's shared tokens and nothing else. Replicas get whole trees, longest first, and only where that
leaves them uneven trees are cut: first all that take more than the least limit that no replica exceeds (by bisection),
then one run at a time of the fullest replica, as long as that gets less to do, recomputed tokens counted.
O(tokens + sequences · log(sequences)).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.data.prefix_tree import runs_within, sequences_in_order, split_into_runs
from evenload.planning.packing import longest_first

EVEN_ENOUGH = 1.01  # Fullest over mean replica at which no more is cut
HALVINGS = 12  # Of the bisection
CUTS_TRIED = 7  # Of a run, at even shares of its work


class TreeRun(NamedTuple):
    """Sequences that become one tree.

    Args:
        group: from which they come, by place; places: among its sequences, in lexicographic order.
        num_unique, num_recomputed: tokens of the tree, and those of them that a run before it computes too.
        seconds: forward and backward through the whole pipeline.
    """

    group: int
    places: list[int]
    num_unique: int
    num_recomputed: int
    seconds: float


def runs_for_replicas(
    groups: Sequence[Sequence[ArrayLike]], costs: PackCosts, most_tokens: int | None = None
) -> list[TreeRun]:
    """Return a step's sequences, whose groups share prefixes, as runs that replicas take as whole trees, each of at
    most `most_tokens` unique tokens (None = no limit) or one sequence."""
    ordered = [_Group.of(sequences, costs) for sequences in groups]
    dp = costs.layout.dp

    def within(most_s: float) -> list[TreeRun]:
        return [run for at, group in enumerate(ordered) for run in group.runs_within(at, most_s, most_tokens)]

    best = within(np.inf)
    low_s, high_s = sum(run.seconds for run in best) / dp, fullest_seconds(best, dp)
    enough_s = EVEN_ENOUGH * low_s
    for _ in range(HALVINGS if high_s > enough_s else 0):
        middle_s = (low_s + high_s) / 2
        runs = within(middle_s)
        if fullest_seconds(runs, dp) <= middle_s:
            best, high_s = runs, middle_s
        else:
            low_s = middle_s
    for _ in range(dp):
        if fullest_seconds(best, dp) <= enough_s:
            break
        shorter = _with_a_cut(best, ordered, dp)
        if shorter is None:
            break
        best = shorter
    return best


def fullest_seconds(runs: Sequence[TreeRun], replicas: int) -> float:
    """Return the seconds of the fullest of so many replicas that runs are dealt to, longest first."""
    return max(sum(runs[at].seconds for at in members) for members in _dealt(runs, replicas))


def split_by_work(sequences: Sequence[ArrayLike], most_s: float, costs: PackCosts) -> list[list[int]]:
    """Return places of sequences as runs of the lexicographic order, each as long as its tree takes at most `most_s`
    seconds, forward and backward through the whole pipeline. A sequence that takes longer is a run of its own."""
    return [run.places for run in _Group.of(sequences, costs).runs_within(0, most_s, None)]


def _dealt(runs: Sequence[TreeRun], replicas: int) -> list[list[int]]:
    return longest_first(np.array([run.seconds for run in runs], np.float64), replicas)


def _with_a_cut(runs: list[TreeRun], groups: Sequence["_Group"], replicas: int) -> list[TreeRun] | None:
    """Return the runs with one of the fullest replica in two, where that leaves the fullest least to do; None where no
    cut makes it shorter."""
    fullest = max(_dealt(runs, replicas), key=lambda members: sum(runs[at].seconds for at in members))
    tried = [
        [*runs[:at], *parts, *runs[at + 1 :]] for at in fullest for parts in groups[runs[at].group].cuts_of(runs[at])
    ]
    best = min(tried, key=lambda made: fullest_seconds(made, replicas), default=runs)
    return best if fullest_seconds(best, replicas) < fullest_seconds(runs, replicas) else None


class _Group(NamedTuple):
    """Sequences, their lexicographic order, and by place what each shares with the one before it in order, and its
    seconds alone and behind that one."""

    sequences: Sequence[ArrayLike]
    order: list[int]
    lengths: NDArray[np.int64]
    shared: NDArray[np.int64]
    alone_s: NDArray[np.float64]
    behind_s: NDArray[np.float64]

    @classmethod
    def of(cls, sequences: Sequence[ArrayLike], costs: PackCosts) -> "_Group":
        order, in_order = sequences_in_order(sequences)
        lengths, shared = np.array([len(np.asarray(one)) for one in sequences], np.int64), np.zeros_like(in_order)
        shared[order] = in_order
        alone_s = costs.piece_seconds(np.zeros_like(lengths), lengths)
        behind_s = np.where(shared < lengths, costs.piece_seconds(shared, lengths), 0.0)
        return cls(sequences, order, lengths, shared, alone_s, behind_s)

    def run(self, number: int, places: list[int]) -> TreeRun:
        first, others = places[0], places[1:]
        unique = int(self.lengths[first] + (self.lengths - self.shared)[others].sum())
        seconds = float(self.alone_s[first] + self.behind_s[others].sum())
        return TreeRun(number, places, unique, int(self.shared[first]), seconds)

    def runs_within(self, number: int, most_s: float, most_tokens: int | None) -> list[TreeRun]:
        runs = runs_within(self.order, self.alone_s[self.order], self.behind_s[self.order], most_s)
        if most_tokens is not None:
            runs = [
                [run[at] for at in part]
                for run in runs
                for part in split_into_runs([self.sequences[place] for place in run], most_tokens)
            ]
        return [self.run(number, places) for places in runs]

    def cuts_of(self, run: TreeRun) -> list[tuple[TreeRun, TreeRun]]:
        """Return a run in two, at several shares of its work."""
        done_s = np.cumsum(self.behind_s[run.places])
        wanted_s = done_s[-1] * np.arange(1, CUTS_TRIED + 1) / (CUTS_TRIED + 1)
        edges = np.unique(np.searchsorted(done_s, wanted_s) + 1).tolist()
        halves = [(run.places[:edge], run.places[edge:]) for edge in edges if edge < len(run.places)]
        return [(self.run(run.group, one), self.run(run.group, other)) for one, other in halves]
