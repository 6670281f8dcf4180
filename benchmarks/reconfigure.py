"""A change of the layout while a run trains: how long training stands still, beside two ways without live switching.

Four CPU processes of one thread each, a Llama of 94 M parameters in fp32 (378 MB of weights, 756 MB of moments), round
all changes between four stages, two replicas of two stages, and four replicas (like FlexPipe's Fig. 10):

    live                 what `evenload train` does: weights read from shared memory behind the step's forwards,
                         optimizer state behind the step
    stop and transfer    the same moves without shared memory, nothing taken ahead, and the step waits for all of them
    save, restart, load  a checkpoint, new processes in the new layout, which load it

Live: seconds for which the step waits to begin and for weights, what the optimizer still waits for behind it, and the
whole step with the change beside one without in the same layout. All in one run, by turns; restarts once a layout.
Predicted: by the copies that the run measured at its start, and the forward of a measured step; corrected: what
decisions of a run take, times the median ratio of the last switches of its kind (`plan.layouts.measured_layouts`). Four
minutes on two cores.

    python benchmarks/reconfigure.py [--quick] [--append]
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing

from cpu_ranks import COSTS, llama, spawn_ranks, write_run
from evenload.config.planner import layouts_of, make_planner
from evenload.config.train_config import load_train_config
from evenload.cost.validity import fill_between_layouts
from evenload.feed.step_maker import PlannedStep, StepMaker
from evenload.planning.layouts.measured_layouts import MeasuredLayouts
from evenload.planning.planner import RunPlanner
from evenload.runtime.comm.mesh import create_meshes, warm_up
from evenload.runtime.model.model_config import model_spec
from evenload.runtime.stages.live_stages import Switch
from evenload.runtime.step_source import prepared_step
from evenload.runtime.trainer import Trainer
from evenload.types.base import Frozen
from evenload.types.plan import seal
from evenload.types.run import switch_kind
from harness import Row, median_ratio, run

WORLD = 4
HIDDEN, QUICK_HIDDEN = 1024, 64
ROUNDS, QUICK_ROUNDS = 3, 1
LAYOUTS = {
    "pp=4": ("parallel.pp=4", "parallel.dp=1"),
    "dp=2 pp=2": ("parallel.pp=2", "parallel.dp=2"),
    "dp=4": ("parallel.pp=1", "parallel.dp=4"),
}
ROUND = (1, 2, 0, 2, 1, 0)
"""Every change between two of the layouts, by the index of where it goes; begins and ends in the first."""
MEMORY_BYTES = 2**34


class Measured(Frozen):
    """Seconds by change ("from -> to") and round."""

    live_s: dict[str, list[float]]
    waited_s: dict[str, list[float]]
    predicted_s: dict[str, list[float]]
    corrected_s: dict[str, list[float]]
    stopped_s: dict[str, list[float]]
    changed_step_s: dict[str, list[float]]
    step_s: dict[str, list[float]]
    save_s: float


class Rank:
    """One process of the run, which goes from layout to layout, with a second copy of the model that shares nothing."""

    def __init__(self, directory: str) -> None:
        config = load_train_config(Path(f"{directory}/config.toml"), [])
        meshes = create_meshes(layouts_of(config, 8), torch.device("cpu"), timeout_s=300)
        warm_up(meshes)
        self.trainer = Trainer(config, meshes.start, meshes)
        alone = msgspec.structs.replace(config, plan=msgspec.structs.replace(config.plan, twin_bytes=0))
        self.without_twins = Trainer(alone, meshes.start, meshes)
        assert self.trainer.state.live is not None
        copies = self.trainer.state.live.measured_copies()
        if meshes.start.rank == 0:
            print(copies, flush=True)
        measured = msgspec.structs.replace(COSTS, devices_per_node=WORLD, copies=copies)
        self.costs = fill_between_layouts(measured, meshes.layouts[1])[0]
        self._planned = [self._step(index) for index in range(len(meshes.layouts))]

    def _step(self, index: int) -> PlannedStep:
        """The first batch, planned for a layout."""
        trainer, mesh = self.trainer, self.trainer.mesh
        loader = trainer.new_loader()
        planner = make_planner(trainer.config, trainer.model, trainer.meshes.layouts[index], self.costs, MEMORY_BYTES)
        maker = StepMaker(
            loader,
            RunPlanner(planner, trainer.config.plan.strategy),
            replicas=lambda layout: layout.replicas(WORLD),
            max_pack_tokens=trainer.config.max_pack_tokens,
            waiting=mesh.watch.waiting,
        )
        planned = cast("PlannedStep", maker.next())
        loader.close()
        return planned

    def train(self, index: int) -> tuple[Switch | None, float]:
        """A step in a layout, switching before it where another runs; what that took, on rank 0, and the seconds of the
        step."""
        trainer, planned = self.trainer, self._planned[index]
        layout = planned.plan.layout
        if layout.arrangement != trainer.state.layout.arrangement:
            layout = msgspec.structs.replace(layout, generation=trainer.state.layout.generation + 1)
        else:
            layout = trainer.state.layout
        planned = replace(planned, plan=seal(msgspec.structs.replace(planned.plan, layout=layout)))
        prepared = prepared_step(planned, trainer.meshes, "all_gather")
        trained = trainer.step_trainer.run(prepared, self.costs, learning_rate=0.0)
        return None if trained.report is None else trained.report.switch, trained.agreed.step_time_s

    def follow(self, index: int, step_s: float) -> None:
        """Scale the predicted seconds of a layout's packs to a step that was measured."""
        planned = self._planned[index]
        plan = planned.plan
        factor = step_s / max(plan.predicted.per_replica_s)
        times = [
            msgspec.structs.replace(one, forward_s=tuple(tuple(factor * s for s in pack) for pack in one.forward_s))
            for one in plan.times
        ]
        prediction = msgspec.structs.replace(plan.predicted, per_replica_s=(step_s,) * len(plan.times))
        plan = msgspec.structs.replace(plan, times=tuple(times), predicted=prediction)
        self._planned[index] = replace(planned, plan=plan)

    def stop_and_transfer(self, index: int) -> float:
        """Seconds until weights and optimizer state are in place, on the slowest rank."""
        trainer = self.without_twins
        layout = trainer.meshes.layouts[index]
        dist.barrier(group=trainer.mesh.control)
        start_s = time.perf_counter()
        trainer.state.change_layout(
            msgspec.structs.replace(layout, generation=trainer.state.layout.generation + 1), self.costs
        )
        trainer.state.settle()
        seconds = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=trainer.mesh.control)
        return float(seconds)


def run_rank(rank: int, directory: str, rounds: int) -> None:
    """One process; rank 0 leaves what was measured in the directory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    here = Rank(directory)
    names = ("live_s", "waited_s", "predicted_s", "corrected_s", "stopped_s", "changed_step_s", "step_s")
    results: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    known = MeasuredLayouts()
    here.train(0)
    for turn in range(rounds + 1):
        for index in ROUND:
            kind = switch_kind(here.trainer.state.layout, here.trainer.meshes.layouts[index])
            switch, changed_step_s = here.train(index)
            _, step_s = here.train(index)
            here.follow(index, step_s)
            stopped_s = here.stop_and_transfer(index)
            if switch is None:
                continue
            print(
                f"{switch.before} -> {switch.after}: stall {switch.stall_s:.3f} s, predicted "
                f"{switch.predicted_stall_s:.3f} s, waited {switch.wait_s:.3f} s, stopped {stopped_s:.3f} s, "
                f"step {changed_step_s:.3f} s, without a change {step_s:.3f} s",
                flush=True,
            )
            corrected_s = switch.predicted_stall_s * known.switch_factor(kind)
            known = known.with_switch(kind, switch.stall_s / switch.predicted_stall_s)
            if not turn:
                continue
            change = f"{switch.before} -> {switch.after}"
            live = switch.stall_s, switch.wait_s, switch.predicted_stall_s
            row = (*live, corrected_s, stopped_s, changed_step_s, step_s)
            for name, seconds in zip(names, row, strict=True):
                results[name].setdefault(change, []).append(seconds)
    start_s = time.perf_counter()
    here.trainer.save()
    save_s = time.perf_counter() - start_s
    if rank == 0:
        result = Measured(**results, save_s=save_s)
        Path(f"{directory}/measured.json").write_bytes(msgspec.json.encode(result))
    dist.barrier()
    dist.destroy_process_group()


def restart(rank: int, directory: str, overrides: list[str], meeting: str) -> None:
    """A new process in another layout, which loads the checkpoint; rank 0 leaves when all were ready."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = load_train_config(Path(f"{directory}/config.toml"), overrides)
    meshes = create_meshes(layouts_of(config, model_spec(config).num_layers)[:1], torch.device("cpu"), timeout_s=300)
    trainer = Trainer(config, meshes.start)
    assert trainer.resume() is not None
    dist.barrier()
    if rank == 0:
        Path(f"{directory}/{meeting}.ready").write_text(repr(time.time()))
    dist.destroy_process_group()


def measure(quick: bool) -> Iterator[Row]:
    """All rows of the benchmark."""
    restarts = {}
    layouts = [name.replace(" ", ",") for name in list(LAYOUTS)[1:]]
    settings = f'[parallel]\npp = {WORLD}\n[plan]\nstrategy = "balanced"\nlayouts = {layouts}\n'
    settings += "options = { max_pack_tokens = 64 }"
    with tempfile.TemporaryDirectory() as directory:
        write_run(Path(directory), llama(QUICK_HIDDEN if quick else HIDDEN, 8, heads=16, key_heads=8, vocabulary=1024),
                  [32] * 64, 4, 100, settings)  # fmt: skip
        spawn_ranks(WORLD, run_rank, directory, QUICK_ROUNDS if quick else ROUNDS)
        result = msgspec.json.decode(Path(directory, "measured.json").read_bytes(), type=Measured)
        for number, (target, sizes) in enumerate(LAYOUTS.items()):
            start_s = time.time()
            spawn_ranks(WORLD, restart, directory, [*sizes, "plan.layouts=[]"], f"again-{number}")
            restarts[target] = float(Path(directory, f"again-{number}.ready").read_text()) - start_s
    for change, live_s in result.live_s.items():
        stopped_s, predicted_s, corrected_s = (
            getattr(result, name)[change] for name in ("stopped_s", "predicted_s", "corrected_s")
        )
        restart_s = result.save_s + restarts[change.partition(" -> ")[2]]
        case = f"4 processes, {'small' if quick else '94 M parameters'}, {change}"
        both_s = [live + waited for live, waited in zip(live_s, result.waited_s[change], strict=True)]
        yield Row("reconfigure", case, "stall", median_ratio(live_s, stopped_s), "x", "stop and transfer")
        yield Row("reconfigure", case, "stall and wait", median_ratio(both_s, stopped_s), "x", "stop and transfer")
        yield Row("reconfigure", case, "stall", statistics.median(live_s) / restart_s, "x", "save, restart, load")
        step_s = result.step_s[change]
        yield Row("reconfigure", case, "stall", median_ratio(live_s, step_s), "x", "one step")
        yield Row("reconfigure", case, "step", median_ratio(result.changed_step_s[change], step_s), "x", "one step")
        yield Row("reconfigure", case, "stall, measured", median_ratio(live_s, predicted_s), "x", "predicted")
        yield Row("reconfigure", case, "stall, measured", median_ratio(live_s, corrected_s), "x", "corrected")


PARTS = {"reconfigure": measure}

if __name__ == "__main__":
    run(PARTS)
