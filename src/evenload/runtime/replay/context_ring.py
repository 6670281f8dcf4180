"""Ring context parallelism: keys and values travel round the group, so that no rank ever holds all of a document's.

    forward    round h of cp: attention of own rows against the keys of rank r - h, merged by log-sum-exp, while they
               travel on to rank r + 1
    backward   the same with [keys, values]; their gradients travel behind them and are home after cp rounds

The rows of a rank that are visible to one of its own ranges are a prefix of another rank's rows of the document (the
ranges of a plan do not overlap), so a round is one call without a mask a range, and the own rows one causal call.
Output and log-sum-exp stay in fp32 (fp64) until the last round.

Every rank keeps only its own rows of K, V and their gradients, of cut documents too; so a slice's rounds carry its
document's whole prefix, and what travels grows with the number of slices times the document. `cost.groups` charges
just that (`CostCoefficients.context_exchange`); `cost.memory` charges the gathered form, an upper bound here. Documents
of one rank are computed in the first round. A sliding window is refused: visible keys would be no prefix.

Source: Ring Attention (Liu et al. 2023), on the row sets of `stepplan.rank_rows`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from evenload.attention.range_attention import KeyRange, Scoring, work_dtype
from evenload.errors import ConfigError
from evenload.runtime.comm.cp_groups import ContextGroup
from evenload.runtime.replay.context_attention import AttentionCall, LocalAttention, PackAttention, rows_of
from evenload.stepplan.rank_rows import PackRows


@dataclass(frozen=True, eq=False)
class _Visit:
    """One of this rank's ranges, by its rows of the pack, against one rank's rows of the document, by their place in
    the travelling buffer; in the own one the last `keys` are those of `rows`."""

    rows: slice
    keys: slice

    def key_range(self, held: Tensor) -> KeyRange:
        """The rows with their keys and values of the travelling buffer [n, 2, G, D]."""
        return KeyRange(self.rows, held[self.keys, 0], held[self.keys, 1])


class RingAttention(PackAttention):
    """Keys and values travel round (see the module)."""

    def __init__(self, rows: PackRows, group: ContextGroup, label: str) -> None:
        super().__init__(rows, group, label)
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
            mine = piece.ranges[group.rank]
            for own, (_, start, stop) in rows_of(mine, row):
                for rank in range(group.size):
                    before = piece.document.rows_before(rank, stop if rank == group.rank else start)
                    at = sum(carried[rank][:index])
                    if before:
                        self._visits[rank].append(_Visit(own, slice(at, at + before)))
            row += sum(stop - start for _, start, stop in mine)
        self._num_shared = row
        self._local = LocalAttention(tuple(rows_of(rows.local[group.rank], row)))

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        require_no_window(call.scoring.window)
        for piece, first, new in zip(self._slices, self._first_rows, self._new, strict=True):
            mine = slice(first, first + sum(stop - start for _, start, stop in piece.ranges[self.group.rank]))
            call.store.record_keys(piece.document.doc_id, call.layer, new, k[mine], v[mine])
        out, lse = torch.zeros_like(q, dtype=work_dtype(q)), q.new_full(q.shape[:2], float("-inf"), dtype=work_dtype(q))
        for rank, held in self._rounds(call, lambda: self._local.forward(call, q, k, v, out, lse)):
            for visit in self._visits[rank]:
                part = call.backend.forward(q, [visit.key_range(held)], self._scoring(call, rank))
                merge_into(out[visit.rows], lse[visit.rows], *part)
        return out.to(q.dtype), lse

    def backward(
        self, call: AttentionCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = self._own_rows(call)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dk, dv = (lse.new_empty((q.shape[0], *own.shape[2:])) for _ in range(2))
        what = f"the gradients of keys and values of {self._label} (layer {call.layer})"
        travelling = None
        for rank, held in self._rounds(
            call, lambda: self._local.backward(call, grad, q, out, lse, (dq, dk, dv)), own=own
        ):
            sums = lse.new_zeros(own.shape)
            for visit in self._visits[rank]:
                [(part_q, part_k, part_v)] = call.backend.backward(
                    grad, q, [visit.key_range(held)], out, lse, self._scoring(call, rank)
                )
                dq[visit.rows] += part_q
                sums[visit.keys, 0] += part_k
                sums[visit.keys, 1] += part_v
            if travelling is not None:
                sums += travelling.wait()
            travelling = self.group.pass_on(sums, what)
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

    def _rounds(self, call: AttentionCall, local, own: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """(rank, its rows) of every round, the own ones first; the next ones are under way meanwhile."""
        held = self._own_rows(call) if own is None else own
        for turn in range(self.group.size):
            under_way = None
            if turn < self.group.size - 1:
                what = f"the keys and values of {self._label} (layer {call.layer})"
                under_way = self.group.pass_on(held, what)
            if turn == 0:
                local()
            yield (self.group.rank - turn) % self.group.size, held
            if under_way is not None:
                held = under_way.wait()

    def _scoring(self, call: AttentionCall, rank: int) -> Scoring:
        """Against the own rows causal; another rank's visible ones are a prefix, so without a mask."""
        return Scoring(call.scoring.scale, is_causal=rank == self.group.rank)

    def _own_rows(self, call: AttentionCall) -> Tensor:
        """K and V of this rank's rows up to the end of every slice; [padded, 2, G, D]."""
        parts = [
            torch.stack(call.store.keys_and_values(piece.document.doc_id, call.layer, 0, carried), dim=1)
            for piece, carried in zip(self._slices, self._carried, strict=True)
        ]
        missing = self._padded - sum(self._carried)
        return torch.cat([*parts, parts[0].new_zeros((missing, *parts[0].shape[1:]))])


def require_no_window(window: int) -> None:
    if window:
        raise ConfigError(
            f"parallel.cp_exchange 'ring' and sliding windows (here {window} tokens) do not go together: the keys that "
            "a row sees are no prefix of another rank's rows; use parallel.cp_exchange = 'all_gather'"
        )


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add attention over other keys, in place: outputs weighted by their log-sum-exps, in that precision.

    Autograd must never run through this; backward gives every part the merged output and log-sum-exp instead.

    Args:
        out: [n, H, D], lse: [n, H], of the keys so far (0 and -inf = none); both fp32 or fp64.
        part: [n, H, D] in any precision, part_lse: [n, H], of other keys, at least one.
    """
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - both).exp().unsqueeze(-1))
    lse.copy_(both)
