"""How long `evenload plan --search-layout` searches on large clusters, and how much of its layouts it looks at.

    python benchmarks/layout_search.py                      4,096 and 16,384 GPUs; prints rows
    python benchmarks/layout_search.py --append             appends them to benchmarks/results/results.csv
    python benchmarks/layout_search.py --gpus 4096 --seconds 60

llama-13b on H100, the lengths of github_dirs up to 128K, as many documents a step as GPUs, four strategies, each in its
own layouts. Seconds are those of all threads of the process: what others run on the machine is no part of the search.
"""

import argparse
import time

from evenload.cost.analytic import analytic_coefficients
from evenload.data.hub import model_from
from evenload.data.lengths import read_lengths
from evenload.explore.batches import BatchRule
from evenload.explore.strategy_layouts import StrategyLayouts, search_strategies
from evenload.plan.problem.options import PlanOptions
from evenload.types.cluster_catalog import cluster_from
from results import RESULTS, Row, append_rows

STRATEGIES = ("best_fit", "balanced", "slimpack", "auto")
GPUS = (4096, 16384)
CONTEXT = 131_072


def search(gpus: int, limit_s: float) -> tuple[float, tuple[StrategyLayouts, ...]]:
    """Processor seconds and what was found."""
    model, cluster = model_from("llama-13b"), cluster_from(f"h100x{gpus}")
    lengths = read_lengths("examples/lengths/github_dirs.npy.gz")
    rule = BatchRule(num_documents=gpus, context=CONTEXT, overlong="truncate")
    started_s = time.process_time()
    found = search_strategies(
        model,
        cluster,
        rule.sample(lengths, steps=1, seed=0),
        lambda layout: analytic_coefficients(model, cluster, layout),
        STRATEGIES,
        PlanOptions(max_pack_tokens=CONTEXT, dp_merge=True),
        limit_s=limit_s,
        clock=time.process_time,
    )
    return time.process_time() - started_s, found


def rows_of(gpus: int, limit_s: float, seconds: float, found: tuple[StrategyLayouts, ...]) -> list[Row]:
    """The time, and of every strategy what it looked at and its best layout's share of the bound."""
    case = f"llama-13b on {gpus:,} H100, {gpus:,} documents, at most {limit_s:g} s"
    rows = [Row("layout_search", case, "processor time", seconds, "s", "")]
    for one in found:
        looked = f"{one.planned} planned, {one.too_large} too large, {one.ruled_out} ruled out, "
        looked += f"{one.not_looked_at} not looked at"
        share = one.best.fraction_of_bound if one.best.feasible else None
        where = " ".join(f"{axis}={size}" for axis, size in one.best.layout.items() if size > 1)
        note = f"{where}; {looked}; one of {one.best.stride} replicas"
        rows.append(Row("layout_search", f"{one.strategy}, {case}", "of bound", share or 0.0, "", note))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="*", default=list(GPUS))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--append", action="store_true", help="to benchmarks/results/results.csv")
    asked = parser.parse_args()
    for gpus in asked.gpus:
        rows = rows_of(gpus, asked.seconds, *search(gpus, asked.seconds))
        for row in rows:
            print(
                row.benchmark,
                "|",
                row.case,
                "|",
                row.metric,
                "|",
                f"{row.value:.4g}",
                row.unit,
                "|",
                row.baseline,
                flush=True,
            )
        if asked.append:
            append_rows(rows, RESULTS)


if __name__ == "__main__":
    main()
