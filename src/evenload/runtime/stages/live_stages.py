"""`LiveStages`: what a rank holds of the model in the layout that runs now, and how it becomes that of another.

Between two steps, on every rank, from the same plan of moves (`plan.reconfiguration.moves`):

    take memory ─► weights, point to point into place ─► let memory go ─► stages, buffers ─┬─► the step runs
                                                                                           └─► optimizer state behind it

Units that stay keep their memory, modules and buffers; only how buffers are cut into shards changes. All ranks post
their transfers in the order of the moves, all before they wait for one, so no circle of waits is possible; groups,
layers as modules and hooks are from the start of the run. Every bit of weights and optimizer state arrives as it was.

Price: the stall is the transfer of the weights that a rank lacks, and the page faults of their memory; the moves are
planned in a millisecond. docs/decisions/0031 has what was measured.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.coverage import completed_between_layouts
from evenload.plan.reconfiguration.moves import Move, moved_bytes, moving_seconds, pipeline_ranks, plan_moves
from evenload.runtime.comm.mesh import Mesh, Meshes
from evenload.runtime.config.optimizer_config import OptimizerConfig
from evenload.runtime.config.train_config import TrainConfig
from evenload.runtime.device import wait_for
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.optim.optimizer import ShardedAdamW
from evenload.runtime.optim.parameter_units import buffer_groups, flatten_units, frozen_bytes
from evenload.runtime.replay.stage import PipelineStage, make_layers_replayable
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.stages.live_pieces import live_pieces
from evenload.runtime.stages.rank_stages import RankStages, build_models
from evenload.runtime.stages.state_arrival import Shards, StateArrival
from evenload.runtime.stages.unit_modules import unit_modules


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A change of the layout before a step, on this rank; `joined_switch` joins those of all ranks.

    Args:
        before, after: layouts in words.
        stall_s: seconds until the weights were in place and the step could begin.
        wait_s: seconds for which the optimizer waited for its state.
        weight_bytes, state_bytes: received.
        predicted_stall_s: of the busiest rank, from the links.
        predicted_state_s: the same for optimizer state, which hides behind the step as far as that lasts.
        predicted_weight_bytes, predicted_state_bytes: received by all ranks.
    """

    before: str
    after: str
    stall_s: float
    wait_s: float
    weight_bytes: int
    state_bytes: int
    predicted_stall_s: float
    predicted_state_s: float
    predicted_weight_bytes: int
    predicted_state_bytes: int


def joined_switch(switch: Switch, mesh: Mesh) -> Switch:
    """What all ranks say of one switch: their longest seconds, the sum of their bytes. Collective."""
    seconds = torch.tensor([switch.stall_s, switch.wait_s], dtype=torch.float64)
    received = torch.tensor([switch.weight_bytes, switch.state_bytes])
    with mesh.watch.waiting("what the change of the layout took"):
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=mesh.control)
        dist.all_reduce(received, group=mesh.control)
    return replace(
        switch,
        stall_s=float(seconds[0]),
        wait_s=float(seconds[1]),
        weight_bytes=int(received[0]),
        state_bytes=int(received[1]),
    )


class LiveStages:
    """One rank's part of the model. `held` is what runs now, in the layout of `mesh`."""

    def __init__(self, config: TrainConfig, meshes: Meshes) -> None:
        self.mesh = mesh = meshes.start
        built = build_models(config, mesh)
        models = built.models
        self._modules = unit_modules(
            tuple(models.values()),
            dtype=built.dtype,
            lora=config.model.lora,
            tp_rank=mesh.tp_rank,
            tp=mesh.layout.tp,
        )
        data_sizes = [meshes.of(layout).data_size for layout in meshes.layouts]
        buffers = flatten_units(tuple(models.values()), mesh.data_size, data_sizes)
        self._pieces = live_pieces(self._modules, buffers, data_sizes, mesh.device)
        self._backend = built.backend
        self._state = ReplayState(backend=built.backend)
        make_layers_replayable(self._modules.layers, self._state, self._modules.architecture, mesh.tensor)
        self.held = RankStages(
            built.hf_config,
            built.model,
            {index: self._stage(model) for index, model in models.items()},
            buffers,
            frozen_bytes(tuple(models.values())),
        )
        self._arrival: StateArrival | None = None
        self._switch: Switch | None = None
        self._num_steps = 0

    def move_to(self, mesh: Mesh, optimizer: ShardedAdamW, coefficients: CostCoefficients, from_s: float) -> None:
        """Become the layout of `mesh`; weights are in place on return, optimizer state when `settle` returns.
        Collective. `RankLostError` where a rank does not come.

        Args:
            optimizer: of the layout so far, of no use afterwards.
            coefficients: for what is predicted, over the links that they know.
            from_s: `time.perf_counter` when training stopped for it.
        """
        assert self._arrival is None, "optimizer state of the switch before has not been waited for"
        old, sizes = self.mesh, [live.piece for live in self._pieces]
        moves = plan_moves(old.layout, mesh.layout, sizes, ranks_per_node=mesh.ranks_per_machine, tp_rank=mesh.tp_rank)
        largest = max(old.layout, mesh.layout, key=lambda layout: layout.world_size)
        links = completed_between_layouts(coefficients, largest)[0]
        self._num_steps = optimizer.num_steps
        before = self._take_state(optimizer)
        gained, lost = [], []
        for live in self._pieces:
            is_needed = mesh.pp_rank in pipeline_ranks(mesh.layout, live.piece)
            if is_needed != live.is_held:
                (gained if is_needed else lost).append(live)
        for live in gained:
            live.gain()
        weight_bytes = self._exchange_weights(moves.weights, mesh)
        for live in lost:
            live.drop()
        self.mesh = mesh  # whose tensor-parallel group the new stages take: a rank that was idle had none
        self.held = self._arranged(mesh)
        wait_for(mesh.device)
        self._switch = Switch(
            before=old.layout.describe(),
            after=mesh.layout.describe(),
            stall_s=time.perf_counter() - from_s,
            wait_s=0.0,
            weight_bytes=weight_bytes,
            state_bytes=0,
            predicted_stall_s=moving_seconds(moves.weights, sizes, links, of_state=False),
            predicted_state_s=moving_seconds(moves.state, sizes, links, of_state=True),
            predicted_weight_bytes=mesh.layout.tp * moved_bytes(moves.weights, sizes, of_state=False),
            predicted_state_bytes=mesh.layout.tp * moved_bytes(moves.state, sizes, of_state=True),
        )
        self._arrival = StateArrival(self._pieces, moves.state, old, mesh, before)

    def settle(self, config: OptimizerConfig) -> tuple[ShardedAdamW, Switch] | None:
        """After `move_to`, before anything reads the optimizer: wait for its state; None where it is settled."""
        if self._arrival is None or self._switch is None:
            return None
        after, wait_s = self._arrival.wait()
        index_of = {id(live.parameters[0]): index for index, live in enumerate(self._pieces)}
        state = [after[index_of[id(buffer.parameters[0])]] for buffer in self.held.buffers]
        optimizer = ShardedAdamW(self.held.buffers, self.mesh, config, state, self._num_steps)
        switch = replace(self._switch, wait_s=wait_s, state_bytes=self._arrival.received_bytes)
        self._arrival = self._switch = None
        return optimizer, switch

    def _take_state(self, optimizer: ShardedAdamW) -> dict[int, Shards]:
        """By piece what this rank owns of the optimizer's state."""
        index_of = {id(live.parameters[0]): index for index, live in enumerate(self._pieces)}
        found: dict[int, dict[str, Tensor]] = {}
        for name, buffer, shard in optimizer.state_tensors():
            found.setdefault(index_of[id(buffer.parameters[0])], {})[name] = shard
        optimizer.close()
        return {index: found[index] for index in sorted(found)}

    def _exchange_weights(self, moves: Sequence[Move], mesh: Mesh) -> int:
        """From memory that has them into memory that was taken for them; bytes received."""
        ops, received_bytes = [], 0
        for number, move in enumerate(moves):
            for tensor in self._pieces[move.piece].weights() if mesh.rank in (move.source, move.target) else ():
                if mesh.rank == move.target:
                    ops.append(dist.P2POp(dist.irecv, tensor, move.source, mesh.moving, tag=number))
                    received_bytes += tensor.nbytes
                else:
                    ops.append(dist.P2POp(dist.isend, tensor, move.target, mesh.moving, tag=number))
        with mesh.watch.waiting(f"weights of layout {mesh.layout.describe()}"):
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
        return received_bytes

    def _arranged(self, mesh: Mesh) -> RankStages[PipelineStage]:
        """Stages and buffers of a layout from the pieces that have memory."""
        models = self._modules.stage_models(mesh.layout, mesh.pp_rank)
        live_of = {id(live.parameters[0]): live for live in self._pieces}
        groups = list(buffer_groups(tuple(models.values())))
        return replace(
            self.held,
            stages={index: self._stage(model) for index, model in models.items()},
            buffers=[live_of[id(group.parameters[0])].cut(group, mesh.data_size) for group in groups],
            frozen_bytes=frozen_bytes(tuple(models.values())),
        )

    def _stage(self, model: StageModel) -> PipelineStage:
        return PipelineStage(model, self._backend, self.mesh.tensor, self._state)
