"""Time to plan a step and choose among its candidates: over documents, where memory binds, and the search of layouts.

The time is that of `StepPlanner.propose`: assignment, cuts, prices, schedules, simulations, choice, and the sealed plan
as objects. Every row names what `best_fit` took for the same documents in the same round. llama-7b on 32 H100, DP 8 x
PP 4, activation policies chosen, documents shared among replicas.

    documents  every strategy, lognormal lengths of at most 32K tokens, 80 GB; a strategy stops where a step takes
               seconds (a layout without a pipeline for those that need one)
    memory     slimpack and auto on the tables of `examples/lengths`, cut off at 32K and at 128K tokens; without a limit
               all activations are stored, within 80 GB they are recomputed or offloaded where they must be
    cluster    the same at 128K for llama-13b on 128 H100, DP 8 x PP 4 x TP 4, within 80 GB
    layouts    `evenload plan --search-layout` for 4,096 and 16,384 GPUs: llama-13b, github_dirs up to 128K, as many
               documents as GPUs, four strategies, 300 s of processor time at most. Shares of the bound that it finds
    price      what `auto` is said to take, by which it ends its search (`planning.problem.Effort`), over the processor
               seconds of all threads that it does take: the tables of `memory`, and a small model without a pipeline

    python benchmarks/planning.py [--quick] [--append] [--part documents|memory|cluster|layouts|price]
"""

import statistics
import time
from collections.abc import Iterator
from functools import partial

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.memory import host_memory
from evenload.data.hub import model_from
from evenload.errors import EvenloadError
from evenload.explore.batches import BatchRule
from evenload.explore.layout_search import LayoutSearch
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.registry import STRATEGIES
from evenload.types.cluster import cluster_from
from harness import Row, alternate, median_and_spread, median_ratio, run
from setups import TABLES, batch_of, documents_of, lognormal_lengths, planner_for, table_lengths

DP, PP = 8, 4
DOCUMENTS = (512, 2_048, 8_192, 32_768, 100_000)
GIVE_UP_S = 2.5
LAYOUT_GPUS, LAYOUT_LIMIT_S = (4_096, 16_384), 300.0


def plan_rows(case: str, seconds: dict[str, list[float]], name: str) -> Iterator[Row]:
    """The time of a planner, beside `best_fit`'s, and over it."""
    took_ms, best_fit_ms = (statistics.median(seconds[one]) * 1e3 for one in (name, "best_fit"))
    yield Row("planning", case, "plan and choose", took_ms, "ms", f"best_fit {best_fit_ms:.3g} ms")
    yield Row("planning", case, "time", median_ratio(seconds[name], seconds["best_fit"]), "x", "best_fit")


def over_documents(quick: bool) -> Iterator[Row]:
    """Every strategy that plans without a solver, as long as it takes little."""
    options = PlanOptions(max_pack_tokens=32_768, dp_merge=True)
    flat = planner_for("llama-7b", f"h100x{DP * PP}", {"dp": DP, "cp": PP}, options)
    deep = planner_for("llama-7b", f"h100x{DP * PP}", {"dp": DP, "pp": PP}, options)
    names = [name for name, one in STRATEGIES.items() if name != "fixed_exact" and not one.changes_layout]
    for count in DOCUMENTS[:1] if quick else DOCUMENTS:
        documents = documents_of(lognormal_lengths(count))
        for name in list(names):
            planner = flat if STRATEGIES[name].needs_one_stage else deep
            variants = {one: partial(planner.propose, 0, documents, one) for one in (name, "best_fit")}
            try:
                seconds = alternate(variants, 1 if quick else 3)
            except EvenloadError:
                names.remove(name)
                continue
            yield from plan_rows(f"{name}, {count:,} documents, lognormal 32K, 80 GB", seconds, name)
            if statistics.median(seconds[name]) > GIVE_UP_S:
                names.remove(name)


def table_rows(table: str, context: int, planners: dict[str, StepPlanner], quick: bool) -> Iterator[Row]:
    """slimpack and auto under every planner, on batches of a table."""
    for count in (512, 2_048)[: 1 if quick else None]:
        documents = batch_of(table, count, context)
        variants = {
            f"{name}, {count:,} documents, {table} {context // 1024}K, {limit}": (
                partial(planner.propose, 0, documents, name)
            )
            for limit, planner in planners.items()
            for name in ("slimpack", "auto")
        }
        variants["best_fit"] = partial(next(iter(planners.values())).propose, 0, documents, "best_fit")
        seconds = alternate(variants, 1 if quick else 5)
        for case in list(variants)[:-1]:
            yield from plan_rows(case, seconds, case)


def where_memory_binds(quick: bool) -> Iterator[Row]:
    """Every table and context, with and without a limit."""
    for table in TABLES[: 1 if quick else None]:
        for context in (32_768, 131_072)[: 1 if quick else None]:
            options = PlanOptions(max_pack_tokens=context, dp_merge=True)
            planners = {
                limit: planner_for("llama-7b", "h100x32", {"dp": DP, "pp": PP}, options, limited=limit == "80 GB")
                for limit in ("no limit", "80 GB")
            }
            yield from table_rows(table, context, planners, quick)


def on_a_cluster(quick: bool) -> Iterator[Row]:
    """Every table on 128 devices."""
    options = PlanOptions(max_pack_tokens=131_072, dp_merge=True)
    planner = planner_for("llama-13b", "h100x128", {"dp": DP, "pp": PP, "tp": 4}, options)
    for table in TABLES[: 1 if quick else None]:
        yield from table_rows(table, 131_072, {"llama-13b on 128 H100": planner}, quick)


def layout_search(quick: bool) -> Iterator[Row]:
    """Processor seconds of all threads, and of every strategy its best layout's share of the bound."""
    limit_s = 3.0 if quick else LAYOUT_LIMIT_S
    for gpus in LAYOUT_GPUS[: 1 if quick else None]:
        model, cluster = model_from("llama-13b"), cluster_from(f"h100x{gpus}")
        rule = BatchRule(num_documents=gpus, context=131_072, overlong="truncate")
        started_s = time.process_time()
        search = LayoutSearch(
            model=model,
            cluster=cluster,
            batches=rule.sample(table_lengths("github_dirs"), steps=1, seed=0),
            coefficients_of=partial(analytic_coefficients, model, cluster),
            options=PlanOptions(max_pack_tokens=131_072, dp_merge=True),
            memory_bytes=cluster.device.usable_bytes,
            host=host_memory(cluster),
        )
        strategies = ("best_fit", "balanced", "slimpack", "auto")
        result = search.strategies(strategies, limit_s=limit_s, clock=time.process_time)
        case = f"llama-13b on {gpus:,} H100, {gpus:,} documents, at most {limit_s:g} s"
        yield Row("layouts", case, "processor time", time.process_time() - started_s, "s")
        for one in result:
            where = " ".join(f"{axis}={size}" for axis, size in one.best.layout.items() if size > 1)
            looked = f"{one.planned} planned, {one.ruled_out} ruled out, {one.not_looked_at} not looked at"
            share = one.best.fraction_of_bound if one.best.feasible else None
            yield Row("layouts", case, f"{one.strategy}: of bound", share or 0.0, "", f"{where}; {looked}")


def price_of_plans(quick: bool) -> Iterator[Row]:
    """The median over batches of every size, and the largest over the smallest."""
    options = PlanOptions(max_pack_tokens=131_072, dp_merge=True)
    deep = planner_for("llama-7b", f"h100x{DP * PP}", {"dp": DP, "pp": PP}, options)
    flat = planner_for("qwen2.5-0.5b", f"h100x{DP}", {"dp": DP}, options)
    for count in (64, 512, 2_048)[: 1 if quick else None]:
        ratios = []
        for table in TABLES[: 1 if quick else None]:
            for context in (32_768, 131_072):
                for planner in (deep, flat):
                    documents = batch_of(table, count, context)
                    variants = {"auto": partial(planner.propose, 0, documents, "auto")}
                    took_s = statistics.median(alternate(variants, 1 if quick else 3, time.process_time)["auto"])
                    ratios.append(planner.propose(0, documents, "auto").effort_s / took_s)
        case = f"auto, {count:,} documents, four tables, 32K and 128K, llama-7b and qwen2.5-0.5b"
        value, spread = median_and_spread(ratios)
        yield Row("price", case, "price over processor time", value, "x", "processor time", spread)


PARTS = {
    "documents": over_documents,
    "memory": where_memory_binds,
    "cluster": on_a_cluster,
    "layouts": layout_search,
    "price": price_of_plans,
}

if __name__ == "__main__":
    run(PARTS)
