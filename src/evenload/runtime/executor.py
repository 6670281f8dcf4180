"""`Executor` runs one rank's actions of a prepared step. It never plans, simulates, reorders or negotiates.

    F   receive hidden states, run the forward pack, send hidden states on
    B   receive the gradient, run the backward pack, send the gradient on
    I   as B, but the weight gradients of linear layers wait until W
    W   add them; nothing is received or sent

A backward starts to fetch its offloaded tensors before it waits for its gradient. Every unit's reduction may start as
soon as no action will add to the unit's gradients. Weights may be under way when a step begins: a forward waits for its
own units, the first backward for all. `forward_losses` runs a plan without backwards.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenload.runtime.comm.channels import Channels, TransferSettings
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.device import HostClock, step_clock, to_device
from evenload.runtime.optim.data_parallel import WeightsUnderWay
from evenload.runtime.replay.held_bytes import STORE_KINDS, HeldBytes
from evenload.runtime.replay.host_copies import host_copies
from evenload.runtime.replay.rank_packs import RankStep
from evenload.runtime.replay.stage import OnFinal, PipelineStage, ignore_unit
from evenload.runtime.replay.store import ActivationStore, ForwardStore
from evenload.runtime.replay.tree_attention import refuse_trees
from evenload.types.document import Range
from evenload.types.layout import Channel
from evenload.types.plan import Action, completing_actions
from evenload.types.timeline import KINDS


@dataclass(frozen=True, eq=False)
class RankTrace:
    """Records one rank's actions of a step, in seconds on its own monotonic clock. kind: uint8[n], index into `KINDS`;
    stage, pack: int32[n]; start_s, end_s: float64[n]; memory_bytes: int64[n], activations held when each action ended;
    memory_kind_bytes: int64[n, kinds], by kind of `held_bytes.STORE_KINDS`."""

    kind: NDArray[np.uint8]
    stage: NDArray[np.int32]
    pack: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    memory_bytes: NDArray[np.int64]
    memory_kind_bytes: NDArray[np.int64]


class HeadOutput(NamedTuple):
    """Holds a head's output for a backward pack: this rank's loss share (fp64) and the gradient's row sums, [rows]."""

    pack: int
    ranges: tuple[Range, ...]
    loss: Tensor
    row_sums: Tensor


@dataclass(frozen=True, eq=False)
class RankRun:
    """Holds the result of one rank's part of a step.

    Args:
        loss_sum: this rank's share of the global mean loss, on its device; 0 except on last stages.
        trace: returns when its actions ran. Waits for a GPU; call it before the next run.
        held: bytes that the activation stores held at most, on the device and in host memory.
        most_sends_kept: sent tensors that any one channel kept at once.
        heads: of every backward pack, on last stages.
    """

    loss_sum: Tensor
    trace: Callable[[], RankTrace]
    held: HeldBytes
    most_sends_kept: int
    heads: tuple[HeadOutput, ...]


class Executor:
    """Runs plans on one rank, with its virtual stages by index; none where it is idle in the mesh's layout."""

    def __init__(self, stages: Mapping[int, PipelineStage], mesh: Mesh) -> None:
        self.move_to(stages, mesh)
        self._clock = step_clock(mesh.device)
        self.receives = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
        self._copies = host_copies(mesh.device)

    def move_to(self, stages: Mapping[int, PipelineStage], mesh: Mesh) -> None:
        """Run the next steps in another layout: its mesh, and this rank's stages in it."""
        self._stages, self._mesh = stages, mesh

    def idle(self) -> RankRun:
        nothing = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        return RankRun(nothing, functools.partial(_trace, [], self._clock), HeldBytes(), 0, ())

    def run(self, step: RankStep, on_final: OnFinal = ignore_unit, weights: WeightsUnderWay | None = None) -> RankRun:
        """Run this rank's actions of a step and add gradients to `main_grad`. `on_final` is called with every unit
        whose gradients are complete, once `step.order` allows sums; `weights` may still be under way, and are complete
        on return."""
        plan, mine = step.plan, step.packs
        packs = plan.pack_plans[self._mesh.dp_rank]
        actions = plan.schedules[self._mesh.dp_rank].ranks[self._mesh.pp_rank]
        document_tokens = {document.doc_id: document.num_tokens for document in plan.documents}
        for stage in self._stages.values():
            if mine.trees:
                refuse_trees(stage.model)
            stage.begin_step(document_tokens, *([] if weights is None else [weights.await_unit]))
        held = HeldBytes()
        stores = self._open_stores(step, held)
        channels = open_channels(step, actions, self._stages, self._mesh, self.receives)
        rows: list[_Row] = []
        heads: list[HeadOutput] = []
        loss = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        before_sums = step.order.num_before_sums
        completing = completing_actions(((action.kind, action.stage) for action in actions), before_sums)
        self._clock.start()
        for at, action in enumerate(actions):
            self._mesh.watch.record(action)
            channels.before_action(at)
            stage, store = self._stages[action.stage], stores[action.stage]
            if weights is not None and action.kind != "F":
                weights.finish()
            if action.kind == "W":
                start = self._clock.mark()
                store.add_deferred_weights(action.pack)
            elif action.kind == "F":
                batch = mine.load(packs.forward[action.pack])
                hidden = channels.receive_hidden(action.stage, action.pack)
                start = self._clock.mark()
                channels.send_hidden(action.stage, action.pack, stage.forward(batch, hidden, store))
            else:
                batch = mine.load(packs.backward[action.pack])
                stage.announce_backward(batch, store)
                grad = channels.receive_grad(action.stage, action.pack)
                start = self._clock.mark()
                products = store.defer_weights(action.pack) if action.kind == "I" else None
                completes = at >= before_sums and completing.get(at) == (action.stage,)
                release = on_final if completes else ignore_unit
                grad, share = stage.backward(batch, grad, store, plan.num_label_tokens, products, release)
                loss += share
                if stage.head_row_sums is not None:
                    heads.append(HeadOutput(action.pack, batch.ranges, share, stage.head_row_sums))
                channels.send_grad(action.stage, action.pack, grad)
            for done in completing.get(at, ()):
                for unit in reversed(self._stages[done].model.units):
                    on_final(unit)
            rows.append(_Row(action, start, self._clock.mark(), tuple(held.held_by_kind.values())))
        if weights is not None:
            weights.finish()  # also of stages without packs in this step
        channels.close()
        _check_empty(stores.values(), held)
        assert not self._copies.arena.live_bytes, "tensors in host memory were not freed"
        return RankRun(loss, functools.partial(_trace, rows, self._clock), held, channels.most_kept, tuple(heads))

    def _open_stores(self, step: RankStep, held: HeldBytes) -> dict[int, ActivationStore]:
        self._copies.begin_step()
        packs, mine = step.plan.pack_plans[self._mesh.dp_rank], step.packs
        backward_packs = [mine.ranges(pack) for pack in packs.backward]
        return {
            number: ActivationStore(
                mine.stored_tokens(),
                backward_packs,
                policies=packs.policies,
                recomputed_layers=step.plan.layout.recomputed_layers(number),
                held=held,
                copies=self._copies,
                shard=stage.row_shard,
            )
            for number, stage in self._stages.items()
        }


def _check_empty(stores: Iterable[ActivationStore], held: HeldBytes) -> None:
    for store in stores:
        store.check_empty()
    assert held.held_bytes == held.host_bytes == 0, f"{held.held_by_kind} bytes are counted as held by no document"


def open_channels(
    step: RankStep,
    actions: Sequence[Action],
    stages: Mapping[int, PipelineStage],
    mesh: Mesh,
    stream: torch.cuda.Stream | None,
) -> Channels:
    """Open the channels for these actions of a rank; `stream` as of `TransferSettings`."""
    packs, mine = step.plan.pack_plans[mesh.dp_rank], step.packs
    rows: dict[Channel, dict[int, int]] = {channel: {} for channel in mesh.channel_groups}
    for action in actions:
        if action.kind == "W":
            continue
        kind, of_kind = ("F", packs.forward) if action.kind == "F" else ("B", packs.backward)
        channel = mesh.channel(kind, action.stage, action.pack)
        if channel in rows:
            rows[channel][action.pack] = stages[action.stage].num_rows(mine.ranges(of_kind[action.pack]))
    like = next(iter(stages.values()))
    tensors = {"hidden_size": like.hidden_size, "dtype": like.dtype, "device": like.device}
    return Channels(step.order, mesh, rows, TransferSettings(**tensors, watch=mesh.watch, stream=stream))


class _Row(NamedTuple):
    action: Action
    start: object
    end: object
    held_bytes: tuple[int, ...]


def _trace(rows: list[_Row], clock: HostClock) -> RankTrace:
    starts, ends = clock.seconds([row.start for row in rows]), clock.seconds([row.end for row in rows])
    kinds = np.array([row.held_bytes for row in rows], dtype=np.int64).reshape(-1, len(STORE_KINDS))
    return RankTrace(
        kind=np.array([KINDS.index(row.action.kind) for row in rows], dtype=np.uint8),
        stage=np.array([row.action.stage for row in rows], dtype=np.int32),
        pack=np.array([row.action.pack for row in rows], dtype=np.int32),
        start_s=np.array(starts, dtype=np.float64),
        end_s=np.array(ends, dtype=np.float64),
        memory_bytes=kinds.sum(axis=1),
        memory_kind_bytes=kinds,
    )


def forward_losses(
    step: RankStep, stages: Mapping[int, PipelineStage], mesh: Mesh, stream: torch.cuda.Stream | None = None
) -> Tensor:
    """Return this rank's share of the sum of label losses of every document of a plan without backwards, in the plan's
    order; float64[n] on the CPU. Collective with the ranks of its pipeline."""
    plan, mine = step.plan, step.packs
    packs = plan.pack_plans[mesh.dp_rank]
    actions = plan.schedules[mesh.dp_rank].ranks[mesh.pp_rank]
    document_tokens = {document.doc_id: document.num_tokens for document in plan.documents}
    place = {document.doc_id: at for at, document in enumerate(plan.documents)}
    held, stored = HeldBytes(), mine.stored_tokens()
    stores: dict[int, ForwardStore] = {}
    for number, stage in stages.items():
        stores[number] = ForwardStore(stored, (), held=held, shard=stage.row_shard)
        if mine.trees:
            refuse_trees(stage.model)
        stage.begin_step(document_tokens)
    sums = torch.zeros(len(plan.documents), dtype=torch.float64, device=mesh.device)
    # All ranks of a tensor-parallel group know the losses, and one reports them.
    reports = mesh.tp_rank == 0
    channels = open_channels(step, actions, stages, mesh, stream)
    for at, action in enumerate(actions):
        mesh.watch.record(action)
        channels.before_action(at)
        stage, store = stages[action.stage], stores[action.stage]
        batch = mine.load(packs.forward[action.pack])
        hidden = stage.forward(batch, channels.receive_hidden(action.stage, action.pack), store)
        if stage.model.is_last:
            losses = stage.losses(batch, hidden)
            if reports and batch.ranges:
                documents = np.repeat([place[r.doc_id] for r in batch.ranges], [r.stop - r.start for r in batch.ranges])
                sums.index_add_(0, to_device(torch.from_numpy(documents), mesh.device), losses.double())
        channels.send_hidden(action.stage, action.pack, hidden)
        slices = packs.forward[action.pack].slices
        store.end_documents(piece.doc_id for piece in slices if piece.stop == document_tokens[piece.doc_id])
    channels.close()
    _check_empty(stores.values(), held)
    return sums.cpu()
