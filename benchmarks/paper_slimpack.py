"""SlimPack's settings: its models, devices and contexts, simulated, beside the speed-ups it reports.

EVERYTHING HERE IS SIMULATED by Evenload's analytic cost model of H100; SlimPack measured on Hopper GPUs. Lengths are
`examples/lengths/commoncrawl_like.py`, fitted to what the paper publishes about its Common Crawl, and the real
`examples/lengths/github_dirs.npy.gz`. It prints no percentiles of its Wikipedia: the part `wikipedia` draws from the
shares that Skrull's Table 1 prints of it, log-uniform between the published lengths (the shape is our assumption).
The part `batch` varies the documents of a step as the paper's workload does (512 to 2,048, §6.1), without figures of
its own to compare with, because §6.2 prints none by batch. Llama 7B and 13B on 128 devices, 70B and 150B on 256
(§6.2, Table 3), 1,024 documents a step unless said, cut to the context.

Every strategy gets its own best layout of tp x cp x pp x dp x virtual stages within 80 GB, storing, recomputing or
offloading activations. Three baselines, all `best_fit`, the paper's Megatron-LM with best-fit packing and 1F1B: tuned
over all layouts; tuned over those with a pipeline of at least 4 stages; and the median of all its layouts that fit,
which is what no tuning gets. SlimPack does not publish its baseline's layouts.
`auto` simulates 768 candidates, as finalists of the layout search do (`plan.options.auto.max_candidates`; a run's
default is 128, over all replicas of a step).

    python benchmarks/paper_slimpack.py [--quick] [--append] [--part MODEL|wikipedia|batch]
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import msgspec

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.memory import host_memory
from evenload.data.hub import model_from
from evenload.explore.batches import BatchRule, SampledBatch
from evenload.explore.layout_search import FINAL_CANDIDATES, LayoutResult, LayoutSearch
from evenload.explore.timelines import split_step_time
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.auto import AutoOptions
from evenload.types.cluster import cluster_from
from evenload.types.timeline import CAUSE_LABELS
from harness import Row, run
from setups import drawn_lengths, planner_for, table_lengths, tokens_of

DEVICES = {"llama-7b": 128, "llama-13b": 128, "llama-70b": 256, "llama-150b": 256}
CONTEXTS = (65_536, 131_072, 262_144)
PAPER = {
    ("llama-150b", 65_536): 1.15, ("llama-150b", 131_072): 1.54, ("llama-150b", 262_144): 1.68,
    ("llama-13b", 262_144): 2.8,
}  # fmt: skip
"""Speed-ups that the text of SlimPack §6.2 states (2.8 is its largest); the others are only bars in its Fig. 13."""
DEEP = 4
DOCUMENTS = 1_024
BATCHES = (512, 1_024, 2_048)
WIKIPEDIA = "wikipedia_like"
STRATEGIES = ("best_fit", "slimpack", "auto")
SHOWN = 0.0005
"""Causes below this share of a step are left out."""


class Best(NamedTuple):
    """A strategy in one layout: seconds of the step, share of the lower bound, and of the step by cause."""

    layout: str
    step_s: float
    fraction: float
    shares: dict[str, float]


def run_cell(name: str, context: int, batch: SampledBatch) -> dict[str, Best | None]:
    """Best layout of every strategy; None where nothing fits."""
    model, cluster = model_from(name), cluster_from(f"h100x{DEVICES[name]}")
    options = PlanOptions(max_pack_tokens=context, policy="choose", dp_merge=True)
    best: dict[str, Best | None] = {}
    search = LayoutSearch(
        model=model,
        cluster=cluster,
        batches=[batch],
        coefficients_of=partial(analytic_coefficients, model, cluster),
        options=options,
        memory_bytes=cluster.device.usable_bytes,
        host=host_memory(cluster),
    )
    for strategy in STRATEGIES:
        results = search.rank(strategy)
        fitting = sorted((one for one in results if one.feasible), key=lambda one: one.mean_step_time_s or 0.0)
        replan = partial(planned_again, name, batch, strategy, options)
        best[strategy] = replan(fitting)
        if strategy == "best_fit":
            best["best_fit, pp >= 4"] = replan([one for one in fitting if one.layout["pp"] >= DEEP])
            best["best_fit, median layout"] = replan(fitting[len(fitting) // 2 :])
    return best


def planned_again(
    name: str, batch: SampledBatch, strategy: str, options: PlanOptions, results: list[LayoutResult]
) -> Best | None:
    """The first layout planned as the search's finalists were, for its losses."""
    if not results:
        return None
    sizes = results[0].layout
    own = options.own(AutoOptions)
    long = msgspec.structs.replace(own, max_candidates=max(own.max_candidates, FINAL_CANDIDATES))
    planner = planner_for(name, f"h100x{DEVICES[name]}", sizes, options.with_own(long))
    proposal = planner.propose(0, batch.documents, strategy)
    step_s = proposal.plan.predicted.step_time_s
    split = msgspec.structs.asdict(split_step_time(planner.costs, proposal.choices))
    bound_s = planner.costs.lower_bound_seconds(tokens_of(batch.documents))
    where = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
    return Best(where, step_s, bound_s / step_s, {CAUSE_LABELS[key]: part / step_s for key, part in split.items()})


def measure(name: str, tables: tuple[str, ...], quick: bool) -> Iterator[Row]:
    """Every context and table of a model; to be quick, of the smallest."""
    if quick and (name != "llama-7b" or WIKIPEDIA in tables):
        return
    for context in CONTEXTS[: 1 if quick else None]:
        for table in tables[: 1 if quick else None]:
            best = run_cell(name, context, batch_of(table, context, 128 if quick else DOCUMENTS))
            paper = PAPER.get((name, context)) if table == "commoncrawl_like" else None
            setting = f"{name} on {DEVICES[name]} H100; {context // 1024}K; {table}"
            yield from rows_of("slimpack", setting, best, paper)


def measure_batches(quick: bool) -> Iterator[Row]:
    """Steps of more and more documents: the smallest model at 128K, nothing to be quick."""
    for documents in () if quick else BATCHES:
        best = run_cell("llama-7b", 131_072, batch_of("commoncrawl_like", 131_072, documents))
        setting = f"llama-7b on {DEVICES['llama-7b']} H100; 128K; commoncrawl_like; {documents:,} documents"
        yield from rows_of("slimpack batch", setting, best)


def batch_of(table: str, context: int, documents: int) -> SampledBatch:
    """Documents of one step, cut to the context."""
    lengths = drawn_lengths("Wikipedia", 20_000, 104) if table == WIKIPEDIA else table_lengths(table)
    (batch,) = BatchRule(num_documents=documents, context=context, overlong="truncate").sample(lengths, steps=1, seed=0)
    return batch


def rows_of(benchmark: str, setting: str, best: dict[str, Best | None], paper: float | None = None) -> Iterator[Row]:
    """Of every strategy that fits: share of the bound, speed-ups, the paper's, and what its time is lost to."""
    for strategy, result in best.items():
        if result is None:
            continue
        case = f"{setting}; {strategy}; simulated"
        yield Row(benchmark, case, "of bound", result.fraction, "", result.layout)
        for baseline in list(best)[:3]:
            if (slow := best[baseline]) is not None:
                yield Row(benchmark, case, "speed-up", slow.step_s / result.step_s, "x", baseline)
        if paper is not None and strategy != "best_fit":
            yield Row(benchmark, case, "speed-up in the paper", paper, "x", "its Megatron-LM")
        for cause, share in result.shares.items():
            if share > SHOWN:
                yield Row(benchmark, case, f"share: {cause}", share, "")


PARTS = {
    **{name: partial(measure, name, ("commoncrawl_like", "github_dirs")) for name in DEVICES},
    "wikipedia": partial(measure, "llama-7b", (WIKIPEDIA,)),
    "batch": measure_batches,
}

if __name__ == "__main__":
    run(PARTS)
