"""`HalvedAttention`: attention of a shared pack in two halves that take turns (`runtime/comm/turns.py`).

Each half has its own rows on every rank and its own gathers and sums, as if it were a pack. What halves cut of a
document they share as slices do, in the order in which they run: the second half sees keys of the first and adds to
their gradients, through the store or `between_halves.py`.

A rank may have rows of one half only, or of none. Then nothing takes turns: it computes its rows in one go, with the
transfers of both halves, layer by layer in the order of those that take turns.

Price: that of two packs, one more latency of every transfer; bytes are those of one go.
"""

import torch
from torch import Tensor

from evenload.runtime.comm.cp_groups import ContextGroup
from evenload.runtime.replay.context_attention import AttentionCall, PackAttention
from evenload.stepplan.rank_rows import PackRows


class HalvedAttention(PackAttention):
    """Both halves, one after the other: of a rank that has rows of one at most.

    Args:
        halves: of which each computes its own rows.
        first_rows: rows of this rank in the first.
    """

    def __init__(
        self,
        rows: PackRows,
        group: ContextGroup,
        label: str,
        halves: tuple[PackAttention, PackAttention],
        first_rows: int,
    ) -> None:
        super().__init__(rows, group, label)
        self.halves = halves
        self._first_rows = first_rows

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `PackAttention`."""
        found = [half.forward(call, q[rows], k[rows], v[rows]) for half, rows in self._with_rows(q.shape[0])]
        out, lse = zip(*found, strict=True)
        return torch.cat(out), torch.cat(lse)

    def backward(
        self, call: AttentionCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `PackAttention`; the second half first, as its rows see keys of the first."""
        found = [
            half.backward(call, grad[rows], q[rows], out[rows], lse[rows])
            for half, rows in reversed(self._with_rows(q.shape[0]))
        ]
        dq, dk, dv = zip(*reversed(found), strict=True)
        return torch.cat(dq), torch.cat(dk), torch.cat(dv)

    def _with_rows(self, rows: int) -> list[tuple[PackAttention, slice]]:
        """The halves of which there is something to do."""
        edges = slice(0, self._first_rows), slice(self._first_rows, rows)
        both = zip(self.halves, edges, strict=True)
        return [(half, mine) for half, mine in both if half.documents or mine.stop > mine.start]
