"""A run whose lengths swing: phases of short and of long documents; `flexpipe` beside every layout that it may take.

Two CPU processes of one thread each, and a decoder with a large vocabulary for its depth, as small models have. Every
step trains as many documents, so a step of short ones is few tokens, and one of long ones thirty times as many:

    few tokens    two replicas sum gradients and gather weights, all of them, after little computing; a pipeline has
                  nothing to sum
    many tokens   the sum is small beside computing; a pipeline waits while it fills and drains, and for its last stage,
                  which has the head

So neither layout suits both phases. The same data for all, documents by turns of phases, written with a seed; runs of
the variants take turns, and `--append` wants a quiet machine. A time is the wall clock of all steps but the first,
whatever they waited for: computing, planning in the background, switches. Static runs pack as `flexpipe` does inside a
layout (`balanced`). All plan by the same costs, measured once in the layout in which `flexpipe` starts, with the links
of the others: two calibrations of one machine differ by more than layouts do.

    python benchmarks/swinging.py [--quick] [--append]
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from cpu_ranks import COSTS, cpu_rank, leave, llama, spawn_ranks, write_run
from evenload.calibrate.calibrate import calibrate
from evenload.calibrate.links import links_of_layouts
from evenload.config.planner import layouts_of
from evenload.config.train_config import TrainConfig, load_train_config
from evenload.cost.coefficients import CostCoefficients
from evenload.runtime.comm.mesh import Meshes, create_meshes, warm_up
from evenload.runtime.model.model_config import model_spec
from evenload.runtime.trainer import Trainer
from evenload.types.base import Frozen
from harness import Row, median_ratio, run

WORLD = 2
BATCH = 4
SHORT, LONG = 12, 384
"""Tokens of a document, drawn evenly from 3/4 to 5/4 of these."""
PHASES = (("short", 30), ("long", 5), ("short", 30), ("long", 5))
"""Of how many steps."""
QUICK_PHASES = (("short", 3), ("long", 3))
VOCABULARY, HIDDEN, LAYERS = 16_384, 256, 2
ROUNDS, QUICK_ROUNDS = 4, 1
MEMORY_BYTES = 2**33
STATIC = {"dp=2": ("parallel.dp=2",), "pp=2": ("parallel.pp=2",)}
FLEXIBLE = "flexpipe"
VARIANTS = {name: (*settings, "plan.strategy=balanced") for name, settings in STATIC.items()} | {
    FLEXIBLE: ("parallel.dp=2", "plan.strategy=flexpipe", "plan.options.flexpipe={known_steps=16}")
}


class Measured(Frozen):
    """One run, on rank 0.

    Args:
        seconds: of the steps but the first.
        predicted_s: of the same steps.
        switch_s: of every switch, its wait behind the step included.
        losses: of every step.
    """

    seconds: float
    predicted_s: float
    switch_s: list[float]
    losses: list[float]


def phase_lengths(phases: tuple[tuple[str, int], ...]) -> np.ndarray:
    """Tokens of all documents, in the order of their phases."""
    means = np.repeat([{"short": SHORT, "long": LONG}[name] for name, _ in phases], [BATCH * n for _, n in phases])
    return np.random.default_rng(0).integers(3 * means // 4, 5 * means // 4, endpoint=True)


class Variant:
    """One way to train the data, again and again, in one process of `WORLD`."""

    def __init__(self, directory: str, settings: tuple[str, ...]) -> None:
        self.config: TrainConfig = load_train_config(Path(f"{directory}/config.toml"), list(settings))
        layouts = layouts_of(self.config, model_spec(self.config).num_layers)
        self.meshes: Meshes = create_meshes(layouts, torch.device("cpu"), timeout_s=300)
        warm_up(self.meshes)

    def measured_costs(self) -> CostCoefficients:
        """Measure costs that hold in all layouts of the run."""
        trainer = Trainer(self.config, self.meshes.start, self.meshes)
        measured, _ = calibrate(trainer.state.stages, trainer.model, self.meshes.start, LONG, "cpu")
        return links_of_layouts(measured, self.meshes)

    def run(self, costs: CostCoefficients) -> Measured | None:
        """Train all steps by these costs; what was measured, on rank 0."""
        trainer = Trainer(self.config, self.meshes.start, self.meshes)
        if trainer.state.live is not None and trainer.state.live.moved.shared:
            # As at the start of a run: what reading the weights of other ranks costs.
            costs = msgspec.structs.replace(costs, copies=trainer.state.live.measured_copies())
        dist.barrier()
        from_s, reports = 0.0, []
        for report in trainer.train(costs, MEMORY_BYTES):
            from_s = from_s or time.perf_counter()
            reports.append(report)
        dist.barrier()
        seconds = time.perf_counter() - from_s
        reported = [report for report in reports if report is not None]
        if not reported:
            return None
        switches = [report.switch for report in reported if report.switch is not None]
        return Measured(
            seconds=seconds,
            predicted_s=sum(report.plan.predicted.step_time_s for report in reported[1:]),
            switch_s=[switch.stall_s + switch.wait_s for switch in switches],
            losses=[float(report.row["loss"] or 0.0) for report in reported],
        )


def run_rank(rank: int, directory: str, rounds: int) -> None:
    """One process."""
    del rank
    with cpu_rank():
        variants = {name: Variant(directory, settings) for name, settings in VARIANTS.items()}
        costs = msgspec.structs.replace(COSTS, devices_per_node=WORLD)
        if rounds != QUICK_ROUNDS:
            costs = variants[FLEXIBLE].measured_costs()
        result: dict[str, list[Measured]] = {name: [] for name in variants}
        names = list(variants)
        for turn in range(rounds):
            # Each begins a round once, so that none always runs behind the same other one.
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                measured = variants[name].run(costs)
                gc.collect()
                if measured is not None:
                    result[name].append(measured)
        leave(directory, result)


def measure(quick: bool) -> Iterator[Row]:
    """All rows of the benchmark."""
    phases, rounds = (QUICK_PHASES, QUICK_ROUNDS) if quick else (PHASES, ROUNDS)
    lengths, steps = phase_lengths(phases), sum(count for _, count in phases)
    model = llama(HIDDEN, LAYERS, heads=4, vocabulary=VOCABULARY)
    with tempfile.TemporaryDirectory() as directory:
        limit = f"[plan]\noptions = {{ max_pack_tokens = {LONG * 5 // 2} }}"
        write_run(Path(directory), model, lengths, BATCH, steps, limit)
        spawn_ranks(WORLD, run_rank, directory, rounds)
        result = msgspec.json.decode(Path(directory, "found.json").read_bytes(), type=dict[str, list[Measured]])
    losses = [one.losses for runs in result.values() for one in runs]
    drift = max(float(np.abs(np.array(one) / np.array(losses[0]) - 1).max()) for one in losses)
    print(f"losses of all runs are equal to {drift:.1e}")
    case = (
        f"{WORLD} processes, {LAYERS} layers, vocabulary {VOCABULARY}, documents of {SHORT} and {LONG} tokens by turns"
    )
    ours = result[FLEXIBLE]
    for name in STATIC:
        for how, field in (("measured", "seconds"), ("predicted", "predicted_s")):
            ratio = median_ratio([getattr(one, field) for one in result[name]], [getattr(one, field) for one in ours])
            yield Row("swinging", case, f"speed-up over {name}, {how}", ratio, "x", name)
    for name, runs in result.items():
        ratio = statistics.median(one.seconds / one.predicted_s for one in runs)
        yield Row("swinging", case, f"{name}: steps, measured", ratio, "x", "predicted")
    yield Row("swinging", case, "switches", statistics.median(len(one.switch_s) for one in ours), "")
    share = statistics.median(sum(one.switch_s) / one.seconds for one in ours)
    yield Row("swinging", case, "share of switches", share, "", "time of flexpipe")


PARTS = {"swinging": measure}

if __name__ == "__main__":
    run(PARTS)
