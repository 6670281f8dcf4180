"""How far the heuristics of whole documents and of slices are from the optimum, on inputs an exact solver finishes.

Documents are drawn, seeded, from `examples/lengths/*.npy.gz`, cut off at 131,072 tokens; work is that of llama-7b on
H100 (analytic costs). A gap is `heuristic / optimum - 1` of the largest group. Instances that the solver does not prove
within its time limit are counted, not averaged. Gaps do not depend on the machine or its load.

    python benchmarks/exact_gaps.py [--quick] [--append]      --append writes benchmarks/results/exact_gaps.csv

Problems, each with 4 groups:

    fixed-length packing     WLB eq. 1: window 131,072 or a little more than a quarter of the tokens, least largest d²
                             work; `fixed_greedy` (LPT with a token limit)
    variable-length packing  WLB eq. 2: S_max four windows, least largest W_a + W_l; `wlb` (Algorithm 1's inner loop)
                             and `balanced` (LPT with a token limit)
    DP assignment            SlimPack §4.1.1, forward + backward seconds, no limit; LPT of `plan.dp_balance`
    slice packing            least largest forward pack when documents may be cut anywhere, longest first, 8 packs;
                             `partition_by_work` against the exact bound of the same order
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.flops import causal_pairs
from evenload.cost.pack_cost import PackCosts
from evenload.data.lengths import read_lengths
from evenload.errors import InfeasiblePlanError
from evenload.plan.bin_packing import longest_first
from evenload.plan.dp_balance import assign_replicas
from evenload.plan.exact import exact_groups, exact_slice_bound
from evenload.plan.partition import partition_by_work
from evenload.plan.var_length import LEFT_OVER, members_of, pack_greedily
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout
from evenload.types.model_catalog import model_from
from results import commit_name, cpu_name

LENGTHS = Path(__file__).parent.parent / "examples" / "lengths"
RESULTS = Path(__file__).parent / "results" / "exact_gaps.csv"
WINDOW = 131_072
GROUPS, PACKS = 4, 8
INSTANCES, QUICK_INSTANCES = 20, 3
DOCUMENTS = (8, 16, 32)
TIME_LIMIT_S = 1.0

Gap = tuple[str, str, float | None]
"""(problem, heuristic, gap or None where the optimum is not proved)."""


def costs() -> PackCosts:
    """Of llama-7b on one pipeline stage; only ratios of seconds matter."""
    model, layout = model_from("llama-7b"), even_layout(32)
    return PackCosts(model, analytic_coefficients(model, cluster_from("h100x8"), layout), layout)


def measure_instance(tokens: NDArray[np.int64], cost: PackCosts) -> list[Gap]:
    """Every problem on one set of documents."""
    seconds = cost.document_seconds(tokens)
    attention = causal_pairs(np.zeros_like(tokens), tokens)
    everyone = np.argsort(-seconds, kind="stable")
    gaps: list[Gap] = []

    window = max(WINDOW, int(tokens.max()), int(1.1 * tokens.sum()) // GROUPS)
    greedy = longest_first(attention, GROUPS, num_tokens=tokens, capacity=window)
    if len(greedy) <= GROUPS:
        gaps.append(_gap("fixed-length packing", "fixed_greedy", attention, greedy, tokens, window))
    limit = 4 * WINDOW
    group_of = pack_greedily(seconds[everyone], tokens[everyone], GROUPS, limit)
    if not (group_of == LEFT_OVER).any():
        placed = members_of(group_of, everyone, GROUPS)
        gaps.append(_gap("variable-length packing", "wlb", seconds, placed, tokens, limit))
    balanced = longest_first(seconds, GROUPS, num_tokens=tokens, capacity=limit)
    if len(balanced) <= GROUPS:
        gaps.append(_gap("variable-length packing", "balanced", seconds, balanced, tokens, limit))
    replicas = [group.tolist() for group in assign_replicas(seconds, GROUPS)]
    gaps.append(_gap("DP assignment", "LPT", seconds, replicas, None, None))

    work = cost.forward_work()
    packs = partition_by_work(tokens, everyone.astype(np.int32), work, PACKS)
    largest = float(packs.pack_sums(work.slice_works_s(packs.start, packs.stop)).max())
    bound = exact_slice_bound(tokens, everyone, work, PACKS)
    gaps.append(("slice packing", "partition_by_work", largest / bound - 1))
    return gaps


def _gap(
    problem: str,
    heuristic: str,
    work: NDArray[np.float64],
    groups: list[list[int]],
    tokens: NDArray[np.int64] | None,
    capacity: int | None,
) -> Gap:
    largest = max(float(work[group].sum()) for group in groups if group)
    try:
        best = exact_groups(work, GROUPS, num_tokens=tokens, capacity=capacity, time_limit_s=TIME_LIMIT_S, start=groups)
    except InfeasiblePlanError as error:
        raise AssertionError("the heuristic's own answer is a start, so a solution exists") from error
    return problem, heuristic, largest / best.objective - 1 if best.is_optimal else None


def measure(quick: bool) -> Iterator[dict[str, str]]:
    """One row per table, number of documents, problem and heuristic, as they are done."""
    cost = costs()
    tables = sorted(LENGTHS.glob("*.npy.gz"))
    for table in tables[:1] if quick else tables:
        lengths = np.minimum(read_lengths(str(table)), WINDOW)
        for count in DOCUMENTS[:1] if quick else DOCUMENTS:
            generator = np.random.default_rng(count)
            found: dict[tuple[str, str], list[float | None]] = {}
            for _ in range(QUICK_INSTANCES if quick else INSTANCES):
                for problem, heuristic, gap in measure_instance(generator.choice(lengths, count), cost):
                    found.setdefault((problem, heuristic), []).append(gap)
            for key, gaps in found.items():
                yield _row(table, count, *key, gaps)


def _row(table: Path, count: int, problem: str, heuristic: str, gaps: list[float | None]) -> dict[str, str]:
    proved = [gap for gap in gaps if gap is not None]
    shown: Callable[[float], str] = "{:.6f}".format
    return {
        "table": table.name.removesuffix(".npy.gz"),
        "documents": str(count),
        "problem": problem,
        "heuristic": heuristic,
        "instances": str(len(gaps)),
        "proved": str(len(proved)),
        "mean_gap": shown(float(np.mean(proved))) if proved else "",
        "p90_gap": shown(float(np.quantile(proved, 0.9))) if proved else "",
        "max_gap": shown(max(proved)) if proved else "",
        "optimal_share": shown(float(np.mean([gap <= 1e-6 for gap in proved]))) if proved else "",
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="gaps of the heuristics to exact solutions")
    parser.add_argument("--quick", action="store_true", help="one table, a few instances: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{RESULTS.name}")
    options = parser.parse_args()
    if options.quick and options.append:
        sys.exit("--quick results are few; measure without --quick to append")
    rows: list[dict[str, str]] = []
    for row in measure(options.quick):
        rows.append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if options.append:
        facts = {"commit": commit_name(), "cpu": cpu_name()}
        is_new = not RESULTS.exists()
        with RESULTS.open("a", newline="") as file:
            writer = csv.DictWriter(file, [*facts, *rows[0]], lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows({**facts, **row} for row in rows)


if __name__ == "__main__":
    main()
