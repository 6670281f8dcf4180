"""Packs in two halves that take turns: what a step takes with and without, what is hidden, what was predicted.

Two CPU processes of one thread each train the same global batches of a Llama of 8 layers (`tp = 2`), every batch in one
go and with every pack in halves by turns, in one run of one set of processes, at learning rate 0. Costs, also what
transfers and compute cost each other, are those that a run measures at its start, just before; a run itself would
halve no pack where they say that it does not pay.

    time          step time with halves, over that without; median of ratios of neighbouring steps
    predicted     the same, as the simulator says
    hidden        of the seconds of tensor-parallel transfers, those while the other half is computed: as the ranks tell
                  it (`tensor_s` and `tensor_hidden_s` of metrics.jsonl), and as the cost model predicts it
    account       hidden seconds told over hidden seconds predicted, median of steps
    loss          whether both train the same, to rounding

gloo moves bytes on the cores that compute, so with a thread a core what is hidden still has to be computed: there the
time tells what is gained, and the hidden share alone says little. Over a link with a speed of its own
(`shaped_link.py`) both do.

    python benchmarks/tensor_halves.py [--quick] [--append]
    python benchmarks/shaped_link.py 4gbit benchmarks/tensor_halves.py [--quick] [--append]
"""

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.pack_cost import PackCosts
from evenload.cost.tensor_halves import halved_packs
from evenload.runtime.trainer import Trainer
from evenload.stepplan.plan_tasks import replica_columns
from evenload.types.plan import StepPlan
from interleaved_steps import bench_rank, spawn_ranks
from reduction import LAYERS, write_run
from results import Row, median_ratio, run_benchmark
from shaped_link import link_name
from token_runs import halved_plan

TP = 2
HIDDEN_SIZE = 512
"""Products grow with its square, and transfers with itself."""
BATCH_TOKENS = 2_048
ROUNDS, QUICK_ROUNDS = 24, 2
KEYS = ("step_time_s", "tensor_s", "tensor_hidden_s", "loss", "predicted_step_time_s")


def run_rank(rank: int, directory: str, rounds: int) -> None:
    """One rank; rank 0 leaves rows of all steps that count, by variant, and what was predicted."""
    with bench_rank(directory, LAYERS, [f"parallel.tp={TP}", "plan.strategy=balanced"]) as bench:
        step = bench.planned_step(msgspec.structs.replace(bench.costs, tensor_beside=None))
        halved = replace(step, plan=halved_plan(step.plan))
        steps = {"whole": (bench.config, step), "halves": (bench.config, halved)}
        found = bench.by_turns(steps, rounds, bench.costs, KEYS)
        if rank == 0:
            told = predicted(halved.plan, bench.trainer, bench.costs)
            Path(directory, "found.json").write_bytes(msgspec.json.encode((found, told, bench.costs.tensor_beside)))


def predicted(plan: StepPlan, trainer: Trainer, costs: CostCoefficients) -> dict[str, float]:
    """Of the plan's halves under measured costs: seconds of transfers, hidden ones, and what they add to the step."""
    of_pack, columns = PackCosts(trainer.model, costs, plan.layout), replica_columns(plan, 0)
    forward = halved_packs(of_pack, columns.forward, "forward", columns.policy, columns.first_rows[0])
    backward = halved_packs(of_pack, columns.backward, "backward", columns.policy, columns.first_rows[1])
    assert forward.first_rows.all(), "every pack is halved"
    assert backward.first_rows.all(), "every pack is halved"
    return {
        name: float(getattr(forward, name).sum() + getattr(backward, name).sum())
        for name in ("transfer_s", "hidden_s", "more_s")
    }


def measure(quick: bool) -> list[Row]:
    """All rows of the benchmark."""
    with tempfile.TemporaryDirectory() as directory:
        write_run(Path(directory), BATCH_TOKENS, HIDDEN_SIZE)
        spawn_ranks(TP, run_rank, directory, QUICK_ROUNDS if quick else ROUNDS)
        found, told, beside = msgspec.json.decode(Path(directory, "found.json").read_bytes())
    shape = f"{LAYERS} layers of {HIDDEN_SIZE} channels"
    case = f"tp={TP}, {BATCH_TOKENS:,} tokens in documents of 512, {shape}, {link_name()}, 1 thread a process"
    return rows_of(case, found, told, beside)


def rows_of(case: str, found: dict[str, list[dict]], told: dict[str, float], beside: dict) -> list[Row]:
    """Of one case."""
    column = {name: {key: [row[key] for row in rows] for key in KEYS} for name, rows in found.items()}
    whole, halves = column["whole"], column["halves"]
    assert all(abs(one - other) <= 1e-5 * abs(one) for one, other in zip(whole["loss"], halves["loss"], strict=True)), (
        "both variants train the same"
    )
    hidden_s, whole_s = halves["tensor_hidden_s"], whole["predicted_step_time_s"][0]
    hidden = statistics.median(h / s for h, s in zip(hidden_s, halves["tensor_s"], strict=True))
    rates = f"a transfer {beside['stretch']:.2f} times as long, compute loses {beside['slowdown']:.0%} of it"
    return [
        Row("tensor_halves", case, "time", median_ratio(halves["step_time_s"], whole["step_time_s"]), "x", "in one go"),
        Row("tensor_halves", case, "time, predicted", 1 + told["more_s"] / whole_s, "x", rates),
        Row("tensor_halves", case, "hidden", hidden, "share", "seconds of transfers"),
        Row("tensor_halves", case, "hidden, predicted", told["hidden_s"] / told["transfer_s"], "share", rates),
        Row("tensor_halves", case, "transfers", statistics.median(halves["tensor_s"]) / told["transfer_s"], "x",
            "seconds predicted"),
        Row("tensor_halves", case, "account", statistics.median(hidden_s) / told["hidden_s"], "x",
            "hidden seconds predicted"),
    ]  # fmt: skip


if __name__ == "__main__":
    run_benchmark(measure, __doc__ or "")
