"""`LiveStages`: what a rank holds of the model in the layout that runs now, and how it becomes that of another.

Between two steps every rank makes the same plan of moves (`plan.layouts.moves`):

    the stall:       weights into place (`twin_layer`) ─► stages, buffers
    the step after:  free old weights, optimizer state while the step runs (`twin_layer`)

Units that stay keep their memory, modules and buffers; only how buffers are cut into shards changes. All ranks post
their transfers in the order of the moves before they wait for one, so no circle of waits is possible. Price: the stall
takes memory for the weights that a rank lacks, and copies them.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from evenload.config.optimizer import OptimizerConfig
from evenload.config.sections import RunConfig
from evenload.config.train_config import ModelConfig
from evenload.cost.coefficients import CopySpec, CostCoefficients
from evenload.cost.validity import fill_between_layouts
from evenload.errors import ConfigError
from evenload.feed.step_maker import PlannedStep
from evenload.planning.layouts.flex_planner import FlexPlanner
from evenload.planning.layouts.measured_layouts import LayoutMonitor, MeasuredAfter
from evenload.planning.layouts.moves import Moves, SwitchPieces, pipeline_ranks, shared_bytes, shared_pieces
from evenload.planning.layouts.switch_prices import stall_seconds
from evenload.runtime.comm.mesh import Mesh, Meshes, most_of_ranks
from evenload.runtime.device import synchronize_device
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.optim.optimizer import MASTER, ShardedOptimizer
from evenload.runtime.optim.parameter_units import BufferGroup, buffer_groups, flatten_units, frozen_bytes
from evenload.runtime.replay.stage import PipelineStage, make_layers_replayable
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.stages.rank_stages import RankStages, build_models, dtype_of, stage_models, unit_modules
from evenload.runtime.stages.twin_layer import (
    WEIGHTS,
    LivePiece,
    SparseMemory,
    StateArrival,
    TwinLayer,
    gather_from_all,
    live_pieces,
    open_twins,
    touch,
)
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.run import LayoutDecision, switch_kind
from evenload.types.timeline import Timeline


@dataclass(frozen=True)
class Twins:
    """Summarises what lies in shared memory; `reason`: why nothing does, where no budget was set."""

    num_shared: int
    num_pieces: int
    num_bytes: int
    reason: str = ""


def share_pieces(
    budget_bytes: int | None, pieces: Sequence[LivePiece], meshes: Meshes
) -> tuple[TwinLayer, Twins | None]:
    """Share as many pieces as a machine's budget holds, None = no limit; return them and a summary. `ConfigError` where
    a budget is set and ranks cannot read each other's memory. Collective."""
    mesh = meshes.start
    if mesh.device.type != "cpu" or mesh.ranks_per_machine == 1 or budget_bytes == 0:
        return TwinLayer(pieces, None), None
    sizes = [live.piece for live in pieces]
    chosen = shared_pieces(sizes, meshes.layouts, mesh.ranks_per_machine, budget_bytes)
    # Parts of other tensor-parallel places may be larger; what is shared decides what all ranks do together.
    chosen = frozenset.intersection(*gather_from_all(chosen, mesh))
    parts = [live.dtypes if index in chosen else None for index, live in enumerate(pieces)]
    memory = open_twins(parts, [live.capacity for live in pieces], mesh)
    if isinstance(memory, str):
        if budget_bytes is not None:
            raise ConfigError(
                f"plan.twin_bytes is {budget_bytes}, but the ranks of a machine cannot read each other's memory "
                f"({memory}); leave plan.twin_bytes out or set it to 0 to send what moves between layouts"
            )
        return TwinLayer(pieces, None), Twins(0, len(sizes), 0, memory)
    for index, places in memory.pieces.items():
        pieces[index].share(places)
    layer = TwinLayer(pieces, memory)
    layer.mark_held(0)
    most_bytes = sum(shared_bytes(sizes[index], meshes.layouts, mesh.ranks_per_machine) for index in chosen)
    return layer, Twins(len(chosen), len(sizes), most_bytes * mesh.layout.tp)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A change of the layout before a step, on this rank; `joined_switch` joins those of all ranks.

    Args:
        stall_s: until the weights were in place and the step could begin.
        wait_s: for which the optimizer waited for its state.
        weight_bytes, state_bytes: received.
        predicted_stall_s: by `planning.layouts.switch_prices`.
    """

    before: str
    after: str
    stall_s: float
    wait_s: float
    weight_bytes: int
    state_bytes: int
    predicted_stall_s: float


def joined_switch(switch: Switch, mesh: Mesh) -> Switch:
    """Join what all ranks report of one switch: their longest seconds, the sum of their bytes. Collective."""
    longest, added = ("stall_s", "wait_s", "predicted_stall_s"), ("weight_bytes", "state_bytes")
    seconds = torch.tensor([getattr(switch, name) for name in longest], dtype=torch.float64)
    received = torch.tensor([getattr(switch, name) for name in added])
    with mesh.watch.waiting("what the change of the layout took"):
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=mesh.control)
        dist.all_reduce(received, group=mesh.control)
    of_all = dict(zip(longest, seconds.tolist(), strict=True)) | dict(zip(added, received.tolist(), strict=True))
    return replace(switch, **of_all)


class LiveStages:
    """One rank's part of the model. `held` is what runs now, in the layout of `mesh`."""

    def __init__(
        self, model: ModelConfig, run: RunConfig, spec: ModelSpec, meshes: Meshes, twin_bytes: int | None
    ) -> None:
        self._meshes, self.mesh = meshes, meshes.start
        mesh, tp = self.mesh, self.mesh.layout.tp
        hf_config, models, self._backend = build_models(model, run, spec, mesh)
        parts = tuple(models.values())
        self._whole, held = unit_modules(
            parts, dtype=dtype_of(model), device=mesh.device, lora=model.lora, tp_rank=mesh.tp_rank, tp=tp
        )
        # Of all stages, so that a piece takes as much memory on every rank.
        data_sizes = sorted({size for layout in meshes.layouts for size in layout.data_sizes})
        buffers = flatten_units(parts, mesh.data_size, data_sizes)
        self._pieces = live_pieces(self._whole, held, buffers, data_sizes, mesh.device)
        self._layer, self.twins = share_pieces(twin_bytes, self._pieces, meshes)
        self._index_of = {id(live.parameters[0]): index for index, live in enumerate(self._pieces)}
        self._state = ReplayState(backend=self._backend)
        make_layers_replayable(self._whole, self._state, mesh.tensor)
        stages = {index: self._stage(part) for index, part in models.items()}
        self.held = RankStages(hf_config, stages, buffers, frozen_bytes(parts))
        self._arrival: StateArrival | None = None
        self._switch: Switch | None = None
        self._num_steps = 0
        self.moved = SwitchPieces(
            pieces=tuple(live.piece for live in self._pieces),
            shared=frozenset(self._layer.twins.pieces if self._layer.twins else ()),
            ranks_per_machine=mesh.ranks_per_machine,
            tp=tp,
        )

    def initial_state(self) -> list[dict[str, Tensor]]:
        """Make a new optimizer's state, in its places: zeros, and weights as masters."""
        states = []
        for buffer in self.held.buffers:
            live, shard = self._live_of(buffer), buffer.shard(buffer.values, self.mesh.data_rank, self.mesh.data_size)
            start, state = live.share_in(self.mesh)[0], {}
            for name in live.state_names:
                if live.shared is None:
                    state[name] = torch.zeros_like(shard, dtype=buffer.grads.dtype)
                else:
                    # Written, so that its pages are there when the process is measured before the first step.
                    state[name] = live.shared.tensor(name, start, start + shard.numel()).zero_()
            if MASTER in state:
                state[MASTER].copy_(shard)
            states.append(state)
        return states

    def move_to(self, mesh: Mesh, optimizer: ShardedOptimizer, coefficients: CostCoefficients, from_s: float) -> None:
        """Become the layout of `mesh`, up to `settle`. Collective. `RankLostError` where a rank does not come."""
        assert self._arrival is None, "optimizer state of the switch before has not been waited for"
        old, moves = self.mesh, self.moved.moves(self.mesh.layout, mesh.layout, mesh.tp_rank)
        largest = max(old.layout, mesh.layout, key=lambda layout: layout.world_size)
        links = fill_between_layouts(coefficients, largest)[0]
        self._num_steps = optimizer.num_steps
        before: dict[int, dict[str, Tensor]] = {}
        for name, buffer, shard in optimizer.state_tensors():
            before.setdefault(self._index_of[id(buffer.parameters[0])], {})[name] = shard
        optimizer.close()
        lost = []
        for index, live in enumerate(self._pieces):
            is_needed = mesh.pp_rank in pipeline_ranks(mesh.layout, live.piece)
            if is_needed and not live.is_held:
                live.gain()
            elif live.is_held and not is_needed:
                lost.append(index)
        weight_bytes = self._layer.bring_weights(moves, mesh, self._num_steps)
        memory = [self._pieces[index].drop() for index in lost]
        self.mesh = mesh  # whose tensor-parallel group the new stages take: a rank that was idle had none
        self.held = self._arranged(mesh)
        synchronize_device(mesh.device)
        self._switch = Switch(
            before=old.layout.describe(),
            after=mesh.layout.describe(),
            stall_s=time.perf_counter() - from_s,
            wait_s=0.0,
            weight_bytes=weight_bytes,
            state_bytes=0,
            predicted_stall_s=stall_seconds(moves, self.moved, links, old.layout, mesh.layout),
        )
        self._arrival = StateArrival(self._layer, moves.state, old, mesh, before, self._num_steps, lost, memory)

    def settle(self, config: OptimizerConfig) -> tuple[ShardedOptimizer, Switch] | None:
        """Wait for the optimizer's state, after `move_to` and before anything reads it; None where it is settled."""
        if self._arrival is None or self._switch is None:
            return None
        after, wait_s = self._arrival.wait()
        state = [after[self._index_of[id(buffer.parameters[0])]] for buffer in self.held.buffers]
        optimizer = ShardedOptimizer(self.held.buffers, self.mesh, config, state, self._num_steps)
        switch = replace(self._switch, wait_s=wait_s, state_bytes=self._arrival.received_bytes)
        self._arrival = self._switch = None
        return optimizer, switch

    def measured_copies(self) -> CopySpec:
        """Measure what a switch costs on this machine, by doing what it does: ranks read each other's memory, all at
        once and one alone, touch fresh memory, and arrange their stages anew. Before the first update, where some piece
        is shared; every rank returns the same. Collective. Price: about two seconds."""
        mesh, reading = self.mesh, Reading(self._layer, self.mesh)
        meshes: dict[int, Mesh] = {}
        for layout in self._meshes.layouts:
            stages = map(layout.stages_of_rank, range(layout.pipeline_ranks))
            most_layers = max(sum(layout.stage_counts[stage] for stage in own) for own in stages)
            meshes[most_layers] = self._meshes.of(layout)
        least, most = min(meshes), max(meshes)
        stand_ins = [live.stand_in() for live in self._pieces if 1 <= live.piece.unit <= len(self._whole.layers)]
        is_first = mesh.rank % mesh.ranks_per_machine == 0
        scratch = torch.zeros(_LEAST_BYTES, dtype=torch.uint8)

        def medians_s(repeats: int, *works: Callable[[], object], trains_on: bool = False) -> list[float]:
            """Take turns, so that what disturbs one disturbs the others."""
            rounds = [[_slowest_s(work, mesh, scratch, trains_on=trains_on) for work in works] for _ in range(repeats)]
            return [statistics.median(one) for one in zip(*rounds, strict=True)]

        (machine_s,) = medians_s(_REPEATS, reading.run, trains_on=True)
        (alone_s,) = medians_s(_REPEATS, reading.run if is_first else lambda: None)
        (fresh_s,) = medians_s(_REPEATS, lambda: touch(SparseMemory(_LEAST_BYTES).tensor(0, _LEAST_BYTES, torch.uint8)))
        gained_s, left_s = medians_s(
            _REPEATS, lambda: [piece.gain() for piece in stand_ins], lambda: [piece.drop() for piece in stand_ins]
        )
        arrangings = (partial(self._arrange_only, meshes[count]) for count in (least, most))
        least_s, most_s = medians_s(_ARRANGINGS, *arrangings, trains_on=True)
        layer_s = max(0.0, most_s - least_s) / max(1, most - least)
        read_alone = reading.num_bytes if is_first else 0
        read = torch.tensor([reading.num_bytes, read_alone, read_alone > 0, is_first], dtype=torch.float64)
        dist.all_reduce(read, group=mesh.control)
        everyone_bytes, alone_bytes, reading_machines, machines = read.tolist()
        return CopySpec(
            rank_bytes_per_s=alone_bytes / reading_machines / alone_s,
            machine_bytes_per_s=everyone_bytes / reading_machines / machine_s,
            taken_bytes_per_s=_LEAST_BYTES * mesh.num_ranks / machines / fresh_s,
            fixed_s=max(0.0, least_s - layer_s * least),
            layer_s=layer_s,
            gained_s=gained_s / len(stand_ins),
            left_s=left_s / len(stand_ins),
            num_ranks=mesh.num_ranks,
        )

    def _arrange_only(self, mesh: Mesh) -> None:
        """Do what a switch does except moving."""
        self.moved.moves(self.mesh.layout, mesh.layout, mesh.tp_rank)
        self._layer.bring_weights(Moves(weights=(), state=()), self.mesh, 0)
        models = tuple(stage_models(self._whole, mesh.layout, mesh.pp_rank).values())
        for model in models:
            self._stage(model)
        list(buffer_groups(models))
        frozen_bytes(models)

    def _live_of(self, group: BufferGroup) -> LivePiece:
        return self._pieces[self._index_of[id(group.parameters[0])]]

    def _arranged(self, mesh: Mesh) -> RankStages[PipelineStage]:
        models = stage_models(self._whole, mesh.layout, mesh.pp_rank)
        groups = list(buffer_groups(tuple(models.values())))
        return replace(
            self.held,
            stages={index: self._stage(model) for index, model in models.items()},
            buffers=[self._live_of(group).cut(group, mesh.data_size) for group in groups],
            frozen_bytes=frozen_bytes(tuple(models.values())),
        )

    def _stage(self, model: StageModel) -> PipelineStage:
        return PipelineStage(model, self._backend, self.mesh.tensor, self._state)


_REPEATS = 5
_ARRANGINGS = 9  # milliseconds each, which vary
_LEAST_BYTES, _MOST_BYTES = 2**26, 2**28  # that a rank reads: less is noise, and pieces may force more
_TRAINED_ON_S = 0.02
_COMPUTED = 128  # rows of a product that takes a tenth of a millisecond


class Reading:
    """Reads the shared pieces that the next rank with any on this machine holds, round and round."""

    def __init__(self, layer: TwinLayer, mesh: Mesh) -> None:
        pieces, twins = layer.pieces, layer.twins
        assert twins is not None
        everyone: list[list[int]] = gather_from_all(
            [index for index, live in enumerate(pieces) if live.is_held and live.shared is not None], mesh
        )
        holding = [rank for rank, there in enumerate(everyone) if any(twins.reaches(index, rank) for index in there)]
        self._source = min(holding, key=lambda rank: (rank - mesh.rank - 1) % mesh.num_ranks, default=mesh.rank)
        self._twins, self._into, self.num_bytes, self._rounds = twins, list[tuple[int, Tensor]](), 0, 0
        for index in everyone[self._source]:
            size = pieces[index].piece.num_elements * pieces[index].piece.weight_bytes
            if not self._into or self.num_bytes + size <= _MOST_BYTES:
                # Memory as weights lie in: the system may give others larger pages, which take copies faster.
                self._into.append((index, SparseMemory(size).tensor(0, size, torch.uint8).zero_()))
                self.num_bytes += size
        if self.num_bytes:
            self._rounds = -(-_LEAST_BYTES // self.num_bytes)
            self.num_bytes *= self._rounds

    def run(self) -> None:
        for _ in range(self._rounds):
            for index, into in self._into:
                self._twins.read(index, WEIGHTS, self._source, 0, into, 0)


def _slowest_s(work: Callable[[], object], mesh: Mesh, scratch: Tensor, *, trains_on: bool) -> float:
    """Return seconds from when all ranks begin, with cold caches, to when the last one has done its `work`;
    `trains_on`: ranks that are ready compute meanwhile, as in a run. Without both, predictions are far too short."""
    scratch.add_(1)
    dist.barrier(group=mesh.control)
    from_s = time.perf_counter()
    work()
    done_s = time.perf_counter()
    if trains_on:
        matrix = torch.ones(_COMPUTED, _COMPUTED)
        while time.perf_counter() < done_s + max(_TRAINED_ON_S, done_s - from_s):
            torch.mm(matrix, matrix)
    return most_of_ranks(done_s - from_s, mesh)


class Monitor:
    """Follows the layouts of one run from `start` on; plans may be made `steps_ahead` of training."""

    def __init__(
        self, planner: FlexPlanner, start: ParallelLayout, steps_ahead: int, known: Sequence[MeasuredAfter]
    ) -> None:
        self._planner, self._layout = planner, start
        self.track = LayoutMonitor(steps_ahead, known) if planner.options.follow_measured else None

    def known(self) -> tuple[MeasuredAfter, ...]:
        """Return what a checkpoint keeps."""
        return () if self.track is None else self.track.known()

    def note(
        self, planned: PlannedStep, measured: Timeline, switch: Switch | None, peak_bytes: int | None
    ) -> LayoutDecision | None:
        """Take a trained step into account, every step in order; return its decision, with what was measured of it. No
        `peak_bytes` = what is counted is not what is predicted."""
        plan, decision, measured_switch = planned.plan, planned.decision, None
        if switch is not None:
            moved_bytes, taken_s = switch.weight_bytes + switch.state_bytes, switch.stall_s + switch.wait_s
            predicted_s = self._planner.switch_seconds(self._layout, plan)
            if predicted_s > 0:
                measured_switch = switch_kind(self._layout, plan.layout), taken_s / predicted_s
            # Processes that resume go from the layout in which they start to that of the checkpoint, undecided.
            if decision is not None and decision.before == switch.before:
                decision = msgspec.structs.replace(decision, measured_switch_s=taken_s, moved_bytes=moved_bytes)
        self._layout = plan.layout
        if self.track is not None:
            self.track.note(plan, measured.step_time_s, measured_switch, peak_bytes if switch is None else None)
        return decision
