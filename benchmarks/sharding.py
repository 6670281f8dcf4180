"""Time to choose how context ranks share one pack of 256K tokens, and to price it rank by rank (some milliseconds).

Lengths are `examples/lengths/github_dirs.npy.gz` in its order up to 256K tokens, and 2,048 documents of 128 tokens,
about as many as one pack can hold; llama-7b's seconds on H100, whose attention has tiles. `mixed` tries every rule and
several bounds between long and short documents. The baseline of every row is `per_document`, one of those rules, in the
same round.

    python benchmarks/sharding.py [--quick] [--append]
"""

import statistics
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.cost.ranked_packs import rank_seconds
from evenload.data.hub import model_from
from evenload.data.lengths import read_lengths
from evenload.plan.problem.options import PlanOptions
from evenload.plan.problem.step_problem import StepProblem
from evenload.plan.sharing.as_run import as_run
from evenload.plan.strategies.registry import STRATEGIES
from evenload.stepplan.ranked_packs import ranked_packs
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout
from results import Row, interleaved_seconds, median_ratio, run_benchmark

LENGTHS = Path(__file__).parent.parent / "examples" / "lengths" / "github_dirs.npy.gz"
PACK_TOKENS = 262_144
RANKS = (2, 4, 8)
REPEATS = 200
QUICK_REPEATS = 5


def measure(quick: bool) -> list[Row]:
    """Every pack and number of ranks."""
    model, cluster = model_from("llama-7b"), cluster_from("h100x8")
    packs = {"github_dirs": first_of(read_lengths(str(LENGTHS))), "128 tokens each": np.full(PACK_TOKENS // 128, 128)}
    rows: list[Row] = []
    for name, tokens in packs.items():
        for cp in RANKS:
            layout = even_layout(model.num_layers, cp=cp)
            costs = PackCosts(model, analytic_coefficients(model, cluster, layout), layout)
            variants, chosen = {}, {}
            for rule in ("mixed", "per_document"):
                options = PlanOptions(max_pack_tokens=PACK_TOKENS, cp_sharding=rule, policy="replay")
                problem = StepProblem(np.arange(len(tokens)), tokens, costs, None, options)
                [choice] = STRATEGIES["best_fit"].plan(problem)
                variants[rule] = lambda problem=problem, one=choice.candidate: as_run(problem, one)
                chosen[rule] = variants[rule]()
            seconds = interleaved_seconds(variants, QUICK_REPEATS if quick else REPEATS)
            mixed_s, document_s = (statistics.median(seconds[rule]) for rule in ("mixed", "per_document"))
            case = f"pack of 256K tokens, {len(tokens):,} documents ({name}), cp={cp}"
            baseline = f"per_document {document_s * 1e3:.3g} ms"
            rows.append(Row("sharding", case, "share (mixed)", mixed_s * 1e3, "ms", baseline))
            ratio = median_ratio(seconds["mixed"], seconds["per_document"])
            rows.append(Row("sharding", case, "time", ratio, "x", "per_document"))
            found = chosen["mixed"]
            forward, _ = ranked_packs(found.forward, found.backward, found.shardings or (), cp)
            uneven = rank_seconds(costs, forward, "forward").sum(axis=1)
            rows.append(Row("sharding", case, "slowest rank", uneven.max() / uneven.mean(), "x", "mean of ranks"))
    return rows


def first_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """As many as fill the pack, the last one cut."""
    ends = np.cumsum(np.minimum(lengths, PACK_TOKENS))
    count = int(np.searchsorted(ends, PACK_TOKENS)) + 1
    tokens = np.minimum(lengths[:count], PACK_TOKENS).astype(np.int64)
    tokens[-1] -= ends[count - 1] - PACK_TOKENS
    return tokens


if __name__ == "__main__":
    run_benchmark(measure, "time to share a pack over context ranks")
