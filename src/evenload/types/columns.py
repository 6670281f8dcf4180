"""Hold packs as flat numpy columns, on which planners work (`SliceColumns`), and price token ranges (`WorkCurve`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.errors import ConfigError
from evenload.types.document import Direction, MicroPack, PackSharding, Slice
from evenload.types.timeline import joined

PackSlices = tuple[tuple[Slice, ...], ...]  # the slices of every pack


@dataclass(frozen=True, eq=False)
class SliceColumns:
    """All packs of one direction.

    Args:
        doc: int32[num_slices], index into the replica's document arrays (not the doc_id).
        start, stop: int64[num_slices], half-open token range.
        pack_offset: int64[num_packs + 1]; pack i holds slices `[pack_offset[i], pack_offset[i+1])`.
        pad_to: int64[num_packs], 0 where slices are not padded.
        cp: int64[num_slices], ranks that share each slice.
    """

    doc: NDArray[np.int32]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    pack_offset: NDArray[np.int64]
    pad_to: NDArray[np.int64]
    cp: NDArray[np.int64]

    @classmethod
    def from_ranges(cls, packs: Sequence[Sequence[tuple[int, int, int]]], cp: int = 1) -> "SliceColumns":
        """Make packs without padding from (document, start, stop), each shared by `cp` ranks."""
        flat = np.array([piece for pack in packs for piece in pack], np.int64).reshape(-1, 3)
        return cls(
            doc=flat[:, 0].astype(np.int32),
            start=flat[:, 1].copy(),
            stop=flat[:, 2].copy(),
            pack_offset=offsets_of([len(pack) for pack in packs]),
            pad_to=np.zeros(len(packs), np.int64),
            cp=np.full(len(flat), cp, np.int64),
        )

    @classmethod
    def concat(cls, parts: Sequence["SliceColumns"], first_doc: Sequence[int]) -> "SliceColumns":
        """Concatenate packs; `first_doc` is the new index of each part's document 0."""
        return cls(
            doc=np.concatenate([part.doc + np.int32(doc) for part, doc in zip(parts, first_doc, strict=True)]),
            pack_offset=offsets_of(np.concatenate([np.diff(part.pack_offset) for part in parts])),
            **joined(parts, ("start", "stop", "pad_to", "cp")),
        )

    @property
    def num_packs(self) -> int:
        """Packs."""
        return len(self.pack_offset) - 1

    @property
    def num_slices(self) -> int:
        """Slices in all packs."""
        return len(self.doc)

    def pack_of_slice(self) -> NDArray[np.int64]:
        """Return the pack of each slice; int64[num_slices]."""
        return np.repeat(np.arange(self.num_packs), np.diff(self.pack_offset))

    def pack_ranks(self) -> NDArray[np.int64]:
        """Return the number of ranks that share each pack, the most of any of its slices; int64[num_packs]."""
        ranks = np.ones(self.num_packs, np.int64)
        np.maximum.at(ranks, self.pack_of_slice(), self.cp)
        return ranks

    def pack_sums(self, values: NDArray) -> NDArray[np.float64]:
        """Sum a per-slice column over each pack; float64[num_packs]."""
        sums = np.bincount(self.pack_of_slice(), weights=values, minlength=self.num_packs)
        return sums.astype(np.float64, copy=False)

    def taken(self, index: NDArray[np.int64], pack: NDArray[np.int64], num_packs: int) -> "SliceColumns":
        """Take slices by index, without padding; `pack` is the new pack of each, not falling."""
        return SliceColumns(
            pack_offset=offsets_of(np.bincount(pack, minlength=num_packs)),
            pad_to=np.zeros(num_packs, np.int64),
            **self._of_slices(index),
        )

    def _of_slices(self, index: NDArray[np.int64] | slice) -> dict[str, NDArray]:
        return {name: getattr(self, name)[index] for name in ("doc", "start", "stop", "cp")}

    def pack_range(self, first: int, last: int) -> "SliceColumns":
        """Return the packs `[first, last)`."""
        lo, hi = self.pack_offset[[first, last]].tolist()
        return SliceColumns(
            pack_offset=self.pack_offset[first : last + 1] - lo,
            pad_to=self.pad_to[first:last],
            **self._of_slices(slice(lo, hi)),
        )

    def slice_tokens(self) -> NDArray[np.int64]:
        """Return the tokens of each slice, padding included; int64[num_slices]."""
        tokens = self.stop - self.start
        if not self.pad_to.any():
            return tokens
        pad_to = self.pad_to[self.pack_of_slice()]
        return np.where(pad_to > 0, pad_to, tokens)

    def pack_tokens(self) -> NDArray[np.int64]:
        """Return the tokens of each pack, padding included; int64[num_packs]."""
        return self.pack_sums(self.slice_tokens()).astype(np.int64)

    def rank_tokens(self) -> NDArray[np.int64]:
        """Return the tokens of each pack on one of the ranks that share it, padding included; int64[num_packs]."""
        return self.pack_sums(-(-self.slice_tokens() // self.cp)).astype(np.int64)

    def pack_slices(self, doc_ids: NDArray[np.int64]) -> PackSlices:
        """Return the slices of every pack as objects; `doc_ids`, int64[num_documents], are by document index."""
        columns = (doc_ids[self.doc].tolist(), self.start.tolist(), self.stop.tolist(), self.cp.tolist())
        slices = tuple(
            Slice(doc_id=doc_id, start=start, stop=stop, cp=ranks)
            for doc_id, start, stop, ranks in zip(*columns, strict=True)
        )
        return tuple(slices[lo:hi] for lo, hi in pairwise(self.pack_offset.tolist()))

    def packs(
        self,
        direction: Direction,
        slices: PackSlices,
        cost_s: NDArray[np.float64],
        shardings: Sequence[PackSharding] = (),
    ) -> tuple[MicroPack, ...]:
        """Return the packs as objects, with `slices` from `pack_slices`, `cost_s` float64[num_packs], and the sharding
        of every pack; () = none is shared, or these are backward packs."""
        unshared: tuple[PackSharding, ...] = ("",) * self.num_packs
        rows = zip(slices, self.pad_to.tolist(), shardings or unshared, cost_s.tolist(), strict=True)
        return tuple(
            MicroPack(index=i, direction=direction, slices=own, pad_to=pad_to, sharding=sharding, cost_s=seconds)
            for i, (own, pad_to, sharding, seconds) in enumerate(rows)
        )


def cuts_within(slices: SliceColumns, other: SliceColumns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count, for every slice, the cuts that the other direction makes in its document from its start to before its
    stop, and those of them that are not its own start; int64[num_slices] each."""
    span = 1 + max(int(slices.stop.max(initial=0)), int(other.stop.max(initial=0)))
    cut = other.start > 0
    edges = np.sort(other.doc[cut].astype(np.int64) * span + other.start[cut])
    first = slices.doc.astype(np.int64) * span + slices.start
    before = np.searchsorted(edges, first + slices.stop - slices.start)
    return before - np.searchsorted(edges, first), before - np.searchsorted(edges, first, side="right")


def whole_document_columns(
    groups: Sequence[Sequence[int]], num_tokens: NDArray[np.int64], cp: int = 1, *, padded: bool = False
) -> SliceColumns:
    """Make packs of whole documents, each shared by `cp` ranks, from the document indices of every pack in order and
    int64[num_documents] lengths; `padded` to the longest of their pack, no pack is empty."""
    sizes = np.array([len(group) for group in groups], np.int64)
    doc = np.fromiter(chain.from_iterable(groups), np.int32, int(sizes.sum()))
    stop, pack_offset = num_tokens[doc].astype(np.int64), offsets_of(sizes)
    pad_to = np.zeros(len(groups), np.int64)
    if padded and len(groups):
        pad_to = np.where(sizes > 1, np.maximum.reduceat(stop, pack_offset[:-1]), 0)
    return SliceColumns(doc, np.zeros(len(doc), np.int64), stop, pack_offset, pad_to, np.full(len(doc), cp, np.int64))


def offsets_of(counts: ArrayLike) -> NDArray[np.int64]:
    """Return where each of so many things begins among all, and the end; int64[n + 1]."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def causal_pairs(start: ArrayLike, stop: ArrayLike, window: int = 0) -> NDArray[np.float64]:
    """Count (query, key) pairs of the queries `[start, stop)` of causal documents, arrays of one shape; query t sees
    `min(t + 1, window)` keys, `window` 0 = all; negative = those of its chunk of so many tokens. Exact below 2**53."""
    return _pairs_below(np.asarray(stop, np.float64), window) - _pairs_below(np.asarray(start, np.float64), window)


def _pairs_below(tokens: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    if not window:
        return tokens * (tokens + 1) * 0.5
    if window < 0:
        whole = np.floor(tokens / -window)
        rest = tokens + whole * window
        return whole * (-window * (1 - window) * 0.5) + rest * (rest + 1) * 0.5
    inside = np.minimum(tokens, window)
    return inside * (inside + 1) * 0.5 + (tokens - inside) * window


def keys_before(edge: NDArray, window: int) -> NDArray:
    """Count the keys before an edge of slices that a window, or a chunk (negative), lets their rows see; 0 = all."""
    if not window:
        return edge
    return np.minimum(edge, window) if window > 0 else edge - np.floor(edge / -window).astype(edge.dtype) * -window


@dataclass(frozen=True)
class WorkCurve:
    """Seconds of token ranges: `linear_s (b - a) + sum_i coef_i pairs_i(a, b) + slice_s` for tokens `[a, b)`.

    Monotone in b and, for a fixed b, in b - a; partitioners rely on it.

    Args:
        linear_s: seconds a token.
        attention_s: (seconds a pair, window in tokens) terms; 0 = full causal attention, negative = chunks.
        slice_s: seconds of every slice whatever its length.
    """

    linear_s: float
    attention_s: tuple[tuple[float, int], ...] = ()
    slice_s: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.linear_s, self.slice_s, *(coef for coef, _ in self.attention_s))
        if not all(0.0 <= number < float("inf") for number in numbers):
            raise ConfigError(f"work curve: {self} has a negative or non-finite coefficient")
