"""Compute measured, communication modelled: pack times of one device in layouts of 64 to 256.

Seconds of packs come from a cost file that was measured on one device: `evenload profile`, `cost.json` of a run, or the
cost files beside a ledger of `evenload bench` (benchmarks/accuracy/costs, where benchmarks/gpu_bench.py leaves those of
a GPU). What one device cannot measure, links, nodes and memory, is the data sheet's of the cluster. Every strategy gets
its own fastest layout within memory; layers may be more than were measured, for they are alike.

    python benchmarks/projected.py --cost COST.json [--layers 32] [--clusters h100x64,h100x128,h100x256]
        [--lengths examples/lengths/github_dirs.npy.gz] [--context 65536] [--documents 512] [--append]

Rows of benchmarks/results/projected.csv say in their case that compute was measured, on what, and that communication
was modelled. Nothing here was run on so many devices.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CostCoefficients, read_coefficients
from evenload.cost.coverage import completed_from_cluster
from evenload.data.lengths import read_lengths
from evenload.errors import ConfigError
from evenload.explore.batches import BatchRule, SampledBatch
from evenload.explore.layout_search import search_layouts
from evenload.explore.prediction_interval import prediction_interval
from evenload.plan.problem.options import PlanOptions
from evenload.report.units import format_seconds
from evenload.types.cluster import ClusterSpec
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from results import Row, append_rows

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "projected.csv"
STRATEGIES = ("best_fit", "balanced", "wlb", "slimpack", "auto")
CLUSTERS = "h100x64,h100x128,h100x256"


class Projected(NamedTuple):
    """A strategy's fastest layout on a cluster; None where nothing fits."""

    cluster: str
    strategy: str
    layout: str
    step_time_s: float | None
    fraction_of_bound: float | None


class MeasuredCompute(NamedTuple):
    """One device's costs, and the model whose layers they are of."""

    coefficients: CostCoefficients
    model: ModelSpec
    origin: str

    def of(self, layout: ParallelLayout, cluster: ClusterSpec) -> CostCoefficients:
        """With what was not measured from the cluster."""
        return completed_from_cluster(self.coefficients, self.model, layout, cluster, self.origin)[0]


def measured_compute(cost_file: Path, layers: int | None) -> MeasuredCompute:
    """Costs of a file, for as many layers.

    Raises:
        ConfigError: no cost file, or one that does not say what it was measured on.
    """
    coefficients = read_coefficients(cost_file)
    if coefficients.measured_on is None:
        raise ConfigError(f"cost file {cost_file} was not measured: it has no 'measured_on'; give one that was")
    model = coefficients.measured_on.model
    if layers is not None and len(set(model.windows)) > 1:
        raise ConfigError(
            f"cost file {cost_file} is of {model.name}, whose layers have different windows, so {layers} are not "
            "told by its own; leave --layers out"
        )
    if layers is not None:
        windows = model.windows[:1] * layers if model.sliding_windows else model.sliding_windows
        model = msgspec.structs.replace(model, num_layers=layers, sliding_windows=windows)
    return MeasuredCompute(coefficients, model, f"cost file {cost_file}")


def project(
    compute: MeasuredCompute,
    clusters: Sequence[str],
    lengths: NDArray[np.int64],
    rule: BatchRule,
    strategies: Sequence[str] = STRATEGIES,
) -> list[Projected]:
    """Every strategy on every cluster, on one global batch, the same for all."""
    (batch,) = rule.sample(lengths, steps=1, seed=0)
    return [_fastest(compute, name, strategy, batch, rule.context) for name in clusters for strategy in strategies]


def _fastest(compute: MeasuredCompute, name: str, strategy: str, batch: SampledBatch, context: int) -> Projected:
    cluster = cluster_from(name)
    options = PlanOptions(max_pack_tokens=context, dp_merge=True)
    results = search_layouts(
        compute.model,
        cluster,
        [batch],
        lambda layout: compute.of(layout, cluster),
        strategy=strategy,
        options=options,
    )
    best = results[0]
    if not best.feasible:
        return Projected(name, strategy, "", None, None)
    return Projected(name, strategy, best.parallel_layout().describe(), best.mean_step_time_s, best.fraction_of_bound)


def rows_of(found: Sequence[Projected], case: str) -> list[Row]:
    """Share of the bound, and speed-up over `best_fit` on the same cluster."""
    baseline = {one.cluster: one.step_time_s for one in found if one.strategy == "best_fit"}
    rows = []
    for one in found:
        if one.step_time_s is None or one.fraction_of_bound is None:
            continue
        label = f"{one.cluster}, {one.strategy}, {case}"
        rows.append(Row("projected", label, "of bound", one.fraction_of_bound, "", one.layout))
        base_s = baseline.get(one.cluster)
        if base_s is not None:
            rows.append(Row("projected", label, "speed-up", base_s / one.step_time_s, "x", "best_fit, its best layout"))
    return rows


def main() -> None:
    """Print, and append when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", type=Path, required=True, help="a measured cost file")
    parser.add_argument("--layers", type=int, help="of the model; default: as measured")
    parser.add_argument("--clusters", default=CLUSTERS, help="names with commas")
    parser.add_argument("--lengths", default=str(HERE.parent / "examples" / "lengths" / "github_dirs.npy.gz"))
    parser.add_argument("--context", type=int, default=65_536, help="longest document and largest pack")
    parser.add_argument("--documents", type=int, default=512, help="of a step")
    parser.add_argument("--append", action="store_true", help=f"append rows to benchmarks/results/{RESULTS.name}")
    asked = parser.parse_args()
    compute = measured_compute(asked.cost, asked.layers)
    measured = f"compute measured on {compute.coefficients.device}, communication modelled"
    case = f"{compute.model.name} with {compute.model.num_layers} layers, {asked.context // 1024}K, {measured}"
    rule = BatchRule(num_documents=asked.documents, context=asked.context, overlong="truncate")
    print(f"PREDICTED: {case}")
    found = project(compute, asked.clusters.split(","), read_lengths(asked.lengths), rule)
    for one in found:
        base_s = next((base.step_time_s for base in found if base[:2] == (one.cluster, "best_fit")), None)
        if one.step_time_s is None:
            print(f"{one.cluster:<10} {one.strategy:<9} does not fit")
            continue
        ratio = f"{base_s / one.step_time_s:.2f}x best_fit" if base_s is not None else ""
        share = f"{one.fraction_of_bound or 0:.1%} of bound"
        print(
            f"{one.cluster:<10} {one.strategy:<9} {format_seconds(one.step_time_s):>8} {share} {ratio:<15} {one.layout}"
        )
    layout = ParallelLayout(stage_layers=((0, compute.model.num_layers),), stage_to_rank=(0,))
    print(prediction_interval(compute.coefficients, layout).describe())
    if asked.append:
        append_rows(rows_of(found, case), RESULTS)


if __name__ == "__main__":
    main()
