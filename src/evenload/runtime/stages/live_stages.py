"""`LiveStages`: what a rank holds of the model in the layout that runs now, and how it becomes that of another.

Between two steps, on every rank, from the same plan of moves (`plan.layouts.moves`):

    the step before: take memory (`arrivals`)
    the stall:       weights into place (`arrivals`) ─► stages, buffers
    the step after:  let old weights go, optimizer state behind the step (`arrivals`)

Units that stay keep their memory, modules and buffers; only how buffers are cut into shards changes. On a CPU shared
pieces lie in memory that the ranks of a machine read (`twin_memory`), the rest is sent. All ranks post their transfers
in the order of the moves before they wait for one, so no circle of waits is possible. Every bit of weights and
optimizer state arrives as it was. Price: the stall is the copy of the weights that a rank lacks.

`Monitor` gives what was measured of such a run to its planner (FlexPipe section 3.2), on rank 0.
"""

import functools
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from evenload.config.optimizer import OptimizerConfig
from evenload.config.sections import RunConfig
from evenload.config.train_config import ModelConfig
from evenload.cost.coefficients import CopySpec, CostCoefficients
from evenload.cost.validity import completed_between_layouts
from evenload.errors import ConfigError
from evenload.feed.step_maker import PlannedStep
from evenload.plan.layouts.flex_planner import FlexPlanner
from evenload.plan.layouts.measured_layouts import KnownAfter, LayoutTrack
from evenload.plan.layouts.moves import Moves, SwitchPieces, pipeline_ranks, shared_bytes, shared_pieces
from evenload.plan.layouts.switch_prices import stall_seconds, state_seconds
from evenload.runtime.comm.mesh import Mesh, Meshes, most_of_ranks
from evenload.runtime.device import wait_for
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.optim.optimizer import ShardedOptimizer
from evenload.runtime.optim.parameter_units import BufferGroup, FlatBuffer, buffer_groups, flatten_units, frozen_bytes
from evenload.runtime.replay.stage import PipelineStage, make_layers_replayable
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.stages.arrivals import (
    Leaving,
    Preallocated,
    Shards,
    StateArrival,
    bring_weights,
    mark_held,
    without,
)
from evenload.runtime.stages.live_pieces import MASTER_NAME, LivePiece, live_pieces, share_of_rank
from evenload.runtime.stages.rank_stages import RankStages, build_models, dtype_of, unit_modules
from evenload.runtime.stages.twin_memory import (
    WEIGHTS,
    SparseMemory,
    TwinMemory,
    gather_from_all,
    open_twins,
    placed,
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


def open_shared_memory(
    budget_bytes: int | None, pieces: Sequence[LivePiece], meshes: Meshes
) -> tuple[TwinMemory | None, Collection[int], Twins | None]:
    """Share as many pieces as a machine's budget holds, None = no limit; return the memory, their indices and a
    summary. `ConfigError` where a budget is set and ranks cannot read each other's memory. Collective."""
    mesh = meshes.start
    if mesh.device.type != "cpu" or mesh.ranks_per_machine == 1 or budget_bytes == 0:
        return None, (), None
    sizes = [live.piece for live in pieces]
    shared = shared_pieces(sizes, meshes.layouts, mesh.ranks_per_machine, budget_bytes)
    # Parts of other tensor-parallel places may be larger; what is shared decides what all ranks do together.
    shared = frozenset.intersection(*gather_from_all(shared, mesh))
    parts = [live.dtypes if index in shared else None for index, live in enumerate(pieces)]
    places, num_bytes = placed(parts, [live.capacity for live in pieces])
    found = open_twins(places, num_bytes, len(sizes), mesh)
    if isinstance(found, str):
        if budget_bytes is not None:
            raise ConfigError(
                f"plan.twin_bytes is {budget_bytes}, but the ranks of a machine cannot read each other's memory "
                f"({found}); leave plan.twin_bytes out or set it to 0 to send what moves between layouts"
            )
        return None, (), Twins(0, len(sizes), 0, found)
    for index, live in enumerate(pieces):
        if (memory := found.of_piece(index)) is not None:
            live.share(memory)
    mark_held(pieces, found, 0)
    most = sum(shared_bytes(sizes[index], meshes.layouts, mesh.ranks_per_machine) for index in shared)
    return found, shared, Twins(len(shared), len(sizes), most * mesh.layout.tp)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A change of the layout before a step, on this rank; `joined_switch` joins those of all ranks.

    Args:
        stall_s: seconds until the weights were in place and the step could begin.
        wait_s: seconds for which the optimizer waited for its state.
        weight_bytes, state_bytes: received.
        predicted_stall_s, predicted_state_s: by `plan.layouts.switch_prices`; the latter hides behind the step.
    """

    before: str
    after: str
    stall_s: float
    wait_s: float
    weight_bytes: int
    state_bytes: int
    predicted_stall_s: float
    predicted_state_s: float


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
        self.mesh = mesh = meshes.start
        hf_config, models, self._backend = build_models(model, run, spec, mesh)
        tp = mesh.layout.tp
        parts = tuple(models.values())
        self._modules = unit_modules(parts, dtype=dtype_of(model), lora=model.lora, tp_rank=mesh.tp_rank, tp=tp)
        # Of all stages, so that a piece takes as much room on every rank.
        data_sizes = sorted({size for layout in meshes.layouts for size in layout.data_sizes})
        buffers = flatten_units(parts, mesh.data_size, data_sizes)
        self._pieces = live_pieces(self._modules, buffers, data_sizes, mesh.device)
        self._index_of = {id(live.parameters[0]): index for index, live in enumerate(self._pieces)}
        self._state = ReplayState(backend=self._backend)
        make_layers_replayable(self._modules.layers, self._state, self._modules.architecture, mesh.tensor)
        self.held = RankStages(
            hf_config,
            {index: self._stage(part) for index, part in models.items()},
            buffers,
            frozen_bytes(parts),
        )
        self._arrival: StateArrival | None = None
        self._meshes = meshes
        self._ahead: Preallocated | None = None
        self._expected: Mesh | None = None
        self._switch: Switch | None = None
        self._num_steps = 0
        self._twin_memory, shared, self.twins = open_shared_memory(twin_bytes, self._pieces, meshes)
        self.moved = SwitchPieces(
            pieces=tuple(live.piece for live in self._pieces),
            shared=frozenset(shared),
            ranks_per_machine=mesh.ranks_per_machine,
            tp=tp,
        )

    def initial_state(self) -> list[dict[str, Tensor]]:
        """Make a new optimizer's state, in its places: zeros, and weights as masters."""
        found = []
        for buffer in self.held.buffers:
            live, shard = self._live_of(buffer), buffer.shard(buffer.values, self.mesh.data_rank, self.mesh.data_size)
            start = share_of_rank(self.mesh, live.piece)[0]
            state = {}
            for name in live.state_names:
                if live.shared is None:
                    state[name] = torch.zeros_like(shard, dtype=buffer.grads.dtype)
                else:
                    # Written, so that its pages are there when the process is measured before the first step.
                    state[name] = live.shared.tensor(name, start, start + shard.numel()).zero_()
            if MASTER_NAME in state:
                state[MASTER_NAME].copy_(shard)
            found.append(state)
        return found

    @property
    def shares_memory(self) -> bool:
        """Some piece is read, and not sent, inside a machine."""
        return self._twin_memory is not None and bool(self.moved.shared)

    def measured_copies(self) -> CopySpec:
        """Measure what switches cost here, where memory is shared. Before the first step. Collective."""
        assert self._twin_memory is not None
        meshes = {}
        for layout in self._meshes.layouts:
            stages = map(layout.stages_of_rank, range(layout.pipeline_ranks))
            most_layers = max(sum(layout.stage_counts[stage] for stage in own) for own in stages)
            meshes[most_layers] = self._meshes.of(layout)
        rehearsals = {layers: functools.partial(self._rehearse, mesh) for layers, mesh in meshes.items()}
        layers = self._modules.layers
        stand_ins = [live.stand_in() for live in self._pieces if 1 <= live.piece.unit <= len(layers)]
        return measured_copies(self._pieces, self._twin_memory, self.mesh, rehearsals, stand_ins)

    def look_ahead(self, coming_layout: Callable[[], ParallelLayout | None], headroom_bytes: int) -> None:
        """Take the memory of the next step's layout, if known and there is room; on a GPU, without page faults,
        nothing."""
        if self.mesh.device.type != "cpu":
            return
        if (layout := coming_layout()) is None or (mesh := self._meshes.of(layout)) in (self.mesh, self._expected):
            return
        self._expected = mesh
        gained = [
            index
            for index, live in enumerate(self._pieces)
            if not live.is_held and mesh.pp_rank in pipeline_ranks(mesh.layout, live.piece)
        ]
        state = {index: ranges for index in range(len(self._pieces)) if (ranges := self._coming_state(index, mesh))}
        taken_bytes = sum(self._pieces[index].held_bytes for index in gained) + sum(
            self._pieces[index].piece.state_bytes * (stop - start)
            for index, ranges in state.items()
            for start, stop in ranges
        )
        if taken_bytes <= headroom_bytes:
            after = None if self._arrival is None else self._arrival.thread
            moves = self._moves_to(mesh)
            self._ahead = Preallocated(mesh, self._pieces, gained, state, moves, self._twin_memory, after)

    def move_to(self, mesh: Mesh, optimizer: ShardedOptimizer, coefficients: CostCoefficients, from_s: float) -> None:
        """Become the layout of `mesh`, up to `settle`. Collective. `RankLostError` where a rank does not come."""
        assert self._arrival is None, "optimizer state of the switch before has not been waited for"
        old, moves = self.mesh, self._moves_to(mesh)
        largest = max(old.layout, mesh.layout, key=lambda layout: layout.world_size)
        links = completed_between_layouts(coefficients, largest)[0]
        self._num_steps = optimizer.num_steps
        before = self._take_state(optimizer)
        ahead = self._preallocated_for(mesh)
        lost = []
        for index, live in enumerate(self._pieces):
            is_needed = mesh.pp_rank in pipeline_ranks(mesh.layout, live.piece)
            if is_needed and not live.is_held:
                live.gain()
            elif live.is_held and not is_needed:
                lost.append(index)
        there = ahead.there if ahead else ()
        weight_bytes = bring_weights(self._pieces, moves, mesh, self._twin_memory, self._num_steps, there)
        leaving = Leaving(lost, [self._pieces[index].drop() for index in lost])
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
            predicted_stall_s=stall_seconds(
                moves, self.moved, links, old.layout, mesh.layout, is_taken=ahead is not None
            ),
            predicted_state_s=state_seconds(moves, self.moved, links),
        )
        self._arrival = StateArrival(
            self._pieces, moves.state, old, mesh, before, self._twin_memory, self._num_steps, leaving
        )

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

    def _rehearse(self, mesh: Mesh) -> None:
        self._moves_to(mesh)
        bring_weights(self._pieces, Moves(weights=(), state=()), self.mesh, self._twin_memory, 0)
        models = tuple(self._modules.stage_models(mesh.layout, mesh.pp_rank).values())
        for model in models:
            self._stage(model)
        list(buffer_groups(models))
        frozen_bytes(models)

    def _moves_to(self, mesh: Mesh) -> Moves:
        return self.moved.moves(self.mesh.layout, mesh.layout, mesh.tp_rank)

    def _coming_state(self, index: int, mesh: Mesh) -> list[tuple[int, int]]:
        """Elements of a shared piece whose optimizer state this rank lacks in a layout."""
        live = self._pieces[index]
        if live.shared is None or not live.state_names or mesh.pp_rank not in pipeline_ranks(mesh.layout, live.piece):
            return []
        had = share_of_rank(self.mesh, live.piece) if live.is_held else (0, 0)
        return without(share_of_rank(mesh, live.piece), had)

    def _preallocated_for(self, mesh: Mesh) -> Preallocated | None:
        ahead, self._ahead, self._expected = self._ahead, None, None
        if ahead is None:
            return None
        ahead.finish(wanted=ahead.mesh is mesh)
        return ahead if ahead.mesh is mesh else None

    def _live_of(self, group: FlatBuffer | BufferGroup) -> LivePiece:
        return self._pieces[self._index_of[id(group.parameters[0])]]

    def _take_state(self, optimizer: ShardedOptimizer) -> dict[int, Shards]:
        found: dict[int, dict[str, Tensor]] = {}
        for name, buffer, shard in optimizer.state_tensors():
            found.setdefault(self._index_of[id(buffer.parameters[0])], {})[name] = shard
        optimizer.close()
        return {index: found[index] for index in sorted(found)}

    def _arranged(self, mesh: Mesh) -> RankStages[PipelineStage]:
        models = self._modules.stage_models(mesh.layout, mesh.pp_rank)
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
_REHEARSALS = 9
"""Milliseconds each, and how ranks come to their cores differs from one to the next."""
_LEAST_BYTES, _MOST_BYTES = 2**26, 2**28
"""A rank reads at least so much, if it has to read the same again, as less is noise; and not more, if its pieces let
it."""
_TRAINED_ON_S = 0.02
_COMPUTED = 128
"""Rows of a product that takes a tenth of a millisecond."""


def measured_copies(
    pieces: Sequence[LivePiece],
    twins: TwinMemory,
    mesh: Mesh,
    rehearsals: Mapping[int, Callable[[], object]],
    stand_ins: Sequence[LivePiece],
) -> CopySpec:
    """Measure what a switch costs on this machine, by doing what it does: ranks read each other's memory, all at once
    and one alone, into memory that was touched and into fresh memory, and arrange their stages anew. Before the first
    update, where some piece is shared; every rank returns the same. Collective. Price: about two seconds.

    Rehearsed with cold caches and with ranks that are ready and train already on the same cores, as in a run; without
    both, predictions were 1.6 to 1.9 times too short.

    Args:
        rehearsals: what a switch does except moving, by the layers that a rank comes to hold.
        stand_ins: pieces as the model's layers are, which nobody holds; at least one.
    """
    reading = _Reading(pieces, twins, mesh)
    first = mesh.rank % mesh.ranks_per_machine == 0
    scratch = torch.zeros(_LEAST_BYTES, dtype=torch.uint8)

    def medians_s(repeats: int, *works: Callable[[], object], trains_on: bool = False) -> list[float]:
        """In turn, so that what disturbs one disturbs the others."""
        rounds = [[_slowest_s(work, mesh, scratch, trains_on=trains_on) for work in works] for _ in range(repeats)]
        return [statistics.median(one) for one in zip(*rounds, strict=True)]

    (machine_s,) = medians_s(_REPEATS, reading.run, trains_on=True)
    (alone_s,) = medians_s(_REPEATS, reading.run if first else lambda: None)
    (fresh_s,) = medians_s(_REPEATS, _touch_fresh)
    gained_s, left_s = medians_s(
        _REPEATS, lambda: [piece.gain() for piece in stand_ins], lambda: [piece.drop() for piece in stand_ins]
    )
    least, most = min(rehearsals), max(rehearsals)
    least_s, most_s = medians_s(_REHEARSALS, rehearsals[least], rehearsals[most], trains_on=True)
    layer_s = max(0.0, most_s - least_s) / max(1, most - least)
    read_alone = reading.num_bytes if first else 0
    read = torch.tensor([reading.num_bytes, read_alone, read_alone > 0, _LEAST_BYTES, first], dtype=torch.float64)
    dist.all_reduce(read, group=mesh.control)
    everyone_bytes, alone_bytes, reading_machines, fresh_bytes, machines = read.tolist()
    return CopySpec(
        rank_bytes_per_s=alone_bytes / reading_machines / alone_s,
        machine_bytes_per_s=everyone_bytes / reading_machines / machine_s,
        taken_bytes_per_s=fresh_bytes / machines / fresh_s,
        fixed_s=max(0.0, least_s - layer_s * least),
        layer_s=layer_s,
        gained_s=gained_s / len(stand_ins),
        left_s=left_s / len(stand_ins),
        num_ranks=mesh.num_ranks,
    )


class _Reading:
    """Reads the shared pieces that the next rank with any on this machine holds, round and round."""

    def __init__(self, pieces: Sequence[LivePiece], twins: TwinMemory, mesh: Mesh) -> None:
        held = [index for index, live in enumerate(pieces) if live.is_held and live.shared is not None]
        everyone: list[list[int]] = [[]] * mesh.num_ranks
        with mesh.watch.waiting("what ranks hold in shared memory"):
            dist.all_gather_object(everyone, held, group=mesh.control)
        holding = [rank for rank, there in enumerate(everyone) if any(twins.reaches(index, rank) for index in there)]
        self._source = min(holding, key=lambda rank: (rank - mesh.rank - 1) % mesh.num_ranks, default=mesh.rank)
        self._twins, self._into, self.num_bytes, self._rounds = twins, list[tuple[int, torch.Tensor]](), 0, 0
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


def _touch_fresh() -> None:
    touch(SparseMemory(_LEAST_BYTES).tensor(0, _LEAST_BYTES, torch.uint8))


def _slowest_s(work: Callable[[], object], mesh: Mesh, scratch: torch.Tensor, *, trains_on: bool = False) -> float:
    """From when all have come, with cold caches, until the last is done; `trains_on`: others compute meanwhile."""
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
        self, planner: FlexPlanner, start: ParallelLayout, steps_ahead: int, known: Sequence[KnownAfter]
    ) -> None:
        self._planner, self._layout = planner, start
        self.track = LayoutTrack(steps_ahead, known) if planner.options.follow_measured else None

    def known(self) -> tuple[KnownAfter, ...]:
        """For a checkpoint."""
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
