"""SlimPack's settings: its models, devices and contexts, simulated, beside the speed-ups it reports.

EVERYTHING HERE IS SIMULATED by Evenload's analytic cost model of H100; SlimPack measured on Hopper GPUs. Lengths are
`examples/lengths/commoncrawl_like.py`, fitted to what the paper publishes about its Common Crawl. Llama 7B and 13B on
128 devices, 70B and 150B on 256 (§6.2, Table 3), 1,024 documents a step (the paper: 512 to 2,048), cut to the context.

Every strategy gets its own best layout of tp x cp x pp x dp within 80 GB, storing, recomputing or offloading
activations (`auto` only the best layouts of the others). Three baselines, all `best_fit`, the paper's Megatron-LM with
best-fit packing and 1F1B: tuned over all layouts; tuned over those with a pipeline of at least 4 stages; and the
median of all its layouts that fit, which is what no tuning gets. SlimPack does not publish its baseline's layouts.

    python benchmarks/paper_slimpack.py [--quick] [--append] [--documents 1024]
"""

import argparse
import runpy
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from evenload.plan.global_batch import sample_global_batches
from evenload.plan.options import PlanOptions
from evenload.plan.strategies import STRATEGIES
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import ParallelLayout
from evenload.types.model_catalog import model_from
from layouts import Tried, layouts_of, try_layouts
from losses import PARTS, time_shares
from results import Row, append_rows

HERE = Path(__file__).parent

SAMPLER = HERE.parent / "examples" / "lengths" / "commoncrawl_like.py"
RESULTS = HERE / "results" / "paper_slimpack.csv"
SETTINGS = (("llama-7b", 128), ("llama-13b", 128), ("llama-70b", 256), ("llama-150b", 256))
CONTEXTS = (65_536, 131_072, 262_144)
PAPER = {
    ("llama-150b", 65_536): "1.15", ("llama-150b", 131_072): "1.54", ("llama-150b", 262_144): "1.68",
    ("llama-13b", 262_144): "2.8",
}  # fmt: skip
"""Speed-ups that the text of SlimPack §6.2 states (2.8 is its largest); the others are only bars in its Fig. 13."""
TP, CP, PP = (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 4, 8, 16)
PROMISING = 2
"""`auto`, the slowest planner, tries only so many of the best layouts of each other strategy."""
DEEP = 4
"""Stages of the second baseline's pipeline, at least."""
NUM_LENGTHS, SEED = 20_000, 104
OURS = tuple(name for name in ("slimpack", "auto") if name in STRATEGIES)


def run_cell(model_name: str, devices: int, context: int, documents: int) -> dict[str, Tried | None]:
    """Best layout of every strategy; None where nothing fits."""
    model, cluster = model_from(model_name), cluster_from(f"h100x{devices}")
    sampler = runpy.run_path(str(SAMPLER))["commoncrawl_like_lengths"]
    lengths = sampler(NUM_LENGTHS, SEED).astype(np.int64)
    (batch,) = sample_global_batches(
        lengths, steps=1, seed=0, num_documents=documents, context=context, overlong="truncate"
    )
    options = PlanOptions(max_pack_tokens=context, policy="choose")
    layouts = list(layouts_of(model, cluster, tp=TP, cp=CP, pp=PP))
    best: dict[str, Tried | None] = {}
    promising: list[ParallelLayout] = []
    for strategy in ("best_fit", *OURS):
        used = promising if strategy == "auto" else layouts
        tried = try_layouts(model, cluster, used, batch.documents, strategy, options)
        promising += [one.layout for one in tried[:PROMISING] if one.layout not in promising]
        best[strategy] = tried[0] if tried else None
        if strategy == "best_fit":
            deep = [one for one in tried if one.layout.pp >= DEEP]
            best["best_fit deep"] = deep[0] if deep else None
            best["best_fit median"] = tried[len(tried) // 2] if tried else None
    return best


def ratio(slow: Tried | None, fast: Tried | None) -> float | None:
    """Speed-up, where both fit."""
    return None if slow is None or fast is None else slow.step_s / fast.step_s


def shown(value: float | None, form: str) -> str:
    """A number, or that there is none."""
    return "does not fit" if value is None else format(value, form)


def main() -> None:
    """Every cell: print, and append when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{RESULTS.name}")
    parser.add_argument("--documents", type=int, default=1024, help="documents of a step")
    options = parser.parse_args()
    console = Console(width=200)
    table = Table(title=f"SlimPack's settings, SIMULATED: commoncrawl_like, {options.documents} documents a step")
    heads = ("model", "context", "strategy", "layout", "step s", "of bound", "x best_fit", f"x pp>={DEEP}", "x median")
    for head in (*heads, "paper", *PARTS[1:]):
        table.add_column(head, justify="left" if head in ("model", "strategy", "layout") else "right")
    rows: list[Row] = []
    cells = [(name, devices, context) for name, devices in SETTINGS for context in CONTEXTS]
    for name, devices, context in cells[:1] if options.quick else cells:
        best = run_cell(name, devices, context, options.documents)
        for strategy, tried in best.items():
            baselines = {
                "best_fit, any layout": best["best_fit"],
                f"best_fit, pp >= {DEEP}": best["best_fit deep"],
                "best_fit, median layout": best["best_fit median"],
            }
            speed_ups = {baseline: ratio(slow, tried) for baseline, slow in baselines.items()}
            paper = PAPER.get((name, context), "") if strategy in OURS else ""
            shares = time_shares(tried.proposal) if tried else {}
            label = f"best_fit pp>={DEEP}" if strategy == "best_fit deep" else strategy
            table.add_row(
                name, f"{context // 1024}K", label, tried.layout.describe() if tried else "-",
                shown(tried and tried.step_s, ".2f"), shown(tried and tried.fraction, ".1%"),
                *(shown(value, ".2f") for value in speed_ups.values()), paper,
                *(f"{shares[part]:.1%}" if shares else "-" for part in PARTS[1:]),
            )  # fmt: skip
            if tried is None:
                continue
            case = f"{name} on {devices} H100, {context // 1024}K, {options.documents} documents, {label}, simulated"
            rows.append(Row("slimpack", case, "of bound", tried.fraction, "", tried.layout.describe()))
            rows += [
                Row("slimpack", case, "speed-up", value, "x", baseline)
                for baseline, value in speed_ups.items()
                if value is not None
            ]
            if paper:
                rows.append(Row("slimpack", case, "speed-up in the paper", float(paper), "x", "its Megatron-LM"))
            rows += [Row("slimpack", case, f"share: {part}", share, "", "") for part, share in shares.items()]
        table.add_section()
        console.print(f"{name} {context // 1024}K done", style="dim")
    console.print(table)
    if options.append:
        append_rows(rows, RESULTS)


if __name__ == "__main__":
    main()
