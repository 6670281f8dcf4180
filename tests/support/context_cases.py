"""Attention of shared packs as one rank of a `GlooPool`, without a model around it."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from evenload.attention.backends import select_backend
from evenload.attention.range_attention import Scoring, work_dtype
from evenload.runtime.comm.rank_groups import ContextGroup, Transfer, create_context_groups
from evenload.runtime.comm.watch import RankWatch
from evenload.runtime.replay.context_attention import AttentionCall, LocalAttention, rows_of
from evenload.runtime.replay.rank_packs import RankPackTokens
from evenload.runtime.replay.store import ActivationStore
from evenload.types.plan import decode_plan

HEADS, GROUPS, DIM = 4, 2, 8


def document_tensors(num_tokens: int, doc_id: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """q, k, v and the output's gradient of a document, [n, heads, D] each, the same on every rank."""
    generator = torch.Generator().manual_seed(doc_id)
    heads = {"q": HEADS, "k": GROUPS, "v": GROUPS, "grad": HEADS}
    return {
        name: torch.randn(num_tokens, count, DIM, generator=generator, dtype=torch.float64).to(dtype)
        for name, count in heads.items()
    }


def attend_shared_packs(
    plans: list[bytes], exchange: str, dtype: torch.dtype, window: int, backend: str
) -> list[tuple[dict, int]]:
    """Per plan what this rank computed of every document, [n, heads, D], NaN elsewhere, and the bytes it received."""
    rank = dist.get_rank()
    watch = RankWatch(rank, f"rank {rank}", dist.get_world_size())
    decoded = [decode_plan(plan) for plan in plans]
    groups = create_context_groups(decoded[0].layout, rank, dist.new_group, watch)
    results = []
    for plan in decoded:
        before = sum(group.moved_bytes for group in groups.values())
        dp_rank = rank // plan.layout.cp
        packs = RankPackTokens(plan, dp_rank, groups, exchange, torch.device("cpu"))  # type: ignore[arg-type]
        of_replica = plan.pack_plans[dp_rank]
        store = ActivationStore(packs.stored_tokens(), [packs.ranges(pack) for pack in of_replica.backward])
        lengths = {document.doc_id: document.num_tokens for document in plan.documents}
        given = {doc: document_tensors(n, doc, dtype) for doc, n in lengths.items()}
        # Output is as the gradient that is given of it.
        as_found = {"grad": "out", "q": "q", "k": "k", "v": "v"}
        result = {
            doc: {as_found[n]: torch.full_like(t, torch.nan) for n, t in own.items()} for doc, own in given.items()
        }
        packs.collate({doc: np.zeros(n, np.int32) for doc, n in lengths.items()})
        for pack in (*of_replica.forward, *of_replica.backward):
            _attend(pack.direction, packs.load(pack), store, given, result, AttentionCall(
                select_backend(backend, "cpu"), store, 0, Scoring(DIM**-0.5, window)
            ), dtype)  # fmt: skip
        store.check_empty()
        results.append((result, sum(group.moved_bytes for group in groups.values()) - before))
    return results


class _Recorder:
    """Rows attended to while transfers of the group were under way, and while none was."""

    def __init__(self) -> None:
        self.under_way = 0
        self.rows = {True: 0, False: 0}

    def take(self) -> tuple[int, int]:
        """(covered, not covered) since the last time."""
        result, self.rows = (self.rows[True], self.rows[False]), {True: 0, False: 0}
        return result


@dataclass(frozen=True, eq=False)
class _RecordedTransfer(Transfer):
    recorder: _Recorder

    def wait(self) -> torch.Tensor:
        result = super().wait()
        self.recorder.under_way -= 1
        return result


class _RecordedGroup(ContextGroup):
    recorder: _Recorder

    def _start(self, what, sent, result, start):
        transfer = super()._start(what, sent, result, start)
        self.recorder.under_way += 1
        fields = {name: getattr(transfer, name) for name in ("result", "works", "sent", "waiting", "what")}
        return _RecordedTransfer(**fields, recorder=self.recorder)


class _RecordedBackend:
    def __init__(self, backend, recorder: _Recorder) -> None:
        self._backend, self._recorder = backend, recorder

    def forward(self, q, *given):
        self._recorder.rows[self._recorder.under_way > 0] += q.shape[0]
        return self._backend.forward(q, *given)

    def backward(self, grad, *given):
        self._recorder.rows[self._recorder.under_way > 0] += grad.shape[0]
        return self._backend.backward(grad, *given)


def covered_rows(plan: bytes, exchange: str) -> list[list[tuple[int, int]]]:
    """Per direction and pack the rows attended to while something travelled (a ring's by rank of keys), and others."""
    decoded, rank, dtype, recorder = decode_plan(plan), dist.get_rank(), torch.float64, _Recorder()
    watch = RankWatch(rank, f"rank {rank}", dist.get_world_size())
    groups = create_context_groups(decoded.layout, rank, dist.new_group, watch)
    for group in groups.values():
        group.__class__ = _RecordedGroup
        group.recorder = recorder  # type: ignore[attr-defined]
    dp_rank = rank // decoded.layout.cp
    packs = RankPackTokens(decoded, dp_rank, groups, exchange, torch.device("cpu"))  # type: ignore[arg-type]
    of_replica = decoded.pack_plans[dp_rank]
    store = ActivationStore(packs.stored_tokens(), [packs.ranges(pack) for pack in of_replica.backward])
    lengths = {document.doc_id: document.num_tokens for document in decoded.documents}
    given = {doc: document_tensors(n, doc, dtype) for doc, n in lengths.items()}
    packs.collate({doc: np.zeros(n, np.int32) for doc, n in lengths.items()})
    backend = _RecordedBackend(select_backend("reference", "cpu"), recorder)
    call = AttentionCall(backend, store, 0, Scoring(DIM**-0.5, 0))  # type: ignore[arg-type]
    result: list[list[tuple[int, int]]] = []
    for listed in (of_replica.forward, of_replica.backward):
        result.append([])
        for pack in listed:
            _attend(pack.direction, packs.load(pack), store, given, None, call, dtype)
            result[-1].append(recorder.take())
    return result


def _attend(direction, pack, store, given, result, call, dtype) -> None:
    def rows(name):
        heads = GROUPS if name in "kv" else HEADS
        return torch.cat([torch.empty(0, heads, DIM, dtype=dtype), *(given[d][name][a:b] for d, a, b in pack.ranges)])

    def spread(name, values):
        if result is None:
            return
        for place, (doc, start, stop) in rows_of(pack.ranges):
            assert result[doc][name][start:stop].isnan().all(), "computed twice"
            result[doc][name][start:stop] = values[place]

    q, k, v = rows("q"), rows("k"), rows("v")
    of_rows = tuple(rows_of(pack.ranges))
    local = LocalAttention(of_rows)
    if direction == "forward":
        store.open_pack(pack.ranges)
        if pack.shared is not None:
            out, lse = pack.shared.forward(call, q, k, v)
        else:
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=work_dtype(q))
            local.forward(call, q, k, v, out, lse)
        store.record("out", out)
        store.record("lse", lse)
        spread("out", out)
        return
    out, lse = q, q.new_empty(q.shape[:2], dtype=work_dtype(q))
    if pack.ranges:
        out, lse = store.read("out", pack.ranges), store.read("lse", pack.ranges)
    if pack.shared is not None:
        dq, dk, dv = pack.shared.backward(call, rows("grad"), q, out, lse)
    else:
        dq, dk, dv = torch.empty_like(q), *(torch.empty_like(k, dtype=lse.dtype) for _ in range(2))
        local.backward(call, rows("grad"), q, out, lse, (dq, dk, dv))
    for name, values in (("q", dq), ("k", dk), ("v", dv)):
        spread(name, values)
    store.close_backward(pack.ended)
