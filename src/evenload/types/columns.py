"""`SliceColumns`: packs as flat numpy columns, the form in which planners think.

Objects (`MicroPack`, `PackPlan`) are made once, for the chosen candidate only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evenload.types.document import Slice
from evenload.types.micropack import Direction, MicroPack

PackSlices = tuple[tuple[Slice, ...], ...]
"""Per pack its slices."""


@dataclass(frozen=True, eq=False)
class SliceColumns:
    """All packs of one direction.

    Args:
        doc: int32[num_slices], index into the replica's document arrays (not the doc_id).
        start, stop: int64[num_slices], half-open token range.
        pack_offset: int64[num_packs + 1]; pack i holds slices `[pack_offset[i], pack_offset[i+1])`.
        pad_to: int64[num_packs], 0 where slices are not padded.
        cp: int64[num_slices], ranks that share each slice; None = the context-parallel ranks of the layout.
    """

    doc: NDArray[np.int32]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    pack_offset: NDArray[np.int64]
    pad_to: NDArray[np.int64]
    cp: NDArray[np.int64] | None = None

    @property
    def num_packs(self) -> int:
        """Packs."""
        return len(self.pack_offset) - 1

    @property
    def num_slices(self) -> int:
        """Slices in all packs."""
        return len(self.doc)

    def pack_of_slice(self) -> NDArray[np.int64]:
        """int64[num_slices]: the pack each slice lies in."""
        return np.repeat(np.arange(self.num_packs), np.diff(self.pack_offset))

    def is_shared(self, layout_cp: int) -> NDArray[np.bool_]:
        """bool[num_packs]: several ranks share some slice of the pack."""
        cp = np.full(self.num_slices, layout_cp) if self.cp is None else self.cp
        return self.pack_sums(cp > 1) > 0

    def pack_sums(self, values: NDArray) -> NDArray[np.float64]:
        """Sum a per-slice column over each pack; float64[num_packs]."""
        sums = np.bincount(self.pack_of_slice(), weights=values, minlength=self.num_packs)
        return sums.astype(np.float64, copy=False)

    def dealt(self, chosen: NDArray[np.bool_], pack: NDArray[np.int64], num_packs: int) -> "SliceColumns":
        """Some slices, without padding, dealt into packs anew; in their order inside a pack.

        Args:
            chosen: bool[num_slices].
            pack: int64[num_slices], the new pack of every slice.
        """
        order = np.flatnonzero(chosen)[np.argsort(pack[chosen], kind="stable")]
        counts = np.bincount(pack[chosen], minlength=num_packs)
        return SliceColumns(
            doc=self.doc[order],
            start=self.start[order],
            stop=self.stop[order],
            pack_offset=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            pad_to=np.zeros(num_packs, np.int64),
            cp=None if self.cp is None else self.cp[order],
        )

    def pack_tokens(self) -> NDArray[np.int64]:
        """Real tokens of each pack; int64[num_packs]."""
        return self.pack_sums(self.stop - self.start).astype(np.int64)

    def pack_slices(self, doc_ids: NDArray[np.int64], *, layout_cp: int = 1) -> PackSlices:
        """The slices of every pack as objects; both directions may share them where they have the same packs.

        Args:
            doc_ids: int64[num_documents], the id of each document index.
            layout_cp: ranks that share a pack where `cp` is None.
        """
        cp = [layout_cp] * self.num_slices if self.cp is None else self.cp.tolist()
        columns = (doc_ids[self.doc].tolist(), self.start.tolist(), self.stop.tolist(), cp)
        slices = tuple(
            Slice(doc_id=doc_id, start=start, stop=stop, cp=ranks)
            for doc_id, start, stop, ranks in zip(*columns, strict=True)
        )
        return tuple(slices[lo:hi] for lo, hi in pairwise(self.pack_offset.tolist()))

    def packs(
        self,
        direction: Direction,
        doc_ids: NDArray[np.int64],
        cost_s: NDArray[np.float64],
        *,
        layout_cp: int = 1,
        sharding: str | Sequence[str] = "",
        slices: PackSlices | None = None,
    ) -> tuple[MicroPack, ...]:
        """The same packs as objects.

        Args:
            doc_ids: int64[num_documents], the id of each document index.
            cost_s: float64[num_packs].
            layout_cp: ranks that share a pack where `cp` is None.
            sharding: how several ranks share a pack; one for all shared packs, or one for every pack.
            slices: what `pack_slices` gave, where it is there already.
        """
        if slices is None:
            slices = self.pack_slices(doc_ids, layout_cp=layout_cp)
        pad_to, cost = self.pad_to.tolist(), cost_s.tolist()
        if isinstance(sharding, str):
            shardings = [sharding if shared else "" for shared in self.is_shared(layout_cp).tolist()]
        else:
            shardings = list(sharding)
        return tuple(
            MicroPack(
                index=i,
                direction=direction,
                slices=slices[i],
                pad_to=pad_to[i],
                sharding=shardings[i],
                cost_s=cost[i],
            )
            for i in range(self.num_packs)
        )


def whole_document_columns(
    groups: list[list[int]], num_tokens: NDArray[np.int64], *, padded: bool = False
) -> SliceColumns:
    """Packs of whole documents.

    Args:
        groups: per pack the document indices, in order.
        num_tokens: int64[num_documents].
        padded: every document of a pack is padded to the pack's longest.
    """
    doc = np.array([d for group in groups for d in group], dtype=np.int32)
    sizes = np.array([len(group) for group in groups], dtype=np.int64)
    pad_to = [int(num_tokens[group].max()) if padded and len(group) > 1 else 0 for group in groups]
    return SliceColumns(
        doc=doc,
        start=np.zeros(len(doc), dtype=np.int64),
        stop=num_tokens[doc].astype(np.int64),
        pack_offset=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        pad_to=np.array(pad_to, dtype=np.int64),
    )
