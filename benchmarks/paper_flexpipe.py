"""FlexPipe's settings: its models and clusters, simulated, beside the speed-ups it reports.

EVERYTHING HERE IS SIMULATED by Evenload's analytic cost model; FlexPipe measured on A100. Models of its Table 1 on 1,
2, 4 and 8 nodes of 4 A100 (NVLink 300 GB/s, InfiniBand 50 GB/s a node, §7.1). Lengths are drawn from a mixture fitted
to what it says of FLANv2 (means of 52 and 978 tokens for two of its tasks, 95 % of batches of 4 below 4K, longest about
60,000); the weights of the mixture are our assumption. Documents are cut off at the longest length of the cell.

    static     the least depth that holds a document of the longest length in every replica without a memory plan, all
               other devices data parallel: what FlexPipe calls static partitioning. Packed as `padded` (its
               Zero-Bubble baseline pads), as `best_fit` (its FlashAttention baseline packs), and as `flexpipe` packs
               `flexpipe` starts there, or where that leaves devices idle, in the next depth that does not: a run
               starts with all its devices
    published  flexpipe as published: least depth, no margin, no patience
    flexpipe   as `evenload plan` runs it: a switch must pay within the eight coming steps, whose lengths are known
    known 1    the same with the coming step alone known (`--known-steps 1`)
    documents  the same without layers that recompute for all documents, the paper's O_plan
    best fixed the fastest single layout over all steps in hindsight, flexpipe's packing and memory plans: what is left
               of the gain when the fixed layout is chosen well (`evenload plan --search-layout`)

Also the time of HBSA, the mappings it prices and the size of the space it searches, with an exhaustive search beside it
where that ends. These times want a quiet machine; the rest is deterministic (`--cells-only`).

    python benchmarks/paper_flexpipe.py [--quick] [--append] [--cells-only]
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Sequence
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
from evenload.plan.reconfiguration.flex_planner import FlexPlanner
from evenload.plan.strategies.flexpipe import FlexOptions
from evenload.types.cluster import ClusterSpec, LinkSpec
from evenload.types.cluster_catalog import cluster_from
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import ModelSpec
from results import Row, append_rows

RESULTS = Path(__file__).parent / "results" / "paper_flexpipe.csv"
NODES = {"bert-340m": 1, "bert-1.36b": 2, "gpt-3.35b": 4, "gpt-13b": 8}
LONGEST = (2_048, 8_192, 60_000)
BATCHES = (4, 64)
"""Documents of a global batch; the paper's 4 (§7.2.1), and one that fills the devices."""
STEPS = 24
PAPER = "1.40 over Zero-Bubble (padded), 1.23 over FlashAttention (packed), 1.14 over DynaPipe; 1.25 on average"
ONE_STEP, DOCUMENTS_ONLY = FlexOptions(known_steps=1), FlexOptions(memory_plans=("documents",))
PUBLISHED = FlexOptions(known_steps=1, margin=0.0, patience_steps=1, least_depth_only=True)
# Share, mean and sigma of ln(tokens); and the share of a Pareto tail (alpha 2) from 4,096 to 60,060 tokens.
MIXTURE = ((0.247, 3.84, 0.45), (0.543, 4.89, 0.9), (0.197, 6.71, 0.6))
TAIL_SHARE, TAIL_FROM, TAIL_TO = 0.013, 4_096, 60_060


def flan_lengths(count: int, seed: int) -> NDArray[np.int64]:
    """int64[count]."""
    generator = np.random.default_rng(seed)
    shares = [share for share, _, _ in MIXTURE] + [TAIL_SHARE]
    part = generator.choice(len(shares), count, p=np.array(shares) / sum(shares))
    low, high = TAIL_FROM**-2.0, TAIL_TO**-2.0
    lengths = (low - generator.random(count) * (low - high)) ** -0.5
    for index, (_, mean, sigma) in enumerate(MIXTURE):
        drawn = np.clip(generator.lognormal(mean, sigma, count), 8, TAIL_FROM)
        lengths = np.where(part == index, drawn, lengths)
    return lengths.astype(np.int64)


def paper_cluster(nodes: int) -> ClusterSpec:
    """Nodes of 4 A100; the links of §7.1, InfiniBand shared by 4 devices, 80 % of PCIe 4's 32 GB/s one way."""
    return msgspec.structs.replace(
        cluster_from("a100x4"),
        name=f"flexpipe {nodes} nodes",
        num_nodes=nodes,
        intra_node=LinkSpec(bandwidth_bytes_per_s=300e9, latency_s=5e-6),
        inter_node=LinkSpec(bandwidth_bytes_per_s=12.5e9, latency_s=10e-6),
    )


def documents(lengths: NDArray[np.int64]) -> tuple[Document, ...]:
    """Ids by position."""
    return tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths.tolist()))


def planner_of(model: ModelSpec, cluster: ClusterSpec, layout: ParallelLayout, longest: int) -> StepPlanner:
    """Within the device's memory, by any policy."""
    options = PlanOptions(max_pack_tokens=longest, policy="choose")
    coefficients = analytic_coefficients(model, cluster, layout)
    return StepPlanner(model, coefficients, layout, usable_bytes(cluster), options, host=host_memory(cluster))


def static_layout(model: ModelSpec, cluster: ClusterSpec, longest: int, batch: int) -> ParallelLayout:
    """The least depth that holds one document of the longest length in every replica without a memory plan.

    Raises:
        EvenloadError: none does.
    """
    for depth in range(1, min(model.num_layers, cluster.num_devices) + 1):
        layout = even_layout(model.num_layers, dp=cluster.num_devices // depth, pp=depth)
        planner = planner_of(model, cluster, layout, longest)
        planner.options = msgspec.structs.replace(planner.options, policy="replay")
        if planner.propose(0, documents(np.full(min(batch, layout.dp), longest)), "flexpipe").feasible:
            return layout
    raise EvenloadError(f"{model.name}: no depth holds a document of {longest} tokens on {cluster.name}")


def with_all_devices(layout: ParallelLayout, devices: int) -> ParallelLayout:
    """The layout, or the next deeper one that leaves no device idle."""
    depth = next(depth for depth in range(layout.pp, devices + 1) if devices % depth == 0)
    return layout if depth == layout.pp else even_layout(layout.num_layers, dp=devices // depth, pp=depth)


def fixed_seconds(planner: StepPlanner, steps: Sequence[tuple[Document, ...]], strategy: str) -> float:
    """Of all steps; infinite where one exceeds memory."""
    proposals = [planner.propose(step, batch, strategy) for step, batch in enumerate(steps)]
    if not all(one.feasible for one in proposals):
        return math.inf
    return sum(one.plan.predicted.step_time_s for one in proposals)


def flexible_seconds(
    planner: StepPlanner, cluster: ClusterSpec, steps: Sequence[tuple[Document, ...]], options: FlexOptions
) -> tuple[float, int, int]:
    """Of all steps with their switches; switches; steps that save memory instead."""
    flex = FlexPlanner(planner, lambda one: analytic_coefficients(planner.costs.model, cluster, one), options)
    state, total_s, switches, saving = flex.initial_state(), 0.0, 0, 0
    for step, batch in enumerate(steps):
        found = flex.propose(step, batch, state=state, coming=steps[step + 1 :])
        found.proposal.require_feasible()
        state = found.state
        total_s += found.proposal.plan.predicted.step_time_s
        switches += found.decision.action == "switch"
        saving += found.decision.action == "save memory"
    return total_s, switches, saving


def measure_search(name: str, cluster_name: str, *, exhaustively: bool) -> list[Row]:
    """Time of HBSA and mappings it prices, on one batch of 256 documents cut off at 16K."""
    model, cluster = model_from(name), cluster_from(cluster_name)
    layout = even_layout(model.num_layers, dp=cluster.num_devices // 4, pp=4)
    planner = planner_of(model, cluster, layout, 16_384)
    flex = FlexPlanner(planner, lambda one: analytic_coefficients(model, cluster, one))
    lengths = np.minimum(flan_lengths(256, 0), 16_384)
    seconds, found = [], flex.search(lengths, layout)
    for _ in range(9):
        started_s = time.perf_counter()
        found = flex.search(lengths, layout)
        seconds.append(time.perf_counter() - started_s)
    depths = range(1, min(model.num_layers, cluster.num_devices) + 1)
    splits = sum(math.comb(model.num_layers - 1, depth - 1) for depth in depths)
    case = f"{name} on {cluster_name}"
    rows = [
        Row("flexpipe", case, "HBSA", statistics.median(seconds) * 1e3, "ms", ""),
        Row("flexpipe", case, "mappings priced", found.num_priced, "", ""),
        Row("flexpipe", case, "splits of layers in all", splits, "", ""),
    ]
    if exhaustively:
        best = found.mappings[0]
        started_s, least_s = time.perf_counter(), math.inf
        for depth in depths:
            receive = flex.candidates.receive_seconds(depth, layout)
            for price in flex.candidates.prices(flex.candidates.batch_costs(lengths), depth):
                for cuts in itertools.combinations(range(1, model.num_layers), depth - 1):
                    edges = (0, *cuts, model.num_layers)
                    if not price.excess_bytes(edges):
                        moved_s = max(receive.of_stage(s, *pair) for s, pair in enumerate(itertools.pairwise(edges)))
                        least_s = min(least_s, price.step_seconds(edges) + moved_s)
        took_ms = (time.perf_counter() - started_s) * 1e3
        rows.append(Row("flexpipe", case, "exhaustive", took_ms, "ms", ""))
        rows.append(Row("flexpipe", case, "gap", (best.step_s + best.switch_s) / least_s - 1, "", "exhaustive"))
    return rows


def main() -> None:
    """Every cell: print, and append when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{RESULTS.name}")
    parser.add_argument("--cells-only", action="store_true", help="leave out the time of the search")
    arguments = parser.parse_args()
    table = Table(title=f"FlexPipe's settings, SIMULATED, {STEPS} steps", caption=f"paper: {PAPER}")
    for head in (
        "model", "longest", "docs", "static", "flexpipe s/step", "x padded", "x best_fit", "x static", "x published",
        "x known 1", "x documents", "best fixed", "x best fixed", "switches", "saving",
    ):  # fmt: skip
        table.add_column(head, justify="left" if head in ("model", "static", "best fixed") else "right")
    rows: list[Row] = []
    cells = list(itertools.product(NODES, LONGEST, BATCHES))
    for name, longest, batch in cells[:1] if arguments.quick else cells:
        model, cluster = model_from(name), paper_cluster(NODES[name])
        lengths = np.minimum(flan_lengths(STEPS * batch, 0), longest).reshape(STEPS, batch)
        steps = [documents(one) for one in lengths]
        try:
            layout = static_layout(model, cluster, longest, batch)
            static = planner_of(model, cluster, layout, longest)
            start = planner_of(model, cluster, with_all_devices(layout, cluster.num_devices), longest)
            took_s, switches, saving = flexible_seconds(start, cluster, steps, FlexOptions())
            published_s, _, _ = flexible_seconds(start, cluster, steps, PUBLISHED)
            one_step_s, one_step_switches, _ = flexible_seconds(start, cluster, steps, ONE_STEP)
            documents_s, _, _ = flexible_seconds(start, cluster, steps, DOCUMENTS_ONLY)
        except EvenloadError as error:
            table.add_row(name, f"{longest:,}", str(batch), str(error)[:80])
            continue
        others = {f"static {one}": fixed_seconds(static, steps, one) for one in ("padded", "best_fit", "flexpipe")}
        devices = cluster.num_devices
        depths = [depth for depth in range(1, min(model.num_layers, devices) + 1) if devices % depth == 0]
        fixed = {
            depth: fixed_seconds(
                planner_of(model, cluster, even_layout(model.num_layers, dp=devices // depth, pp=depth), longest),
                steps,
                "flexpipe",
            )
            for depth in depths
        }
        depth = min(fixed, key=fixed.__getitem__)
        others |= {"published": published_s, "known 1": one_step_s, "documents only": documents_s}
        others["best fixed"] = fixed[depth]
        table.add_row(
            name, f"{longest:,}", str(batch), layout.describe(), f"{took_s / STEPS:.3f}",
            *[f"{others[one] / took_s:.2f}" for one in list(others)[:6]],
            f"dp={devices // depth} pp={depth}", f"{others['best fixed'] / took_s:.2f}",
            f"{switches}, {one_step_switches}", str(saving),
        )  # fmt: skip
        case = f"{name}, {NODES[name]} nodes, longest {longest}, {batch} documents, simulated"
        rows += [
            Row("flexpipe", case, "speed-up", seconds / took_s, "x", base)
            for base, seconds in others.items()
            if math.isfinite(seconds)
        ]
        rows.append(Row("flexpipe", case, "switches", switches, "", ""))
    console = Console(width=190)
    console.print(table)
    for base in (
        *("static padded", "static best_fit", "static flexpipe"),
        *("published", "known 1", "documents only", "best fixed"),
    ):
        found = [row.value for row in rows if row.metric == "speed-up" and row.baseline == base]
        if found:
            console.print(f"flexpipe over {base}: geometric mean {statistics.geometric_mean(found):.2f} (simulated)")
    # The second is the issue's: 40 layers on 16 devices.
    searches = [("gpt-3.35b", "a100x16", True), ("gpt-13b", "a100x16", False), ("gpt-13b", "a100x32", False)]
    searches = [] if arguments.cells_only else searches[:1] if arguments.quick else searches
    for name, cluster_name, exhaustively in searches:
        for row in measure_search(name, cluster_name, exhaustively=exhaustively and not arguments.quick):
            console.print(f"{row.case:<24} {row.metric:<26} {row.value:>16,.4g} {row.unit}")
            rows.append(row)
    if arguments.append:
        append_rows(rows, RESULTS)


if __name__ == "__main__":
    main()
