"""Ring context parallelism: keys and values travel round the group, so that no rank ever holds all of a document's.

    forward    hop h of cp: attention of own rows against the keys of rank r - h, merged by log-sum-exp, while they
               travel on to rank r + 1
    backward   the same with [keys, values]; their gradients travel behind them and are home after cp hops

The rows of a rank that are visible to one of its own ranges are a prefix of another rank's rows of the document (the
ranges of a plan do not overlap), so a hop is one call without a mask a range, and the own rows one causal call. Output
and log-sum-exp stay in fp32 (fp64) until the last hop.

Every rank keeps only its own rows of K, V and their gradients, of cut documents too; so a slice's hops carry its
document's whole prefix, and what travels grows with the number of slices times the document. `cost.group_comm` charges
just that (`CostCoefficients.context_exchange`); `cost.memory` charges the gathered form, an upper bound here. Documents
of one rank are computed under the first hop. A sliding window is refused: visible keys would be no prefix.

Source: Ring Attention (Liu et al. 2023), on the row sets of `plan.rank_rows`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from evenload.attention.merge_attention import merge_into
from evenload.attention.range_attention import FullAttention, RangeAttention
from evenload.errors import ConfigError
from evenload.plan.rank_rows import PackRows
from evenload.runtime.context_attention import AttentionCall, LocalAttention, rows_of, slice_ranges, work_dtype
from evenload.runtime.cp_groups import ContextGroup


@dataclass(frozen=True, eq=False)
class _Visit:
    """One of this rank's ranges against one rank's rows of the document.

    Args:
        rows: of this rank's pack.
        keys: of the travelling buffer; in the own one the last are those of `rows`.
    """

    rows: slice
    keys: slice


class RingAttention:
    """See the module and `context_attention.PackAttention`.

    Args:
        label: of the pack, for messages.
    """

    def __init__(self, rows: PackRows, group: ContextGroup, label: str) -> None:
        self._group = group
        self._label = label
        self._slices = rows.shared
        # Per rank and slice the rows of its document up to the slice's end: what travels.
        carried = [
            [piece.document.rows_before(rank, piece.stop) for piece in rows.shared] for rank in range(group.size)
        ]
        self._carried = carried[group.rank]
        self._new = [piece.document.rows_before(group.rank, piece.start) for piece in rows.shared]
        self._padded = max(map(sum, carried))
        self._visits: list[list[_Visit]] = [[] for _ in range(group.size)]
        row = 0
        self._first_rows = []
        for index, piece in enumerate(rows.shared):
            self._first_rows.append(row)
            mine = slice_ranges(piece, group.rank)
            for own, (_, start, stop) in rows_of(mine, row):
                for rank in range(group.size):
                    before = piece.document.rows_before(rank, stop if rank == group.rank else start)
                    at = sum(carried[rank][:index])
                    if before:
                        self._visits[rank].append(_Visit(own, slice(at, at + before)))
            row += sum(stop - start for _, start, stop in mine)
        self._num_shared = row
        self._local = LocalAttention(tuple(rows_of(rows.local[group.rank], row)))

    @property
    def group(self) -> ContextGroup:
        """See `PackAttention.group`."""
        return self._group

    @property
    def documents(self) -> tuple[int, ...]:
        """See `PackAttention.documents`."""
        return tuple(piece.document.doc_id for piece in self._slices)

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `PackAttention.forward`."""
        full = require_ring(call.backend, call.window)
        for piece, first, new in zip(self._slices, self._first_rows, self._new, strict=True):
            mine = slice(first, first + sum(stop - start for start, stop in piece.spans[self._group.rank]))
            call.store.record_keys(piece.document.doc_id, call.layer, new, k[mine], v[mine])
        out, lse = torch.zeros_like(q, dtype=work_dtype(q)), q.new_full(q.shape[:2], float("-inf"), dtype=work_dtype(q))
        for rank, held in self._hops(call, lambda: self._local.forward(call, q, k, v, out, lse)):
            for visit in self._visits[rank]:
                rows, keys, values = visit.rows, held[visit.keys, 0], held[visit.keys, 1]
                if rank == self._group.rank:
                    part = call.backend.forward(q[rows], keys, values, scale=call.scale, window=0)
                else:
                    part = full.forward_full(q[rows], keys, values, scale=call.scale)
                merge_into(out[rows], lse[rows], *part)
        return out.to(q.dtype), lse

    def backward(
        self, call: AttentionCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `PackAttention.backward`."""
        full = require_ring(call.backend, call.window)
        own = self._own_rows(call)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dk, dv = (lse.new_empty((q.shape[0], *own.shape[2:])) for _ in range(2))
        what = f"the gradients of keys and values of {self._label} (layer {call.layer})"
        travelling = None
        for rank, held in self._hops(
            call, lambda: self._local.backward(call, grad, q, out, lse, (dq, dk, dv)), own=own
        ):
            sums = lse.new_zeros(own.shape)
            for visit in self._visits[rank]:
                rows, keys, values = visit.rows, held[visit.keys, 0], held[visit.keys, 1]
                arguments = (grad[rows], q[rows], keys, values, out[rows], lse[rows])
                if rank == self._group.rank:
                    part_q, part_k, part_v = call.backend.backward(*arguments, scale=call.scale, window=0)
                else:
                    part_q, part_k, part_v = full.backward_full(*arguments, scale=call.scale)
                dq[rows] += part_q
                sums[visit.keys, 0] += part_k
                sums[visit.keys, 1] += part_v
            if travelling is not None:
                sums += travelling.wait()
            travelling = self._group.pass_on(sums, what)
        assert travelling is not None
        home = travelling.wait()
        at = 0
        for piece, first, new, carried in zip(self._slices, self._first_rows, self._new, self._carried, strict=True):
            part = home[at : at + carried]
            at += carried
            mine = slice(first, first + carried - new)
            dk[mine], dv[mine] = call.store.add_key_grads(
                piece.document.doc_id, call.layer, 0, part[:, 0], part[:, 1], new, carried
            )
        return tuple(total.to(q.dtype) for total in (dq, dk, dv))  # type: ignore[return-value]

    def _hops(self, call: AttentionCall, local, own: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """(rank, its rows) of every hop, the own ones first; the next ones are under way meanwhile."""
        held = self._own_rows(call) if own is None else own
        for hop in range(self._group.size):
            under_way = None
            if hop < self._group.size - 1:
                what = f"the keys and values of {self._label} (layer {call.layer})"
                under_way = self._group.pass_on(held, what)
            if hop == 0:
                local()
            yield (self._group.rank - hop) % self._group.size, held
            if under_way is not None:
                held = under_way.wait()

    def _own_rows(self, call: AttentionCall) -> Tensor:
        """K and V of this rank's rows up to the end of every slice; [padded, 2, G, D]."""
        parts = [
            torch.stack(call.store.keys_and_values(piece.document.doc_id, call.layer, 0, carried), dim=1)
            for piece, carried in zip(self._slices, self._carried, strict=True)
        ]
        missing = self._padded - sum(self._carried)
        return torch.cat([*parts, parts[0].new_zeros((missing, *parts[0].shape[1:]))])


def require_no_window(window: int) -> None:
    """Refuse a ring of a model with sliding windows.

    Raises:
        ConfigError: the window is not 0.
    """
    if window:
        raise ConfigError(
            f"parallel.cp_exchange 'ring' and sliding windows (here {window} tokens) do not go together: the keys that "
            "a row sees are no prefix of another rank's rows; use parallel.cp_exchange = 'all_gather'"
        )


def require_ring(backend: RangeAttention, window: int) -> FullAttention:
    """The backend, where it can do a ring's hops.

    Raises:
        ConfigError: it cannot, or the layer has a sliding window.
    """
    require_no_window(window)
    if not isinstance(backend, FullAttention):
        raise ConfigError(
            f"attention backend {backend.name} has no attention without a mask, which a ring's hops need; use "
            "parallel.cp_exchange = 'all_gather'"
        )
    return cast("FullAttention", backend)
