"""Time to plan a step and choose among its candidates, for slimpack, and how it grows with documents.

Lengths are `examples/lengths/github_dirs.npy.gz`, truncated to 16K tokens; model llama-7b on 32 H100, DP 8 x PP 4.
The time is that of `StepPlanner.propose`: assignment, cuts, prices, schedules, simulations, choice, and the sealed
plan as objects. The baseline of every row is best_fit planning the same documents in the same round.

    python benchmarks/planning.py [--quick] [--append]
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

LENGTHS = Path(__file__).parent.parent / "examples" / "lengths" / "github_dirs.npy.gz"
CONTEXT = 16_384
DP, PP = 8, 4
DOCUMENTS = (512, 2_048, 8_192, 32_768, 100_000)
REPEATS = 7
QUICK_REPEATS = 2


def measure(quick: bool) -> list[Row]:
    """Every batch size."""
    model, cluster = model_from("llama-7b"), cluster_from(f"h100x{DP * PP}")
    layout = even_layout(model.num_layers, dp=DP, pp=PP)
    costs = analytic_coefficients(model, cluster, layout)
    planner = StepPlanner(
        model,
        costs,
        layout,
        usable_bytes(cluster),
        PlanOptions(max_pack_tokens=CONTEXT, dp_merge=True),
        host=host_memory(cluster),
    )
    lengths = read_lengths(str(LENGTHS))
    rows: list[Row] = []
    smallest_s = 0.0
    for count in DOCUMENTS[:2] if quick else DOCUMENTS:
        (batch,) = BatchRule(num_documents=count, context=CONTEXT, overlong="truncate").sample(lengths, steps=1, seed=0)
        variants = {
            "slimpack": lambda b=batch: planner.propose(0, b.documents, "slimpack"),
            "best_fit": lambda b=batch: planner.propose(0, b.documents, "best_fit"),
        }
        seconds = interleaved_seconds(variants, QUICK_REPEATS if quick or count > 10_000 else REPEATS)
        slimpack_s, best_fit_s = (statistics.median(seconds[name]) for name in ("slimpack", "best_fit"))
        smallest_s = smallest_s or slimpack_s / count
        case = f"slimpack, {count:,} documents, dp={DP} pp={PP}"
        baseline = f"best_fit {best_fit_s * 1e3:.3g} ms"
        rows.append(Row("planning", case, "plan and choose", slimpack_s * 1e3, "ms", baseline))
        rows.append(
            Row("planning", case, "time", median_ratio(seconds["slimpack"], seconds["best_fit"]), "x", "best_fit")
        )
        growth = slimpack_s / count / smallest_s
        rows.append(Row("planning", case, "time per document", growth, "x", f"{DOCUMENTS[0]} documents"))
    return rows


if __name__ == "__main__":
    run_benchmark(measure, "planning time of slimpack")
