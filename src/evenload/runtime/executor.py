"""`Executor`: follows one rank's actions of a plan. It never plans, reorders or negotiates."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from evenload.data.collate import collate_pack
from evenload.errors import InvalidPlanError
from evenload.runtime.channels import Channels
from evenload.runtime.mesh import Mesh
from evenload.runtime.stage import PackTokens, PipelineStage
from evenload.runtime.held_bytes import StoreKind
from evenload.runtime.store import ActivationStore, Range
from evenload.types.micropack import MicroPack, PackPlan
from evenload.types.plan import StepPlan
from evenload.types.timeline import KINDS


@dataclass(frozen=True, eq=False)
class RankTrace:
    """What one rank did in a step; times in seconds on its own monotonic clock.

    Args:
        kind: uint8[n], index into `KINDS`; pack: int32[n]; start_s, end_s: float64[n].
        memory_bytes: int64[n], activations held when each action ended.
    """

    kind: NDArray[np.uint8]
    pack: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    memory_bytes: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankRun:
    """Result of one rank's part of a step.

    Args:
        loss: this rank's share of the global mean loss (0 except on last stages).
        peak_bytes: the most the activation store held.
        peak_by_kind: the most it held of each kind, at different times.
    """

    loss: float
    trace: RankTrace
    peak_bytes: int
    peak_by_kind: dict[StoreKind, int]


class Executor:
    """Runs plans on one stage.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, stage: PipelineStage, mesh: Mesh, clock: Callable[[], float] = time.perf_counter) -> None:
        self._stage = stage
        self._mesh = mesh
        self._clock = clock

    def run(self, plan: StepPlan, tokens: dict[int, NDArray[np.int32]]) -> RankRun:
        """Run this rank's actions of `plan`; gradients are added to `main_grad`.

        Args:
            tokens: of every document of this rank's replica.
        """
        if plan.layout != self._mesh.layout:
            raise InvalidPlanError(
                f"step {plan.step} is planned for {plan.layout.describe()}, this run is {self._mesh.layout.describe()}"
            )
        packs = plan.pack_plans[self._mesh.dp_rank]
        shared = next((piece for p in (*packs.forward, *packs.backward) for piece in p.slices if piece.cp > 1), None)
        if shared is not None:
            raise InvalidPlanError(
                f"step {plan.step}: {shared.cp} ranks share document {shared.doc_id} (cp or DP-Merge); "
                "the runtime of this version runs documents on one replica only: plan with dp_merge = false"
            )
        if packs.policies:
            raise InvalidPlanError(
                f"step {plan.step}: activation policies {sorted(set(packs.policies.values()))} are planned; "
                "the runtime of this version executes 'replay' only"
            )
        actions = plan.schedules[self._mesh.dp_rank].ranks[self._mesh.pp_rank]
        store = ActivationStore(_stored_tokens(packs), [pack_ranges(pack) for pack in packs.backward])
        channels = self._open_channels(packs, actions)
        rows: list[tuple[int, int, float, float, int]] = []
        loss = 0.0
        for action in actions:
            pack = (packs.forward if action.kind == "F" else packs.backward)[action.pack]
            self._mesh.watch.note(action)
            batch = self._load(pack, tokens)
            if action.kind == "F":
                hidden = channels.receive_hidden(action.pack)
                start_s = self._clock()
                channels.send_hidden(action.pack, self._stage.forward(batch, hidden, store))
            else:
                if action.kind != "B":
                    raise InvalidPlanError(
                        f"step {plan.step}: action {action} splits a backward into I and W, which can be planned and "
                        "simulated; the runtime of this version executes F and B only"
                    )
                grad = channels.receive_grad(action.pack)
                start_s = self._clock()
                grad, share = self._stage.backward(batch, grad, store, plan.num_label_tokens)
                loss += float(share)
                channels.send_grad(action.pack, grad)
            rows.append((KINDS.index(action.kind), action.pack, start_s, self._clock(), store.held.held_bytes))
        channels.close()
        store.check_empty()
        return RankRun(loss, _trace(rows), store.held.peak_bytes, store.held.peak_by_kind)

    def _open_channels(self, packs: PackPlan, actions) -> Channels:
        def rows(kind: str, of: tuple[MicroPack, ...]) -> list[tuple[int, int]]:
            return [(a.pack, num_pack_rows(of[a.pack])) for a in actions if a.kind == kind]

        return Channels(
            previous=self._mesh.previous,
            next=self._mesh.next,
            forward=self._mesh.forward,
            backward=self._mesh.backward,
            forward_rows=rows("F", packs.forward),
            backward_rows=rows("B", packs.backward),
            hidden_size=self._stage.hidden_size,
            dtype=self._stage.dtype,
            device=self._stage.device,
            watch=self._mesh.watch,
        )

    def _load(self, pack: MicroPack, tokens: dict[int, NDArray[np.int32]]) -> PackTokens:
        batch = collate_pack(pack, tokens)
        token_ids, targets, positions = (
            torch.from_numpy(column).to(self._mesh.device)
            for column in (batch.token_ids, batch.targets, batch.positions)
        )
        return PackTokens(pack_ranges(pack), token_ids, targets, positions)


def pack_ranges(pack: MicroPack) -> tuple[Range, ...]:
    """The token ranges a pack computes, padding included."""
    return tuple((s.doc_id, s.start, pack.pad_to or s.stop) for s in pack.slices)


def num_pack_rows(pack: MicroPack) -> int:
    """Rows a pack computes, padding included."""
    return pack.num_tokens + pack.num_padding_tokens


def _stored_tokens(packs: PackPlan) -> dict[int, int]:
    """Rows stored per document: its tokens, or its padded length."""
    stored: dict[int, int] = {}
    for pack in packs.forward:
        for doc_id, _, stop in pack_ranges(pack):
            stored[doc_id] = max(stop, stored.get(doc_id, 0))
    return stored


def _trace(rows: list[tuple[int, int, float, float, int]]) -> RankTrace:
    kind, pack, start_s, end_s, memory = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return RankTrace(
        kind=np.array(kind, dtype=np.uint8),
        pack=np.array(pack, dtype=np.int32),
        start_s=np.array(start_s, dtype=np.float64),
        end_s=np.array(end_s, dtype=np.float64),
        memory_bytes=np.array(memory, dtype=np.int64),
    )
