"""How the ranks of a context-parallel group share the tokens of a pack (DESIGN §5, WLB §5, Skrull §4.1).

    per_sequence   the pack as one sequence in 2·cp chunks; rank r computes chunks r and 2·cp - 1 - r. Equal tokens,
                   but documents cut anywhere: attention is uneven.
    per_document   every document in 2·cp chunks, rank r computes a symmetric pair. Equal tokens (± 1) and equal
                   attention; many short pieces waste kernel tiles. Padding-free: the tokens beyond a multiple of
                   2·cp make chunks one longer, dealt round robin over ranks through all documents. (WLB §5.1 deals
                   them as separate one-token pieces, each of which would cost a whole tile.)
    adaptive       the faster of the two by predicted time, tiles included (WLB §5.3)
    mixed          long documents per document, short ones whole on one rank, longest first to the least loaded; the
                   bound between long and short by predicted time, both of the above among the choices. Beyond WLB.
    dacp           Skrull's: `plan.dacp` says which documents are whole; transfers of the others overlap the compute
                   of the whole ones

Predicted seconds are of one stage forward: linear work, attention with incomplete tiles at their full price, a constant
a piece, and the transfers of keys and values that attention (dacp: local documents) does not hide.
O(documents · cp) numpy; below 1 ms for a pack of 256K tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.plan.bin_packing import longest_first
from evenload.types.work import WorkCurve

MIXED_BOUNDS = (1, 4, 16)
"""Documents of at least so many tiles a chunk count as long; all are tried."""


@dataclass(frozen=True)
class ShardingCost:
    """What deciding needs to know.

    Args:
        work: seconds of a token range on one stage.
        tile: query rows of one attention block.
        gather_s_per_token: transfer of one token's keys and values to all ranks of the group.
        hidden_share: of a rank's attention, behind which transfers hide.
        prefix_travels: with every slice go the keys and values of its prefix (a ring).
    """

    work: WorkCurve
    tile: int = 1
    gather_s_per_token: float = 0.0
    hidden_share: float = 0.8
    prefix_travels: bool = False


@dataclass(frozen=True, eq=False)
class Sharding:
    """Who computes what.

    Args:
        name: the rule that made it.
        rank, piece: int32[n]; rank `rank[i]` computes tokens `[start[i], stop[i])` of slice `piece[i]` of the pack.
        start, stop: int64[n], positions in the document; not empty.
        rank_s: float64[cp], predicted seconds of every rank.
    """

    name: str
    rank: NDArray[np.int32]
    piece: NDArray[np.int32]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    rank_s: NDArray[np.float64]

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""
        return float(self.rank_s.max())

    def rank_tokens(self) -> NDArray[np.int64]:
        """Tokens of every rank; int64[cp]."""
        tokens = np.bincount(self.rank, weights=self.stop - self.start, minlength=len(self.rank_s))
        return tokens.astype(np.int64)


def shard_pack(
    rule: str,
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    cp: int,
    cost: ShardingCost,
    owner: NDArray[np.int64] | None = None,
) -> Sharding:
    """Share one pack.

    Args:
        rule: a name of the module's table.
        start, stop: int64[k], the pack's slices; `start` is the length of the prefix in front.
        cp: ranks.
        owner: int64[k], only for `dacp`: the rank that computes each slice whole, -1 = all of them.

    Raises:
        ConfigError: an unknown rule, no ranks, or `owner` given or missing.
    """
    if cp < 1:
        raise ConfigError(f"cp sharding: cp is {cp}, must be at least 1")
    if (rule == "dacp") != (owner is not None):
        raise ConfigError(f"cp sharding: rule {rule} and owner do not fit; dacp needs the owner of every slice")
    start, stop = np.asarray(start, np.int64), np.asarray(stop, np.int64)
    if owner is not None:
        return _owned("dacp", start, stop, np.asarray(owner, np.int64), cp, cost, overlaps_local=True)
    if rule == "per_sequence":
        return _per_sequence(start, stop, cp, cost)
    if rule == "per_document":
        return _owned(rule, start, stop, np.full(len(start), -1), cp, cost)
    if rule == "adaptive":
        return _fastest(rule, [shard_pack(name, start, stop, cp, cost) for name in ("per_sequence", "per_document")])
    if rule == "mixed":
        return _mixed(start, stop, cp, cost)
    raise ConfigError(f"unknown cp sharding '{rule}'; available: per_sequence, per_document, adaptive, mixed, dacp")


def _per_sequence(start: NDArray[np.int64], stop: NDArray[np.int64], cp: int, cost: ShardingCost) -> Sharding:
    ends = np.cumsum(stop - start)
    total = int(ends[-1]) if len(ends) else 0
    edges = np.concatenate([[0], np.cumsum(_chunk_tokens(np.array([total]), cp)[0])])
    # Every border of a chunk and of a document starts a new range.
    borders = np.unique(np.concatenate([edges, ends]))
    low, high = borders[:-1], borders[1:]
    piece = np.searchsorted(ends, low, side="right")
    chunk = np.searchsorted(edges, low, side="right") - 1
    shift = start[piece] - (ends - (stop - start))[piece]
    rank = np.minimum(chunk, 2 * cp - 1 - chunk)
    return _priced("per_sequence", rank, piece, low + shift, high + shift, cp, cost, _travelling(start, stop, cost))


def _chunk_tokens(tokens: NDArray[np.int64], cp: int) -> NDArray[np.int64]:
    """Tokens of the 2·cp chunks of every sequence; int64[k, 2·cp]. Over all sequences ranks differ by at most one."""
    base, extra = np.divmod(tokens, 2 * cp)
    first = np.cumsum(extra) - extra  # the next rank in turn
    turn = (np.arange(cp)[None, :] - first[:, None]) % cp
    once, twice = (turn < extra[:, None]).astype(np.int64), (turn + cp < extra[:, None]).astype(np.int64)
    # In the early chunk in one round of ranks, in the late one in the next: a token that opens a tile costs by what
    # it sees, and always early would be cheap for rank 0 and dear for the last.
    is_late = (first // cp % 2 == 1)[:, None]
    head = base[:, None] + np.where(is_late, twice, once)
    tail = base[:, None] + np.where(is_late, once, twice)
    return np.concatenate([head, tail[:, ::-1]], axis=1)


def _owned(
    name: str,
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    owner: NDArray[np.int64],
    cp: int,
    cost: ShardingCost,
    *,
    overlaps_local: bool = False,
) -> Sharding:
    """Slices whole on their owner; those of owner -1 per document."""
    shared, whole = np.flatnonzero(owner < 0), np.flatnonzero(owner >= 0)
    chunks = _chunk_tokens(stop[shared] - start[shared], cp)
    high = start[shared][:, None] + np.cumsum(chunks, axis=1)
    chunk = np.arange(2 * cp)
    used = (chunks > 0).ravel()
    return _priced(
        name,
        np.concatenate([np.tile(np.minimum(chunk, 2 * cp - 1 - chunk), len(shared))[used], owner[whole]]),
        np.concatenate([np.repeat(shared, 2 * cp)[used], whole]),
        np.concatenate([(high - chunks).ravel()[used], start[whole]]),
        np.concatenate([high.ravel()[used], stop[whole]]),
        cp,
        cost,
        _travelling(start[shared], stop[shared], cost),
        num_shared=int(used.sum()) if overlaps_local else None,
    )


def _mixed(start: NDArray[np.int64], stop: NDArray[np.int64], cp: int, cost: ShardingCost) -> Sharding:
    found = [shard_pack(name, start, stop, cp, cost) for name in ("per_sequence", "per_document")]
    tokens = stop - start
    seconds = _range_seconds(start, stop, cost)
    tried: set[int] = set()
    for bound in MIXED_BOUNDS:
        short = np.flatnonzero(tokens < bound * 2 * cp * cost.tile)
        if len(short) in tried or not len(short):
            continue
        tried.add(len(short))
        owner = np.full(len(start), -1)
        for rank, members in enumerate(longest_first(seconds[short], cp)):
            owner[short[members]] = rank
        found.append(_owned("mixed", start, stop, owner, cp, cost))
    return _fastest("mixed", found)


def _fastest(name: str, found: list[Sharding]) -> Sharding:
    best = min(found, key=lambda sharding: sharding.seconds)
    return Sharding(name, best.rank, best.piece, best.start, best.stop, best.rank_s)


def _priced(
    name: str,
    rank: NDArray[np.int64],
    piece: NDArray[np.int64],
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    cp: int,
    cost: ShardingCost,
    gathered_tokens: float,
    num_shared: int | None = None,
) -> Sharding:
    """Add up ranks. With `num_shared`, transfers hide behind the ranges after the first so many, all of their time."""
    seconds = _range_seconds(start, stop, cost)
    compute_s = np.bincount(rank, weights=seconds, minlength=cp).astype(np.float64, copy=False)
    gather_s = cost.gather_s_per_token * gathered_tokens if cp > 1 else 0.0
    if num_shared is None:
        linear_s = cost.work.linear_s * (stop - start) + cost.work.slice_s
        hidden_s = cost.hidden_share * np.bincount(rank, weights=seconds - linear_s, minlength=cp)
    else:
        hidden_s = np.bincount(rank[num_shared:], weights=seconds[num_shared:], minlength=cp)
    return Sharding(
        name,
        rank.astype(np.int32),
        piece.astype(np.int32),
        start,
        stop,
        compute_s + np.maximum(0.0, gather_s - hidden_s),
    )


def _travelling(start: NDArray[np.int64], stop: NDArray[np.int64], cost: ShardingCost) -> float:
    """Tokens whose keys and values go to all ranks."""
    return float((stop if cost.prefix_travels else stop - start).sum())


def _range_seconds(start: NDArray[np.int64], stop: NDArray[np.int64], cost: ShardingCost) -> NDArray[np.float64]:
    """Of every range; rows that it lacks to whole tiles cost like its last row."""
    seconds = cost.work.slice_works_s(start, stop)
    missing = -(stop - start) % cost.tile
    for coefficient, window in cost.work.attention_s:
        seconds = seconds + coefficient * missing * (np.minimum(stop, window) if window else stop)
    return seconds
