"""Documents of a step into the places of a fixed number of micro-batches, under a time that the step should not pass.

    micro-batch 0   [ d0 d0 d0 d0 | d1 d1 | d2 | d3 ]     a place: an aligned block of ranks of one micro-batch, free or
    micro-batch 1   [ d4 | d5 | d6 | d6 d6 | ...    ]     a group's already

`context_groups` lets every block have as many micro-batches as it needs and makes the numbers equal afterwards, for
which few documents on many ranks are too few. Here the number is given first, and all micro-batches are filled at once:

1. Longest document first. It goes where it takes fewest ranks and ends within the time aimed at; of such places to the
   one whose ranks have least to do. Where there is none, to the place in which it ends first.
2. Ranks left free in a micro-batch get a document from a group of several, or a group beside them takes them in.
3. Documents leave the busiest rank for places that end earlier.

Numbers of micro-batches and times are tried from the least that documents, tokens and work allow; the fastest by
`context_groups.step_seconds` is kept. O(tries · documents · micro-batches · ranks).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenload.engines.context_groups import GroupPrices, RankDocuments, plan_context_groups, step_seconds
from evenload.errors import InfeasiblePlanError

MORE_MICRO_BATCHES = 3
"""Numbers of micro-batches that are tried, from the least."""
MOST_MOVES, LEAST_GAIN = 32, 1e-6
"""Of documents that leave the busiest rank, and by which share of its time they have to end earlier."""
AIMS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5)
"""Times that are aimed at, over the least that the work takes on all ranks."""


@dataclass(eq=False)
class _Group:
    """Ranks `first` to `first + size` of a micro-batch that share documents; `row` counts sizes."""

    at: int
    first: int
    row: int
    size: int
    documents: list[int]
    left_tokens: int

    @property
    def ranks(self) -> slice:
        return slice(self.first, self.first + self.size)


@dataclass(eq=False)
class _Places:
    """All micro-batches while they are filled.

    Args:
        count: micro-batches.
        shares: int64[sizes, documents], tokens on one rank.

    Attributes:
        is_free: bool[micro-batches, ranks]; busy_s: float64[ranks], in all micro-batches.
    """

    prices: GroupPrices
    count: int
    shares: NDArray[np.int64]
    groups: list[_Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_free = np.ones((self.count, self.prices.num_ranks), bool)
        self.busy_s = np.zeros(self.prices.num_ranks)

    def options(self, document: int, row: int, of: _Group | None = None) -> Iterator[tuple[float, _Group]]:
        """Where a document can go on groups of one size, and when their ranks have done everything with it; a group
        without documents is one that would be opened."""
        prices, size, share = self.prices, self.prices.sizes[row], int(self.shares[row, document])
        if share > prices.room_tokens:
            return
        seconds = float(prices.seconds[row, document])
        most = prices.most_documents
        for group in self.groups:
            has_place = most is None or len(group.documents) < most
            if group.row == row and group.left_tokens >= share and has_place and group is not of:
                yield float(self.busy_s[group.ranks].max()) + seconds, group
        blocks = np.asarray(self.is_free.reshape(self.count, -1, size).all(axis=2))
        ends_s = self.busy_s.reshape(-1, size).max(axis=1) + prices.pack_s + seconds
        for at in range(self.count):
            free = np.flatnonzero(blocks[at])
            if len(free):
                block = int(free[ends_s[free].argmin()])
                yield float(ends_s[block]), _Group(at, block * size, row, size, [], prices.room_tokens)

    def put(self, document: int, group: _Group) -> None:
        seconds = float(self.prices.seconds[group.row, document])
        if not group.documents:
            self.groups.append(group)
            self.is_free[group.at, group.ranks] = False
            seconds += self.prices.pack_s
        group.documents.append(document)
        group.left_tokens -= int(self.shares[group.row, document])
        # What its ranks do together begins when the last of them has come.
        self.busy_s[group.ranks] = self.busy_s[group.ranks].max() + seconds

    def take(self, document: int, group: _Group) -> None:
        group.documents.remove(document)
        group.left_tokens += int(self.shares[group.row, document])
        self.busy_s[group.ranks] -= float(self.prices.seconds[group.row, document])

    def fill(self) -> bool:
        """Documents for the ranks that have none; False where there are none to be had."""
        while (free := np.argwhere(self.is_free)).size:
            at, first = (int(number) for number in free[0])
            if not (self._widen(at, first) or self._move_to(at, first)):
                return False
        return True

    def _widen(self, at: int, first: int) -> bool:
        """The block beside a free one takes it in, where that shortens what its ranks do."""
        for group in self.groups:
            row = group.row + 1
            if group.at != at or row >= len(self.prices.sizes):
                continue
            size = self.prices.sizes[row]
            start = group.first // size * size
            others = self.is_free[at, start : start + size].sum()
            if not start <= first < start + size or others != size - group.size:
                continue
            # Rows are rounded up to chunks, so short documents may take more room on more ranks.
            if int(self.shares[row, group.documents].sum()) > self.prices.room_tokens:
                continue
            seconds = self.prices.seconds[:, group.documents].sum(axis=1)
            if seconds[row] > seconds[group.row] and any(len(one.documents) > 1 for one in self.groups):
                continue
            self.busy_s[group.ranks] -= seconds[group.row]
            group.row, group.size, group.first = row, size, start
            group.left_tokens = self.prices.room_tokens - int(self.shares[row, group.documents].sum())
            self.is_free[at, group.ranks] = False
            self.busy_s[group.ranks] = self.busy_s[group.ranks].max() + seconds[row]
            return True
        return False

    def _move_to(self, at: int, first: int) -> bool:
        """A free rank gets a document of the group of several whose ranks have most to do."""
        givers = sorted(
            (group for group in self.groups if len(group.documents) > 1),
            key=lambda group: -float(self.busy_s[group.ranks].max()),
        )
        for giver in givers:
            for document in giver.documents:
                if self.shares[0, document] <= self.prices.room_tokens:
                    size = self.prices.sizes[0]
                    self.take(document, giver)
                    self.put(document, _Group(at, first // size * size, 0, size, [], self.prices.room_tokens))
                    return True
        return False

    def relieve(self) -> None:
        """Documents leave the rank that has most to do for places that end before it, some times."""
        for _ in range(MOST_MOVES):
            worst_s, rank = float(self.busy_s.max()), int(self.busy_s.argmax())
            crowded = [
                one for one in self.groups if one.ranks.start <= rank < one.ranks.stop and len(one.documents) > 1
            ]
            if not any(self._leave(group, document, worst_s) for group in crowded for document in group.documents):
                return

    def _leave(self, group: _Group, document: int, worst_s: float) -> bool:
        busy_s = self.busy_s.copy()
        self.take(document, group)
        rows = range(len(self.prices.sizes))
        options = itertools.chain.from_iterable(self.options(document, row, group) for row in rows)
        best = min(options, key=lambda option: option[0], default=None)
        if best is not None and best[0] < worst_s * (1 - LEAST_GAIN):
            self.put(document, best[1])
            return True
        group.documents.append(document)
        group.left_tokens -= int(self.shares[group.row, document])
        self.busy_s = busy_s
        return False

    def micro_batches(self) -> tuple[RankDocuments, ...]:
        found: list[list[tuple[int, ...]]] = [[()] * self.prices.num_ranks for _ in range(self.count)]
        for group in self.groups:
            found[group.at][group.ranks] = [tuple(sorted(group.documents))] * group.size
        # Groups of most ranks first: their members then come from nothing before.
        return tuple(tuple(ranks) for ranks in sorted(found, key=lambda ranks: len(set(ranks))))


def fastest_groups(prices: GroupPrices, count_multiple: int = 1) -> tuple[RankDocuments, ...]:
    """The faster of `plan_context_groups` and `plan_placed_groups`; raises as the first."""
    found = plan_placed_groups(prices, count_multiple)
    try:
        blocks = plan_context_groups(prices, count_multiple)
    except InfeasiblePlanError:
        if found is None:
            raise
        return found
    if found is None:
        return blocks
    return min(found, blocks, key=lambda micro_batches: step_seconds(prices, micro_batches))


def plan_placed_groups(prices: GroupPrices, count_multiple: int = 1) -> tuple[RankDocuments, ...] | None:
    """Micro-batches of a step, the fastest of those tried; None where none was found.

    Args:
        prices: each of the sizes divides the next.
        count_multiple: what the number of micro-batches has to be a multiple of.
    """
    if not len(prices.num_tokens):
        return ()
    shares = np.array([prices.share_tokens(size) for size in prices.sizes])
    if shares[-1].max() > prices.room_tokens:
        return None
    sizes = np.array(prices.sizes)[:, None]
    fits = shares <= prices.room_tokens
    work_s = np.where(fits, prices.seconds * sizes, np.inf).min(axis=0)
    tokens = np.where(fits, shares * sizes, np.iinfo(np.int64).max).min(axis=0).sum()
    least = max(1, -(-int(tokens) // (prices.room_tokens * prices.num_ranks)))
    least = -(-least // count_multiple) * count_multiple
    counts = range(least, least + MORE_MICRO_BATCHES * count_multiple, count_multiple)
    even_s = float(work_s.sum()) / prices.num_ranks
    alone_s = float(np.where(fits, prices.seconds, np.inf).min(axis=0).max()) + prices.pack_s
    found: tuple[float, tuple[RankDocuments, ...]] | None = None
    for count, aim in itertools.product(counts, AIMS):
        if found is not None and found[0] <= max(alone_s, even_s + count * prices.pack_s) * (1 + LEAST_GAIN):
            break  # nothing with as many micro-batches or more is faster
        places = _placed(prices, shares, work_s, count, aim * (even_s + count * prices.pack_s))
        if places is not None:
            micro_batches = places.micro_batches()
            seconds = step_seconds(prices, micro_batches)
            found = (seconds, micro_batches) if found is None or seconds < found[0] else found
    return None if found is None else found[1]


def _placed(
    prices: GroupPrices, shares: NDArray[np.int64], work_s: NDArray[np.float64], count: int, aim_s: float
) -> _Places | None:
    places = _Places(prices, count, shares)
    for document in np.argsort(-work_s, kind="stable").tolist():
        chosen: tuple[float, _Group] | None = None
        for row in range(len(prices.sizes)):
            best = min(places.options(document, row), key=lambda option: option[0], default=None)
            if best is not None and (chosen is None or best[0] < chosen[0]):
                chosen = best
            if chosen is not None and chosen[0] <= aim_s:
                break
        if chosen is None:
            return None
        places.put(document, chosen[1])
    if not places.fill():
        return None
    places.relieve()
    return places
