"""A document twenty times the mean on two replicas: step times with and without DP-Merge, and against the prediction.

Two CPU processes of one thread each train a Llama of 4 layers as `evenload train` does: costs calibrated at start,
steps planned ahead, gradients summed, weights updated; all of that is in a step's time, measured and predicted. Every
step has 32 documents; one has 20 times the mean tokens of the 32.

    merged   slimpack with `plan.options.dp_merge`: both replicas share the long document
    apart    slimpack without: one replica runs it alone

Both train the same batches in turn, under the same costs; figures are medians over steps after the first. Then a step
under each activation policy: the most bytes that the activation stores held.

    python benchmarks/dp_merge.py [--quick] [--append]
"""

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from transformers import LlamaConfig

from evenload.calibrate.calibrate import calibrate
from evenload.config.train_config import layout_of, load_train_config
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory_kinds import bytes_by_kind
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.configured import model_spec
from evenload.runtime.replay.held_bytes import STORE_KINDS
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.simulate.timeline import memory_ledger
from evenload.stepplan.plan_tasks import replica_columns, tasks_of_columns
from evenload.types.cluster import LinkSpec
from evenload.types.pipeline import action_columns
from evenload.types.plan import StepPlan
from evenload.types.timeline import MEMORY_KINDS
from results import Row, median_ratio, run_benchmark
from token_runs import save_tokens

DP = 2
DOCUMENTS = 32
TIMES_THE_MEAN = 20
SHORT_TOKENS, QUICK_SHORT_TOKENS = 48, 12
STEPS, QUICK_STEPS = 6, 2
MEMORY_BYTES = 2**34
POLICIES = ("replay", "recompute", "offload")
HOST_LINK = LinkSpec(bandwidth_bytes_per_s=1e10, latency_s=1e-5)
"""Only so that offloading can be planned: on a CPU nothing is calibrated, for host memory is the device's."""


@dataclass(frozen=True)
class Found:
    """A step, measured and predicted.

    Args:
        imbalance, planned_imbalance: max/mean time of replicas.
        shared_by: most ranks of a document.
        stored_bytes, predicted_stored_bytes: the most that the activation stores of a rank held.
    """

    step_s: float
    predicted_s: float
    imbalance: float
    planned_imbalance: float
    shared_by: int
    stored_bytes: int
    predicted_stored_bytes: int


def model_config() -> LlamaConfig:
    """A Llama of 4 layers, large enough that a step takes seconds."""
    return LlamaConfig(
        vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=3, tie_word_embeddings=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def step_lengths(short_tokens: int, seed: int) -> np.ndarray:
    """Exponential short documents and, anywhere among them, one of 20 times the mean of all."""
    generator = np.random.default_rng(seed)
    short = np.maximum(4, generator.exponential(short_tokens, DOCUMENTS - 1)).astype(np.int64)
    # x = 20 (S + x) / n
    long = TIMES_THE_MEAN * int(short.sum()) // (DOCUMENTS - TIMES_THE_MEAN)
    return np.insert(short, generator.integers(DOCUMENTS), long)


def write_run(directory: Path, short_tokens: int, steps: int) -> int:
    """Documents and a configuration; returns the longest document's tokens."""
    lengths = np.concatenate([step_lengths(short_tokens, seed) for seed in range(steps)])
    save_tokens(directory, lengths, 257, np.random.default_rng(0))
    model_config().save_pretrained(directory / "model")
    longest = int(lengths.max())
    (directory / "config.toml").write_text(
        f"""
        [model]
        path = "{directory / "model"}"
        random_init = true
        [data]
        sources = ["{directory / "tokens.npy"}"]
        record = "tokens"
        max_document_tokens = {longest}
        batch_documents = {DOCUMENTS}
        shuffle_window = 1
        streams = 1
        [parallel]
        dp = {DP}
        [plan]
        strategy = "slimpack"
        options = {{ max_pack_tokens = {longest} }}
        [train]
        output_dir = "{directory / "run"}"
        steps = {steps}
        threads_per_process = 1
        """
    )
    return longest


def run_rank(rank: int, directory: str, steps: int, longest: int) -> None:
    """One replica; rank 0 leaves what was measured in the directory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=DP)
    trainers = {"merged": make_trainer(directory, "dp_merge=true"), "apart": make_trainer(directory, "dp_merge=false")}
    first = trainers["merged"]
    costs = calibrate(first.stages, first.model, first.mesh, longest, "cpu").coefficients
    found: dict[str, list[Found]] = {name: [] for name in (*trainers, *POLICIES)}
    runs = {name: trainer.train(costs, MEMORY_BYTES) for name, trainer in trainers.items()}
    for _ in range(steps):
        for name, run in runs.items():
            report = next(run)
            if report is not None:
                found[name].append(summary(report, trainers[name]))
    with_host = msgspec.structs.replace(costs, host_link=HOST_LINK)
    for policy in POLICIES:
        trainer = make_trainer(directory, "dp_merge=true", f"policy={policy}")
        for report in trainer.train(with_host, MEMORY_BYTES, stop_after=1):
            if report is not None:
                found[policy].append(summary(report, trainer))
    if rank == 0:
        Path(f"{directory}/found.json").write_bytes(msgspec.json.encode((found, costs)))
    for run in runs.values():
        assert next(run, None) is None, "all steps are done, and nothing is prepared any more"
    dist.barrier()
    dist.destroy_process_group()


def make_trainer(directory: str, *options: str) -> Trainer:
    """With groups of its own, because it prepares steps ahead on them."""
    config = load_train_config(Path(f"{directory}/config.toml"), [f"plan.options.{option}" for option in options])
    layout = layout_of(config, model_spec(config).num_layers)
    return Trainer(config, create_meshes([layout], torch.device("cpu"), timeout_s=300).start)


def summary(report: StepReport, trainer: Trainer) -> Found:
    """What the rows need of a step."""
    row, plan = report.row, report.plan
    pieces = [piece for packs in plan.pack_plans for pack in packs.forward for piece in pack.slices]
    seconds = plan.predicted.per_replica_s
    return Found(
        step_s=cast("float", row["step_time_s"]),
        predicted_s=plan.predicted.step_time_s,
        imbalance=cast("float", row["imbalance_dp"]),
        planned_imbalance=max(seconds) / statistics.mean(seconds),
        shared_by=max(piece.cp for piece in pieces),
        stored_bytes=cast("int", row["peak_memory_bytes"]) - int(report.measured.memory_bytes.min()),
        predicted_stored_bytes=max(stored_bytes(plan, trainer, dp_rank) for dp_rank in range(DP)),
    )


def stored_bytes(plan: StepPlan, trainer: Trainer, dp_rank: int) -> int:
    """The most that a replica's activation stores hold, by the memory model."""
    columns = replica_columns(plan, dp_rank)
    tasks = tasks_of_columns(plan, dp_rank, trainer.model, columns)
    kinds = bytes_by_kind(
        trainer.model, plan.layout, tasks, columns.forward, columns.backward, columns.num_tokens, columns.policy
    )
    held = memory_ledger(kinds, action_columns(plan.schedules[dp_rank]))
    return int(held[:, [MEMORY_KINDS.index(name) for name in STORE_KINDS]].sum(axis=1).max())


def measure(quick: bool) -> list[Row]:
    """All rows of the benchmark."""
    steps = QUICK_STEPS if quick else STEPS
    with tempfile.TemporaryDirectory() as directory:
        longest = write_run(Path(directory), QUICK_SHORT_TOKENS if quick else SHORT_TOKENS, steps)
        torch.multiprocessing.spawn(run_rank, (directory, steps, longest), nprocs=DP)
        text = Path(f"{directory}/found.json").read_bytes()
    found, costs = msgspec.json.decode(text, type=tuple[dict[str, list[Found]], CostCoefficients])
    case = f"dp 2, {DOCUMENTS} documents, one {TIMES_THE_MEAN} x the mean, at most {longest} tokens, slimpack"
    print(costs)
    rows = []
    for name in ("merged", "apart"):
        timed = found[name][1:]
        assert {one.shared_by for one in timed} == {DP if name == "merged" else 1}, (
            "the long document is shared, or not"
        )
        ratio = statistics.median(one.step_s / one.predicted_s for one in timed)
        print(name, [f"{one.step_s:.2f} s of {one.predicted_s:.2f} s" for one in timed])
        rows.append(Row("dp_merge", f"{case}: {name}", "step time", ratio, "x", "its prediction"))
        for metric, values in (
            ("imbalance, planned", [one.planned_imbalance for one in timed]),
            ("imbalance, measured", [one.imbalance for one in timed]),
        ):
            rows.append(Row("dp_merge", f"{case}: {name}", metric, statistics.median(values), "x", "mean of replicas"))
    merged, apart = found["merged"][1:], found["apart"][1:]
    for metric, field in (("speed-up, measured", "step_s"), ("speed-up, predicted", "predicted_s")):
        faster = median_ratio(*([getattr(one, field) for one in steps_] for steps_ in (apart, merged)))
        rows.append(Row("dp_merge", f"{case}: merged", metric, faster, "x", "apart"))
    replay = found["replay"][0]
    for policy in POLICIES:
        (one,) = found[policy]
        against = one.stored_bytes / one.predicted_stored_bytes
        rows.append(Row("dp_merge", f"{case}: merged, {policy}", "peak store bytes", against, "x", "its prediction"))
        for metric, field in (
            ("peak store bytes", "stored_bytes"),
            ("predicted store bytes", "predicted_stored_bytes"),
        ):
            share = getattr(one, field) / getattr(replay, field)
            rows.append(Row("dp_merge", f"{case}: merged, {policy}", metric, share, "x", "replay"))
    return rows


if __name__ == "__main__":
    run_benchmark(measure, "A document twenty times the mean, shared by replicas.")
