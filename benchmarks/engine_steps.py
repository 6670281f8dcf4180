"""Step time on other engines: Evenload's plans against what their users pack, on two CPU processes of one thread each.

A small Llama of 2 layers; lengths are `examples/lengths/github_dirs.npy.gz` divided by 32, as in loader_training.py. In
one run of one set of processes the variants train the same global batches by turns, at learning rate 0, and must have
the same losses. Attention is called once a document, as kernels with cumulative lengths do it on GPUs. A step is as
long as that of its slowest rank, update included.

    best_fit    the baseline: the fullest packs of `max_tokens` (what TRL calls bfd), dealt to the ranks in turn, every
                rank as many. FSDP2 and DeepSpeed pack nothing themselves: they train what a collator gives them
    balanced    packs of equal predicted time, for how the engine runs them
    auto        the fastest of all strategies that the engine runs, by its price

The prediction is `engines.price` with what `evenload profile` measures on this machine just before. That is Evenload's
own runtime, not the engine's modules: compare ratios.

    python benchmarks/engine_steps.py [--quick] [--append] [--engine fsdp2 ...]

Engines that are not installed are left out, and a line says so.
"""

import argparse
import functools
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing
from transformers import LlamaConfig

import engine_loops
from engine_turns import BASELINE, DOCUMENTS, RANKS, VARIANTS, Train, Trained
from loader_sources import write_tokens
from loader_training import CONTEXT, read_scaled_lengths, tiny_config
from results import Row, median_ratio, run_benchmark

ROUNDS, QUICK_ROUNDS = 12, 1
PROFILE_MINUTES, QUICK_PROFILE_MINUTES = 1.0, 0.2
SAME_LOSS = 1e-4
"""Relative: float32, summed in another order."""


class Engine(NamedTuple):
    """What trains on an engine, and the package that must be installed."""

    train: Train
    package: str = "torch"


ENGINES = {
    "fsdp2": Engine(engine_loops.train_fsdp2),
    "deepspeed": Engine(engine_loops.deepspeed_trains(1), "deepspeed"),
    "deepspeed-zero2": Engine(engine_loops.deepspeed_trains(2), "deepspeed"),
    "deepspeed-zero3": Engine(engine_loops.deepspeed_trains(3), "deepspeed"),
}


def run_rank(rank: int, name: str, directory: str, port: int, turns: list[str]) -> None:
    """One rank; rank 0 leaves the steps of all turns, with the seconds of the slowest rank."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    steps = ENGINES[name].train(Path(directory), turns)
    slowest = torch.tensor([step.seconds for step in steps])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        found = [step._replace(seconds=seconds) for step, seconds in zip(steps, slowest.tolist(), strict=True)]
        Path(directory, "found.json").write_bytes(msgspec.json.encode(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # engines leave threads behind, which would wait for each other


def measure_engine(name: str, cost_file: Path, quick: bool) -> list[Row]:
    """All rows of an engine."""
    rounds, config = QUICK_ROUNDS if quick else ROUNDS, tiny_config()
    # Who goes first changes from round to round; the first round, which makes buffers, does not count.
    orders = (list(VARIANTS), list(VARIANTS)[::-1])
    turns = [variant for one in range(rounds + 1) for variant in orders[one % 2]]
    with tempfile.TemporaryDirectory() as directory:
        lengths = read_scaled_lengths(DOCUMENTS * (rounds + 2))
        write_tokens(Path(directory, "documents"), lengths, vocab_size=config.vocab_size)
        Path(directory, "cost.json").write_bytes(cost_file.read_bytes())
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(run_rank, (name, directory, port, turns), nprocs=RANKS)
        steps = msgspec.json.decode(Path(directory, "found.json").read_bytes(), type=list[Trained])
    counted = list(zip(turns, steps, strict=True))[len(VARIANTS) :]
    return rows_of(name, {variant: [step for of, step in counted if of == variant] for variant in VARIANTS})


def rows_of(name: str, found: dict[str, list[Trained]]) -> list[Row]:
    """Medians over rounds of ratios; stops where the variants have not trained the same."""
    baseline = found[BASELINE]
    case = f"{name}, {RANKS} processes, {DOCUMENTS} documents of github_dirs/32 a step, packs of {CONTEXT}"
    rows = []
    for variant, steps in found.items():
        for ours, theirs in zip(steps, baseline, strict=True):
            if abs(ours.loss - theirs.loss) > SAME_LOSS * theirs.loss:
                sys.exit(f"{name}: {variant} has loss {ours.loss}, {BASELINE} {theirs.loss}: not the same training")
        if variant != BASELINE:
            for metric, column in (("faster", "seconds"), ("predicted faster", "predicted_s")):
                slow, fast = ([getattr(one, column) for one in of] for of in (baseline, steps))
                rows.append(Row("engine_steps", case, f"{variant} {metric}", median_ratio(slow, fast), "x", BASELINE))
        share = statistics.median(one.predicted_s / one.seconds for one in steps)
        rows.append(Row("engine_steps", case, f"{variant} predicted over measured", share, "x", variant))
    return rows


def profile(config: LlamaConfig, directory: Path, quick: bool) -> Path:
    """A cost file of the model on two processes of this machine."""
    config.save_pretrained(directory)
    command = [sys.executable, "-m", "evenload.cli.main", "profile", "--layout", f"dp={RANKS}", "--threads", "1"]
    command += ["--minutes", str(QUICK_PROFILE_MINUTES if quick else PROFILE_MINUTES), "--context", str(CONTEXT)]
    subprocess.run([*command, "--model", str(directory), "-o", str(directory / "cost.json")], check=True)
    return directory / "cost.json"


def measure(quick: bool, names: Sequence[str] = tuple(ENGINES)) -> list[Row]:
    """Rows of all engines that are installed."""
    installed = [name for name in names if importlib.util.find_spec(ENGINES[name].package) is not None]
    for name in names:
        if name not in installed:
            print(f"engine_steps: left out: {name}, because {ENGINES[name].package} is not installed")
    with tempfile.TemporaryDirectory() as directory:
        cost_file = profile(tiny_config(), Path(directory), quick)
        return [row for name in installed for row in measure_engine(name, cost_file, quick)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--engine", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    options, rest = parser.parse_known_args()
    run_benchmark(functools.partial(measure, names=options.engine), __doc__ or "", rest)
