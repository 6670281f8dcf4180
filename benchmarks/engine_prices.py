"""What engines cost against Evenload's own runtime: EVERYTHING HERE IS PREDICTED, none of it measured.

A Llama 7B on 32 H100, 512 documents a step of real corpora (`examples/lengths`), cut to 16,384 tokens. Engines without
a pipeline run dp=32; those with one, dp=4 and pp=8 (Megatron-Core without context parallelism). Of every engine, the
mean step of `auto` (the fastest that it can run, by its price) and of `best_fit` (the fullest packs), over that of
`auto` on Evenload's runtime in the same layout (slices, separate backward packs, documents shared among replicas).
Memory bounds neither: what an engine holds depends on its settings, so all activations are stored on both sides.

`evenload plan LENGTHS --model llama-7b --cluster h100x32 --layout dp=32 --context 16384 --overlong truncate --documents
512 --engine NAME` says it for one.

    python benchmarks/engine_prices.py [--quick] [--append]
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evenload.cost.analytic import analytic_coefficients
from evenload.data.hub import model_from
from evenload.data.lengths import read_length_table
from evenload.explore.batches import BatchRule, SampledBatch, plan_steps
from evenload.integrations.catalog import ENGINES, require_heads
from evenload.integrations.evaluate import evaluate_engine
from evenload.integrations.planner import EnginePlanner
from evenload.integrations.price import StepShape
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.types.cluster import cluster_from
from evenload.types.layout import ParallelLayout, even_layout
from harness import Row, run

LENGTHS = Path(__file__).parent.parent / "examples" / "lengths"
TABLES = ("github_dirs", "stdlib", "docs")
MODEL, CLUSTER, CONTEXT, DOCUMENTS = "llama-7b", "h100x32", 16_384, 512
FLAT, DEEP = {"dp": 32}, {"dp": 4, "pp": 8}
STEPS = 3
STRATEGIES = ("best_fit", "auto")


def layout_of(sizes: dict[str, int]) -> ParallelLayout:
    return even_layout(model_from(MODEL).num_layers, **sizes)


def own_seconds(batches: Sequence[SampledBatch], sizes: dict[str, int]) -> float:
    """Mean step of `auto` on Evenload's runtime."""
    model, layout = model_from(MODEL), layout_of(sizes)
    coefficients = analytic_coefficients(model, cluster_from(CLUSTER), layout)
    options = PlanOptions(max_pack_tokens=CONTEXT, policy="replay", dp_merge=True)
    proposals, _, _ = plan_steps(
        StepPlanner(model, coefficients, layout, None, options, host="unlimited"), batches, "auto"
    )
    return float(np.mean([proposal.plan.predicted.step_time_s for proposal in proposals]))


def engine_seconds(engine: str, batches: Sequence[SampledBatch], sizes: dict[str, int]) -> dict[str, float]:
    """Mean step of every strategy on an engine."""
    model, layout, profile = model_from(MODEL), layout_of(sizes), ENGINES[engine]
    coefficients = analytic_coefficients(model, cluster_from(CLUSTER), layout)
    options = PlanOptions(max_pack_tokens=CONTEXT)
    shape = StepShape(pack_tokens=CONTEXT if profile.pads_in(layout) else None)
    require_heads(profile, model, layout)
    planner = EnginePlanner(profile, model, coefficients, layout, options, shape)
    results = {result.name: result for result in evaluate_engine(planner, batches, STRATEGIES).results}
    why = [result.why for result in results.values() if result.mean_step_time_s is None]
    if why:
        raise SystemExit(f"{engine}: {why[0]}")
    return {name: result.mean_step_time_s or 0.0 for name, result in results.items()}


def measure_table(table: str, steps: int, documents: int) -> list[Row]:
    """All rows of a table of lengths."""
    rule = BatchRule(num_documents=documents, context=CONTEXT, overlong="truncate")
    batches = rule.sample(read_length_table(str(LENGTHS / f"{table}.npy.gz")).lengths, steps=steps, seed=0)
    own = {str(sizes): own_seconds(batches, sizes) for sizes in (FLAT, DEEP)}
    rows = []
    for engine, profile in ENGINES.items():
        # An engine with a pipeline that our adapter runs; torchtitan's runs data parallel only.
        is_deep = bool(profile.schedules) and "pipeline" not in profile.not_adapted
        sizes = DEEP if is_deep else FLAT
        seconds = engine_seconds(engine, batches, sizes)
        case = f"{engine}, {table}, {MODEL} on {CLUSTER}, {layout_of(sizes).describe()}, {documents} documents"
        for name, step_s in seconds.items():
            rows.append(Row("engine_prices", case, name, step_s / own[str(sizes)], "x", "auto on Evenload's runtime"))
    return rows


def measure(quick: bool) -> list[Row]:
    """Rows of all tables; predicted."""
    tables, steps, documents = (TABLES[:1], 1, 128) if quick else (TABLES, STEPS, DOCUMENTS)
    return [row for table in tables for row in measure_table(table, steps, documents)]


if __name__ == "__main__":
    run({"engine_prices": measure})
