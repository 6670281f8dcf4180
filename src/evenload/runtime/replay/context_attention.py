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
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from evenload.attention.backends import backend_of_call
from evenload.attention.range_attention import (
    Gradients,
    KeyParts,
    RangeAttention,
    RangeSizes,
    Scoring,
    first_visible_key,
    merge_into,
    work_dtype,
)
from evenload.errors import ConfigError
from evenload.runtime.comm.collectives import ContextGroup, Transfer
from evenload.runtime.comm.tensor_group import with_padding
from evenload.runtime.device import to_device
from evenload.runtime.replay.store import ActivationStore, CallKey, KeyRows, KeysAndValues, layer_of, num_rows
from evenload.stepplan.cp_rows import PackRows
from evenload.types.document import Direction, Range
from evenload.types.layer_kind import AttentionKind


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Computes one layer's attention in one pass. Queries and keys are Dk wide, values and output Dv; backends get all
    as wide as the wider (zeros change no score and no sum), and nothing else keeps or sends the zeros."""

    backend: RangeAttention
    store: ActivationStore
    key: CallKey
    scoring: Scoring

    def first_key(self, start: int) -> int:
        """Return the first key that the row at position `start` sees."""
        chunk = self.scoring.chunk
        return start // chunk * chunk if chunk else first_visible_key(start, self.scoring.window)

    def sizes(self, ranges: Iterable[Range]) -> RangeSizes:
        """Return those of ranges, cut at the edges of chunks: a range's pieces see all that it sees, one by one."""
        pieces = []
        for _, start, stop in ranges:
            chunk = self.scoring.chunk or stop
            edges = itertools.pairwise((start, *range(start // chunk * chunk + chunk, stop, chunk), stop))
            pieces += [(end - first, end - self.first_key(first)) for first, end in edges]
        return RangeSizes([rows for rows, _ in pieces], [keys for _, keys in pieces])

    def forward(self, q: Tensor, seen: KeyParts, sizes: RangeSizes) -> tuple[Tensor, Tensor]:
        """Return output [n, H, Dv] and log-sum-exp [n, H] of q [n, H, Dk]."""
        width, backend = seen[0][1].shape[-1], backend_of_call(self.backend, self.scoring)
        (q,), seen = _as_wide((q,), seen)
        out, lse = backend.forward(q, seen, sizes, self.scoring)
        return out[..., :width].contiguous(), lse

    def backward(
        self, grad: Tensor, q: Tensor, seen: KeyParts, out: Tensor, lse: Tensor, sizes: RangeSizes
    ) -> Gradients:
        """Return the gradients of q, keys and values; grad, q and out as `forward` takes and returns them."""
        key_width, width, backend = q.shape[-1], out.shape[-1], backend_of_call(self.backend, self.scoring)
        (grad, q, out), seen = _as_wide((grad, q, out), seen)
        dq, dk, dv = backend.backward(grad, q, seen, out, lse, sizes, self.scoring)
        return dq[..., :key_width], dk[..., :key_width], dv[..., :width]


def _as_wide(rows: Sequence[Tensor], seen: KeyParts) -> tuple[Sequence[Tensor], KeyParts]:
    width = max(one.shape[-1] for one in seen[0])
    if all(one.shape[-1] == width for one in seen[0]):
        return rows, seen

    def wide(one: Tensor) -> Tensor:
        return pad(one, (0, width - one.shape[-1]))

    return [wide(one) for one in rows], [(wide(keys), wide(values)) for keys, values in seen]


def _divided(rows: Tensor, widths: tuple[int, int]) -> KeysAndValues:
    """Return keys and values (or gradients), which travel side by side: [n, G, Dk + Dv]."""
    keys, values = rows.split(widths, dim=-1)
    return keys, values


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

    def join(
        self,
        direction: Direction,
        backend: RangeAttention,
        store: ActivationStore,
        key: CallKey,
        shape: AttentionKind,
        like: Tensor,
    ) -> None:
        """Take part in the transfers of a call where this rank has no rows. Collective."""
        call = AttentionCall(backend, store, key, Scoring(1.0))
        q, out = (like.new_empty(0, shape.heads, width) for width in (shape.head_dim, shape.value_dim))
        k, v = (like.new_empty(0, shape.kv_heads, width) for width in (shape.head_dim, shape.value_dim))
        if direction == "forward":
            self.forward(call, q, k, v)
        else:
            self.backward(call, out, q, out, q.new_empty(q.shape[:2], dtype=work_dtype(q)))

    def _no_gradients(self, call: AttentionCall, like: Tensor) -> KeysAndValues:
        """Return gradients [0, G, Dk] and [0, G, Dv] of the keys and values of no rows, of the dtype of `like`."""
        keys, values = call.store.keys_and_values(self.documents[0], call.key, 0, 0)
        return like.new_empty(keys.shape), like.new_empty(values.shape)

    def _what(self, call: AttentionCall, *, gradients: bool = False) -> str:
        return (
            f"the {'gradients of ' if gradients else ''}keys and values of {self._label} (layer {layer_of(call.key)})"
        )


class _Seen(NamedTuple):
    """Says where the keys that the ranges of a pack see lie, and for runs of ranges what becomes of their gradients:
    rows, keys among all, and the range whose document adds them up (None = they are final)."""

    sizes: RangeSizes
    lying: list[KeyRows]
    runs: list[tuple[slice, slice, Range | None]]

    def parts(self, key: CallKey) -> KeyParts:
        return [rows.of(key) for rows in self.lying]

    def add_keys(self, keys: KeyRows) -> None:
        """Add those of the next range, to the last where they follow it in one tensor."""
        last = self.lying[-1] if self.lying else None
        if last is not None and last.layers is keys.layers and last.stop == keys.start:
            keys = self.lying.pop()._replace(stop=keys.stop)
        self.lying.append(keys)

    def add_run(self, rows: slice, keys: slice, of: Range | None) -> None:
        """Add the next range, to the last run where the gradients of both are final."""
        if of is None and self.runs and self.runs[-1][2] is None:
            first_rows, first_keys, _ = self.runs.pop()
            rows, keys = slice(first_rows.start, rows.stop), slice(first_keys.start, keys.stop)
        self.runs.append((rows, keys, of))


class LocalAttention:
    """Computes attention of documents that lie whole on this rank: `ranges` of them, with their rows of the pack, which
    follow each other. What does not depend on the layer is made once a pack."""

    def __init__(self, ranges: tuple[tuple[slice, Range], ...] = ()) -> None:
        self.ranges = ranges
        self.rows = slice(ranges[0][0].start, ranges[-1][0].stop) if ranges else slice(0, 0)
        self._seen: dict[tuple[ActivationStore, int, int], _Seen] = {}  # by the store of a stage, window and chunk
        self._halves: dict[int, tuple[LocalAttention, LocalAttention]] = {}  # by number of first ranges

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        for rows, (doc_id, start, _) in self.ranges:
            call.store.record_keys(doc_id, call.key, start, k[rows], v[rows])
        if self.ranges:
            out[self.rows], lse[self.rows] = self.attend(call, q[self.rows])

    def attend(self, call: AttentionCall, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return output [n, H, D] and log-sum-exp [n, H] of own rows' q [n, H, D]; keys are recorded."""
        seen = self._seen_by(call)
        return call.forward(q, seen.parts(call.key), seen.sizes)

    def backward(
        self, call: AttentionCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, gradients: Gradients
    ) -> None:
        if not self.ranges:
            return
        rows = self.rows
        parts = self.gradients(call, grad[rows], q[rows], out[rows], lse[rows])
        for total, part in zip(gradients, parts, strict=True):
            total[rows] = part

    def gradients(self, call: AttentionCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Return the gradients of own rows' q [n, H, D], k and v [n, G, D], those of documents summed."""
        seen = self._seen_by(call)
        dq, dk, dv = call.backward(grad, q, seen.parts(call.key), out, lse, seen.sizes)
        if all(of is None for _, _, of in seen.runs):
            return dq, dk, dv  # keys are own rows, and no other pack adds to their gradients
        own_k, own_v = (lse.new_empty(q.shape[0], *one.shape[1:]) for one in (dk, dv))
        for rows, keys, of in seen.runs:
            final = dk[keys], dv[keys]
            if of is not None:
                doc_id, start, stop = of
                final = call.store.add_key_grads(doc_id, call.key, call.first_key(start), *final, start, stop)
            own_k[rows], own_v[rows] = final
        return dq, own_k, own_v

    def _seen_by(self, call: AttentionCall) -> _Seen:
        store, by = call.store, (call.store, call.scoring.window, call.scoring.chunk)
        if by not in self._seen:
            seen = _Seen(call.sizes(r for _, r in self.ranges), [], [])
            at = 0
            for rows, r in self.ranges:
                num_keys = r.stop - call.first_key(r.start)
                seen.add_keys(store.document_keys(r.doc_id).part(r.stop - num_keys, r.stop))
                own = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
                seen.add_run(own, slice(at, at + num_keys), None if store.is_whole(r) else r)
                at += num_keys
            self._seen[by] = seen
        return self._seen[by]

    def split(self, share: float) -> tuple["LocalAttention", "LocalAttention"]:
        """Return the first ranges, with about this share of the rows, and the others."""
        first, last = self.rows.start, self.rows.stop
        count = sum(rows.stop - first <= share * (last - first) for rows, _ in self.ranges)
        if count not in self._halves:
            self._halves[count] = LocalAttention(self.ranges[:count]), LocalAttention(self.ranges[count:])
        return self._halves[count]


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Places rows of some shared slices in a gathered buffer: the rows that every rank sends (as many as the fullest
    has), and by index of the slice the gathered row of every token, int64[stop - start]."""

    padded: int
    places: dict[int, Tensor]


class GatherAttention(PackAttention):
    """All-gathers keys and values (see the module)."""

    def __init__(self, rows: PackRows, group: ContextGroup, label: str, device: torch.device) -> None:
        super().__init__(rows, group, label)
        self._all = self._exchange(range(len(self._slices)), device)
        # Those that are never cut are gathered again in backward.
        self._again = self._exchange([i for i, piece in enumerate(self._slices) if not piece.document.is_cut], device)

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        gather = self._gather(self._all, k[self._shared_rows], v[self._shared_rows], call)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        lse = q.new_empty(q.shape[:2], dtype=work_dtype(q))
        self._local.forward(call, q, k, v, out, lse)
        self._keep_own(call, k, v)
        gathered = _divided(gather.wait(), (k.shape[-1], v.shape[-1]))
        seen: list[tuple[Tensor, Tensor]] = []
        for index, places in self._all.places.items():
            piece, (keys, values) = self._slices[index], (rows[places] for rows in gathered)
            if piece.document.is_cut:
                call.store.record_keys(piece.document.doc_id, call.key, piece.start, keys, values)
                keys, values = call.store.keys_and_values(piece.document.doc_id, call.key, 0, piece.stop)
            visible = (slice(call.first_key(start), stop) for _, (_, start, stop) in self._ranges[index])
            seen += [(keys[one], values[one]) for one in visible]
        if seen:
            mine, sizes = self._shared_rows, call.sizes(r for _, r in itertools.chain(*self._ranges))
            out[mine], lse[mine] = call.forward(q[mine], seen, sizes)
        return out, lse

    def backward(self, call: AttentionCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        gather = self._gather_again(call)
        like = self._no_gradients(call, lse)
        widths = like[0].shape[-1], like[1].shape[-1]
        dq, dk, dv = torch.empty_like(q), *(one.new_empty((q.shape[0], *one.shape[1:])) for one in like)
        # Local documents overlap with the all-gather and the reduce-scatter, by the bytes of each.
        gathered_bytes = 0 if gather is None else gather.sent.nbytes
        scattered_bytes = lse.element_size() * self._all.padded * sum(one.shape[1:].numel() for one in like)
        first_local, then_local = self._local.split(gathered_bytes / (gathered_bytes + scattered_bytes))
        first_local.backward(call, grad, q, out, lse, (dq, dk, dv))
        gathered = None if gather is None else _divided(gather.wait(), widths)
        sums = self._backward_shared(call, gathered, (grad, q, out, lse), dq, like)
        scatter = self.group.reduce_scatter(sums, self._what(call, gradients=True))
        then_local.backward(call, grad, q, out, lse, (dq, dk, dv))
        mine = self._shared_rows
        dk[mine], dv[mine] = _divided(scatter.wait()[mine], widths)
        return dq, dk.to(q.dtype), dv.to(q.dtype)

    def _backward_shared(
        self,
        call: AttentionCall,
        gathered: KeysAndValues | None,
        given: tuple[Tensor, Tensor, Tensor, Tensor],
        dq: Tensor,
        like: KeysAndValues,
    ) -> Tensor:
        """Fill the shared rows of `dq` [T, H, D] from `given` gradient, q, output and log-sum-exp, and K and V gathered
        again; return the gradients of K and V to scatter, [n, G, Dk + Dv], in the precision of `like`."""
        store, key, (grad, q, out, lse) = call.store, call.key, given
        no_sums = torch.cat(like, dim=-1)
        sums = no_sums.new_zeros((self.group.size * self._all.padded, *no_sums.shape[1:]))
        for index, place in self._all.places.items():
            piece = self._slices[index]
            doc_id = piece.document.doc_id
            if piece.document.is_cut:
                keys, values = store.keys_and_values(doc_id, key, 0, piece.stop)
            else:
                assert gathered is not None
                keys, values = (rows[self._again.places[index]] for rows in gathered)
            first = call.first_key(piece.start)
            total_k, total_v = (one.new_zeros((piece.stop - first, *one.shape[1:])) for one in like)
            if self._ranges[index]:
                mine = self._rows[index]
                visible = [slice(call.first_key(start), stop) for _, (_, start, stop) in self._ranges[index]]
                sizes = call.sizes(r for _, r in self._ranges[index])
                seen = [(keys[one], values[one]) for one in visible]
                dq[mine], *parts = call.backward(grad[mine], q[mine], seen, out[mine], lse[mine], sizes)
                num_keys = [one.stop - one.start for one in visible]
                for total, part in zip((total_k, total_v), parts, strict=True):
                    for one, of_range in zip(visible, part.split(num_keys), strict=True):
                        total[one.start - first : one.stop - first] += of_range
            if piece.document.is_cut:
                total_k, total_v = store.add_key_grads(doc_id, key, first, total_k, total_v, piece.start, piece.stop)
            sums[place] = torch.cat([total_k, total_v], dim=-1)
        return sums

    def _exchange(self, slices: Iterable[int], device: torch.device) -> _Exchange:
        size, pieces = self.group.size, {index: self._slices[index] for index in slices}
        padded = max(sum(num_rows(piece.ranges[rank]) for piece in pieces.values()) for rank in range(size))
        places = {}
        at = [rank * padded for rank in range(size)]
        for index, piece in pieces.items():
            place = np.empty(piece.stop - piece.start, np.int64)
            for rank in range(size):
                for _, start, stop in piece.ranges[rank]:
                    place[start - piece.start : stop - piece.start] = np.arange(at[rank], at[rank] + stop - start)
                    at[rank] += stop - start
            places[index] = to_device(torch.from_numpy(place), device)
        return _Exchange(padded, places)

    def _gather(self, exchange: _Exchange, k: Tensor, v: Tensor, call: AttentionCall) -> Transfer:
        return self.group.all_gather(with_padding(torch.cat([k, v], dim=-1), exchange.padded), self._what(call))

    def _gather_again(self, call: AttentionCall) -> Transfer | None:
        if not self._again.places:
            return None
        own = [
            call.store.keys_and_values(piece.document.doc_id, call.key, 0, num_rows(piece.ranges[self.group.rank]))
            for piece in (self._slices[index] for index in self._again.places)
        ]
        keys, values = (torch.cat(pieces) for pieces in zip(*own, strict=True))
        return self._gather(self._again, keys, values, call)

    def _keep_own(self, call: AttentionCall, k: Tensor, v: Tensor) -> None:
        """Keep this rank's rows of documents that are never cut; of others it keeps all that arrive."""
        for index in self._again.places:
            mine, piece = self._rows[index], self._slices[index]
            first = piece.document.rows_before(self.group.rank, piece.start)
            call.store.record_keys(piece.document.doc_id, call.key, first, k[mine], v[mine])


def rows_of(ranges: Sequence[Range], first_row: int = 0) -> Iterator[tuple[slice, Range]]:
    row = first_row
    for r in ranges:
        stop = row + r.stop - r.start
        yield slice(row, stop), r
        row = stop


class _Visit(NamedTuple):
    """Names rows of one of this rank's ranges, and the keys in a rank's sent buffer that all of them see; in the own
    buffer the last `keys` are those of `rows`."""

    rows: slice
    keys: slice
    sizes: RangeSizes


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
                        sizes = RangeSizes([own.stop - own.start], [before])
                        self._visits[rank].append(_Visit(own, slice(at, at + before), sizes))

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        require_no_window(call.scoring.window or call.scoring.chunk)
        for piece, mine, new in zip(self._slices, self._rows, self._new, strict=True):
            call.store.record_keys(piece.document.doc_id, call.key, new, k[mine], v[mine])
        lse = q.new_full(q.shape[:2], float("-inf"), dtype=work_dtype(q))
        out = lse.new_zeros(*q.shape[:2], v.shape[-1])
        local = functools.partial(self._local.forward, call, q, k, v, out, lse)
        for rank, held in self._rounds(call, local, self._own_rows(call)):
            for rows, keys, sizes in self._visits[rank]:
                seen = _divided(held[keys], (k.shape[-1], v.shape[-1]))
                merge_into(out[rows], lse[rows], *self._round(call, rank).forward(q[rows], [seen], sizes))
        return out.to(q.dtype), lse

    def backward(self, call: AttentionCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        own = self._own_rows(call)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        like = self._no_gradients(call, lse)
        dk, dv = (one.new_empty((q.shape[0], *one.shape[1:])) for one in like)
        widths = like[0].shape[-1], like[1].shape[-1]
        transfer = None
        local = functools.partial(self._local.backward, call, grad, q, out, lse, (dq, dk, dv))
        for rank, held in self._rounds(call, local, own):
            sums = lse.new_zeros(own.shape)
            for rows, keys, sizes in self._visits[rank]:
                given = grad[rows], q[rows], [_divided(held[keys], widths)], out[rows], lse[rows]
                part_q, *parts = self._round(call, rank).backward(*given, sizes)
                dq[rows] += part_q
                for total, part in zip(_divided(sums[keys], widths), parts, strict=True):
                    total += part
            if transfer is not None:
                sums += transfer.wait()
            transfer = self.group.pass_on(sums, self._what(call, gradients=True))
        assert transfer is not None
        home = transfer.wait()
        at = 0
        for piece, mine, new, carried in zip(self._slices, self._rows, self._new, self._carried, strict=True):
            doc_id, (keys, values) = piece.document.doc_id, _divided(home[at : at + carried], widths)
            at += carried
            dk[mine], dv[mine] = call.store.add_key_grads(doc_id, call.key, 0, keys, values, new, carried)
        return tuple(total.to(q.dtype) for total in (dq, dk, dv))  # type: ignore[return-value]

    def _rounds(self, call: AttentionCall, local: Callable[[], None], held: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its rows) of every round, the own ones first, while the next ones are sent."""
        for turn in range(self.group.size):
            transfer = self.group.pass_on(held, self._what(call)) if turn < self.group.size - 1 else None
            if turn == 0:
                local()
            yield (self.group.rank - turn) % self.group.size, held
            if transfer is not None:
                held = transfer.wait()

    def _round(self, call: AttentionCall, rank: int) -> AttentionCall:
        """Return the call for keys of a rank: other than the own, those that rows see are a prefix, without a mask."""
        return replace(call, scoring=call.scoring._replace(is_causal=rank == self.group.rank))

    def _own_rows(self, call: AttentionCall) -> Tensor:
        """Return K and V of this rank's rows up to the end of every slice; [padded, G, Dk + Dv]."""
        parts = [
            torch.cat(call.store.keys_and_values(piece.document.doc_id, call.key, 0, carried), dim=-1)
            for piece, carried in zip(self._slices, self._carried, strict=True)
        ]
        return with_padding(torch.cat(parts), self._padded)


def require_no_window(window: int) -> None:
    if window:
        raise ConfigError(
            f"parallel.cp_exchange 'ring' and sliding windows (here {window} tokens) do not go together; use "
            "parallel.cp_exchange = 'all_gather'"
        )
