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
layout (`balanced`), and every run plans by costs that were measured in the layout in which it starts.

    python benchmarks/swinging.py [--quick] [--append]
"""

import gc
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from transformers import LlamaConfig

from context_parallel import COSTS
from evenload.calibrate.calibrate import calibrate
from evenload.config.layouts import layouts_of
from evenload.config.train_config import TrainConfig, load_train_config
from evenload.cost.coefficients import CostCoefficients
from evenload.runtime.comm.mesh import Meshes, create_meshes, warm_up
from evenload.runtime.model.configured import model_spec
from evenload.runtime.trainer import Trainer
from evenload.types.base import Frozen
from results import Row, median_ratio, run_benchmark
from token_runs import save_tokens

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
STATIC = {
    "dp=2": ("parallel.dp=2",),
    "pp=2": ("parallel.pp=2",),
}
FLEXIBLE = "flexpipe"
VARIANTS = {name: (*settings, "plan.strategy=balanced") for name, settings in STATIC.items()} | {
    FLEXIBLE: (
        "parallel.dp=2",
        'plan.layouts=["pp=2"]',
        "plan.strategy=flexpipe",
        "plan.options.flexpipe={known_steps=16}",
    )
}


class Measured(Frozen):
    """One run, on rank 0.

    Args:
        seconds: of the steps but the first.
        predicted_s: of the same steps.
        step_s: of every step, by its own clock.
        layouts: of every step.
        switch_s: of every switch, its wait behind the step included.
        losses: of every step.
    """

    seconds: float
    predicted_s: float
    step_s: list[float]
    layouts: list[str]
    switch_s: list[float]
    losses: list[float]


def write_run(directory: Path, phases: tuple[tuple[str, int], ...]) -> None:
    """A model, documents in the order of their phases, and a configuration."""
    LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=HIDDEN * 11 // 4, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=LONG * 2, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory / "model")  # fmt: skip
    generator = np.random.default_rng(0)
    means = np.repeat([{"short": SHORT, "long": LONG}[name] for name, _ in phases], [BATCH * n for _, n in phases])
    lengths = generator.integers(3 * means // 4, 5 * means // 4, endpoint=True)
    save_tokens(directory, lengths, VOCABULARY, generator)
    (directory / "config.toml").write_text(
        f"""
        [model]
        path = "{directory / "model"}"
        random_init = true
        [data]
        sources = ["{directory / "tokens.npy"}"]
        record = "tokens"
        max_document_tokens = {LONG * 5 // 4}
        batch_documents = {BATCH}
        shuffle_window = 1
        streams = 1
        workers = 0
        [plan]
        options = {{ max_pack_tokens = {LONG * 5 // 2} }}
        [train]
        output_dir = "{directory / "run"}"
        steps = {sum(count for _, count in phases)}
        threads_per_process = 1
        """
    )


class Variant:
    """One way to train the data, again and again, in one process of `WORLD`."""

    def __init__(self, directory: str, settings: tuple[str, ...], *, quick: bool) -> None:
        self.config: TrainConfig = load_train_config(Path(f"{directory}/config.toml"), list(settings))
        layouts = layouts_of(self.config, model_spec(self.config).num_layers)
        self.meshes: Meshes = create_meshes(layouts, torch.device("cpu"), timeout_s=300)
        warm_up(self.meshes)
        self.costs: CostCoefficients = msgspec.structs.replace(COSTS, devices_per_node=WORLD)
        if not quick:
            trainer = Trainer(self.config, self.meshes.start, self.meshes)
            measured = calibrate(trainer.stages, trainer.model, self.meshes.start, LONG, "cpu")
            self.costs = measured.coefficients

    def run(self) -> Measured | None:
        """Train all steps; what was measured, on rank 0."""
        trainer, costs = Trainer(self.config, self.meshes.start, self.meshes), self.costs
        if trainer.live is not None and trainer.live.shares_memory:
            # As at the start of a run: what reading the weights of other ranks costs.
            costs = msgspec.structs.replace(costs, copies=trainer.live.measured_copies())
        dist.barrier()
        from_s, reports = 0.0, []
        for report in trainer.train(costs, MEMORY_BYTES):
            from_s = from_s or time.perf_counter()
            reports.append(report)
        dist.barrier()
        seconds = time.perf_counter() - from_s
        told = [report for report in reports if report is not None]
        if not told:
            return None
        switches = [report.switch for report in told if report.switch is not None]
        return Measured(
            seconds=seconds,
            predicted_s=sum(report.plan.predicted.step_time_s for report in told[1:]),
            step_s=[report.measured.step_time_s for report in told],
            layouts=[report.plan.layout.describe() for report in told],
            switch_s=[switch.stall_s + switch.wait_s for switch in switches],
            losses=[float(report.row["loss"] or 0.0) for report in told],
        )


def run_rank(rank: int, directory: str, rounds: int) -> None:
    """One process; rank 0 leaves what was measured in the directory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=WORLD)
    quick = rounds == QUICK_ROUNDS
    variants = {name: Variant(directory, settings, quick=quick) for name, settings in VARIANTS.items()}
    found: dict[str, list[Measured]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(rounds):
        # Each begins a round once, so that none always runs behind the same other one.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            measured = variants[name].run()
            gc.collect()
            if measured is not None:
                found[name].append(measured)
    if rank == 0:
        Path(f"{directory}/found.json").write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(quick: bool) -> list[Row]:
    """All rows of the benchmark."""
    phases, rounds = (QUICK_PHASES, QUICK_ROUNDS) if quick else (PHASES, ROUNDS)
    with tempfile.TemporaryDirectory() as directory:
        write_run(Path(directory), phases)
        torch.multiprocessing.spawn(run_rank, (directory, rounds), nprocs=WORLD)
        found = msgspec.json.decode(Path(f"{directory}/found.json").read_bytes(), type=dict[str, list[Measured]])
    for name, runs in found.items():
        print(f"{name}: {', '.join(f'{run.seconds:.2f}' for run in runs)} s, predicted {runs[0].predicted_s:.2f} s")
        print(f"  median step by phase, ms: {', '.join(_phase_steps(runs, phases))}")
    for run in found[FLEXIBLE]:
        changes = [f"{at} {new}" for at, (old, new) in enumerate(zip(run.layouts, run.layouts[1:], strict=False), 1)
                   if old != new]  # fmt: skip
        switched = ", ".join(f"{1e3 * seconds:.0f}" for seconds in run.switch_s)
        print(f"  {FLEXIBLE}: starts in {run.layouts[0]}; before steps {', '.join(changes)}; switches {switched} ms")
    losses = [run.losses for runs in found.values() for run in runs]
    drift = max(float(np.abs(np.array(one) / np.array(losses[0]) - 1).max()) for one in losses)
    print(f"losses of all runs are equal to {drift:.1e}")
    case = (
        f"{WORLD} processes, {LAYERS} layers, vocabulary {VOCABULARY}, documents of {SHORT} and {LONG} tokens by turns"
    )
    flexible_s = [run.seconds for run in found[FLEXIBLE]]
    rows = []
    for name in STATIC:
        ratio = median_ratio([run.seconds for run in found[name]], flexible_s)
        predicted = median_ratio([run.predicted_s for run in found[name]], [run.predicted_s for run in found[FLEXIBLE]])
        # The metric names the layout, too, because newest rows are told apart by case and metric.
        rows.append(Row("swinging", case, f"speed-up over {name}, measured", ratio, "x", name))
        rows.append(Row("swinging", case, f"speed-up over {name}, predicted", predicted, "x", name))
    switches = statistics.median(len(run.switch_s) for run in found[FLEXIBLE])
    share = statistics.median(sum(run.switch_s) / run.seconds for run in found[FLEXIBLE])
    return [
        *rows,
        Row("swinging", case, "switches", switches, "", ""),
        Row("swinging", case, "share of switches", share, "", "time of flexpipe"),
    ]


def _phase_steps(runs: list[Measured], phases: tuple[tuple[str, int], ...]) -> list[str]:
    """Medians over the steps of all runs, by phase."""
    kinds = np.repeat([name for name, _ in phases], [count for _, count in phases])[1:]
    steps = np.array([run.step_s[1:] for run in runs])
    return [f"{kind} {1e3 * np.median(steps[:, kinds == kind]):.1f}" for kind in dict.fromkeys(kinds.tolist())]


if __name__ == "__main__":
    run_benchmark(measure, __doc__ or "")
