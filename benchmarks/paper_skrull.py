"""Skrull's settings: its models, layouts and data sets, simulated, beside the speed-ups it reports.

EVERYTHING HERE IS SIMULATED by Evenload's analytic cost model of H100; Skrull measured on H100. Lengths are drawn from
the shares of its Table 1, log-uniform between the published lengths (the shape inside a bin is our assumption).
DP 4 x CP 8 with 64 documents a replica; Qwen2.5-7B on ChatQA2 has DP 2 x CP 16 with 40 (§5).

    one a pass   every document is a micro-batch of its own, sharded over all context ranks: what the paper's DeepSpeed
                 baseline comes to when its batches are not packed
    best_fit     documents packed into windows of the bucket times cp: a baseline that packs
    skrull       GDS and DACP, bucket from our memory model
    slimpack     beside them

    python benchmarks/paper_skrull.py [--quick] [--append]
"""

import argparse
import statistics
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.host_memory import host_memory
from evenload.data.hub import model_from
from evenload.errors import EvenloadError
from evenload.explore.stage_layers import usable_bytes
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.types.cluster_catalog import cluster_from
from evenload.types.document import Document
from evenload.types.layout import even_layout
from planner_score import whole_documents_within
from results import Row, append_rows

RESULTS = Path(__file__).parent / "results" / "paper_skrull.csv"
K = 1024
# Table 1: (tokens, share of shorter documents); the first entry, the shortest document, is assumed.
DATA_SETS = {
    "Wikipedia": ((8, 0.0), (K, 0.8788), (4 * K, 0.9934), (8 * K, 0.9992), (32 * K, 0.9999), (78 * K, 1.0)),
    "LMSysChat1M": (
        (8, 0.0), (K, 0.8712), (4 * K, 0.9935), (8 * K, 0.9987), (32 * K, 0.9998), (128 * K, 0.9999), (1643 * K, 1.0),
    ),
    "ChatQA2": ((32, 0.0), (K, 0.2192), (4 * K, 0.3148), (8 * K, 0.4043), (32 * K, 0.9986), (99 * K, 1.0)),
}  # fmt: skip
BUCKETS = {"qwen2.5-0.5b": 26 * K, "qwen2.5-7b": 13 * K}
"""Tokens a rank may hold in the paper (§5); used for the windows of `best_fit`."""
STEPS = 8
PAPER = "mean 5.50 for 0.5B, 2.03 for 7B, over DeepSpeed"
OURS = ("best_fit", "skrull", "slimpack")


def table_lengths(knots: tuple[tuple[int, float], ...], count: int, seed: int) -> NDArray[np.int64]:
    """int64[count], log-uniform inside every bin, cut to what one pass over all context ranks is asked to hold."""
    shares = np.random.default_rng(seed).random(count)
    tokens, edges = np.array([knot[0] for knot in knots], float), np.array([knot[1] for knot in knots])
    return np.exp(np.interp(shares, edges, np.log(tokens))).astype(np.int64)


def step_seconds(planner: StepPlanner, lengths: NDArray[np.int64], strategy: str) -> float:
    """Simulated.

    Raises:
        EvenloadError: refused, or beyond memory.
    """
    if strategy != "one a pass":
        documents = tuple(
            Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths.tolist())
        )
        proposal = planner.propose(0, documents, strategy)
        return proposal.require_feasible().predicted.step_time_s
    dp = planner.layout.dp
    replicas = [[[index] for index in range(rank, len(lengths), dp)] for rank in range(dp)]
    assert planner.memory_cap_bytes is not None
    choices = whole_documents_within(replicas, lengths, planner.costs, planner.memory_cap_bytes, planner.host)
    if choices is None:
        raise EvenloadError("does not fit memory by any policy")
    after_s = planner.costs.reduction_seconds() + planner.costs.optimizer_seconds()
    return max(choice.candidate.makespan_s for choice in choices) + after_s


def main() -> None:
    """Every cell: print, and append when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{RESULTS.name}")
    options = parser.parse_args()
    table = Table(title=f"Skrull's settings, SIMULATED, {STEPS} steps", caption=f"paper: {PAPER}")
    for head in ("model", "data", "layout", "strategy", "s", "of bound", "x one a pass", "x best_fit"):
        table.add_column(head, justify="left" if head in ("model", "data", "layout", "strategy") else "right")
    rows: list[Row] = []
    cells = [(name, data) for name in BUCKETS for data in DATA_SETS]
    for name, data in cells[:1] if options.quick else cells:
        model, cluster = model_from(name), cluster_from("h100x32")
        dp, cp, batch = (2, 16, 40) if (name, data) == ("qwen2.5-7b", "ChatQA2") else (4, 8, 64)
        layout = even_layout(model.num_layers, dp=dp, cp=cp)
        window = BUCKETS[name] * cp
        plan_options = PlanOptions(max_pack_tokens=window, policy="choose", dp_merge=True)
        # The row that is priced by hand sums gradients after the last backward; so do all.
        coefficients = msgspec.structs.replace(
            analytic_coefficients(model, cluster, layout), overlap_reduction=False, overlap_gather=False
        )
        planner = StepPlanner(
            model, coefficients, layout, usable_bytes(cluster), plan_options, host=host_memory(cluster)
        )
        steps = [np.minimum(table_lengths(DATA_SETS[data], batch * dp, seed), window) for seed in range(STEPS)]
        bound_s = sum(planner.costs.lower_bound_seconds(lengths) for lengths in steps)
        seconds: dict[str, float] = {}
        for strategy in ("one a pass", *OURS):
            try:
                seconds[strategy] = sum(step_seconds(planner, lengths, strategy) for lengths in steps)
            except EvenloadError as error:
                table.add_row(name, data, layout.describe(), strategy, "", "", "", str(error)[:60])
                continue
            took_s = seconds[strategy]
            ratios = {base: seconds[base] / took_s for base in ("one a pass", "best_fit") if base in seconds}
            table.add_row(
                name, data, layout.describe(), strategy, f"{took_s:.2f}", f"{bound_s / took_s:.1%}",
                *(f"{ratio:.2f}" for ratio in ratios.values()),
            )  # fmt: skip
            case = f"{name} on {data}, {layout.describe()}, {strategy}, simulated"
            rows.append(Row("skrull", case, "of bound", bound_s / took_s, "", ""))
            rows += [Row("skrull", case, "speed-up", ratio, "x", base) for base, ratio in ratios.items()]
        table.add_section()
    console = Console(width=150)
    console.print(table)
    for name in BUCKETS:
        found = [
            row.value for row in rows if row.case.startswith(name) and ", skrull," in row.case and row.unit == "x"
            and row.baseline == "one a pass"
        ]  # fmt: skip
        if found:
            console.print(f"{name}: skrull over one a pass, mean {statistics.mean(found):.2f} (simulated)")
    if options.append:
        append_rows(rows, RESULTS)


if __name__ == "__main__":
    main()
