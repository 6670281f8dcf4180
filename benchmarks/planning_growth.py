"""How planning time grows with the documents of a global batch, for every strategy.

Lognormal lengths (those of benchmarks/planners.py), llama-7b on 32 H100 of 80 GB, DP 8 x PP 4 (skrull, which has no
pipeline: DP 8 x CP 4), packs of at most 32K tokens, options as `evenload plan` has them: activation policies chosen,
documents shared among replicas.
The time is that of `StepPlanner.propose`: assignment, cuts, prices, schedules, simulations, choice and the sealed
plan. A strategy that took more than `GIVE_UP_S` for one plan is not asked for a larger one.

    python benchmarks/planning_growth.py [--quick] [--append] [--picture]
"""

import argparse
import time

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.host_memory import host_memory
from evenload.data.hub import model_from
from evenload.errors import EvenloadError
from evenload.explore.stage_layers import usable_bytes
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.plan.strategies.registry import STRATEGIES
from evenload.types.cluster_catalog import cluster_from
from evenload.types.document import Document
from evenload.types.layout import even_layout
from planners import HERE, MODEL, NEED_SOLVER, lognormal_lengths, median_ms
from results import Row, append_rows

DP, PP = 8, 4
DOCUMENTS = (512, 2_048, 8_192, 32_768, 100_000)
CAPACITY = 32_768
GIVE_UP_S = 2.5
RESULTS = HERE / "results" / "planning_growth.csv"
PICTURE = HERE / "results" / "planning_growth.png"


def measure(quick: bool) -> dict[str, dict[int, float]]:
    """Per strategy, documents to milliseconds."""
    model, cluster = model_from(MODEL), cluster_from(f"h100x{DP * PP}")
    times_ms: dict[str, dict[int, float]] = {}
    for strategy in STRATEGIES:
        if strategy in NEED_SOLVER or STRATEGIES[strategy].changes_layout:
            continue
        layout = even_layout(model.num_layers, **_layout_of(strategy))
        coefficients = analytic_coefficients(model, cluster, layout)
        planner = StepPlanner(
            model,
            coefficients,
            layout,
            usable_bytes(cluster),
            PlanOptions(max_pack_tokens=CAPACITY, dp_merge=True),
            host=host_memory(cluster),
        )
        for count in DOCUMENTS[:2] if quick else DOCUMENTS:
            documents = tuple(
                Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1)
                for i, n in enumerate(lognormal_lengths(count).tolist())
            )
            start_s = time.perf_counter()
            try:
                planner.propose(0, documents, strategy)
            except EvenloadError as error:
                print(f"{strategy}, {count} documents: {error}")
                break
            first_s = time.perf_counter() - start_s
            took_ms = median_ms(lambda p=planner, d=documents, s=strategy: p.propose(0, d, s))
            times_ms.setdefault(strategy, {})[count] = took_ms
            print(f"{strategy:<14} {count:>7,} documents {took_ms:>10.1f} ms {took_ms / count * 1e3:>8.1f} us/document")
            if first_s > GIVE_UP_S:
                break
    return times_ms


def _layout_of(strategy: str) -> dict[str, int]:
    return {"dp": DP, "cp": PP} if STRATEGIES[strategy].needs_one_stage else {"dp": DP, "pp": PP}


def rows_of(times_ms: dict[str, dict[int, float]]) -> list[Row]:
    """Times, and times per document over those of the smallest batch."""
    rows = []
    for strategy, points in times_ms.items():
        first = min(points)
        for count, took_ms in points.items():
            shape = " ".join(f"{axis}={size}" for axis, size in _layout_of(strategy).items())
            case = f"{strategy}, {count:,} documents, {shape}"
            rows.append(Row("growth", case, "plan and choose", took_ms, "ms", ""))
            growth = took_ms / count / (points[first] / first)
            rows.append(Row("growth", case, "time per document", growth, "x", f"{first} documents"))
    return rows


def main() -> None:
    """Measure, print, and append and draw when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small batches only: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{RESULTS.name}")
    parser.add_argument("--picture", action="store_true", help=f"draw benchmarks/results/{PICTURE.name}")
    options = parser.parse_args()
    times_ms = measure(options.quick)
    if options.append:
        append_rows(rows_of(times_ms), RESULTS)
    if options.picture:
        from planner_pictures import draw_growth

        draw_growth(times_ms, PICTURE)


if __name__ == "__main__":
    main()
