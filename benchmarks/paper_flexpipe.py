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
where that ends. And the layouts of its Table 2, devices of every stage for a longest document: each planned on a batch
with such a document, beside the three that our search finds from there, the fastest without the switch. The paper does
not say how many documents its iterations have.

    python benchmarks/paper_flexpipe.py [--quick] [--append] [--part cells|search|table_2]
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.analytic import analytic_coefficients
from evenload.data.hub import model_from
from evenload.errors import EvenloadError
from evenload.planning.layouts.flex_planner import FlexPlanner
from evenload.planning.layouts.mapping_search import BatchCosts, BatchLengths, layer_costs
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.flexpipe import FlexOptions
from evenload.types.cluster import ClusterSpec, LinkSpec, cluster_from
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import ModelSpec
from harness import Row, alternate, run
from setups import documents_of, planner_in

NODES = {"bert-340m": 1, "bert-1.36b": 2, "gpt-3.35b": 4, "gpt-13b": 8}
LONGEST = (2_048, 8_192, 60_000)
BATCHES = (4, 64)
"""Documents of a global batch; the paper's 4 (§7.2.1), and one that fills the devices."""
STEPS = 24
# Table 2: longest document, devices of every stage.
TABLE_2 = {
    "bert-1.36b": (
        (512, (4, 4)), (1024, (4, 4)), (2048, (3, 3, 2)), (4096, (2, 2, 2, 2)), (8192, (1, 1, 2, 1, 1, 1, 1)),
    ),
    "gpt-3.35b": (
        (512, (8, 8)), (2048, (4, 4, 4, 4)), (2560, (4, 4, 4, 4)), (3072, (3, 3, 3, 4, 3)), (2560, (3, 3, 3, 4, 3)),
    ),
}  # fmt: skip
OTHER_OPTIONS = {
    "published": FlexOptions(known_steps=1, margin=0.0, patience_steps=1, least_depth_only=True),
    "known 1": FlexOptions(known_steps=1),
    "documents only": FlexOptions(memory_plans=("documents",)),
}
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


def planner_of(model: ModelSpec, cluster: ClusterSpec, layout: ParallelLayout, longest: int) -> StepPlanner:
    """Within the device's memory, by any policy."""
    return planner_in(model.name, cluster, layout, PlanOptions(max_pack_tokens=longest, policy="choose"))


def static_layout(model: ModelSpec, cluster: ClusterSpec, longest: int, batch: int) -> ParallelLayout:
    """The least depth that holds one document of the longest length in every replica without a memory plan.

    Raises:
        EvenloadError: none does.
    """
    for depth in range(1, min(model.num_layers, cluster.num_devices) + 1):
        layout = even_layout(model.num_layers, dp=cluster.num_devices // depth, pp=depth)
        planner = planner_of(model, cluster, layout, longest)
        planner.options = msgspec.structs.replace(planner.options, policy="replay")
        if planner.propose(0, documents_of(np.full(min(batch, layout.dp), longest)), "flexpipe").feasible:
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


def flex_planner(planner: StepPlanner, cluster: ClusterSpec, options: FlexOptions) -> FlexPlanner:
    """Chooses layouts of the cluster, from a planner's on."""
    return FlexPlanner(planner, lambda one: analytic_coefficients(planner.costs.model, cluster, one), options)


def flexible_seconds(
    planner: StepPlanner, cluster: ClusterSpec, steps: Sequence[tuple[Document, ...]], options: FlexOptions
) -> tuple[float, int]:
    """Of all steps with their switches; switches."""
    flex = flex_planner(planner, cluster, options)
    state, total_s, switches = flex.initial_state(), 0.0, 0
    for step, batch in enumerate(steps):
        result = flex.propose(step, batch, state=state, coming=steps[step + 1 :])
        result.proposal.require_feasible()
        state = result.state
        total_s += result.proposal.plan.predicted.step_time_s
        switches += result.decision.action == "switch"
    return total_s, switches


def cells(quick: bool) -> Iterator[Row]:
    """Every model, longest document and batch size."""
    for name, longest, batch in itertools.islice(itertools.product(NODES, LONGEST, BATCHES), 1 if quick else None):
        model, cluster = model_from(name), paper_cluster(NODES[name])
        lengths = np.minimum(flan_lengths(STEPS * batch, 0), longest).reshape(STEPS, batch)
        steps = [documents_of(one) for one in lengths]
        case = f"{name}, {NODES[name]} nodes, longest {longest}, {batch} documents, simulated"
        devices = cluster.num_devices
        try:
            layout = static_layout(model, cluster, longest, batch)
            static = planner_of(model, cluster, layout, longest)
            start = planner_of(model, cluster, with_all_devices(layout, devices), longest)
            took_s, switches = flexible_seconds(start, cluster, steps, FlexOptions())
            others = {
                base: flexible_seconds(start, cluster, steps, options)[0] for base, options in OTHER_OPTIONS.items()
            }
        except EvenloadError as error:
            print(f"{case}: {error}")
            continue
        others |= {f"static {one}": fixed_seconds(static, steps, one) for one in ("padded", "best_fit", "flexpipe")}
        depths = [depth for depth in range(1, min(model.num_layers, devices) + 1) if devices % depth == 0]
        layouts = [even_layout(model.num_layers, dp=devices // depth, pp=depth) for depth in depths]
        planners = [planner_of(model, cluster, one, longest) for one in layouts]
        others["best fixed"] = min(fixed_seconds(planner, steps, "flexpipe") for planner in planners)
        for base, seconds in others.items():
            if math.isfinite(seconds):
                yield Row("flexpipe", case, "speed-up", seconds / took_s, "x", base)
        yield Row("flexpipe", case, "switches", switches, "")


def search(quick: bool) -> Iterator[Row]:
    """Time of HBSA and mappings it prices, on one batch of 256 documents cut off at 16K.

    The exhaustive search, where it ends, is the baseline.
    """
    settings = (("gpt-3.35b", "a100x16", True), ("gpt-13b", "a100x16", False), ("gpt-13b", "a100x32", False))
    for name, cluster_name, exhaustively in settings[: 1 if quick else None]:
        model, cluster = model_from(name), cluster_from(cluster_name)
        layout = even_layout(model.num_layers, dp=cluster.num_devices // 4, pp=4)
        flex = FlexPlanner(
            planner_of(model, cluster, layout, 16_384), lambda one, m=model, c=cluster: analytic_coefficients(m, c, one)
        )
        lengths = np.minimum(flan_lengths(256, 0), 16_384)
        seconds = alternate({"HBSA": lambda f=flex, n=lengths, at=layout: f.candidates.search(n, at)}, 9)["HBSA"]
        result = flex.candidates.search(lengths, layout)
        depths = range(1, min(model.num_layers, cluster.num_devices) + 1)
        splits = sum(math.comb(model.num_layers - 1, depth - 1) for depth in depths)
        case = f"{name} on {cluster_name}"
        yield Row("flexpipe search", case, "HBSA", statistics.median(seconds) * 1e3, "ms")
        yield Row("flexpipe search", case, "mappings priced", result.num_priced, "")
        yield Row("flexpipe search", case, "splits of layers in all", splits, "")
        if exhaustively and not quick:
            started_s = time.perf_counter()
            least_s = exhaustive_seconds(flex, lengths, layout, depths)
            took_ms = (time.perf_counter() - started_s) * 1e3
            yield Row("flexpipe search", case, "exhaustive", took_ms, "ms")
            best = result.mappings[0]
            yield Row("flexpipe search", case, "gap", (best.step_s + best.switch_s) / least_s - 1, "", "exhaustive")


def exhaustive_seconds(
    flex: FlexPlanner, lengths: NDArray[np.int64], layout: ParallelLayout, depths: Sequence[int]
) -> float:
    """The least estimate of all splits of layers within memory."""
    num_layers, least_s = layout.num_layers, math.inf
    costs = flex.start.costs
    batch = BatchCosts(BatchLengths(layer_costs(costs.model, costs.coefficients), lengths), None)
    for depth in depths:
        receive = flex.candidates.receive_seconds(depth, layout)
        for price in flex.candidates.prices(batch, depth):
            for cuts in itertools.combinations(range(1, num_layers), depth - 1):
                edges = (0, *cuts, num_layers)
                if not price.excess_bytes(edges):
                    moved_s = max(receive.of_stage(s, *pair) for s, pair in enumerate(itertools.pairwise(edges)))
                    least_s = min(least_s, price.step_seconds(edges) + moved_s)
    return least_s


def table_2(quick: bool) -> Iterator[Row]:
    """Every layout that the paper prints, and what our search finds."""
    wanted = [(name, *one, batch) for name, rows in TABLE_2.items() for one in rows for batch in BATCHES]
    for name, longest, devices, batch in wanted[: 1 if quick else None]:
        model, cluster = model_from(name), paper_cluster(NODES[name])
        lengths = np.minimum(flan_lengths(batch, 0), longest)
        lengths[0] = longest
        documents, depth = documents_of(lengths), len(devices)
        part = {"devices": devices} if len(set(devices)) > 1 else {"dp": devices[0]}
        theirs = even_layout(model.num_layers, pp=depth, **part)
        planner = planner_of(model, cluster, theirs, longest)
        flex = flex_planner(planner, cluster, FlexOptions())
        found = flex.candidates.promising_layouts([flex.candidates.search(lengths, theirs)], theirs)[
            : flex.options.finalists
        ]
        layouts = [theirs, *(one.arrangement for one in found)]
        plans = [
            planner_of(model, cluster, one, longest).propose(0, documents, "flexpipe").require_feasible()
            for one in layouts
        ]
        seconds = [plan.predicted.step_time_s for plan in plans]
        fastest = layouts[seconds.index(min(seconds))].describe()
        case = f"{name}, longest {longest}, {'+'.join(map(str, devices))}, {batch} documents, simulated"
        yield Row("flexpipe table 2", case, "step in the paper's layout", seconds[0] / min(seconds), "x", fastest)
        peak_gb = plans[0].predicted.peak_memory_bytes / 1e9
        yield Row("flexpipe table 2", case, "peak memory in the paper's layout", peak_gb, "GB")
        least = (
            flex_planner(planner, cluster, FlexOptions(least_depth_only=True))
            .candidates.search(lengths, theirs)
            .mappings[0]
        )
        yield Row("flexpipe table 2", case, "least depth within memory", least.depth, "")


PARTS = {"cells": cells, "search": search, "table_2": table_2}

if __name__ == "__main__":
    run(PARTS)
