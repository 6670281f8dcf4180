"""Sharding of the same micro-batches over context ranks: bytes received from other ranks, and time of a step.

Lengths are drawn from Skrull's Table 1 as in `paper_skrull.py`, divided and cut at 4,096 tokens, 32 documents a step; a
Llama of 4 layers on 4 CPU processes (`parallel.cp = 4`). Micro-batches are those that `skrull` plans.

    dacp           short documents whole on one rank, long ones shared by all, as `skrull` decides
    per_document   the same packs, every document shared by all ranks: static context parallelism
    ring           as per_document, keys and values round the ranks

Seconds are of the executor (forward and backward of all packs), slowest rank, interleaved; four processes on fewer
cores take turns, so that times show work and messages, not what overlap hides.

    python benchmarks/context_parallel.py [--quick] [--append]
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
from evenload.cost.coefficients import CostCoefficients, PassCoefficients
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.executor import Executor
from evenload.runtime.model.hf_model import build_rank_models, build_stage_model
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.step_source import prepare_step
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.hf_config import model_from_hf_config
from evenload.types.layout import even_layout
from evenload.types.plan import StepPlan, seal
from paper_skrull import DATA_SETS, table_lengths
from results import Row, median_ratio, run_benchmark

CP = 4
DOCUMENTS = 32
MAX_TOKENS = 4096
DIVISORS = {"Wikipedia": 4, "LMSysChat1M": 8, "ChatQA2": 32}
# Of one CPU core for this model; what matters is the ratio of work to messages.
COSTS = CostCoefficients(
    source="analytic",
    device="cpu",
    peak_flops_per_s=2e10,
    forward=PassCoefficients(linear_s_per_token=1e-4, attention_s_per_pair=4e-8, slice_s=1e-4, pack_s=1e-3),
    backward=PassCoefficients(linear_s_per_token=2e-4, attention_s_per_pair=1e-7, slice_s=2e-4, pack_s=2e-3),
    p2p_bandwidth_bytes_per_s=1e9,
    p2p_latency_s=1e-4,
    reduce_bandwidth_bytes_per_s=1e9,
    reduce_latency_s=1e-4,
    intra_node=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-4),
    devices_per_node=CP,
)


def model_config() -> LlamaConfig:
    """A Llama of 4 layers with grouped queries."""
    return LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def shared_by_all(plan: StepPlan) -> StepPlan:
    """The same packs, every document shared by all ranks."""

    def shared(pack):
        slices = tuple(msgspec.structs.replace(piece, cp=CP) for piece in pack.slices)
        rule = "per_document" if pack.direction == "forward" else ""
        return msgspec.structs.replace(pack, slices=slices, sharding=rule)

    packs = plan.pack_plans[0]
    packs = msgspec.structs.replace(
        packs, forward=tuple(map(shared, packs.forward)), backward=tuple(map(shared, packs.backward))
    )
    return seal(msgspec.structs.replace(plan, pack_plans=(packs,)))


def plans_of(name: str, num_documents: int) -> dict[str, tuple[StepPlan, str]]:
    """Variant -> plan and exchange."""
    lengths = np.clip(table_lengths(DATA_SETS[name], num_documents, 0) // DIVISORS[name], 1, MAX_TOKENS)
    model = model_from_hf_config(model_config().to_dict(), "llama", 4)
    layout = even_layout(model.num_layers, cp=CP)
    planner = StepPlanner(model, COSTS, layout, None, PlanOptions(max_pack_tokens=4 * MAX_TOKENS), host="unlimited")
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths.tolist()))
    dacp = planner.plan(0, documents, "skrull")
    static = shared_by_all(dacp)
    return {
        "dacp": (dacp, "all_gather"),
        "per_document": (static, "all_gather"),
        "ring": (static, "ring"),
    }


def run_rank(rank: int, directory: str, name: str, num_documents: int, repeats: int) -> None:
    """One context rank; rank 0 leaves what was measured in the directory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/{name}", rank=rank, world_size=CP)
    variants = plans_of(name, num_documents)
    layout = next(iter(variants.values()))[0].layout
    mesh = create_meshes([layout], torch.device("cpu"), timeout_s=300).start
    build = functools.partial(build_stage_model, dtype=torch.float32, device=mesh.device, weights=None, seed=0)
    models = build_rank_models(model_config(), layout, 0, build)
    flatten_units(tuple(models.values()), dp=mesh.data_size)
    stages = {stage: PipelineStage(model, select_backend("auto", "cpu")) for stage, model in models.items()}
    generator = np.random.default_rng(0)
    plan = variants["dacp"][0]
    tokens = {d.doc_id: generator.integers(0, 4096, d.num_tokens, dtype=np.int32) for d in plan.documents}
    found: dict[str, list[float]] = {variant: [] for variant in variants}
    moved = dict.fromkeys(variants, 0)
    executor = Executor(stages, mesh)
    for repeat in range(repeats + 1):
        for variant, (of_variant, exchange) in variants.items():
            step = prepare_step(of_variant, tokens, mesh, exchange)  # type: ignore[arg-type]
            dist.barrier()
            start_s = time.perf_counter()
            moved[variant] = executor.run(step).context_bytes
            dist.barrier()
            if repeat:
                found[variant].append(time.perf_counter() - start_s)
    if rank == 0:
        shares = sum(piece.cp > 1 for pack in plan.pack_plans[0].forward for piece in pack.slices)
        text = msgspec.json.encode((found, moved, shares, len(plan.pack_plans[0].forward)))
        Path(f"{directory}/{name}.json").write_bytes(text)
    dist.barrier()
    dist.destroy_process_group()


def measure(quick: bool) -> list[Row]:
    """All rows of the benchmark."""
    rows = []
    for name, divisor in DIVISORS.items():
        with tempfile.TemporaryDirectory() as directory:
            arguments = (directory, name, 12 if quick else DOCUMENTS, 1 if quick else 3)
            torch.multiprocessing.spawn(run_rank, arguments, nprocs=CP)
            found, moved, shares, packs = msgspec.json.decode(Path(f"{directory}/{name}.json").read_bytes())
        case = f"{name} / {divisor}, {packs} micro-batches, {shares} of {arguments[2]} documents shared, cp 4"
        baseline = "per_document, every document shared"
        for variant in ("dacp", "ring"):
            seconds = median_ratio(found[variant], found["per_document"])
            received = moved[variant] / moved["per_document"]
            rows.append(Row("context", f"{case}: {variant}", "bytes", received, "x", baseline))
            rows.append(Row("context", f"{case}: {variant}", "time", seconds, "x", baseline))
        print(case, {variant: f"{statistics.median(times):.2f} s" for variant, times in found.items()}, moved)
    return rows


if __name__ == "__main__":
    run_benchmark(measure, "Sharding over context ranks: bytes and seconds.")
