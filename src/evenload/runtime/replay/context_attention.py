"""Compute attention of one rank's rows of a pack that a group shares (WLB §5, Skrull §4.1, SlimPack §4.1.1).

    forward    start the all-gather ─► local documents ─► wait ─► shared documents, range by range
    backward   start the all-gather of documents never cut ─► local ─► wait ─► shared ─► start the reduce-scatter of dK
               and dV (fp32) ─► local ─► wait

Each of a rank's token ranges is one range attention against its document's prefix. Of a document that is cut in forward
or backward every rank keeps all K and V and accumulates dK and dV of its own queries; of one that is never cut a rank
keeps its own rows and gathers the others again in backward. Documents that lie whole on one rank overlap with the
transfers (Skrull §4.1). Price: (cp - 1) · rows of the fullest rank · 2·Hkv·D elements received a layer and transfer.

`RingAttention` (Liu et al. 2023) sends keys and values round the group, so that no rank holds all of a document's:

    forward    round h of cp: attention of own rows against the keys of rank r - h, merged by log-sum-exp, while they
               are sent on to rank r + 1
    backward   the same with [keys, values]; their gradients follow them and arrive at their rank after cp rounds

The rows of another rank that one of a rank's ranges sees are a prefix of its rows of the document, so a round is one
call without a mask a range, and the own rows one causal call. A slice's rounds carry its document's whole prefix.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evenload.attention.range_attention import (
    KeyRange,
    RangeAttention,
    RangeGradients,
    Scoring,
    first_visible_key,
    rows_of_all,
    work_dtype,
)
from evenload.errors import ConfigError
from evenload.runtime.comm.rank_groups import ContextGroup, Transfer
from evenload.runtime.device import to_device
from evenload.runtime.replay.store import ActivationStore, num_rows
from evenload.stepplan.cp_rows import PackRows, SharedSlice
from evenload.types.document import Range

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Describes one layer's attention in one pass."""

    backend: RangeAttention
    store: ActivationStore
    layer: int
    scoring: Scoring

    def key_ranges(self, ranges: Iterable[tuple[slice, Range]]) -> list[KeyRange]:
        return [
            KeyRange(rows, *self.store.keys_and_values(doc_id, self.layer, self.first_key(start), stop))
            for rows, (doc_id, start, stop) in ranges
        ]

    def first_key(self, start: int) -> int:
        return first_visible_key(start, self.scoring.window)


class PackAttention(ABC):
    """Computes attention of one rank's rows of a shared pack; T rows, H query heads, G key/value heads."""

    def __init__(self, rows: PackRows, group: ContextGroup, label: str) -> None:
        self.group, self._label, self._slices = group, label, rows.shared
        self._ranges: list[list[tuple[slice, Range]]] = []
        """Of each shared slice this rank's token ranges, with their rows of the pack."""
        self._rows: list[slice] = []
        """Rows of each shared slice; those of local documents follow."""
        row = 0
        for piece in rows.shared:
            own = piece.ranges[group.rank]
            self._ranges.append(list(rows_of(own, row)))
            self._rows.append(slice(row, row + num_rows(own)))
            row = self._rows[-1].stop
        self._shared_rows = slice(0, row)
        self._local = LocalAttention(tuple(rows_of(rows.local[group.rank], row)))

    @property
    def documents(self) -> tuple[int, ...]:
        """Return those of the shared slices, in the same order on every rank of the group; one may come twice."""
        return tuple(piece.document.doc_id for piece in self._slices)

    @abstractmethod
    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return output [T, H, D] and log-sum-exp [T, H] of own rows' q [T, H, D], k and v [T, G, D]. Collective."""

    @abstractmethod
    def backward(self, call: AttentionCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Return own rows' gradients of q, k and v; those of k and v summed over all rows that see them. Collective."""

    def _what(self, call: AttentionCall, *, gradients: bool = False) -> str:
        return f"the {'gradients of ' if gradients else ''}keys and values of {self._label} (layer {call.layer})"


@dataclass(frozen=True, eq=False)
class LocalAttention:
    """Computes attention of documents that lie whole on this rank: `ranges` of them with their rows of the pack."""

    ranges: tuple[tuple[slice, Range], ...] = ()

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        for rows, (doc_id, start, _) in self.ranges:
            call.store.record_keys(doc_id, call.layer, start, k[rows], v[rows])
        attend_into(call, q, call.key_ranges(self.ranges), out, lse)

    def backward(
        self, call: AttentionCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, gradients: Gradients
    ) -> None:
        parts = call.backend.backward(grad, q, call.key_ranges(self.ranges), out, lse, call.scoring)
        self.add_gradients(call, parts, gradients)

    def add_gradients(self, call: AttentionCall, parts: Iterable[RangeGradients], gradients: Gradients) -> None:
        dq, dk, dv = gradients
        for (rows, (doc_id, start, stop)), (part_q, part_k, part_v) in zip(self.ranges, parts, strict=True):
            dq[rows] = part_q
            first = call.first_key(start)
            dk[rows], dv[rows] = call.store.add_key_grads(doc_id, call.layer, first, part_k, part_v, start, stop)

    def is_whole(self, store: ActivationStore) -> bool:
        return all(store.is_whole(r) for _, r in self.ranges)

    def split(self, share: float) -> tuple["LocalAttention", "LocalAttention"]:
        """Return the first ranges, with about this share of the rows, and the others."""
        if not self.ranges:
            return self, self
        first, last = self.ranges[0][0].start, self.ranges[-1][0].stop
        count = sum(rows.stop - first <= share * (last - first) for rows, _ in self.ranges)
        return LocalAttention(self.ranges[:count]), LocalAttention(self.ranges[count:])


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Places rows of some shared slices (indices) in a gathered buffer: the rows that every rank sends (as many as the
    fullest has), and per slice the gathered row of every token, int64[stop - start]."""

    slices: tuple[int, ...]
    padded: int
    places: tuple[Tensor, ...]

    def pad(self, rows: Tensor) -> Tensor:
        if rows.shape[0] == self.padded:
            return rows
        return torch.cat([rows, rows.new_zeros((self.padded - rows.shape[0], *rows.shape[1:]))])


class GatherAttention(PackAttention):
    """All-gathers keys and values (see the module)."""

    def __init__(self, rows: PackRows, group: ContextGroup, label: str, device: torch.device) -> None:
        super().__init__(rows, group, label)
        # Their rows are gathered again in backward.
        self._never_cut = [index for index, piece in enumerate(self._slices) if not piece.document.is_cut]
        self._all = self._exchange(dict(enumerate(self._slices)), device)
        self._again = self._exchange({index: self._slices[index] for index in self._never_cut}, device)

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        gather = self._gather(self._all, k[self._shared_rows], v[self._shared_rows], call)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=work_dtype(q))
        self._local.forward(call, q, k, v, out, lse)
        self._keep_own(call, k, v)
        gathered = gather.wait()
        seen: list[KeyRange] = []
        for index, places in zip(self._all.slices, self._all.places, strict=True):
            keys, values = self._placed(call, index, places, gathered)
            for rows, (_, start, stop) in self._ranges[index]:
                first = call.first_key(start)
                seen.append(KeyRange(rows, keys[first:stop], values[first:stop]))
        attend_into(call, q, seen, out, lse)
        return out, lse

    def backward(self, call: AttentionCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        no_keys, _ = call.store.keys_and_values(self.documents[0], call.layer, 0, 0)
        gather = self._gather_again(call)
        like = lse.new_empty(no_keys.shape)
        dq, dk, dv = torch.empty_like(q), *(like.new_empty((q.shape[0], *like.shape[1:])) for _ in range(2))
        # Local documents overlap with the all-gather and the reduce-scatter, by the bytes of each.
        gathered_bytes = 0 if gather is None else gather.sent.nbytes
        scattered_bytes = like.element_size() * 2 * self._all.padded * like.shape[1:].numel()
        first_local, then_local = self._local.split(gathered_bytes / (gathered_bytes + scattered_bytes))
        first_local.backward(call, grad, q, out, lse, (dq, dk, dv))
        gathered = None if gather is None else gather.wait()
        sums = self._backward_shared(call, gathered, (grad, q, out, lse), dq, like)
        scatter = self.group.reduce_scatter(sums, self._what(call, gradients=True))
        then_local.backward(call, grad, q, out, lse, (dq, dk, dv))
        mine = self._shared_rows
        own = scatter.wait()[mine]
        dk[mine], dv[mine] = own[:, 0], own[:, 1]
        return dq, dk.to(q.dtype), dv.to(q.dtype)

    def _backward_shared(
        self,
        call: AttentionCall,
        gathered: Tensor | None,
        given: tuple[Tensor, Tensor, Tensor, Tensor],
        dq: Tensor,
        like: Tensor,
    ) -> Tensor:
        """Fill the shared rows of `dq` [T, H, D] from `given` gradient, q, output and log-sum-exp, and K and V gathered
        again; return the gradients of K and V to scatter, [n, 2, G, D], in the precision of `like` [_, G, D]."""
        store, layer, (grad, q, out, lse) = call.store, call.layer, given
        places = dict(zip(self._again.slices, self._again.places, strict=True))
        shape = like.shape[1:]
        sums = like.new_zeros((self.group.size * self._all.padded, 2, *shape))
        for index, place in zip(self._all.slices, self._all.places, strict=True):
            piece = self._slices[index]
            doc_id = piece.document.doc_id
            if piece.document.is_cut:
                keys, values = store.keys_and_values(doc_id, layer, 0, piece.stop)
            else:
                assert gathered is not None
                keys, values = (gathered[:, side][places[index]] for side in (0, 1))
            first = call.first_key(piece.start)
            total_k, total_v = (like.new_zeros((piece.stop - first, *shape)) for _ in range(2))
            visible = [(call.first_key(start), stop) for _, (_, start, stop) in self._ranges[index]]
            seen = [
                KeyRange(rows, keys[low:stop], values[low:stop])
                for (rows, _), (low, stop) in zip(self._ranges[index], visible, strict=True)
            ]
            parts = call.backend.backward(grad, q, seen, out, lse, call.scoring)
            for (rows, _, _), (low, stop), (part_q, part_k, part_v) in zip(seen, visible, parts, strict=True):
                dq[rows] = part_q
                total_k[low - first : stop - first] += part_k
                total_v[low - first : stop - first] += part_v
            if piece.document.is_cut:
                total_k, total_v = store.add_key_grads(doc_id, layer, first, total_k, total_v, piece.start, piece.stop)
            sums[place, 0], sums[place, 1] = total_k, total_v
        return sums

    def _exchange(self, slices: Mapping[int, SharedSlice], device: torch.device) -> _Exchange:
        size = self.group.size
        padded = max(sum(num_rows(piece.ranges[rank]) for piece in slices.values()) for rank in range(size))
        places = []
        at = [rank * padded for rank in range(size)]
        for piece in slices.values():
            place = np.empty(piece.stop - piece.start, np.int64)
            for rank in range(size):
                for _, start, stop in piece.ranges[rank]:
                    place[start - piece.start : stop - piece.start] = np.arange(at[rank], at[rank] + stop - start)
                    at[rank] += stop - start
            places.append(to_device(torch.from_numpy(place), device))
        return _Exchange(tuple(slices), padded, tuple(places))

    def _gather(self, exchange: _Exchange, k: Tensor, v: Tensor, call: AttentionCall) -> Transfer:
        return self.group.all_gather(exchange.pad(torch.stack([k, v], dim=1)), self._what(call))

    def _gather_again(self, call: AttentionCall) -> Transfer | None:
        if not self._again.slices:
            return None
        own = [
            call.store.keys_and_values(piece.document.doc_id, call.layer, 0, num_rows(piece.ranges[self.group.rank]))
            for piece in (self._slices[index] for index in self._again.slices)
        ]
        keys, values = (torch.cat(pieces) for pieces in zip(*own, strict=True))
        return self._gather(self._again, keys, values, call)

    def _keep_own(self, call: AttentionCall, k: Tensor, v: Tensor) -> None:
        """Keep this rank's rows of documents that are never cut; of others it keeps all that arrive."""
        for index in self._never_cut:
            mine, piece = self._rows[index], self._slices[index]
            first = piece.document.rows_before(self.group.rank, piece.start)
            call.store.record_keys(piece.document.doc_id, call.layer, first, k[mine], v[mine])

    def _placed(self, call: AttentionCall, index: int, places: Tensor, gathered: Tensor) -> tuple[Tensor, Tensor]:
        piece = self._slices[index]
        keys, values = (gathered[:, side][places] for side in (0, 1))
        if not piece.document.is_cut:
            return keys, values
        call.store.record_keys(piece.document.doc_id, call.layer, piece.start, keys, values)
        return call.store.keys_and_values(piece.document.doc_id, call.layer, 0, piece.stop)


def attend_into(call: AttentionCall, q: Tensor, seen: Sequence[KeyRange], out: Tensor, lse: Tensor) -> None:
    """Fill the rows of `out` [T, H, D] and `lse` [T, H] that belong to ranges, if there are any."""
    if seen:
        rows = rows_of_all(seen)
        out[rows], lse[rows] = call.backend.forward(q, seen, call.scoring)


def rows_of(ranges: Sequence[Range], first_row: int = 0) -> Iterator[tuple[slice, Range]]:
    row = first_row
    for r in ranges:
        stop = row + r.stop - r.start
        yield slice(row, stop), r
        row = stop


@dataclass(frozen=True, eq=False)
class _Visit:
    """Names rows of one of this rank's ranges, and the keys in a rank's sent buffer that all of them see; in the own
    buffer the last `keys` are those of `rows`."""

    rows: slice
    keys: slice

    def key_range(self, held: Tensor) -> KeyRange:
        return KeyRange(self.rows, held[self.keys, 0], held[self.keys, 1])


class RingAttention(PackAttention):
    """Sends keys and values round the group (see the module)."""

    def __init__(self, rows: PackRows, group: ContextGroup, label: str) -> None:
        super().__init__(rows, group, label)
        # Per rank and slice the rows of its document up to the slice's end, which are sent.
        ranks = range(group.size)
        carried = [[piece.document.rows_before(rank, piece.stop) for piece in rows.shared] for rank in ranks]
        self._carried = carried[group.rank]
        self._new = [piece.document.rows_before(group.rank, piece.start) for piece in rows.shared]
        self._padded = max(map(sum, carried))
        self._visits: list[list[_Visit]] = [[] for _ in range(group.size)]
        for index, piece in enumerate(rows.shared):
            for own, (_, start, stop) in self._ranges[index]:
                for rank in ranks:
                    before = piece.document.rows_before(rank, stop if rank == group.rank else start)
                    at = sum(carried[rank][:index])
                    if before:
                        self._visits[rank].append(_Visit(own, slice(at, at + before)))

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        require_no_window(call.scoring.window)
        for piece, mine, new in zip(self._slices, self._rows, self._new, strict=True):
            call.store.record_keys(piece.document.doc_id, call.layer, new, k[mine], v[mine])
        out, lse = torch.zeros_like(q, dtype=work_dtype(q)), q.new_full(q.shape[:2], float("-inf"), dtype=work_dtype(q))
        for rank, held in self._rounds(call, lambda: self._local.forward(call, q, k, v, out, lse)):
            for visit in self._visits[rank]:
                part = call.backend.forward(q, [visit.key_range(held)], self._scoring(call, rank))
                merge_into(out[visit.rows], lse[visit.rows], *part)
        return out.to(q.dtype), lse

    def backward(self, call: AttentionCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        own = self._own_rows(call)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dk, dv = (lse.new_empty((q.shape[0], *own.shape[2:])) for _ in range(2))
        transfer = None
        local = functools.partial(self._local.backward, call, grad, q, out, lse, (dq, dk, dv))
        for rank, held in self._rounds(call, local, own=own):
            sums = lse.new_zeros(own.shape)
            for visit in self._visits[rank]:
                [(part_q, part_k, part_v)] = call.backend.backward(
                    grad, q, [visit.key_range(held)], out, lse, self._scoring(call, rank)
                )
                dq[visit.rows] += part_q
                sums[visit.keys, 0] += part_k
                sums[visit.keys, 1] += part_v
            if transfer is not None:
                sums += transfer.wait()
            transfer = self.group.pass_on(sums, self._what(call, gradients=True))
        assert transfer is not None
        home = transfer.wait()
        at = 0
        for piece, mine, new, carried in zip(self._slices, self._rows, self._new, self._carried, strict=True):
            doc_id, (keys, values) = piece.document.doc_id, home[at : at + carried].unbind(1)
            at += carried
            dk[mine], dv[mine] = call.store.add_key_grads(doc_id, call.layer, 0, keys, values, new, carried)
        return tuple(total.to(q.dtype) for total in (dq, dk, dv))  # type: ignore[return-value]

    def _rounds(self, call: AttentionCall, local, own: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its rows) of every round, the own ones first, while the next ones are sent."""
        held = self._own_rows(call) if own is None else own
        for turn in range(self.group.size):
            transfer = self.group.pass_on(held, self._what(call)) if turn < self.group.size - 1 else None
            if turn == 0:
                local()
            yield (self.group.rank - turn) % self.group.size, held
            if transfer is not None:
                held = transfer.wait()

    def _scoring(self, call: AttentionCall, rank: int) -> Scoring:
        """Return causal scoring for own rows; another rank's visible rows are a prefix, so without a mask."""
        return Scoring(call.scoring.scale, is_causal=rank == self.group.rank)

    def _own_rows(self, call: AttentionCall) -> Tensor:
        """Return K and V of this rank's rows up to the end of every slice; [padded, 2, G, D]."""
        parts = [
            torch.stack(call.store.keys_and_values(piece.document.doc_id, call.layer, 0, carried), dim=1)
            for piece, carried in zip(self._slices, self._carried, strict=True)
        ]
        missing = self._padded - sum(self._carried)
        return torch.cat([*parts, parts[0].new_zeros((missing, *parts[0].shape[1:]))])


def require_no_window(window: int) -> None:
    if window:
        raise ConfigError(
            f"parallel.cp_exchange 'ring' and sliding windows (here {window} tokens) do not go together; use "
            "parallel.cp_exchange = 'all_gather'"
        )


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add attention over other keys in place, weighted by log-sum-exps. Autograd must never run through this.

    Args:
        out: [n, H, D], lse: [n, H], of the keys so far (0 and -inf = none); both fp32 or fp64.
        part: [n, H, D] in any precision, part_lse: [n, H], of other keys, at least one.
    """
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - both).exp().unsqueeze(-1))
    lse.copy_(both)
