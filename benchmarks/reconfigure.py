"""A change of the layout while a run trains: how long training stands still, beside two ways without live switching.

Four CPU processes of one thread each, a Llama of 94 M parameters in fp32 (378 MB of weights, 756 MB of moments), from
four stages to two replicas of two stages, and to four replicas (like FlexPipe's Fig. 10):

    live                 what `evenload train` does: weights before the step, optimizer state behind it
    stop and transfer    the same moves, but the step waits for all of them
    save, restart, load  a checkpoint, new processes in the new layout, which load it

Live: seconds until the step begins, and what the optimizer still waits for behind a step. All in one run, rounds by
turns; restarts once a layout. Predicted: by the links that calibration measured, whatever else uses the machine then.

    python benchmarks/reconfigure.py [--quick] [--append]
"""

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from transformers import LlamaConfig

from context_parallel import COSTS
from evenload.calibrate.calibrate import calibrate
from evenload.cost.coverage import completed_between_layouts
from evenload.feed.step_maker import PlannedStep, StepMaker
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.comm.warm_up import warm_up
from evenload.runtime.config.run_layouts import layouts_of
from evenload.runtime.config.run_planner import run_planner
from evenload.runtime.config.train_config import load_train_config
from evenload.runtime.model.configured import model_spec
from evenload.runtime.stages.live_stages import Switch
from evenload.runtime.step_source import prepared_step
from evenload.runtime.trainer import Trainer
from evenload.types.base import Frozen
from evenload.types.plan import seal
from results import Row, median_ratio, run_benchmark
from token_runs import save_tokens

WORLD = 4
HIDDEN, QUICK_HIDDEN = 1024, 64
ROUNDS, QUICK_ROUNDS = 5, 1
TARGETS = {"dp=2 pp=2": ("parallel.pp=2", "parallel.dp=2"), "dp=4": ("parallel.pp=1", "parallel.dp=4")}
MEMORY_BYTES = 2**34


class Found(Frozen):
    """Seconds by target and round; bytes of all ranks."""

    live_s: dict[str, list[float]]
    waited_s: dict[str, list[float]]
    back_s: dict[str, list[float]]
    stopped_s: dict[str, list[float]]
    predicted_s: dict[str, float]
    weight_bytes: dict[str, int]
    state_bytes: dict[str, int]
    save_s: float


def write_run(directory: Path, hidden: int) -> None:
    """A model, documents and a configuration."""
    LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, vocab_size=1024, max_position_embeddings=256, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory / "model")  # fmt: skip
    save_tokens(directory, [64] * 64, 1024, np.random.default_rng(0))
    layouts = [target.replace(" ", ",") for target in TARGETS]
    (directory / "config.toml").write_text(
        f"""
        [model]
        path = "{directory / "model"}"
        random_init = true
        [data]
        sources = ["{directory / "tokens.npy"}"]
        record = "tokens"
        max_document_tokens = 64
        batch_documents = 16
        shuffle_window = 1
        workers = 0
        [parallel]
        pp = {WORLD}
        [plan]
        strategy = "balanced"
        layouts = {layouts}
        options = {{ max_pack_tokens = 128 }}
        [train]
        output_dir = "{directory / "run"}"
        steps = 100
        threads_per_process = 1
        """
    )


class Rank:
    """One process of the run, which goes from layout to layout."""

    def __init__(self, directory: str, *, quick: bool) -> None:
        config = load_train_config(Path(f"{directory}/config.toml"), [])
        meshes = create_meshes(layouts_of(config, 8), torch.device("cpu"), timeout_s=300)
        warm_up(meshes)
        self.trainer = Trainer(config, meshes.start, meshes)
        measured = msgspec.structs.replace(COSTS, devices_per_node=WORLD)
        if not quick:
            measured = calibrate(self.trainer.stages, self.trainer.model, meshes.start, 64, "cpu").coefficients
        self.costs = completed_between_layouts(measured, meshes.layouts[1])[0]
        self._planned = [self._step(index) for index in range(len(meshes.layouts))]

    def _step(self, index: int) -> PlannedStep:
        """The first batch, planned for a layout."""
        trainer, mesh = self.trainer, self.trainer.mesh
        loader = trainer.new_loader()
        planner = run_planner(trainer.config, trainer.model, trainer.meshes.layouts[index], self.costs, MEMORY_BYTES)
        maker = StepMaker(
            loader,
            planner,
            trainer.config.plan.strategy,
            replicas=lambda layout: layout.replicas(WORLD),
            max_pack_tokens=trainer.config.max_pack_tokens,
            waiting=mesh.watch.waiting,
        )
        planned = cast("PlannedStep", maker.next())
        loader.close()
        return planned

    def train(self, index: int) -> Switch | None:
        """A step in a layout, switching before it where another runs; what that took, on rank 0."""
        trainer, planned = self.trainer, self._planned[index]
        layout = planned.plan.layout
        if layout.arrangement != trainer.layout.arrangement:
            layout = msgspec.structs.replace(layout, generation=trainer.layout.generation + 1)
        else:
            layout = trainer.layout
        planned = replace(planned, plan=seal(msgspec.structs.replace(planned.plan, layout=layout)))
        prepared = prepared_step(planned, trainer.meshes, "all_gather")
        report = trainer.run_step(prepared, self.costs, learning_rate=0.0)
        return None if report is None else report.switch

    def stop_and_transfer(self, index: int) -> float:
        """Seconds until weights and optimizer state are in place, on the slowest rank."""
        trainer = self.trainer
        layout = trainer.meshes.layouts[index]
        dist.barrier(group=trainer.mesh.control)
        start_s = time.perf_counter()
        trainer._change_layout(msgspec.structs.replace(layout, generation=trainer.layout.generation + 1), self.costs)
        trainer._settled()
        seconds = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=trainer.mesh.control)
        return float(seconds)


def run_rank(rank: int, directory: str, rounds: int) -> None:
    """One process; rank 0 leaves what was measured in the directory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=WORLD)
    here = Rank(directory, quick=rounds == QUICK_ROUNDS)
    found: dict[str, dict[str, list[float]]] = {name: {target: [] for target in TARGETS} for name in
                                                ("live_s", "waited_s", "back_s", "stopped_s")}  # fmt: skip
    switches: dict[str, Switch] = {}
    here.train(0)
    for turn in range(rounds + 1):
        for index, target in enumerate(TARGETS, start=1):
            there, back = here.train(index), here.train(0)
            stopped_s = here.stop_and_transfer(index)
            here.train(0)
            if turn and there is not None and back is not None:
                switches[target] = there
                row = {
                    "live_s": there.stall_s,
                    "waited_s": there.wait_s,
                    "back_s": back.stall_s,
                    "stopped_s": stopped_s,
                }
                for name, seconds in row.items():
                    found[name][target].append(seconds)
    start_s = time.perf_counter()
    here.trainer.save()
    save_s = time.perf_counter() - start_s
    if rank == 0:
        result = Found(
            **found,
            predicted_s={target: switch.predicted_stall_s for target, switch in switches.items()},
            weight_bytes={target: switch.weight_bytes for target, switch in switches.items()},
            state_bytes={target: switch.state_bytes for target, switch in switches.items()},
            save_s=save_s,
        )
        Path(f"{directory}/found.json").write_bytes(msgspec.json.encode(result))
    dist.barrier()
    dist.destroy_process_group()


def restart(rank: int, directory: str, overrides: list[str], meeting: str) -> None:
    """A new process in another layout, which loads the checkpoint; rank 0 leaves when all were ready."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/{meeting}", rank=rank, world_size=WORLD)
    config = load_train_config(Path(f"{directory}/config.toml"), overrides)
    meshes = create_meshes(layouts_of(config, model_spec(config).num_layers)[:1], torch.device("cpu"), timeout_s=300)
    trainer = Trainer(config, meshes.start)
    assert trainer.resume() is not None
    dist.barrier()
    if rank == 0:
        Path(f"{directory}/{meeting}.ready").write_text(repr(time.time()))
    dist.destroy_process_group()


def measure(quick: bool) -> list[Row]:
    """All rows of the benchmark."""
    restarts = {}
    with tempfile.TemporaryDirectory() as directory:
        write_run(Path(directory), QUICK_HIDDEN if quick else HIDDEN)
        torch.multiprocessing.spawn(run_rank, (directory, QUICK_ROUNDS if quick else ROUNDS), nprocs=WORLD)
        found = msgspec.json.decode(Path(f"{directory}/found.json").read_bytes(), type=Found)
        for number, (target, sizes) in enumerate(TARGETS.items()):
            start_s = time.time()
            torch.multiprocessing.spawn(
                restart, (directory, [*sizes, "plan.layouts=[]"], f"again-{number}"), nprocs=WORLD
            )
            restarts[target] = float(Path(f"{directory}/again-{number}.ready").read_text()) - start_s
    rows = []
    for target in TARGETS:
        live_s, waited_s, stopped_s = found.live_s[target], found.waited_s[target], found.stopped_s[target]
        restart_s = found.save_s + restarts[target]
        weights, state = (sizes[target] / 1e6 for sizes in (found.weight_bytes, found.state_bytes))
        print(f"pp=4 -> {target}: {weights:.0f} MB of weights, {state:.0f} MB of optimizer state")
        print(f"  live {[f'{s:.3f}' for s in live_s]} s, the optimizer waited {[f'{s:.3f}' for s in waited_s]} s")
        print(f"  back {[f'{s:.3f}' for s in found.back_s[target]]} s, stopped {[f'{s:.3f}' for s in stopped_s]} s")
        print(f"  save {found.save_s:.2f} s, restart and load {restarts[target]:.2f} s")
        case = f"4 processes, {'small' if quick else '94 M parameters'}, pp=4 -> {target}"
        both_s = [live + waited for live, waited in zip(live_s, waited_s, strict=True)]
        rows += [
            Row("reconfigure", case, "stall", median_ratio(live_s, stopped_s), "x", "stop and transfer"),
            Row("reconfigure", case, "stall and wait", median_ratio(both_s, stopped_s), "x", "stop and transfer"),
            Row("reconfigure", case, "stall", statistics.median(live_s) / restart_s, "x", "save, restart, load"),
            Row("reconfigure", case, "stall, measured", statistics.median(live_s) / found.predicted_s[target], "x",
                "predicted"),
        ]  # fmt: skip
    return rows


if __name__ == "__main__":
    run_benchmark(measure, __doc__ or "")
