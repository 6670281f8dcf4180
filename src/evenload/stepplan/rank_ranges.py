"""Which tokens of shared packs each rank of a context-parallel group computes: the geometry of the sharding rules.

    per_sequence   the pack as one sequence in 2·cp chunks; rank r computes chunks r and 2·cp - 1 - r. Equal tokens,
                   but documents cut anywhere: attention is uneven.
    per_document   every slice in 2·cp chunks, rank r computes a symmetric pair. Equal tokens (± 1) and equal
                   attention; many short pieces waste kernel tiles. Padding-free: the tokens beyond a multiple of
                   2·cp make chunks one longer, round robin over ranks through all slices of a pack. (WLB §5.1 assigns
                   them as separate one-token pieces, each of which would cost a whole tile.)
    owners         a slice whole on its owner; those of owner -1 per document

No prices: which rule a pack gets is the planner's choice (`plan.cp_sharding`). O(slices · cp) numpy, for any
number of packs at once.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class RankRanges:
    """Who computes what: rank `rank[i]` of the group computes tokens `[start[i], stop[i])` of slice `piece[i]`.

    Args:
        rank, piece: int64[n].
        start, stop: int64[n], positions in the document; not empty.
    """

    rank: NDArray[np.int64]
    piece: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


def joined(ranges: RankRanges) -> RankRanges:
    """By slice, rank and position; neighbours of one slice and rank are one range, as they are one kernel call."""
    order = np.lexsort((ranges.start, ranges.rank, ranges.piece))
    rank, piece, start, stop = (column[order] for column in (ranges.rank, ranges.piece, ranges.start, ranges.stop))
    is_new = np.ones(len(piece), bool)
    is_new[1:] = (piece[1:] != piece[:-1]) | (rank[1:] != rank[:-1]) | (start[1:] != stop[:-1])
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(piece))[: len(first)] - 1
    return RankRanges(rank[first], piece[first], start[first], stop[last])


def ranges_per_sequence(
    start: NDArray[np.int64], stop: NDArray[np.int64], pack_offset: NDArray[np.int64], cp: int
) -> RankRanges:
    """Every pack as one sequence.

    Args:
        start, stop: int64[k], the packs' slices; not empty.
        pack_offset: int64[p + 1]; pack i holds slices `[pack_offset[i], pack_offset[i + 1])`.
        cp: ranks.
    """
    # All packs are laid end to end, so that a pack's first token is a border of a chunk.
    ends = np.cumsum(stop - start)
    pack_ends = np.concatenate([[0], ends])[pack_offset]
    chunks = _chunk_tokens(np.diff(pack_ends), np.arange(len(pack_ends)), cp)
    edges = np.concatenate([[0], np.cumsum(chunks.ravel())])
    # Every border of a chunk and of a slice starts a new range.
    borders = np.unique(np.concatenate([edges, ends]))
    low, high = borders[:-1], borders[1:]
    piece = np.searchsorted(ends, low, side="right")
    chunk = (np.searchsorted(edges, low, side="right") - 1) % (2 * cp)
    shift = start[piece] - (ends - (stop - start))[piece]
    return RankRanges(_rank_of_chunk(chunk, cp), piece, low + shift, high + shift)


def ranges_by_owner(
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    owner: NDArray[np.int64],
    pack_offset: NDArray[np.int64],
    cp: int,
) -> RankRanges:
    """Slices whole on their owner; those of owner -1 per document.

    Args:
        start, stop, pack_offset, cp: see `ranges_per_sequence`.
        owner: int64[k], a rank or -1.
    """
    shared, whole = np.flatnonzero(owner < 0), np.flatnonzero(owner >= 0)
    chunks = _chunk_tokens((stop - start)[shared], np.searchsorted(shared, pack_offset), cp)
    high = start[shared][:, None] + np.cumsum(chunks, axis=1)
    used = (chunks > 0).ravel()
    return RankRanges(
        np.concatenate([np.tile(_rank_of_chunk(np.arange(2 * cp), cp), len(shared))[used], owner[whole]]),
        np.concatenate([np.repeat(shared, 2 * cp)[used], whole]),
        np.concatenate([(high - chunks).ravel()[used], start[whole]]),
        np.concatenate([high.ravel()[used], stop[whole]]),
    )


def _rank_of_chunk(chunk: NDArray[np.int64], cp: int) -> NDArray[np.int64]:
    return np.minimum(chunk, 2 * cp - 1 - chunk)


def _chunk_tokens(tokens: NDArray[np.int64], offset: NDArray[np.int64], cp: int) -> NDArray[np.int64]:
    """Tokens of the 2·cp chunks of every sequence; int64[k, 2·cp]. Over a pack ranks differ by at most one.

    Args:
        offset: int64[p + 1], the sequences of every pack.
    """
    base, extra = np.divmod(tokens, 2 * cp)
    before = np.concatenate([[0], np.cumsum(extra)])
    first = before[:-1] - np.repeat(before[offset[:-1]], np.diff(offset))  # the next rank in turn
    turn = (np.arange(cp)[None, :] - first[:, None]) % cp
    once, twice = (turn < extra[:, None]).astype(np.int64), (turn + cp < extra[:, None]).astype(np.int64)
    # In the early chunk in one round of ranks, in the late one in the next: a token that opens a tile costs by what
    # it sees, and always early would be cheap for rank 0 and expensive for the last.
    is_late = (first // cp % 2 == 1)[:, None]
    head = base[:, None] + np.where(is_late, twice, once)
    tail = base[:, None] + np.where(is_late, once, twice)
    return np.concatenate([head, tail[:, ::-1]], axis=1)
