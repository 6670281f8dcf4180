"""SlimPack's settings: its models, devices and contexts, simulated, beside the speed-ups it reports.

EVERYTHING HERE IS SIMULATED by Evenload's analytic cost model of H100; SlimPack measured on Hopper GPUs. Lengths are
`examples/lengths/commoncrawl_like.py`, fitted to what the paper publishes about its Common Crawl, and the real
`examples/lengths/github_dirs.npy.gz`. Llama 7B and 13B on 128 devices, 70B and 150B on 256 (SlimPack §6.2, Table 3),
1,024 documents a step (the paper: 512 to 2,048), cut to the context.

Every strategy gets its own best layout of tp x cp x pp x dp x virtual stages within 80 GB, storing, recomputing or
offloading activations (`plan.layout_search`). Three baselines, all `best_fit`, the paper's Megatron-LM with best-fit
packing and 1F1B: tuned over all layouts; tuned over those with a pipeline of at least 4 stages; and the median of all
its layouts that fit, which is what no tuning gets. SlimPack does not publish its baseline's layouts.
`auto` simulates 768 candidates, as finalists of the layout search do (`plan.options.auto.max_candidates`; a run's
default is 128, over all replicas of a step).

    python benchmarks/paper_slimpack.py [--quick] [--append] [--documents 1024] [--models ...] [--cells ...]
"""

import argparse
import runpy
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.host_memory import host_memory
from evenload.data.hub import model_from
from evenload.data.lengths import read_lengths
from evenload.explore.batches import BatchRule, SampledBatch
from evenload.explore.layout_search import FINAL_CANDIDATES, LayoutResult, search_layouts
from evenload.explore.stage_layers import usable_bytes
from evenload.explore.time_split import split_step_time
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.plan.strategies.auto import AutoOptions
from evenload.types.cluster import ClusterSpec
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout
from evenload.types.model import ModelSpec
from evenload.types.time_split import CAUSE_LABELS
from results import Row, append_rows

HERE = Path(__file__).parent

LENGTHS = HERE.parent / "examples" / "lengths"
RESULTS = HERE / "results" / "paper_slimpack.csv"
TABLES = ("commoncrawl_like", "github_dirs")
SETTINGS = (("llama-7b", 128), ("llama-13b", 128), ("llama-70b", 256), ("llama-150b", 256))
CONTEXTS = (65_536, 131_072, 262_144)
PAPER = {
    ("llama-150b", 65_536): "1.15", ("llama-150b", 131_072): "1.54", ("llama-150b", 262_144): "1.68",
    ("llama-13b", 262_144): "2.8",
}  # fmt: skip
"""Speed-ups that the text of SlimPack §6.2 states (2.8 is its largest); the others are only bars in its Fig. 13."""
DEEP = 4
"""Stages of the second baseline's pipeline, at least."""
NUM_LENGTHS, SEED = 20_000, 104
STRATEGIES = ("best_fit", "slimpack", "auto")
SHOWN = 0.0005
"""Causes below this share of a step are left out."""


class Found(NamedTuple):
    """A strategy in one layout: seconds of the step, share of the lower bound, and of the step by cause."""

    layout: str
    step_s: float
    fraction: float
    shares: dict[str, float]


def lengths_of(table: str) -> NDArray[np.int64]:
    """All lengths of a table."""
    if table == "commoncrawl_like":
        sampler = runpy.run_path(str(LENGTHS / "commoncrawl_like.py"))["commoncrawl_like_lengths"]
        return sampler(NUM_LENGTHS, SEED).astype(np.int64)
    return read_lengths(str(LENGTHS / f"{table}.npy.gz"))


def run_cell(table: str, model_name: str, devices: int, context: int, documents: int) -> dict[str, Found | None]:
    """Best layout of every strategy; None where nothing fits."""
    model, cluster = model_from(model_name), cluster_from(f"h100x{devices}")
    (batch,) = BatchRule(num_documents=documents, context=context, overlong="truncate").sample(
        lengths_of(table), steps=1, seed=0
    )
    options = PlanOptions(max_pack_tokens=context, policy="choose", dp_merge=True)
    best: dict[str, Found | None] = {}
    for strategy in STRATEGIES:
        results = search_layouts(
            model,
            cluster,
            [batch],
            lambda layout: analytic_coefficients(model, cluster, layout),
            strategy=strategy,
            options=options,
        )
        fitting = sorted(
            (result for result in results if result.feasible), key=lambda result: result.mean_step_time_s or 0.0
        )
        best[strategy] = found_in(model, cluster, fitting[:1], batch, strategy, options)
        if strategy == "best_fit":
            deep = [result for result in fitting if result.layout["pp"] >= DEEP]
            middle = fitting[len(fitting) // 2 :]
            best["best_fit deep"] = found_in(model, cluster, deep[:1], batch, strategy, options)
            best["best_fit median"] = found_in(model, cluster, middle[:1], batch, strategy, options)
    return best


def found_in(
    model: ModelSpec,
    cluster: ClusterSpec,
    results: list[LayoutResult],
    batch: SampledBatch,
    strategy: str,
    options: PlanOptions,
) -> Found | None:
    """The first layout planned again as the search's finalists were, for its losses."""
    if not results:
        return None
    layout = even_layout(model.num_layers, **results[0].layout)
    coefficients = analytic_coefficients(model, cluster, layout)
    search = options.own(AutoOptions)
    long = msgspec.structs.replace(search, max_candidates=max(search.max_candidates, FINAL_CANDIDATES))
    room, host = usable_bytes(cluster), host_memory(cluster)
    planner = StepPlanner(model, coefficients, layout, room, options.with_own(long), host=host)
    proposal = planner.propose(0, batch.documents, strategy)
    step_s = proposal.plan.predicted.step_time_s
    split = msgspec.structs.asdict(split_step_time(planner.costs, proposal.choices))
    bound_s = planner.costs.lower_bound_seconds(np.array([document.num_tokens for document in batch.documents]))
    shares = {CAUSE_LABELS[field]: seconds / step_s for field, seconds in split.items()}
    return Found(describe(results[0].layout), step_s, bound_s / step_s, shares)


def describe(sizes: dict[str, int]) -> str:
    """Sizes above 1."""
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"


def ratio(slow: Found | None, fast: Found | None) -> float | None:
    """Speed-up, where both fit."""
    return None if slow is None or fast is None else slow.step_s / fast.step_s


def shown(value: float | None, form: str) -> str:
    """A number, or that there is none."""
    return "does not fit" if value is None else format(value, form)


def lost_to(found: Found) -> str:
    """Causes but useful work, the largest first."""
    lost = sorted(((share, cause) for cause, share in found.shares.items() if cause != "useful work"), reverse=True)
    return ", ".join(f"{cause} {share:.1%}" for share, cause in lost[:4] if share > SHOWN)


def main() -> None:
    """Every cell: print, and append when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{RESULTS.name}")
    parser.add_argument("--documents", type=int, default=1024, help="documents of a step")
    parser.add_argument("--models", default=",".join(name for name, _ in SETTINGS), help="of these, with commas")
    parser.add_argument("--cells", default="", help="these only, such as llama-13b/128K/github_dirs, with commas")
    options = parser.parse_args()
    console = Console(width=220)
    table = Table(title=f"SlimPack's settings, SIMULATED, {options.documents} documents a step")
    heads = ("lengths", "model", "context", "strategy", "layout", "step s", "of bound", "x best_fit", f"x pp>={DEEP}")
    for head in (*heads, "x median", "paper", "lost to"):
        table.add_column(head, justify="right" if head in heads[5:] else "left")
    settings = [setting for setting in SETTINGS if setting[0] in options.models.split(",")]
    cells = [(name, *setting, context) for setting in settings for context in CONTEXTS for name in TABLES]
    if options.cells:
        named = {f"{cell[1]}/{cell[3] // 1024}K/{cell[0]}": cell for cell in cells}
        if unknown := sorted(set(options.cells.split(",")) - set(named)):
            parser.error(f"no cells are called {', '.join(unknown)}; there are {', '.join(named)}")
        cells = [named[cell] for cell in options.cells.split(",")]
    for lengths, name, devices, context in cells[:1] if options.quick else cells:
        best = run_cell(lengths, name, devices, context, options.documents)
        rows: list[Row] = []
        for strategy, found in best.items():
            baselines = {
                "best_fit, any layout": best["best_fit"],
                f"best_fit, pp >= {DEEP}": best["best_fit deep"],
                "best_fit, median layout": best["best_fit median"],
            }
            speed_ups = {baseline: ratio(slow, found) for baseline, slow in baselines.items()}
            is_ours = strategy in ("slimpack", "auto") and lengths == "commoncrawl_like"
            paper = PAPER.get((name, context), "") if is_ours else ""
            label = f"best_fit pp>={DEEP}" if strategy == "best_fit deep" else strategy
            table.add_row(
                lengths, name, f"{context // 1024}K", label, found.layout if found else "-",
                shown(found and found.step_s, ".2f"), shown(found and found.fraction, ".1%"),
                *(shown(value, ".2f") for value in speed_ups.values()), paper, lost_to(found) if found else "",
            )  # fmt: skip
            if found is None:
                continue
            case = f"{name} on {devices} H100, {context // 1024}K, {lengths}, {label}, simulated"
            rows.append(Row("slimpack", case, "of bound", found.fraction, "", found.layout))
            rows += [
                Row("slimpack", case, "speed-up", value, "x", baseline)
                for baseline, value in speed_ups.items()
                if value is not None
            ]
            if paper:
                rows.append(Row("slimpack", case, "speed-up in the paper", float(paper), "x", "its Megatron-LM"))
            rows += [
                Row("slimpack", case, f"share: {cause}", share, "", "")
                for cause, share in found.shares.items()
                if share > SHOWN
            ]
        table.add_section()
        if options.append:  # cell by cell: all of them take hours
            append_rows(rows, RESULTS)
        auto = best["auto"]
        console.print(f"{lengths} {name} {context // 1024}K: auto {shown(auto and auto.fraction, '.1%')}", style="dim")
    console.print(table)


if __name__ == "__main__":
    main()
