"""How far the heuristics of whole documents and of slices are from the optimum, on inputs an exact solver finishes.

Documents are sampled, seeded, from `examples/lengths/*.npy.gz`, cut off at 131,072 tokens; work is that of llama-7b on
H100 (analytic costs). A gap is `heuristic / optimum - 1` of the largest group. Instances that the solver does not prove
within its time limit are counted, not averaged; how many depends on the machine and its load, a gap does not.

    python benchmarks/exact_gaps.py [--quick] [--append] [--part groups|skrull]

Problems of part `groups`, each with 4 groups:

    fixed-length packing     WLB eq. 1: window 131,072 or a little more than a quarter of the tokens, least largest d²
                             work; `fixed_greedy` (LPT with a token limit)
    variable-length packing  WLB eq. 2: S_max four windows, least largest W_a + W_l; `wlb` (Algorithm 1's inner loop)
                             and `balanced` (LPT with a token limit)
    DP assignment            SlimPack §4.1.1, forward + backward seconds, no limit; LPT of `bin_packing`
    slice packing            least largest forward pack when documents may be cut anywhere, longest first, 8 packs;
                             `partition_by_work` against the exact bound of the same order

Problems of part `skrull`, forward + backward seconds, transfers included:

    DACP                     Skrull eq. 1-7: one micro-batch on cp = 8, a bucket of 1.1 or 1.5 times its even share
    GDS                      Skrull eq. 8-11: dp = 2, cp = 4, memory for about two micro-batches a replica; replicas and
                             micro-batches together, up to 16 documents

There the solver has ten seconds, the optimum counts as proved within 0.1 % (memory leaves ties that a solver cannot
tell apart in that time), and the gap is `heuristic / bound - 1`: the true gap is at most that.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.data.hub import model_from
from evenload.planning.packing import LEFT_OVER, assign_replicas, longest_first, members_of, pack_greedily
from evenload.planning.problem import PlanOptions, StepProblem
from evenload.planning.strategies.fixed import exact_groups
from evenload.planning.strategies.skrull import StepDocuments, assign_micro_batches, assign_owners, step_documents
from evenload.types.cluster import cluster_from
from evenload.types.columns import WorkCurve, causal_pairs
from evenload.types.layout import even_layout
from harness import Row, run
from setups import TABLES, table_lengths  # puts tests/ on the path

from reference.exact_dacp import Exact, exact_micro_batches, exact_owners  # isort: skip
from reference.partition import partition_by_work  # isort: skip
from reference.slice_work import slice_work_s, slice_works_s  # isort: skip

WINDOW = 131_072
GROUPS, PACKS = 4, 8
INSTANCES, QUICK_INSTANCES = 20, 3
DOCUMENTS = (8, 16, 32)
TIME_LIMIT_S = 1.0
SKRULL_TIME_LIMIT_S = 10.0
PROVED_SKRULL = 1e-3
MOST_GDS = 16

Gap = tuple[str, str, float | None]
"""(problem, heuristic, gap or None where the optimum is not proved)."""


def costs(dp: int = 1, cp: int = 1) -> PackCosts:
    """Of llama-7b on one pipeline stage; only ratios of seconds matter."""
    model, layout = model_from("llama-7b"), even_layout(32, dp=dp, cp=cp)
    return PackCosts(model, analytic_coefficients(model, cluster_from("h100x8"), layout), layout)


def measure_skrull(tokens: NDArray[np.int64], cost: PackCosts) -> list[Gap]:
    """DACP and GDS on one set of documents; layouts are their own, `cost` is not used."""
    gaps: list[Gap] = []
    for room in (1.1, 1.5):
        batch = _skrull_step(tokens, dp=1, cp=8, share=1 / room).columns
        ours = assign_owners(batch, [range(len(tokens))])
        assert np.isfinite(ours.seconds[0]), "all documents shared fit the bucket"
        result = exact_owners(batch, time_limit_s=SKRULL_TIME_LIMIT_S, start=ours.owner)
        gaps.append(_skrull_gap("DACP", float(ours.seconds[0]), result))
    if len(tokens) <= MOST_GDS:
        step = _skrull_step(tokens, dp=2, cp=4, share=2.0)
        replicas = assign_micro_batches(step)
        assert replicas is not None, "every document fits a bucket of its share"
        seconds = max(float(step.group_seconds(groups).sum()) for groups in replicas)
        gaps.append(
            _skrull_gap("GDS", seconds, exact_micro_batches(step, time_limit_s=SKRULL_TIME_LIMIT_S, start=replicas))
        )
    return gaps


def _skrull_step(tokens: NDArray[np.int64], dp: int, cp: int, share: float) -> StepDocuments:
    """With memory for `1 / share` of the tokens of a replica; at least for every document and its rounding."""
    problem = StepProblem(np.arange(len(tokens)), tokens, costs(dp, cp), None, PlanOptions())
    bucket = max(int(tokens.sum() / dp / cp / share) + len(tokens), -(-int(tokens.max()) // cp))
    return step_documents(problem, bucket)


def _skrull_gap(problem: str, seconds: float, exact: Exact) -> Gap:
    return problem, "skrull", seconds / exact.bound - 1 if exact.gap <= PROVED_SKRULL else None


def measure_instance(tokens: NDArray[np.int64], cost: PackCosts) -> list[Gap]:
    """Every problem on one set of documents."""
    seconds = cost.document_seconds(tokens)
    attention = causal_pairs(np.zeros_like(tokens), tokens)
    everyone = np.argsort(-seconds, kind="stable")
    gaps: list[Gap] = []

    window = max(WINDOW, int(tokens.max()), int(1.1 * tokens.sum()) // GROUPS)
    greedy = longest_first(attention, GROUPS, num_tokens=tokens, capacity=window)
    if len(greedy) <= GROUPS:
        gaps.append(_gap("fixed-length packing", "fixed_greedy", attention, greedy, tokens, window))
    limit = 4 * WINDOW
    group_of = pack_greedily(seconds[everyone], tokens[everyone], GROUPS, limit)
    if not (group_of == LEFT_OVER).any():
        placed = members_of(group_of, everyone, GROUPS)
        gaps.append(_gap("variable-length packing", "wlb", seconds, placed, tokens, limit))
    balanced = longest_first(seconds, GROUPS, num_tokens=tokens, capacity=limit)
    if len(balanced) <= GROUPS:
        gaps.append(_gap("variable-length packing", "balanced", seconds, balanced, tokens, limit))
    replicas = [group.tolist() for group in assign_replicas(seconds, GROUPS)]
    gaps.append(_gap("DP assignment", "LPT", seconds, replicas, tokens, int(tokens.sum())))

    work = cost.work_curve("forward")
    packs = partition_by_work(tokens, everyone.astype(np.int32), work, PACKS)
    largest = float(packs.pack_sums(np.array(slice_works_s(work, packs))).max())
    bound = exact_slice_bound(tokens, everyone, work, PACKS)
    gaps.append(("slice packing", "partition_by_work", largest / bound - 1))
    return gaps


def exact_slice_bound(
    num_tokens: NDArray[np.int64], order: NDArray[np.int64], work: WorkCurve, num_packs: int
) -> float:
    """Least possible work of the largest pack when documents are cut freely, in this order (int64[n]), into `num_packs`
    packs; seconds, to a relative 1e-9."""
    lengths = [int(num_tokens[index]) for index in order]
    high = sum(slice_work_s(work, 0, n) for n in lengths)
    if not high:
        return 0.0
    low = 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _packs_needed(lengths, work, middle, num_packs) <= num_packs:
            high = middle
        else:
            low = middle
    return high


def _packs_needed(lengths: list[int], work: WorkCurve, limit_s: float, stop_after: int) -> int:
    """Packs when each is filled to `limit_s`; `stop_after + 1` stands for "too many"."""
    packs, room_s = 1, limit_s
    for length in lengths:
        start = 0
        while start < length:
            stop = _furthest(work, start, length, room_s)
            if stop == start:
                packs += 1
                if room_s == limit_s or packs > stop_after:
                    return stop_after + 1  # not even one token fits an empty pack, or too many
                room_s = limit_s
                continue
            room_s -= slice_work_s(work, start, stop)
            start = stop
    return packs


def _furthest(work: WorkCurve, start: int, most: int, room_s: float) -> int:
    """Largest `stop <= most` whose slice fits `room_s`; `start` when none does."""
    low, high = start, most
    while low < high:
        middle = (low + high + 1) // 2
        if slice_work_s(work, start, middle) <= room_s:
            low = middle
        else:
            high = middle - 1
    return low


def _gap(
    problem: str,
    heuristic: str,
    work: NDArray[np.float64],
    groups: list[list[int]],
    tokens: NDArray[np.int64],
    capacity: int,
) -> Gap:
    largest = max(float(work[group].sum()) for group in groups if group)
    best = exact_groups(work, tokens, capacity, start=groups, time_limit_s=TIME_LIMIT_S)
    return problem, heuristic, largest / best.objective - 1 if best.is_optimal else None


def measure(problems: Callable[[NDArray[np.int64], PackCosts], list[Gap]], quick: bool) -> Iterator[Row]:
    """Gaps of every table, number of documents, problem and heuristic."""
    cost = costs()
    for table in TABLES[: 1 if quick else None]:
        lengths = np.minimum(table_lengths(table), WINDOW)
        for count in DOCUMENTS[: 1 if quick else None]:
            generator = np.random.default_rng(count)
            result: dict[tuple[str, str], list[float | None]] = {}
            for _ in range(QUICK_INSTANCES if quick else INSTANCES):
                for problem, heuristic, gap in problems(generator.choice(lengths, count), cost):
                    result.setdefault((problem, heuristic), []).append(gap)
            for (problem, heuristic), gaps in result.items():
                case = f"{problem}; {heuristic}; {count} documents of {table}"
                proved = [gap for gap in gaps if gap is not None]
                yield Row("exact gaps", case, "instances", len(gaps), "")
                yield Row("exact gaps", case, "proved", len(proved), "")
                if proved:
                    yield Row("exact gaps", case, "mean gap", float(np.mean(proved)), "", "optimum")
                    yield Row("exact gaps", case, "largest gap", max(proved), "", "optimum")
                    optimal = float(np.mean([gap <= 1e-6 for gap in proved]))
                    yield Row("exact gaps", case, "share optimal", optimal, "")


PARTS = {"groups": partial(measure, measure_instance), "skrull": partial(measure, measure_skrull)}

if __name__ == "__main__":
    run(PARTS)
