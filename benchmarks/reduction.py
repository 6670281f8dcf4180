"""Sums of gradients beside the last backward: what a step takes with and without, what is hidden, what was predicted.

Two CPU processes of one thread each train the same global batches of a Llama of 8 layers (`dp = 2`), every batch with
`train.overlap_reduction` on and off by turns, in one run of one set of processes, at learning rate 0. Costs, also what
sums and compute cost each other, are those that a run measures at its start, just before.

    time          step time with sums beside packs, over that without; median of ratios of neighbouring steps
    hidden        of the seconds in which gradients are summed, those while packs are computed: as the ranks tell it
                  (`reduction_s` and `reduction_hidden_s` of metrics.jsonl), and as the simulator predicts it
    account       hidden seconds told over hidden seconds predicted, median of steps
    loss          whether both train the same, to the bit

gloo moves bytes on the cores that compute, so with a thread a core what is hidden still has to be computed: there the
time tells what is gained, and the hidden share alone says little.

    python benchmarks/reduction.py [--quick] [--append]
"""

import os
import socket
import statistics
import tempfile
from pathlib import Path

import msgspec
import torch.multiprocessing
from rich.console import Console
from transformers import LlamaConfig

from evenload.cli.worker_setup import run_coefficients, started_rank
from evenload.cost.coefficients import CostCoefficients
from evenload.feed.step_maker import PlannedStep, StepMaker
from evenload.runtime.config.run_planner import run_planner
from evenload.runtime.config.train_config import TrainConfig, layout_of, load_train_config
from evenload.runtime.prepare import prepare_step
from evenload.runtime.step_source import PreparedStep
from evenload.runtime.trainer import Trainer
from results import Row, median_ratio, run_benchmark
from token_runs import write_token_run

DP, LAYERS = 2, 8
LENGTHS = [256] * 4
BATCHES = {"2 packs a replica": 1_024}
ROUNDS, QUICK_ROUNDS = 24, 2
KEYS = (
    "step_time_s", "reduction_s", "reduction_hidden_s", "predicted_reduction_s", "predicted_reduction_hidden_s", "loss",
    "predicted_step_time_s",
)  # fmt: skip


def write_run(directory: Path, batch_tokens: int) -> Path:
    """The run's configuration."""
    model = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return write_token_run(directory, model, LENGTHS, f"batch_tokens = {batch_tokens}", steps=1, device="cpu")


def run_rank(rank: int, directory: str, port: int, rounds: int) -> None:
    """One replica; rank 0 leaves rows of all steps that count, by variant, and what was measured before."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(DP), "LOCAL_WORLD_SIZE": str(DP)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    settings = ["model.dtype=float32", f"parallel.dp={DP}", "plan.strategy=balanced", "train.threads_per_process=1"]
    config = load_train_config(Path(directory) / "config.toml", settings)
    with started_rank(config, layout_of(config, LAYERS)) as setup:
        trainer = Trainer(config, setup.mesh)
        costs = run_coefficients(trainer, Path(directory) / "cache", setup.threads, Console(quiet=True))
        planned: dict[str, tuple[TrainConfig, PlannedStep]] = {}
        for name, is_beside in (("after", False), ("beside", True)):
            chosen = msgspec.structs.replace(
                config, train=msgspec.structs.replace(config.train, overlap_reduction=is_beside)
            )
            priced = costs if is_beside else msgspec.structs.replace(costs, reduction_beside=None)
            planned[name] = chosen, planned_step(trainer, chosen, priced, setup.memory_cap_bytes)
        found: dict[str, list[dict]] = {name: [] for name in planned}
        for turn in range(rounds + 1):
            for name, (trainer.config, step) in sorted(planned.items(), reverse=bool(turn % 2)):
                rank_step = prepare_step(step.plan, step.tokens, trainer.mesh)
                report = trainer.run_step(PreparedStep(step, rank_step), costs, learning_rate=0.0)
                if report is not None and turn:
                    found[name].append({key: report.row[key] for key in KEYS})
        if rank == 0:
            Path(directory, "found.json").write_bytes(msgspec.json.encode((found, costs.reduction_beside)))


def planned_step(trainer: Trainer, config: TrainConfig, costs: CostCoefficients, memory_cap_bytes: int) -> PlannedStep:
    """The first global batch, with its tokens."""
    mesh = trainer.mesh
    planner = run_planner(config, trainer.model, mesh.layout, costs, memory_cap_bytes, mesh.ranks_per_machine)
    source = trainer.new_loader()
    maker = StepMaker(
        source,
        planner,
        config.plan.strategy,
        replicas=lambda layout: layout.replicas(mesh.num_ranks),
        max_pack_tokens=config.max_pack_tokens,
        may_delay=False,
        waiting=mesh.watch.waiting,
    )
    step = maker.next()
    source.close()
    assert step is not None
    return step


def measure(quick: bool) -> list[Row]:
    """All rows of the benchmark."""
    rows = []
    for name, batch_tokens in BATCHES.items():
        with tempfile.TemporaryDirectory() as directory, socket.socket() as free:
            write_run(Path(directory), batch_tokens)
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
            free.close()
            arguments = (directory, port, QUICK_ROUNDS if quick else ROUNDS)
            torch.multiprocessing.spawn(run_rank, arguments, nprocs=DP)
            found, beside = msgspec.json.decode(Path(directory, "found.json").read_bytes())
        rows += rows_of(f"dp={DP}, {name} of 256 tokens, {LAYERS} layers, gloo, 1 thread a process", found, beside)
    return rows


def rows_of(case: str, found: dict[str, list[dict]], beside: dict) -> list[Row]:
    """Of one case."""
    column = {name: {key: [row[key] for row in rows] for key in KEYS} for name, rows in found.items()}
    late, early = column["after"], column["beside"]
    assert late["loss"] == early["loss"], "both variants train the same"
    share = statistics.median(late["reduction_s"]) / statistics.median(late["step_time_s"])
    hidden_s, predicted_s = early["reduction_hidden_s"], early["predicted_reduction_hidden_s"]
    faster = median_ratio(early["step_time_s"], late["step_time_s"])
    told = statistics.median(h / s for h, s in zip(hidden_s, early["reduction_s"], strict=True))
    expected = predicted_s[0] / early["predicted_reduction_s"][0]
    rates = f"a sum {beside['stretch']:.2f} times as long, compute loses {beside['slowdown']:.0%} of it"
    return [
        Row("reduction", case, "summed after packs", share, "share", "the step's time"),
        Row("reduction", case, "time", faster, "x", "sums after packs"),
        Row("reduction", case, "hidden", told, "share", "seconds in which gradients are summed"),
        Row("reduction", case, "hidden, predicted", expected, "share", rates),
        Row("reduction", case, "account", median_ratio(hidden_s, predicted_s), "x", "hidden seconds predicted"),
    ]


if __name__ == "__main__":
    run_benchmark(measure, __doc__ or "")
