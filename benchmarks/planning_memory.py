"""Time to plan a step where memory binds and where it does not, for slimpack and auto.

Every table of `examples/lengths`, cut off at 32K and at 128K tokens; llama-7b on 32 H100, DP 8 x PP 4. The time is
that of `StepPlanner.propose`: everything up to the sealed plan. Without a limit all activations are stored; with the
80 GB of the device, policies are chosen, within the node's host memory, and documents are shared among replicas. The
baseline of a row is best_fit planning the same documents without a limit in the same round.

    python benchmarks/planning_memory.py [--quick] [--append]
"""

import statistics
from pathlib import Path

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.host_memory import host_memory
from evenload.data.hub import model_from
from evenload.data.lengths import read_lengths
from evenload.explore.batches import BatchRule
from evenload.explore.stage_layers import usable_bytes
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout
from results import Row, interleaved_seconds, median_ratio, run_benchmark

TABLES = Path(__file__).parent.parent / "examples" / "lengths"
CONTEXTS = (32_768, 131_072)
DOCUMENTS = (512, 2_048)
DP, PP = 8, 4
REPEATS = 5


def measure(quick: bool) -> list[Row]:
    """Every table, context and batch size."""
    model, cluster = model_from("llama-7b"), cluster_from(f"h100x{DP * PP}")
    layout = even_layout(model.num_layers, dp=DP, pp=PP)
    costs = analytic_coefficients(model, cluster, layout)
    rows: list[Row] = []
    for file in sorted(TABLES.glob("*.npy.gz"))[: 1 if quick else None]:
        name, lengths = file.name.removesuffix(".npy.gz"), read_lengths(str(file))
        for context in CONTEXTS[: 1 if quick else None]:
            options = PlanOptions(max_pack_tokens=context, dp_merge=True)
            planners = {
                memory: StepPlanner(model, costs, layout, limit, options, host=host)
                for memory, limit, host in (
                    ("unlimited", None, "unlimited"),
                    ("80 GB", usable_bytes(cluster), host_memory(cluster)),
                )
            }
            for count in DOCUMENTS[: 1 if quick else None]:
                (batch,) = BatchRule(num_documents=count, context=context, overlong="truncate").sample(
                    lengths, steps=1, seed=0
                )
                variants = {
                    f"{strategy}, {memory}": lambda p=planner, s=strategy, b=batch: p.propose(0, b.documents, s)
                    for memory, planner in planners.items()
                    for strategy in ("slimpack", "auto")
                }
                baseline = planners["unlimited"]
                variants["best_fit"] = lambda p=baseline, b=batch: p.propose(0, b.documents, "best_fit")
                seconds = interleaved_seconds(variants, 2 if quick else REPEATS)
                best_fit_ms = statistics.median(seconds["best_fit"]) * 1e3
                for variant in list(variants)[:-1]:
                    case = f"{variant}, {name}, {context // 1024}K, {count:,} documents"
                    took_ms = statistics.median(seconds[variant]) * 1e3
                    ratio = median_ratio(seconds[variant], seconds["best_fit"])
                    rows.append(
                        Row("planning_memory", case, "plan and choose", took_ms, "ms", f"best_fit {best_fit_ms:.3g} ms")
                    )
                    rows.append(Row("planning_memory", case, "time", ratio, "x", "best_fit"))
    return rows


if __name__ == "__main__":
    run_benchmark(measure, "planning time where memory binds")
