"""Documents of a step to groups of ranks and micro-batches, for an engine whose context groups change between them.

    micro-batch 0   [ d0 d0 d0 d0 | d1 d1 | d2 d3 | d3 ... ]    ranks that share a document hold the same ones
    micro-batch 1   [ d4 d4       | d5    | d6    | d7 ... ]    every rank has work in every micro-batch

What such an engine (dynamic context parallelism of Megatron-LM) takes: all ranks run equally many micro-batches, none
of them empty; the ranks of a group lie side by side, begin at a multiple of their number, and share *all* documents of
their micro-batch. So a document is shared by 1, 2, 4 ... ranks, and a group waits until all its members have come.

1. A ceiling: every document gets the fewest ranks with which it fits memory and takes no longer than the ceiling; where
   none is short enough, those with which it is shortest. 16 ceilings, from no limit down to a 64th of the even share.
2. Sizes from the largest: longest document first to the aligned block of ranks that has the least to do.
3. In every block documents share micro-batches, first-fit decreasing by tokens. Larger groups come first in time, so
   their members come from the same larger group and nobody waits. Blocks with fewer micro-batches than others divide
   some; a ceiling under which they cannot is left out. One group of all ranks always can.

The fastest is kept, by the recurrence of `step_seconds`. O(16 · (n log n + n · ranks)).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.errors import InfeasiblePlanError
from evenload.types.columns import whole_document_columns
from evenload.types.micropack import Direction

RankDocuments = tuple[tuple[int, ...], ...]
"""Of one micro-batch: by rank its documents, of which a group's ranks have the same."""

_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_CEILINGS = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupPrices:
    """What the documents of a step take on groups of every size.

    Args:
        num_tokens: int64[n].
        sizes: of groups, ascending. To plan: each divides the next, the last is all ranks.
        seconds: float64[sizes, n], forward and backward of each document by itself, on the slowest stage.
        pack_s: constant of a micro-batch on that stage.
        num_ranks: that share the documents of the step.
        room_tokens: that one rank may hold in a micro-batch.
        most_documents: of a micro-batch; None = any number.
        stages: of the pipeline.
    """

    num_tokens: NDArray[np.int64]
    sizes: tuple[int, ...]
    seconds: NDArray[np.float64]
    pack_s: float
    num_ranks: int
    room_tokens: int
    most_documents: int | None = None
    stages: int = 1

    def share_tokens(self, size: int) -> NDArray[np.int64]:
        """Rows of each document on one of so many ranks. Of 2·size parts of a shared document each has two."""
        return self.num_tokens if size == 1 else 2 * -(-self.num_tokens // (2 * size))


def group_sizes(num_ranks: int, least: int = 1) -> tuple[int, ...]:
    """Powers of two, from `least`, that divide all ranks, and all ranks."""
    powers = itertools.takewhile(lambda size: num_ranks % size == 0, (1 << power for power in itertools.count()))
    return tuple(sorted({size for size in powers if size >= least} | {num_ranks}))


def group_prices(
    costs: PackCosts,
    num_tokens: Sequence[int],
    sizes: tuple[int, ...],
    room_tokens: int,
    most_documents: int | None = None,
) -> GroupPrices:
    """Prices by the cost model: compute of a rank's share, and keys and values that attention does not hide.

    Args:
        costs: of the layout whose data- and context-parallel ranks share the documents. Whatever they say of short
            documents (`keeps_short_whole`): such an engine cuts every document of a group.
    """
    costs = PackCosts(costs.model, costs.coefficients, costs.layout, keeps_short_whole=False)
    tokens = np.asarray(num_tokens, np.int64)
    alone = [[index] for index in range(len(tokens))]
    constant = sum(costs.pack_seconds(whole_document_columns([[]], tokens), direction) for direction in _DIRECTIONS)
    rows = [
        sum(costs.pack_seconds(whole_document_columns(alone, tokens, size), direction) for direction in _DIRECTIONS)
        - constant
        for size in sizes
    ]
    seconds = np.array(rows).reshape(len(sizes), len(tokens), costs.layout.num_stages)
    slowest = int(seconds.sum(axis=(0, 1)).argmax()) if len(tokens) else 0
    return GroupPrices(
        num_tokens=tokens,
        sizes=sizes,
        seconds=np.maximum(seconds[:, :, slowest], 0.0),
        pack_s=float(np.asarray(constant)[0, slowest]),
        num_ranks=costs.layout.dp * costs.layout.cp,
        room_tokens=room_tokens,
        most_documents=most_documents,
        stages=costs.layout.pp,
    )


def step_seconds(prices: GroupPrices, micro_batches: Sequence[RankDocuments]) -> float:
    """Predicted seconds of a step: a group begins when its last member has come.

    With a pipeline: the slowest stage's sum, and once through the others the longest micro-batch.
    """
    row = {size: index for index, size in enumerate(prices.sizes)}
    ready, longest_s = np.zeros(prices.num_ranks), 0.0
    for ranks in micro_batches:
        for first, size, documents in groups_of(ranks):
            taken_s = prices.pack_s + float(prices.seconds[row[size], list(documents)].sum())
            members = slice(first, first + size)
            ready[members] = ready[members].max() + taken_s
            longest_s = max(longest_s, taken_s)
    return float(ready.max(initial=0.0)) + (prices.stages - 1) * longest_s


def groups_of(ranks: RankDocuments) -> list[tuple[int, int, tuple[int, ...]]]:
    """(first rank, number of ranks, documents) of every group of a micro-batch."""
    found, first = [], 0
    for documents, members in itertools.groupby(ranks):
        size = len(list(members))
        found.append((first, size, documents))
        first += size
    return found


def plan_context_groups(prices: GroupPrices, count_multiple: int = 1) -> tuple[RankDocuments, ...]:
    """Micro-batches of a step, the fastest of those tried.

    Args:
        count_multiple: what the number of micro-batches has to be a multiple of.

    Raises:
        InfeasiblePlanError: a document that all ranks together have no room for; fewer documents than micro-batches.
    """
    if not len(prices.num_tokens):
        return ()
    widest = prices.share_tokens(prices.num_ranks)
    if widest.max() > prices.room_tokens:
        raise InfeasiblePlanError(
            f"a document of {int(prices.num_tokens[widest.argmax()])} tokens takes {int(widest.max())} on each of "
            f"{prices.num_ranks} ranks, and a rank may hold {prices.room_tokens}; raise that limit, use more ranks, or "
            "shorten the document"
        )
    tried = (_under_ceiling(prices, ceiling_s, count_multiple) for ceiling_s in _ceilings(prices))
    found = [micro_batches for micro_batches in tried if micro_batches is not None]
    if not found:
        raise InfeasiblePlanError(
            f"{len(prices.num_tokens)} documents cannot fill a multiple of {count_multiple} micro-batches on "
            f"{prices.num_ranks} ranks; use more documents a step, or micro_batch_group_size_per_vp_stage of less"
        )
    return min(found, key=lambda micro_batches: step_seconds(prices, micro_batches))


def _ceilings(prices: GroupPrices) -> list[float]:
    """Of seconds of one document in its group: none, fractions of the even share, and 0 (the most ranks that pay)."""
    even_s = float(prices.seconds.min(axis=0).sum()) / prices.num_ranks
    return [np.inf, *(even_s * 2.0 ** (1 - 0.5 * step) for step in range(_CEILINGS - 3)), 0.0, -1.0]


def _under_ceiling(prices: GroupPrices, ceiling_s: float, multiple: int) -> tuple[RankDocuments, ...] | None:
    """Steps 1 to 3 of the module's docstring; None where micro-batches cannot be made equally many. A ceiling below 0
    shares everything among all ranks."""
    num_ranks = prices.num_ranks
    chosen = _chosen_sizes(prices, ceiling_s)
    busy_s = np.zeros(num_ranks)
    blocks: list[_Block] = []
    for row in reversed(range(len(prices.sizes))):
        documents = np.flatnonzero(chosen == row)
        size, seconds = prices.sizes[row], prices.seconds[row]
        members: dict[int, list[int]] = {}
        for document in documents[np.argsort(-seconds[documents], kind="stable")].tolist():
            first = int(busy_s[::size].argmin()) * size
            busy_s[first : first + size] += seconds[document]
            members.setdefault(first, []).append(document)
        shares = prices.share_tokens(size)
        blocks += [
            _Block(first, size, _first_fit(documents, shares, prices)) for first, documents in sorted(members.items())
        ]
    used = np.zeros(num_ranks, np.int64)
    for block in blocks:
        used[block.ranks] += len(block.packs)
    wanted = -(-int(used.max()) // multiple) * multiple
    # Small groups first: what they divide changes fewest ranks, and no transfers.
    for block in sorted(blocks, key=lambda block: block.size):
        while used[block.ranks].max() < wanted and block.divide(prices.num_tokens):
            used[block.ranks] += 1
    if (used != wanted).any():
        return None
    return _by_rank(blocks, num_ranks, wanted)


@dataclass(frozen=True, eq=False)
class _Block:
    """Ranks `first` to `first + size` that share packs, and these."""

    first: int
    size: int
    packs: list[list[int]]

    @property
    def ranks(self) -> slice:
        return slice(self.first, self.first + self.size)

    def divide(self, num_tokens: NDArray[np.int64]) -> bool:
        """One pack becomes two; False where all hold one document."""
        most = max(self.packs, key=len)
        if len(most) < 2:
            return False
        self.packs.remove(most)
        descending = sorted(most, key=lambda document: -int(num_tokens[document]))
        self.packs.extend((descending[::2], descending[1::2]))
        return True


def _chosen_sizes(prices: GroupPrices, ceiling_s: float) -> NDArray[np.int64]:
    """Of every document the index of its group's size."""
    rows = np.arange(len(prices.sizes))[:, None]
    if ceiling_s < 0:
        return np.full(len(prices.num_tokens), len(prices.sizes) - 1)
    fits = np.array([prices.share_tokens(size) <= prices.room_tokens for size in prices.sizes])
    seconds = np.where(fits, prices.seconds, np.inf)
    fewest = np.where(seconds <= ceiling_s, rows, len(rows)).min(axis=0)
    return (
        np.where(fewest < len(rows), fewest, seconds.argmin(axis=0)) if np.isfinite(ceiling_s) else fits.argmax(axis=0)
    )


def _first_fit(documents: list[int], shares: NDArray[np.int64], prices: GroupPrices) -> list[list[int]]:
    most = len(documents) if prices.most_documents is None else prices.most_documents
    packs: list[list[int]] = []
    left: list[int] = []
    for document in sorted(documents, key=lambda document: (-int(shares[document]), document)):
        share = int(shares[document])
        fitting = (index for index, tokens in enumerate(left) if tokens >= share and len(packs[index]) < most)
        place = next(fitting, len(packs))
        if place == len(packs):
            packs.append([])
            left.append(prices.room_tokens)
        packs[place].append(document)
        left[place] -= share
    return packs


def _by_rank(blocks: list[_Block], num_ranks: int, count: int) -> tuple[RankDocuments, ...]:
    """Micro-batch by micro-batch; blocks come from the largest to the smallest."""
    columns: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    for block in blocks:
        for pack in block.packs:
            for rank in range(block.first, block.first + block.size):
                columns[rank].append(tuple(sorted(pack)))
    return tuple(tuple(columns[rank][index] for rank in range(num_ranks)) for index in range(count))
