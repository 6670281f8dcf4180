"""Evenload's strategies beside public packers: the same lengths, one cost model, one simulator, one process.

Every planner gets one global batch and a token limit of a pack, for llama-7b on 32 H100: DP 8 x PP 4, and DP 8 x TP 4,
where nothing but the micro-batches themselves is to be planned. There is one table for each. How many micro-batches a
peer makes is what its users get: `Peer.micro_batches` says by which rule. Cases: the
lognormal lengths of our peer study (median 1,200, sigma 1.4, clipped to 32..32,768, seed 0), and the tables of
`examples/lengths` cut to contexts of 32K and 128K. Step times are SIMULATED; planning times are measured here,
median of 3 after a warm-up. A peer's time is that of its packing call alone; Evenload's covers assignment, packing,
pricing, schedules, simulation, choice and the sealed plan.

    pip install 'evenload[bench]' && pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/planners.py [--quick] [--append] [--picture] [--layout pp4|pp1]
"""

import argparse
import csv
import gc
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.host_memory import host_memory
from evenload.data.hub import model_from
from evenload.data.lengths import read_lengths
from evenload.errors import EvenloadError
from evenload.explore.batches import BatchRule
from evenload.explore.stage_layers import usable_bytes
from evenload.plan.packing.bin_packing import best_fit_decreasing
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.plan.strategies.registry import STRATEGIES
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster_catalog import cluster_from
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout, even_layout
from peers import PEERS, Batch, Calls, Replicas, deal
from planner_score import Score, score_choices, whole_documents, whole_documents_within
from results import commit_name, cpu_name

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TABLES = ("github_dirs", "docs", "stdlib", "books")
CONTEXTS = (32_768, 131_072)
MODEL = "llama-7b"
DOCUMENTS = 512
REPEATS = 3
SLOW_S = 5.0
"""A planner whose warm-up took longer is timed once."""
NEED_SOLVER = ("fixed_exact",)
"""Strategies that solve integer programs: reference solutions, not planners of a training step."""
FACTS = ("date", "commit", "cpu", "cores", "load")
"""Load: of the machine's last minute at the end of the run; far above 1, times are those of a busy machine."""
FIGURES = ("plan_ms", *Score.__dataclass_fields__)
COLUMNS = (*FACTS, "case", "documents", "capacity", "planner", "version", *FIGURES, "note")

RowDict = dict[str, Any]


class Setting(NamedTuple):
    """A layout of 32 devices.

    Args:
        name: in words, for titles.
        file: in benchmarks/results, of its rows and of its picture.
        sizes: of the layout.
    """

    name: str
    file: str
    sizes: dict[str, int]

    @property
    def csv(self) -> Path:
        return (RESULTS / self.file).with_suffix(".csv")

    def layout(self, num_layers: int) -> ParallelLayout:
        return even_layout(num_layers, **self.sizes)


SETTINGS = {
    "pp4": Setting("DP 8 x PP 4", "planners", {"dp": 8, "pp": 4}),
    "pp1": Setting("DP 8 x TP 4, no pipeline", "planners_pp1", {"dp": 8, "tp": 4}),
}


def lognormal_lengths(count: int) -> NDArray[np.int64]:
    """Median 1,200 tokens, sigma 1.4, clipped to 32..32,768, seed 0."""
    generator = np.random.default_rng(0)
    return np.clip(generator.lognormal(np.log(1200), 1.4, count), 32, 32_768).astype(np.int64)


def cases(quick: bool) -> list[tuple[str, NDArray[np.int64], int]]:
    """(name, lengths, token limit of a pack)."""
    found = [("lognormal 32K", lognormal_lengths(512), 32_768)]
    if quick:
        return found
    found.append(("lognormal 32K", lognormal_lengths(2048), 32_768))
    for context in CONTEXTS:
        for table in TABLES:
            lengths = read_lengths(str(HERE.parent / "examples" / "lengths" / f"{table}.npy.gz"))
            (batch,) = BatchRule(num_documents=DOCUMENTS, context=context, overlong="truncate").sample(
                lengths, steps=1, seed=0
            )
            tokens = np.array([document.num_tokens for document in batch.documents], dtype=np.int64)
            found.append((f"{table} {context // 1024}K", tokens, context))
    return found


def median_ms(work: Callable[[], object]) -> float:
    """Median of `REPEATS` calls after one that does not count."""
    start_s = time.perf_counter()
    work()
    warm_up_s = time.perf_counter() - start_s
    seconds = []
    gc.collect()
    for _ in range(REPEATS if warm_up_s < SLOW_S else 1):
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds) * 1e3


def load_peers() -> tuple[list[tuple[str, str, str, Calls]], list[str]]:
    """(name, version, note, calls) of the installed ones, and why the others are left out."""
    found, missing = [], []
    for peer in PEERS:
        try:
            found.append((peer.name, version(peer.package), peer.how, peer.load()))
        except (ImportError, PackageNotFoundError) as error:
            missing.append(f"{peer.name}: {peer.package} cannot be imported ({error})")
    return found, missing


def measure_case(
    setting: Setting,
    name: str,
    lengths: NDArray[np.int64],
    capacity: int,
    peers: list[tuple[str, str, str, Calls]],
) -> list[RowDict]:
    """One row a planner; a planner that refuses the case has a note and no figures."""
    model = model_from(MODEL)
    layout = setting.layout(model.num_layers)
    cluster = cluster_from(f"h100x{layout.world_size}")
    room_bytes = usable_bytes(cluster)
    coefficients = analytic_coefficients(model, cluster, layout)
    options = PlanOptions(max_pack_tokens=capacity, policy="choose", dp_merge=True)
    planner = StepPlanner(model, coefficients, layout, None, options, host="unlimited")
    limited = StepPlanner(model, coefficients, layout, room_bytes, options, host=host_memory(cluster))
    costs = planner.costs
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths.tolist()))
    batch = Batch(lengths, capacity, layout.dp, layout.pp)
    rows: list[RowDict] = []

    def add(planner_name: str, package: str, note: str, plan_ms: float | None, score: Score | None) -> None:
        row: RowDict = {"case": name, "documents": len(lengths), "capacity": capacity, "planner": planner_name}
        row |= {"version": package, "note": note, "plan_ms": plan_ms}
        if score:
            row |= asdict(score)
        rows.append(row)

    ours = version("evenload")
    for strategy in STRATEGIES:
        if strategy in NEED_SOLVER or STRATEGIES[strategy].changes_layout:
            continue
        label = f"evenload {strategy}"
        try:
            proposal, within = (one.propose(0, documents, strategy) for one in (planner, limited))
            validate_plan(proposal.plan)
            validate_plan(within.plan)
            plan_ms = median_ms(lambda chosen=strategy: planner.propose(0, documents, chosen))
        except EvenloadError as error:
            add(label, ours, str(error), None, None)
            continue
        fitting = within.choices if within.feasible else None
        add(label, ours, "", plan_ms, score_choices(proposal.choices, fitting, lengths, costs, capacity))

    def judge(replicas: Replicas) -> Score:
        choices = whole_documents(replicas, lengths, costs)
        fitting = whole_documents_within(replicas, lengths, costs, room_bytes, host_memory(cluster))
        return score_choices(choices, fitting, lengths, costs, capacity)

    packing_ms = median_ms(lambda: best_fit_decreasing(lengths, capacity))
    score = judge(deal(best_fit_decreasing(lengths, capacity), layout.dp))
    add("evenload best_fit_decreasing", ours, "packing call alone, as the peers'", packing_ms, score)

    for peer_name, package, how, calls in peers:
        prepared = calls.prepare(batch)
        try:
            replicas = calls.read(calls.pack(prepared), batch)
            plan_ms = median_ms(lambda given=prepared, used=calls: used.pack(given))
        except Exception as error:  # whatever a peer raises belongs in its row, not in our traceback
            add(peer_name, package, f"raised {type(error).__name__}: {error}", None, None)
            continue
        add(peer_name, package, how, plan_ms, judge(replicas))
    return rows


def print_rows(setting: Setting, rows: list[RowDict], console: Console) -> None:
    """One table a case."""
    for case in dict.fromkeys((row["case"], row["documents"], row["capacity"]) for row in rows):
        table = Table(title=f"{case[0]}, {case[1]} documents, packs of {case[2]:,} tokens, {setting.name}, simulated")
        table.add_column("planner")
        heads = ("plan ms", "packs", "fill", "dropped", "over cap", "pack fwd", "pack bwd", "DP", "step s", "of bound")
        for head in (*heads, "GiB", "in 80 GB"):
            table.add_column(head, justify="right")
        table.add_column("by")
        for row in rows:
            if (row["case"], row["documents"], row["capacity"]) != case:
                continue
            if row.get("step_s") is None:
                table.add_row(row["planner"], *[""] * (len(heads) + 2), row["note"][:40])
                continue
            table.add_row(
                row["planner"], f"{row['plan_ms']:.3g}", str(row["packs"]), f"{row['fill']:.1%}",
                str(row["dropped"]), str(row["over_cap"]), f"{row['pack_forward']:.3f}",
                f"{row['pack_backward']:.3f}", f"{row['dp']:.4f}", f"{row['step_s']:.3f}", f"{row['fraction']:.1%}",
                f"{row['peak_gib']:.0f}",
                "does not fit" if row["within_fraction"] is None else f"{row['within_fraction']:.1%}",
                row["within_policy"],
            )  # fmt: skip
        console.print(table)


def append_csv(path: Path, rows: list[RowDict]) -> None:
    """Append rows with date, commit and machine; writes the header of a new file."""
    load = f"{os.getloadavg()[0]:.1f}"
    values = (time.strftime("%Y-%m-%d"), commit_name(), cpu_name(), os.cpu_count(), load)
    facts = dict(zip(FACTS, values, strict=True))
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for row in rows:
            rounded = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow(facts | rounded)


def main() -> None:
    """Measure, print, and append and draw when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest case only: does it work at all?")
    parser.add_argument("--append", action="store_true", help="append the rows to benchmarks/results")
    parser.add_argument("--picture", action="store_true", help="draw them, into the same folder")
    parser.add_argument("--layout", choices=SETTINGS, help="only this one")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the peers' imports
    logging.disable(logging.WARNING)
    peers, missing = load_peers()
    console = Console(width=190)
    for setting in [SETTINGS[options.layout]] if options.layout else SETTINGS.values():
        rows: list[RowDict] = []
        for name, lengths, capacity in cases(options.quick):
            found = measure_case(setting, name, lengths, capacity, peers)
            print_rows(setting, found, console)
            rows += found
        if options.append:
            append_csv(setting.csv, rows)
        if options.picture:
            from planner_pictures import draw_planners

            draw_planners(rows, f"{MODEL} on 32 H100, {setting.name}", setting.csv.with_suffix(".png"))
    for reason in missing:
        console.print(f"left out: {reason}")


if __name__ == "__main__":
    main()
