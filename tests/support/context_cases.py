"""Attention of shared packs as one rank of a `GlooPool`, without a model around it."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from evenload.attention.backends import select_backend
from evenload.runtime.comm.collectives import ContextGroup, Transfer, create_context_groups
from evenload.runtime.comm.watch import RankWatch
from evenload.runtime.model.mask_rules import MaskRule
from evenload.runtime.replay.context_attention import LocalAttention, rows_of
from evenload.runtime.replay.rank_packs import RankPackTokens
from evenload.runtime.replay.replayable import attention
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.replay.store import ActivationStore
from evenload.types.layer_kind import AttentionKind
from evenload.types.plan import decode_plan

HEADS, GROUPS, DIM = 4, 2, 8


@dataclass(frozen=True)
class AttentionCase:
    """What a layer asks for; `window` and `chunk` 0 = none."""

    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    value_dim: int = DIM
    has_sinks: bool = False

    def sinks(self, dtype: torch.dtype) -> torch.Tensor | None:
        return torch.linspace(-1.0, 2.0, HEADS, dtype=dtype, requires_grad=True) if self.has_sinks else None


PLAIN = AttentionCase()


def document_tensors(
    num_tokens: int, doc_id: int, dtype: torch.dtype, case: AttentionCase = PLAIN
) -> dict[str, torch.Tensor]:
    """q, k, v and the output's gradient of a document, [n, heads, D] each, the same on every rank."""
    generator = torch.Generator().manual_seed(doc_id)
    shapes = {"q": (HEADS, DIM), "k": (GROUPS, DIM), "v": (GROUPS, case.value_dim), "grad": (HEADS, case.value_dim)}
    return {
        name: torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def attend_shared_packs(
    plans: list[bytes], exchange: str, dtype: torch.dtype, case: AttentionCase, backend: str
) -> list[tuple[dict, int, torch.Tensor | None]]:
    """Per plan what this rank computed of every document, [n, heads, D], NaN elsewhere, the bytes it received, and its
    part of the sinks' gradient, if there are sinks."""
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
        layer = _Layer(select_backend(backend, "cpu"), case, dtype)
        layer.replay.store = ActivationStore(
            packs.stored_tokens(), [packs.ranges(pack) for pack in of_replica.backward]
        )
        lengths = {document.doc_id: document.num_tokens for document in plan.documents}
        given = {doc: document_tensors(n, doc, dtype, case) for doc, n in lengths.items()}
        # Output is as the gradient that is given of it.
        as_found = {"grad": "out", "q": "q", "k": "k", "v": "v"}
        result = {
            doc: {as_found[n]: torch.full_like(t, torch.nan) for n, t in own.items()} for doc, own in given.items()
        }
        packs.collate({doc: np.zeros(n, np.int32) for doc, n in lengths.items()})
        for pack in (*of_replica.forward, *of_replica.backward):
            layer.run(pack.direction, packs.load(pack), given, result)
        layer.replay.store.check_empty()
        moved = sum(group.moved_bytes for group in groups.values()) - before
        results.append((result, moved, None if layer.sinks is None else layer.sinks.grad))
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
    layer = _Layer(_RecordedBackend(select_backend("reference", "cpu"), recorder), PLAIN, dtype)
    layer.replay.store = store
    result: list[list[tuple[int, int]]] = []
    for listed in (of_replica.forward, of_replica.backward):
        result.append([])
        for pack in listed:
            layer.run(pack.direction, packs.load(pack), given, None)
            result[-1].append(recorder.take())
    return result


class _Layer(torch.nn.Module):
    """Attention alone, called as transformers' layers call it; layer 0."""

    def __init__(self, backend, case: AttentionCase, dtype: torch.dtype) -> None:
        super().__init__()
        self.replay, self.case, self.dtype, self.sinks = ReplayState(backend), case, dtype, case.sinks(dtype)

    def run(self, direction, pack, given, result) -> None:
        """Record outputs of a forward pack, or go back through those of a backward pack; keep both in `result`."""
        state = self.replay
        state.direction, state.ranges, state.shared = direction, pack.ranges, pack.shared
        state.attention = LocalAttention(tuple(rows_of(pack.ranges)))
        state.enter_layer(0)
        if direction == "forward":
            state.store.open_pack(pack.ranges)
        if not pack.ranges:
            shape = AttentionKind(heads=HEADS, kv_heads=GROUPS, head_dim=DIM, value_dim=self.case.value_dim)
            if pack.shared is not None:
                like = torch.empty(0, dtype=self.dtype)
                pack.shared.join(direction, state.backend, state.store, 0, shape, like)
        elif direction == "forward":
            with torch.no_grad():
                self._spread("out", pack, self._attend(*(self._rows(n, pack, given) for n in "qkv")), result)
        else:
            inputs = {name: self._rows(name, pack, given).requires_grad_() for name in "qkv"}
            self._attend(*inputs.values()).backward(self._rows("grad", pack, given))
            for name, rows in inputs.items():
                self._spread(name, pack, rows.grad, result)
        if direction == "backward":
            state.store.close_backward(pack.ended)

    def _attend(self, *qkv):
        rule = MaskRule(self.case.window, self.case.chunk)
        given = (rows.transpose(0, 1)[None] for rows in qkv)
        return attention(self, *given, rule, softcap=self.case.soft_cap or None, s_aux=self.sinks)[0][0]

    @staticmethod
    def _rows(name, pack, given):
        return torch.cat([given[doc][name][start:stop] for doc, start, stop in pack.ranges])

    @staticmethod
    def _spread(name, pack, values, result):
        if result is None:
            return
        for place, (doc, start, stop) in rows_of(pack.ranges):
            assert result[doc][name][start:stop].isnan().all(), "computed twice"
            result[doc][name][start:stop] = values[place]
