"""Two ways to share the same packs between two context ranks: measured against each other, beside the prediction.

    per_sequence   the packed sequence is cut as one, whatever documents it holds: as engines do, and WLB-LLM's baseline
    per_document   every document is cut by itself, so that both ranks have the same attention (WLB-LLM §5)

One long document and short ones behind it in every pack: cut as one sequence, the inner half of the long document is
one rank's and the other waits. Two CPU processes of one thread each calibrate their costs (`calibrate.calibrate`) and
run forward and backward of the same packs under both rules by turns; seconds are of the executor, on the slower rank.
Predicted: the packs' seconds of the two plans under those costs.

    python benchmarks/sharding_rows.py [--quick] [--append]
"""

import functools
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

from evenload.attention.backends import select_backend
from evenload.calibrate.calibrate import calibrate
from evenload.cost.coefficients import CostCoefficients
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.executor import Executor
from evenload.runtime.model.hf_model import build_rank_models, build_stage_model
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.step_source import prepare_step
from evenload.types.document import Document
from evenload.types.hf_config import model_from_hf_config
from evenload.types.layout import even_layout
from evenload.types.plan import StepPlan
from results import Row, median_ratio, run_benchmark

CP, LAYERS, VOCABULARY = 2, 2, 512
RULES = ("per_sequence", "per_document")
PACKS = {
    "one document of half the pack": (4096, *[256] * 16),
    "one document of three quarters": (6144, *[256] * 8),
    "documents alike": (512,) * 16,
}
"""Lengths of the documents of a pack, in its order."""
REPEATS = 9


class Found(msgspec.Struct):
    """Seconds of forward and backward by rule and repeat, and predicted ones by rule."""

    measured_s: dict[str, list[float]]
    predicted_s: dict[str, float]


def model_config() -> LlamaConfig:
    """Narrow, so that attention is most of the work at these lengths."""
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def plan_of(lengths: tuple[int, ...], rule: str, costs: CostCoefficients) -> StepPlan:
    """All documents in one pack, shared by a rule."""
    model = model_from_hf_config(model_config().to_dict(), "llama", 4)
    options = PlanOptions(max_pack_tokens=sum(lengths), cp_sharding=rule)
    planner = StepPlanner(model, costs, even_layout(LAYERS, cp=CP), None, options, host="unlimited")
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths))
    plan = planner.plan(0, documents, "sequential")
    (pack,) = plan.pack_plans[0].forward
    assert [piece.doc_id for piece in pack.slices] == list(range(len(lengths)))
    assert pack.sharding == rule
    return plan


def run_rank(rank: int, directory: str, repeats: int) -> None:
    """One context rank; rank 0 leaves what was measured in the directory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=CP)
    layout = even_layout(LAYERS, cp=CP)
    mesh = create_meshes([layout], torch.device("cpu"), timeout_s=300).start
    build = functools.partial(build_stage_model, dtype=torch.float32, device=mesh.device, weights=None, seed=0)
    models = build_rank_models(model_config(), layout, 0, build)
    flatten_units(tuple(models.values()), dp=mesh.data_size)
    stages = {stage: PipelineStage(model, select_backend("auto", "cpu")) for stage, model in models.items()}
    longest = max(map(max, PACKS.values()))
    measured = calibrate(stages, model_from_hf_config(model_config().to_dict(), "llama", 4), mesh, longest, "cpu")
    executor, found = Executor(stages, mesh), {}
    for name, lengths in PACKS.items():
        generator = np.random.default_rng(0)
        tokens = {doc: generator.integers(0, VOCABULARY, n, dtype=np.int32) for doc, n in enumerate(lengths)}
        plans = {rule: plan_of(lengths, rule, measured.coefficients) for rule in RULES}
        seconds: dict[str, list[float]] = {rule: [] for rule in RULES}
        for repeat in range(repeats + 1):
            for rule, plan in plans.items():
                step = prepare_step(plan, tokens, mesh, "all_gather")
                dist.barrier()
                start_s = time.perf_counter()
                executor.run(step)
                dist.barrier()
                if repeat:
                    seconds[rule].append(time.perf_counter() - start_s)
        found[name] = Found(seconds, {rule: _pack_seconds(plan) for rule, plan in plans.items()})
    if rank == 0:
        Path(f"{directory}/found.json").write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()


def _pack_seconds(plan: StepPlan) -> float:
    (times,) = plan.times
    return sum(sum(map(sum, seconds)) for seconds in (times.forward_s, times.backward_s))


def measure(quick: bool) -> list[Row]:
    """All rows of the benchmark."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run_rank, (directory, 2 if quick else REPEATS), nprocs=CP)
        found = msgspec.json.decode(Path(f"{directory}/found.json").read_bytes(), type=dict[str, Found])
    for name, one in found.items():
        case, (sequence, document) = f"cp 2, {name}", RULES
        measured = median_ratio(one.measured_s[sequence], one.measured_s[document])
        predicted = one.predicted_s[sequence] / one.predicted_s[document]
        for metric, value in (("measured seconds", measured), ("predicted seconds", predicted)):
            rows.append(Row("sharding_rows", f"{case}: {sequence}", metric, value, "x", document))
        medians = {rule: f"{statistics.median(one.measured_s[rule]):.3f} s" for rule in RULES}
        print(case, medians, {rule: f"predicted {one.predicted_s[rule]:.3f} s" for rule in RULES}, flush=True)
    return rows


if __name__ == "__main__":
    run_benchmark(measure, "Packs shared by sequence and by document.")
