"""`LiveStages`: what a rank holds of the model in the layout that runs now, as stages that run packs and flat buffers
(`RankStages`), and how it becomes that of another.

A run whose layout changes makes all modules at its start (`unit_modules`), so that a switch builds none; those of units
that the rank does not hold are shells, whose parameters have no elements until the unit comes (`twin_layer`).
Between two steps every rank makes the same plan of moves (`planning.layouts.moves`):

    before the step:  memory, stages, buffers
    behind the step:  weights, unit by unit before the first forward that reads them, then optimizer state (`arrival`)

Units that stay keep their memory, modules and buffers; only how buffers are cut into shards changes. Price: until all
ranks have their weights, old ones are held beside the new.
"""

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from evenload.attention.backends import select_backend
from evenload.attention.range_attention import RangeAttention
from evenload.config.sections import LoraConfig, OptimizerConfig, RunConfig, uses_liger
from evenload.config.train_config import ModelConfig
from evenload.cost.coefficients import CopySpec, CostCoefficients
from evenload.cost.validity import fill_between_layouts
from evenload.data.hub import local_path
from evenload.errors import ConfigError
from evenload.feed.step_maker import PlannedStep
from evenload.planning.layouts.flex_planner import FlexPlanner
from evenload.planning.layouts.measured_layouts import LayoutMonitor, MeasuredAfter
from evenload.planning.layouts.moves import (
    Moves,
    SwitchPieces,
    pipeline_ranks,
    shared_bytes,
    shared_pieces,
    switch_seconds,
)
from evenload.runtime.comm.mesh import Mesh, Meshes, gather_from_all, most_of_ranks
from evenload.runtime.model.around import WholeModel
from evenload.runtime.model.hf_model import (
    StageModel,
    build_rank_models,
    build_stage_model,
    empty_model,
    numbered_units,
)
from evenload.runtime.model.lora import inject_adapters
from evenload.runtime.model.model_config import load_config, router_aux_loss_coef
from evenload.runtime.model.tensor_weights import split_weights
from evenload.runtime.model.weight_files import empty_parameters, fill_buffers
from evenload.runtime.optim.data_parallel import BufferGroup, FlatBuffer, buffer_groups, flatten_units, frozen_bytes
from evenload.runtime.optim.optimizer import MASTER, ShardedOptimizer
from evenload.runtime.replay.host_copies import touch
from evenload.runtime.replay.stage import PipelineStage, make_layers_replayable
from evenload.runtime.replay.state import ReplayState
from evenload.runtime.stages.arrival import Arrival
from evenload.runtime.stages.host_twins import open_host_twins
from evenload.runtime.stages.live_pieces import LivePiece, live_pieces
from evenload.runtime.stages.twin_layer import WEIGHTS, SparseMemory, Transport, TwinMemory, open_twins
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.run import LayoutDecision, switch_kind
from evenload.types.timeline import Timeline


def require_same_revision(path: str, folder: str, mesh: Mesh) -> None:
    """Raise `ConfigError` on all ranks where their `folder`s are of different revisions of `path`. Collective."""
    mine = None if folder == path else Path(folder).name  # a folder of a cache is called as the revision is
    everyone = gather_from_all(mine, mesh, "the revision of the model")
    if len(set(everyone)) == 1:
        return
    named = "; ".join(
        f"{one or 'a folder of that name'} on ranks {[rank for rank, other in enumerate(everyone) if other == one]}"
        for one in dict.fromkeys(everyone)
    )
    first = next(one for one in everyone if one is not None)
    raise ConfigError(
        f"model.path '{path}' is not the same on all ranks: {named}; name one revision, such as model.path = "
        f'"{path.partition("@")[0]}@{first}", or give a folder that all machines reach'
    )


def unit_modules(
    models: Collection[StageModel],
    *,
    dtype: torch.dtype,
    device: torch.device,
    lora: LoraConfig | None,
    tp_rank: int,
    tp: int,
) -> tuple[StageModel, frozenset[int]]:
    """Return the whole model, with the units of a rank's stages as they are and shells for all others, and the ids of
    parameters with values. Of a tied model embedding and head have one weight."""
    some = next(iter(models))
    structure, model = some.structure, empty_model(some.config, dtype)
    fill_buffers(model, device)
    layers = [structure.layer_path(index) for index in range(structure.num_layers)]
    held = {path: unit for stage in models for _, path, unit in numbered_units(stage)}
    shells = {
        path: model.get_submodule(path)
        for path in (*structure.prologue, *layers, *structure.epilogue)
        if path not in held
    }
    # Memory that nothing touches is not taken: sizes come from it, then it goes (`twin_layer`). A GPU's would be.
    for path, unit in shells.items():
        empty_parameters(unit, "cpu")
        if lora is not None:
            unit.requires_grad_(False)
            if path in layers:
                with torch.random.fork_rng(devices=[]):
                    inject_adapters(unit, layers.index(path), structure, lora)
    for path, unit in held.items():
        model.set_submodule(path, unit)
    if structure.is_tied:
        words, head = model.get_submodule(structure.embedding), model.get_submodule(structure.head)
        words.weight = head.weight = (head if structure.head in held else words).weight
    for index, layer in some.whole.layers.items():
        # Of weights that are loaded, biases that choose experts: every rank has them.
        for name, buffer in layer.named_buffers(prefix=structure.layer_path(index)):
            if layers[index] in shells:
                model.get_buffer(name).copy_(buffer)
    if tp > 1:
        split_weights(shells.items(), structure, tp_rank, tp, filled=False)
    parts = WholeModel(model, structure.layers, structure.prologue, returns_tuple=structure.returns_tuple)
    whole = replace(
        some,
        whole=parts,
        layers=parts.layers,
        prologue=parts.modules,
        epilogue={path: model.get_submodule(path) for path in structure.epilogue},
    )
    if some.liger:
        whole.use_liger(tp)
    return whole, frozenset(id(parameter) for unit in held.values() for parameter in unit.parameters())


def stage_models(whole: StageModel, layout: ParallelLayout, pp_rank: int) -> dict[int, StageModel]:
    """Return the virtual stages of a pipeline rank in a layout, as `build_rank_models` makes them."""
    models: dict[int, StageModel] = {}
    for stage in layout.stages_of_rank(pp_rank):
        models[stage] = replace(
            whole,
            layers={index: whole.layers[index] for index in range(*layout.stage_layers[stage])},
            prologue=whole.prologue if stage == 0 else {},
            epilogue=whole.epilogue if stage == layout.num_stages - 1 else {},
        )
    return models


Stage = TypeVar("Stage", bound=PipelineStage)


@dataclass(frozen=True, eq=False)
class RankStages(Generic[Stage]):
    """Holds one rank's part of the model: virtual stages by index, ascending, and their trained parameters."""

    hf_config: PretrainedConfig
    stages: dict[int, Stage]
    buffers: list[FlatBuffer]
    frozen_bytes: int


def build_rank_stages(
    model: ModelConfig,
    run: RunConfig,
    spec: ModelSpec,
    mesh: Mesh,
    stage_class: type[Stage] = PipelineStage,
    backend: RangeAttention | None = None,
    *,
    unit_gradients: bool = False,
) -> RankStages[Stage]:
    """Make this rank's stages with weights. `ConfigError`, `UnsupportedModelError`: they cannot be trained so."""
    hf_config, parts, backend = build_models(model, run, spec, mesh, backend)
    models = tuple(parts.values())
    buffers = flatten_units(models, mesh.data_size, unit_gradients=unit_gradients)
    stages = {index: stage_class(part, backend, mesh.tensor) for index, part in parts.items()}
    return RankStages(hf_config, stages, buffers, frozen_bytes(models))


def build_models(
    model: ModelConfig, run: RunConfig, spec: ModelSpec, mesh: Mesh, backend: RangeAttention | None = None
) -> tuple[PretrainedConfig, dict[int, StageModel], RangeAttention]:
    """Make the modules of `build_rank_stages`, by index of stage, ascending, and what runs them; errors as there."""
    hf_config = load_config(model.path)
    dtype = dtype_of(model)
    folder = local_path(model.path, "model.path", "settings" if model.random_init else "weights")
    require_same_revision(model.path, folder, mesh)
    build = partial(
        build_stage_model,
        tp_rank=mesh.tp_rank,
        dtype=dtype,
        device=mesh.device,
        weights=None if model.random_init else folder,
        seed=run.seed,
        lora=model.lora,
        router_aux_loss_coef=router_aux_loss_coef(hf_config, model.router_aux_loss_coef),
    )
    if backend is None:
        backend = select_backend(run.attention, mesh.device.type, dtype=dtype, head_dim=spec.head_dim)
    parts = build_rank_models(mesh.layout, mesh.pp_rank, partial(build, hf_config))
    for part in parts.values() if uses_liger(run, model.dtype) else ():
        part.use_liger(mesh.layout.tp)
    return hf_config, parts, backend


def dtype_of(model: ModelConfig) -> torch.dtype:
    return getattr(torch, model.dtype)


@dataclass(frozen=True)
class Twins:
    """Summarises what lies in shared memory; `reason`: why nothing does, where no budget was set."""

    num_shared: int
    num_pieces: int
    num_bytes: int
    reason: str = ""


def passes_host(device: torch.device) -> bool:
    """Say whether ranks of a machine share host memory in which their pieces do not live."""
    return device.type == "cuda"


def share_pieces(
    budget_bytes: int | None, pieces: Sequence[LivePiece], meshes: Meshes, patience_s: float
) -> tuple[Transport | None, Twins | None]:
    """Share as many pieces as a machine's budget holds, None = no limit; return what they lie in and a summary.
    `ConfigError` where a budget is set and ranks cannot read each other's memory. Collective."""
    mesh = meshes.start
    if mesh.ranks_per_machine == 1 or budget_bytes == 0:
        return None, None
    sizes, via_host = [live.piece for live in pieces], passes_host(mesh.device)
    chosen = shared_pieces(sizes, meshes.layouts, mesh.ranks_per_machine, budget_bytes, via_host=via_host)
    # Parts of other tensor-parallel places may be larger; what is shared decides what all ranks do together.
    chosen = frozenset.intersection(*gather_from_all(chosen, mesh))
    parts = [live.dtypes if index in chosen else None for index, live in enumerate(pieces)]
    open_memory = open_host_twins if via_host else open_twins
    memory = open_memory(parts, [live.capacity for live in pieces], mesh, patience_s)
    if isinstance(memory, str):
        if budget_bytes is not None and not via_host:
            raise ConfigError(
                f"plan.twin_bytes is {budget_bytes}, but the ranks of a machine cannot read each other's memory "
                f"({memory}); leave plan.twin_bytes out or set it to 0 to send what moves between layouts"
            )
        return None, Twins(0, len(sizes), 0, memory)
    if isinstance(memory, TwinMemory):
        for index, places in memory.pieces.items():
            pieces[index].share(places)
            memory.mark(index, 0 if pieces[index].is_held else None)
    each = (shared_bytes(sizes[at], meshes.layouts, mesh.ranks_per_machine, via_host=via_host) for at in chosen)
    most_bytes = sum(each)
    return memory, Twins(len(chosen), len(sizes), most_bytes * mesh.layout.tp)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A change of the layout before a step, on this rank; `joined_switch` joins those of all ranks.

    Args:
        stall_s: for which the step waited, to begin and for weights.
        wait_s: for which the optimizer waited for its state.
        weight_bytes, state_bytes: received.
        predicted_stall_s: by `planning.layouts.moves`.
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
        self._memory, self.twins = share_pieces(twin_bytes, self._pieces, meshes, run.timeout_s)
        self._index_of = {id(live.parameters[0]): index for index, live in enumerate(self._pieces)}
        self._state = ReplayState(backend=self._backend)
        make_layers_replayable(self._whole, self._state, mesh.tensor)
        stages = {index: self._stage(part) for index, part in models.items()}
        self.held = RankStages(hf_config, stages, buffers, frozen_bytes(parts))
        self.arrival: Arrival | None = None
        """Of the last switch, up to `settle`."""
        self._switch: Switch | None = None
        self._num_steps = 0
        self.moved = SwitchPieces(
            pieces=tuple(live.piece for live in self._pieces),
            shared=frozenset(self._memory.pieces if self._memory else ()),
            ranks_per_machine=mesh.ranks_per_machine,
            tp=tp,
            via_host=passes_host(mesh.device),
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

    def move_to(
        self,
        mesh: Mesh,
        optimizer: ShardedOptimizer,
        coefficients: CostCoefficients,
        from_s: float,
        forward_s: float = 0.0,
    ) -> None:
        """Become the layout of `mesh`, whose weights are there when `arrival` says so and whose optimizer when `settle`
        does. `from_s`: when the switch began; `forward_s`: predicted until weights of all stages are read. Collective.
        `RankLostError` where a rank does not come."""
        assert self.arrival is None, "optimizer state of the switch before has not been waited for"
        old, moves = self.mesh, self.moved.moves(self.mesh.layout, mesh.layout, mesh.tp_rank)
        largest = max(old.layout, mesh.layout, key=lambda layout: layout.world_size)
        links = fill_between_layouts(coefficients, largest)[0]
        self._num_steps = optimizer.num_steps
        before: dict[int, dict[str, Tensor]] = {}
        for name, buffer, shard in optimizer.state_tensors():
            before.setdefault(self._index_of[id(buffer.parameters[0])], {})[name] = shard
        optimizer.close()
        weights: dict[int, Tensor] = {}
        for index, live in enumerate(self._pieces):
            is_needed = mesh.pp_rank in pipeline_ranks(mesh.layout, live.piece)
            if is_needed and not live.is_held:
                live.gain()
            if live.is_held:
                weights[index] = live.weights
            if not is_needed and live.is_held:
                live.drop()
        self.mesh = mesh  # whose tensor-parallel group the new stages take: a rank that was idle had none
        self.held = self._arranged(mesh)
        given = weights, before, self._num_steps
        self.arrival = Arrival(self._pieces, self._memory, moves, old, mesh, *given)
        self._switch = Switch(
            before=old.layout.describe(),
            after=mesh.layout.describe(),
            stall_s=time.perf_counter() - from_s,
            wait_s=0.0,
            weight_bytes=0,
            state_bytes=0,
            predicted_stall_s=switch_seconds(moves, self.moved, links, old.layout, mesh.layout).stall_s(forward_s),
        )

    def settle(self, config: OptimizerConfig) -> tuple[ShardedOptimizer, Switch] | None:
        """Wait for the optimizer's state, after `move_to` and before anything reads it; None where it is settled."""
        arrival = self.arrival
        if arrival is None or self._switch is None:
            return None
        arrival.finish()
        from_s = time.perf_counter()
        after = arrival.wait()
        wait_s = time.perf_counter() - from_s
        state = [after[self._index_of[id(buffer.parameters[0])]] for buffer in self.held.buffers]
        optimizer = ShardedOptimizer(self.held.buffers, self.mesh, config, state, self._num_steps)
        switch = replace(
            self._switch,
            stall_s=self._switch.stall_s + arrival.waited_s(),
            wait_s=wait_s,
            weight_bytes=arrival.weight_bytes,
            state_bytes=arrival.state_bytes,
        )
        self.arrival = self._switch = None
        return optimizer, switch

    def measured_copies(self) -> CopySpec:
        """Measure what a switch costs on this machine, by doing what it does: ranks read each other's memory, all at
        once and one alone, touch fresh memory, and arrange their stages anew. Before the first update, where some piece
        is shared; every rank returns the same. Collective. Price: about two seconds."""
        assert isinstance(self._memory, TwinMemory)
        mesh, reading = self.mesh, Reading(self._pieces, self._memory, self.mesh)
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
        models = tuple(stage_models(self._whole, mesh.layout, mesh.pp_rank).values())
        for model in models:
            self._stage(model)
        list(buffer_groups(models))
        frozen_bytes(models)
        Arrival(self._pieces, self._memory, Moves(weights=(), state=()), self.mesh, self.mesh, {}, {}, 0).wait()

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

    def __init__(self, pieces: Sequence[LivePiece], twins: TwinMemory, mesh: Mesh) -> None:
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
