"""Step time on other engines: Evenload's plans against what their users get, on two CPU processes of one thread each.

A small Llama of 2 layers; lengths are `examples/lengths/github_dirs.npy.gz` divided by 32, as in loader_training.py. In
one run of one set of processes both variants train the same global batches by turns, at learning rate 0, and must have
the same losses. Attention is called once a document, as kernels with cumulative lengths do it on GPUs. A step is as
long as that of its slowest rank, update included; reading and planning are done before.

    auto                the fastest of all strategies that the engine runs, by its price
    best_fit            the fullest packs (TRL's bfd, which its trainers pack by), dealt to the ranks in turn, equally
                        many on each. Baseline of the Trainer, and of FSDP2 and DeepSpeed, which pack nothing themselves
    in_order            documents as they come, into a pack until the next does not fit. Baseline of torchtitan, whose
                        own loader also cuts the document that does not fit; that would be another training
    in_order, padded    the same, every pack padded to one length: baseline of Megatron-Core (its data for fine-tuning)

The prediction is `integrations.price` with what `evenload profile` measures on this machine just before. That is
Evenload's own runtime, not the engine's modules: compare ratios.

    python benchmarks/engine_steps.py [--quick] [--append] [--part fsdp2|deepspeed|...]

An engine takes two to four minutes. Those that are not installed are left out, and a line says so; torchtitan's
environment is that of `make test-engines`. Megatron-Core runs on CPUs with the shim of its tests: one stage, two
replicas.
"""

import functools
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig

import engine_loops
import engine_trainers
from cpu_ranks import spawn_ranks
from engine_turns import OURS, RANKS, STEP_TOKENS, Race, Train, Trained
from harness import Row, median_ratio, run
from loader_sources import write_tokens
from loader_training import CONTEXT, read_scaled_lengths, tiny_config

ROUNDS, QUICK_ROUNDS = 14, 1
PROFILE_MINUTES, QUICK_PROFILE_MINUTES = 1.0, 0.2
SAME_LOSS = 1e-4
"""Relative: float32, summed in another order."""


class Engine(NamedTuple):
    """What trains on an engine, what its users get without Evenload, its model, and the package that is needed."""

    train: Train
    baseline: str = "best_fit"
    package: str = "torch"
    config: Callable[[], LlamaConfig] = tiny_config


ENGINES = {
    "fsdp2": Engine(engine_loops.train_fsdp2),
    "deepspeed": Engine(engine_loops.deepspeed_trains(1), package="deepspeed"),
    "deepspeed-zero2": Engine(engine_loops.deepspeed_trains(2), package="deepspeed"),
    "deepspeed-zero3": Engine(engine_loops.deepspeed_trains(3), package="deepspeed"),
    "megatron": Engine(engine_loops.train_megatron, "in_order, padded", "megatron"),
    "torchtitan": Engine(engine_trainers.train_torchtitan, "in_order", "torchtitan", engine_trainers.titan_config),
    "trainer": Engine(engine_trainers.train_with_trainer, package="accelerate"),
}


def run_rank(rank: int, name: str, directory: str, turns: list[str]) -> None:
    """One rank; rank 0 leaves the steps of all turns, with the seconds of the slowest rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine, folder = ENGINES[name], Path(directory)
    config = LlamaConfig.from_pretrained(folder)
    steps = engine.train(Race(folder, name, config, engine.baseline, turns))
    slowest = torch.tensor([step.seconds for step in steps])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        result = [step._replace(seconds=seconds) for step, seconds in zip(steps, slowest.tolist(), strict=True)]
        Path(directory, "found.json").write_bytes(msgspec.json.encode(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # engines leave threads behind, which would wait for each other


def measure_engine(name: str, directory: Path, quick: bool) -> list[Row]:
    """All rows of an engine.

    Args:
        directory: with `config.json` and the cost file.
    """
    rounds, config = QUICK_ROUNDS if quick else ROUNDS, LlamaConfig.from_pretrained(directory)
    # Who goes first changes from round to round; the first round, which makes buffers, does not count.
    variants = [ENGINES[name].baseline, OURS]
    turns = [variant for one in range(rounds + 1) for variant in variants[:: -1 if one % 2 else 1]]
    lengths = read_scaled_lengths(STEP_TOKENS * (rounds + 3) // 8)
    enough = int(np.searchsorted(np.cumsum(lengths), STEP_TOKENS * (rounds + 3)))
    write_tokens(directory / "documents", lengths[:enough], vocab_size=config.vocab_size)
    spawn_ranks(RANKS, run_rank, name, str(directory), turns)
    steps = msgspec.json.decode((directory / "found.json").read_bytes(), type=list[Trained])
    counted = list(zip(turns, steps, strict=True))[len(variants) :]
    return rows_of(name, *([step for of, step in counted if of == variant] for variant in variants))


def rows_of(name: str, baseline: list[Trained], ours: list[Trained]) -> list[Row]:
    """Medians over rounds of ratios and their quartiles; stops where the variants have not trained the same."""
    for step, other in zip(ours, baseline, strict=True):
        if abs(step.loss - other.loss) > SAME_LOSS * other.loss:
            sys.exit(f"{name}: {OURS} has loss {step.loss}, the baseline {other.loss}: not the same training")
    against = ENGINES[name].baseline
    case = f"{name}, {RANKS} processes, {STEP_TOKENS} tokens of github_dirs/32 a step, packs of {CONTEXT}"
    row = functools.partial(Row, "engine_steps", case)
    measured = [slow.seconds / fast.seconds for slow, fast in zip(baseline, ours, strict=True)]
    low, high = np.quantile(measured, [0.25, 0.75]).tolist()
    predicted = median_ratio([step.predicted_s for step in baseline], [step.predicted_s for step in ours])
    reported = {
        name: statistics.median(step.predicted_s / step.seconds for step in steps)
        for name, steps in (("baseline", baseline), (OURS, ours))
    }
    return [
        row(f"{OURS} faster", statistics.median(measured), "x", against),
        row(f"{OURS} faster, lower quartile", low, "x", against),
        row(f"{OURS} faster, upper quartile", high, "x", against),
        row(f"{OURS} predicted faster", predicted, "x", against),
        *(row(f"{variant} predicted over measured", share, "x", "") for variant, share in reported.items()),
    ]


def profile(config: LlamaConfig, directory: Path, quick: bool) -> None:
    """The model's configuration and its cost file, on two processes of this machine, in a folder."""
    config.save_pretrained(directory)
    command = [sys.executable, "-m", "evenload.cli.main", "profile", "--layout", f"dp={RANKS}", "--threads", "1"]
    command += ["--minutes", str(QUICK_PROFILE_MINUTES if quick else PROFILE_MINUTES), "--context", str(CONTEXT)]
    subprocess.run([*command, "--model", str(directory), "-o", str(directory / "cost.json")], check=True)


def measure(name: str, quick: bool) -> list[Row]:
    """Rows of an engine that is installed; its model is profiled just before."""
    engine = ENGINES[name]
    if importlib.util.find_spec(engine.package) is None:
        print(f"engine_steps: left out: {name}, because {engine.package} is not installed")
        return []
    with tempfile.TemporaryDirectory() as directory:
        profile(engine.config(), Path(directory), quick)
        return measure_engine(name, Path(directory), quick)


PARTS = {name: functools.partial(measure, name) for name in ENGINES}

if __name__ == "__main__":
    run(PARTS)
