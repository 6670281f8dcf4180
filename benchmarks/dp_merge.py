"""A document twenty times the mean on two replicas: step times with and without DP-Merge, and against the prediction.

Two CPU processes of one thread each train a Llama of 4 layers as `evenload train` does: costs calibrated at start,
steps planned ahead, gradients summed, weights updated; all of that is in a step's time, measured and predicted. Every
step has 32 documents; one has 20 times the mean tokens of the 32.

    merged   slimpack with `plan.options.dp_merge`: both replicas share the long document
    apart    slimpack without: one replica runs it alone

Both train the same batches in turn, under the same costs; figures are medians over steps after the first.

    python benchmarks/dp_merge.py [--quick] [--append]
"""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch

from cpu_ranks import cpu_rank, leave, llama, spawn_ranks, write_run
from evenload.calibrate.calibrate import calibrate
from evenload.config.train_config import layout_of, load_train_config
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.model_config import model_spec
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from harness import Row, median_ratio, run

DP, DOCUMENTS, TIMES_THE_MEAN = 2, 32, 20
SHORT_TOKENS, QUICK_SHORT_TOKENS = 48, 12
STEPS, QUICK_STEPS = 6, 2
MEMORY_BYTES = 2**34


def step_lengths(short_tokens: int, seed: int) -> np.ndarray:
    """Exponential short documents and, anywhere among them, one of 20 times the mean of all."""
    generator = np.random.default_rng(seed)
    short = np.maximum(4, generator.exponential(short_tokens, DOCUMENTS - 1)).astype(np.int64)
    # x = 20 (S + x) / n
    long = TIMES_THE_MEAN * int(short.sum()) // (DOCUMENTS - TIMES_THE_MEAN)
    return np.insert(short, generator.integers(DOCUMENTS), long)


def make_trainer(directory: str, option: str) -> Trainer:
    """With groups of its own, because it prepares steps ahead on them."""
    config = load_train_config(Path(directory, "config.toml"), [f"plan.options.{option}"])
    layout = layout_of(config.parallel, model_spec(config).num_layers)
    return Trainer(config, create_meshes([layout], torch.device("cpu"), timeout_s=300).start)


def run_rank(rank: int, directory: str, steps: int, longest: int) -> None:
    """One replica."""
    del rank
    with cpu_rank():
        trainers = {
            "merged": make_trainer(directory, "dp_merge=true"),
            "apart": make_trainer(directory, "dp_merge=false"),
        }
        first = trainers["merged"]
        costs, _ = calibrate(first.state.stages, first.model, first.mesh, longest, "cpu")
        result: dict[str, list[tuple]] = {name: [] for name in trainers}
        runs = {name: trainer.train(costs, MEMORY_BYTES) for name, trainer in trainers.items()}
        for _ in range(steps):
            for name, training in runs.items():
                report = next(training)
                if report is not None:
                    result[name].append(figures(report))
        leave(directory, result)
        for training in runs.values():
            assert next(training, None) is None, "all steps are done, and nothing is prepared any more"


def figures(report: StepReport) -> tuple:
    """Seconds, predicted seconds, imbalance of replicas, and the most ranks of a document."""
    row, plan = report.row, report.plan
    pieces = [piece for packs in plan.pack_plans for pack in packs.forward for piece in pack.slices]
    return row["step_time_s"], plan.predicted.step_time_s, row["imbalance_dp"], max(piece.cp for piece in pieces)


def measure(quick: bool) -> Iterator[Row]:
    """All rows of the benchmark."""
    steps, short = (QUICK_STEPS, QUICK_SHORT_TOKENS) if quick else (STEPS, SHORT_TOKENS)
    lengths = np.concatenate([step_lengths(short, seed) for seed in range(steps)])
    longest = int(lengths.max())
    plan = f'[parallel]\ndp = {DP}\n[plan]\nstrategy = "slimpack"\noptions = {{ max_pack_tokens = {longest} }}'
    with tempfile.TemporaryDirectory() as directory:
        write_run(Path(directory), llama(384, 4, heads=6, key_heads=3), lengths, DOCUMENTS, steps, plan)
        spawn_ranks(DP, run_rank, directory, steps, longest)
        result = msgspec.json.decode(Path(directory, "found.json").read_bytes())
    case = f"dp 2, {DOCUMENTS} documents, one {TIMES_THE_MEAN} x the mean, at most {longest} tokens, slimpack"
    columns = {name: list(zip(*steps_[1:], strict=True)) for name, steps_ in result.items()}
    for name, (took_s, predicted_s, uneven, shared_by) in columns.items():
        assert set(shared_by) == {DP if name == "merged" else 1}, "the long document is shared, or not"
        yield Row("dp_merge", f"{case}: {name}", "step time", median_ratio(took_s, predicted_s), "x", "its prediction")
        imbalance = statistics.median(uneven)
        yield Row("dp_merge", f"{case}: {name}", "imbalance, measured", imbalance, "x", "mean of replicas")
    for place, how in enumerate(("measured", "predicted")):
        faster = median_ratio(columns["apart"][place], columns["merged"][place])
        yield Row("dp_merge", f"{case}: merged", f"speed-up, {how}", faster, "x", "apart")


PARTS = {"dp_merge": measure}

if __name__ == "__main__":
    run(PARTS)
