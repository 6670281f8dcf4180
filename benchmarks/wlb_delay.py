"""What `wlb` buys by putting documents off, and what it costs: imbalance and token delay over a long stream.

As WLB-LLM measures it (Table 2, §7.4): llama-7b, context 128K, global batches of N windows of 128K tokens, N = dp x pp
micro-batches, S_max four windows, pp 4. Imbalance is `max * N / total` of the micro-batches' forward + backward
seconds, mean over all steps, the first ones included; the end of the data, where everything is flushed, is not
reached. Delay is that of the tokens trained. Each table once per seed; the rows are means over seeds.

Tables: lognormal(ln 1200, 1.756) cut off at 131,072, which meets WLB-LLM Fig. 3; those of examples/lengths, cut off
likewise; and any file that `evenload plan` reads, named on the command line.

    python benchmarks/wlb_delay.py [LENGTHS ...] [--quick] [--append]
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from evenload.cost.analytic import analytic_coefficients
from evenload.data.hub import model_from
from evenload.data.lengths import read_lengths
from evenload.plan.deferral.delay import DelayState, arrivals_of, state_after, trained_documents
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.plan.problem.step_problem import StepProblem
from evenload.plan.strategies.wlb import WlbOptions, delay_wlb
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout
from results import Row, append_rows

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "wlb_delay.csv"
TABLES = ("github_dirs", "docs", "stdlib", "books")
WINDOW = 131_072
PP = 4
REPLICAS = (8, 4, 2)
STEPS, SEEDS = 40, 3
RELEASES = ("balance", "queues")


def lognormal_table(count: int) -> NDArray[np.int64]:
    """Median 1,200, sigma 1.756, at most the window."""
    lengths = np.random.default_rng(0).lognormal(np.log(1200), 1.756, count)
    return np.clip(lengths.astype(np.int64), 16, WINDOW)


def planner_of(dp: int, release: str) -> StepPlanner:
    """N = dp x pp micro-batches on H100."""
    model, layout = model_from("llama-7b"), even_layout(32, dp=dp, pp=PP)
    coefficients = analytic_coefficients(model, cluster_from(f"h100x{dp * PP}"), layout)
    options = PlanOptions(max_pack_tokens=4 * WINDOW, micro_batches=PP, strategies=(WlbOptions(release=release),))  # type: ignore[arg-type]
    return StepPlanner(model, coefficients, layout, None, options, host="unlimited")


def run_stream(planner: StepPlanner, batches: NDArray[np.int64]) -> tuple[float, float]:
    """Mean imbalance degree and mean token delay.

    Args:
        batches: int64[steps, documents].
    """
    state, doc_ids, num_tokens = DelayState(), np.zeros(0, np.int64), np.zeros(0, np.int64)
    degrees, tokens, late = [], 0, 0
    for step, batch in enumerate(batches):
        doc_ids = np.concatenate([doc_ids, step * batches.shape[1] + np.arange(batches.shape[1])])
        num_tokens = np.concatenate([num_tokens, batch])
        problem = StepProblem(doc_ids, num_tokens, planner.costs, None, planner.options)
        arrivals = arrivals_of(step, doc_ids, state, is_last=False)
        answer = delay_wlb(problem, arrivals)
        state = state_after(arrivals, doc_ids, num_tokens, answer)
        loads = [load for choice in answer.choices for load in _loads(problem.document_s[choice.documents], choice)]
        degrees.append(max(loads) * planner.layout.dp * PP / sum(loads))
        trained = trained_documents(answer.choices)
        tokens += int(num_tokens[trained].sum())
        late += int((arrivals.age_steps() * num_tokens)[trained].sum())
        doc_ids, num_tokens = (np.delete(column, trained) for column in (doc_ids, num_tokens))
    return float(np.mean(degrees)), late / tokens


def _loads(work_s, choice) -> list[float]:
    return np.add.reduceat(work_s, choice.candidate.forward.pack_offset[:-1]).tolist()


def main() -> None:
    """Every table, N and release rule: print, and append when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", help="more tables: files of lengths")
    parser.add_argument("--quick", action="store_true", help="one cell: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{RESULTS.name}")
    options = parser.parse_args()
    tables = {"WLB-like lognormal": lognormal_table(400_000)}
    files = [HERE.parent / "examples" / "lengths" / f"{name}.npy.gz" for name in TABLES] + options.lengths
    for file in files:
        tables[Path(file).name.removesuffix(".npy.gz")] = np.minimum(read_lengths(str(file)), WINDOW)
    shown = Table(title=f"wlb, 128K, {STEPS} steps from the first, mean of {SEEDS} seeds: imbalance, delay in steps")
    for head in ("table", "N", *RELEASES):
        shown.add_column(head)
    rows: list[Row] = []
    cells = [(name, lengths, dp) for name, lengths in tables.items() for dp in REPLICAS]
    for name, lengths, dp in cells[:1] if options.quick else cells:
        count = int(dp * PP * WINDOW // lengths.mean())
        line = [name, str(dp * PP)]
        for release in RELEASES:
            planner = planner_of(dp, release)
            found = [
                run_stream(planner, np.random.default_rng(seed).choice(lengths, (STEPS, count)).astype(np.int64))
                for seed in range(1 if options.quick else SEEDS)
            ]
            imbalance, delay = np.mean(found, axis=0).tolist()
            line.append(f"{imbalance:.3f}, {delay:.2f}")
            case = f"{name}, N={dp * PP}, release {release}"
            rows += [
                Row("wlb delay", case, "imbalance", imbalance, "x", "mean micro-batch"),
                Row("wlb delay", case, "mean token delay", delay, "steps", ""),
            ]
        shown.add_row(*line)
    Console(width=120).print(shown)
    if options.append:
        append_rows(rows, RESULTS)


if __name__ == "__main__":
    main()
