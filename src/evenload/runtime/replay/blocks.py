"""`BlockIndex`: which recorded rows are kept together, and where token ranges lie in them.

A *block* is a run of slices of one forward pack with one activation policy whose first tokens come back in one backward
pack. A slice may be freed when the backward of its first token is over (`cost.memory`), so a block's slices are freed
at the same moment, and one tensor for all of them holds no byte longer than one tensor each. A forward pack with all
its slices in one block is kept as it was recorded, uncut.

Price: a slice costs Python when a pack is opened, looked up and closed, not for every tensor of every layer: 8 layers
record about 80 tensors.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from evenload.runtime.comm.tensor_group import RowShard
from evenload.runtime.replay.host_arena import HostRows
from evenload.types.micropack import ActivationPolicy
from evenload.types.token_range import Range


@dataclass(eq=False)
class StoredBlock:
    """Recorded tensors of the rows of `ranges`, freed when the last of them is done.

    Args:
        rows, own_rows: in the forward pack; own rows are those of a tensor-parallel rank, of others all.
        tensors: on the device; host: by layer, in host memory.
        leaving: of the layer being recorded, still on the device and on its way to the host.
    """

    ranges: tuple[Range, ...]
    policy: ActivationPolicy
    rows: slice
    own_rows: slice
    open_ranges: int
    tensors: dict[Hashable, Tensor] = field(default_factory=dict)
    host: dict[int, dict[Hashable, HostRows]] = field(default_factory=dict)
    leaving: dict[Hashable, Tensor] = field(default_factory=dict)
    num_bytes: int = 0
    num_host_bytes: int = 0


class Part(NamedTuple):
    """Rows of a block, of all its rows and of its own rows."""

    block: StoredBlock
    rows: slice
    own_rows: slice

    def of(self, tensor: Tensor, *, own: bool) -> Tensor:
        """These rows of a tensor of the block; the tensor itself where they are all."""
        rows = self.own_rows if own else self.rows
        return tensor if rows.stop - rows.start == tensor.shape[0] else tensor[rows]

    def num_rows(self, *, own: bool) -> int:
        rows = self.own_rows if own else self.rows
        return rows.stop - rows.start


class _Place(NamedTuple):
    """A recorded range, and its first rows in its block."""

    range: Range
    row: int
    own_row: int
    block: StoredBlock


class BlockIndex:
    """The blocks of one stage during one step.

    Args:
        backward_packs: their ranges; ranges that are in none are blocks of their own.
        policy: of a document.
        shard: of a tensor-parallel rank.
    """

    def __init__(
        self,
        backward_packs: Sequence[tuple[Range, ...]],
        policy: Callable[[int], ActivationPolicy],
        shard: RowShard | None,
    ) -> None:
        self._policy, self._shard = policy, shard
        self._places: dict[int, list[_Place]] = defaultdict(list)
        self._parts: dict[tuple[Range, ...], list[Part]] = {}
        backward: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for pack, ranges in enumerate(backward_packs):
            for doc_id, start, _ in ranges:
                backward[doc_id].append((start, pack))
        self._backward = {doc_id: sorted(starts) for doc_id, starts in backward.items()}

    def open_pack(self, ranges: tuple[Range, ...]) -> list[StoredBlock]:
        """The blocks of a new forward pack, in row order."""
        self._parts.clear()
        blocks: list[StoredBlock] = []
        kind = None
        row = own_row = 0
        for r in ranges:
            policy = self._policy(r[0])
            before, kind = kind, (policy, self._freed_by(r[0], r[1]))
            if kind != before or kind[1] is None:
                blocks.append(StoredBlock((), policy, slice(row, row), slice(own_row, own_row), 0))
            block = blocks[-1]
            place = _Place(r, row - block.rows.start, own_row - block.own_rows.start, block)
            self._places[r[0]].append(place)
            row += r[2] - r[1]
            own_row += r[2] - r[1] if self._shard is None else self._shard.num_rows((r,))
            block.ranges += (r,)
            block.open_ranges += 1
            block.rows, block.own_rows = slice(block.rows.start, row), slice(block.own_rows.start, own_row)
        return blocks

    def parts(self, ranges: tuple[Range, ...]) -> list[Part]:
        """Where ranges were recorded, in row order; neighbours in a block are one part."""
        if ranges not in self._parts:
            parts: list[Part] = []
            for part in (part for r in ranges for part in self._parts_of(r)):
                last = parts[-1] if parts else None
                if last is not None and last.block is part.block and last.rows.stop == part.rows.start:
                    rows, own = slice(last.rows.start, part.rows.stop), slice(last.own_rows.start, part.own_rows.stop)
                    parts[-1] = Part(part.block, rows, own)
                else:
                    parts.append(part)
            self._parts[ranges] = parts
        return self._parts[ranges]

    def close(self, ranges: Iterable[Range]) -> list[StoredBlock]:
        """A backward of these ranges is over: the blocks that nobody needs any more."""
        self._parts.clear()
        done = []
        for doc_id, start, _ in ranges:
            kept = []
            for place in self._places[doc_id]:
                if place.range[1] < start:
                    kept.append(place)
                    continue
                place.block.open_ranges -= 1
                if not place.block.open_ranges:
                    done.append(place.block)
            self._places[doc_id] = kept
            if start == 0:
                del self._places[doc_id]
        return done

    def unfinished(self) -> set[int]:
        """Documents with rows that are still kept."""
        return {doc_id for doc_id, places in self._places.items() if places}

    def _freed_by(self, doc_id: int, token: int) -> int | None:
        """The backward pack with a slice's first token."""
        starts = self._backward.get(doc_id, ())
        at = bisect_right(starts, token, key=lambda entry: entry[0])
        return starts[at - 1][1] if at else None

    def _parts_of(self, wanted: Range) -> Iterable[Part]:
        doc_id, start, stop = wanted
        for (_, lo, hi), row, own_row, block in self._places[doc_id]:
            if lo < stop and start < hi:
                first, last = max(lo, start), min(hi, stop)
                rows = slice(first - lo + row, last - lo + row)
                if self._shard is None:
                    yield Part(block, rows, rows)
                    continue
                own_start, own_stop = (
                    own_row + self._shard.num_rows((Range(doc_id, lo, position),)) for position in (first, last)
                )
                yield Part(block, rows, slice(own_start, own_stop))
