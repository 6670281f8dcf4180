"""Sharding of the same micro-batches over context ranks: bytes received from other ranks, and time of a step.

Lengths are drawn from Skrull's Table 1 as in `paper_skrull.py`, divided and cut at 4,096 tokens, 32 documents a step; a
Llama of 4 layers on 4 CPU processes (`parallel.cp = 4`). Micro-batches are those that `skrull` plans.

    dacp           short documents whole on one rank, long ones shared by all, as `skrull` decides
    per_document   the same packs, every document shared by all ranks: static context parallelism
    ring           as per_document, keys and values round the ranks

Seconds are of the executor (forward and backward of all packs), slowest rank, alternating; four processes on fewer
cores take turns, so that times show work and messages, not what overlap hides.

    python benchmarks/context_parallel.py [--quick] [--append]
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from cpu_ranks import COSTS, cpu_rank, leave, llama, rank_stages, spawn_ranks
from evenload.data.hub import model_from_config
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.executor import Executor
from evenload.runtime.step_source import prepare_step
from evenload.types.layout import even_layout
from evenload.types.plan import StepPlan, seal
from harness import Row, median_ratio, run
from setups import documents_of, drawn_lengths

CP, DOCUMENTS, MAX_TOKENS = 4, 32, 4096
DIVISORS = {"Wikipedia": 4, "LMSysChat1M": 8, "ChatQA2": 32}
MODEL = llama(256, 4)


def shared_by_all(plan: StepPlan) -> StepPlan:
    """The same packs, every document shared by all ranks."""

    def shared(pack):
        slices = tuple(msgspec.structs.replace(piece, cp=CP) for piece in pack.slices)
        rule = "per_document" if pack.direction == "forward" else ""
        return msgspec.structs.replace(pack, slices=slices, sharding=rule)

    (packs,) = plan.pack_plans
    both = {way: tuple(map(shared, getattr(packs, way))) for way in ("forward", "backward")}
    return seal(msgspec.structs.replace(plan, pack_plans=(msgspec.structs.replace(packs, **both),)))


def plans_of(name: str, num_documents: int) -> dict[str, tuple[StepPlan, str]]:
    """Variant -> plan and exchange."""
    lengths = np.clip(drawn_lengths(name, num_documents, 0) // DIVISORS[name], 1, MAX_TOKENS)
    model = model_from_config(MODEL.to_dict(), "llama", 4)
    layout = even_layout(model.num_layers, cp=CP)
    planner = StepPlanner(model, COSTS, layout, None, PlanOptions(max_pack_tokens=4 * MAX_TOKENS), host="unlimited")
    dacp = planner.plan(0, documents_of(lengths), "skrull")
    static = shared_by_all(dacp)
    return {"dacp": (dacp, "all_gather"), "per_document": (static, "all_gather"), "ring": (static, "ring")}


def run_rank(rank: int, directory: str, name: str, num_documents: int, repeats: int) -> None:
    """One context rank."""
    del rank
    with cpu_rank():
        variants = plans_of(name, num_documents)
        plan = variants["dacp"][0]
        mesh = create_meshes([plan.layout], torch.device("cpu"), timeout_s=300).start
        executor = Executor(rank_stages(MODEL, mesh), mesh)
        generator = np.random.default_rng(0)
        tokens = {d.doc_id: generator.integers(0, 4096, d.num_tokens, dtype=np.int32) for d in plan.documents}
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        moved = dict.fromkeys(variants, 0)
        for repeat in range(repeats + 1):
            for variant, (of_variant, exchange) in variants.items():
                step = prepare_step(of_variant, tokens, mesh, exchange)  # type: ignore[arg-type]
                dist.barrier()
                moved_before = sum(group.moved_bytes for group in mesh.context.values())
                start_s = time.perf_counter()
                executor.run(step)
                dist.barrier()
                if repeat:
                    seconds[variant].append(time.perf_counter() - start_s)
                moved[variant] = sum(group.moved_bytes for group in mesh.context.values()) - moved_before
        forward = plan.pack_plans[0].forward
        leave(directory, (seconds, moved, sum(piece.cp > 1 for pack in forward for piece in pack.slices), len(forward)))


def measure(quick: bool) -> Iterator[Row]:
    """Every data set."""
    count = 12 if quick else DOCUMENTS
    for name, divisor in DIVISORS.items():
        with tempfile.TemporaryDirectory() as directory:
            spawn_ranks(CP, run_rank, directory, name, count, 1 if quick else 3)
            seconds, moved, shared, packs = msgspec.json.decode(Path(directory, "found.json").read_bytes())
        case = f"{name} / {divisor}, {packs} micro-batches, {shared} of {count} documents shared, cp 4"
        print(case, {variant: f"{statistics.median(times):.2f} s" for variant, times in seconds.items()}, moved)
        for variant in ("dacp", "ring"):
            baseline = "per_document, every document shared"
            share = moved[variant] / moved["per_document"]
            yield Row("context", f"{case}: {variant}", "bytes", share, "x", baseline)
            ratio = median_ratio(seconds[variant], seconds["per_document"])
            yield Row("context", f"{case}: {variant}", "time", ratio, "x", baseline)


PARTS = {"context": measure}

if __name__ == "__main__":
    run(PARTS)
