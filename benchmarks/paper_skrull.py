"""Skrull's settings: its models, layouts and data sets, simulated, beside the speed-ups it reports.

EVERYTHING HERE IS SIMULATED by Evenload's analytic cost model of H100; Skrull measured on H100. Lengths are drawn from
the shares of its Table 1, log-uniform between the published lengths (the shape inside a bin is our assumption).
DP 4 x CP 8 with 64 documents a replica; Qwen2.5-7B on ChatQA2 has DP 2 x CP 16 with 40 (§5).

    one a pass   every document is a micro-batch of its own, sharded over all context ranks: what the paper's DeepSpeed
                 baseline comes to when its batches are not packed
    best_fit     documents packed into windows of the bucket times cp: a baseline that packs
    skrull       GDS and DACP, bucket from our memory model
    slimpack     in the same layout

The part `steps` is the paper's Figure 3, with its BucketSize (§5). Where nothing else is said all context ranks share
every document, so `one a pass` and `best_fit` may not choose here as they may above:

    sorted       LongAlign's batching, which the paper compares with: `one a pass`, batches from the lengths in order
    DACP only    documents as they come, dealt in turn, filled into micro-batches of the bucket; DACP finds owners
    GDS only     GDS's micro-batches, shared by all ranks
    as published Algorithms 1 and 2 alone, both
    skrull       ours, both

The part `sizes` is Figure 4(a): Qwen2.5-0.5B on ChatQA2, DP 1 x CP 8, over BatchSize and BucketSize. Lengths are cut to
what the smallest bucket holds, 64K. Roll-back cannot be switched off: without it micro-batches exceed memory, which is
all that Table 3 says. The part `lora` is like Figure 4(b), whose models the text does not name: all
weights against adapters of rank 16 on every linear, bucket from our memory model.

    python benchmarks/paper_skrull.py [--quick] [--append] [--part skrull|steps|sizes|lora]
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.config.sections import LoraConfig
from evenload.errors import EvenloadError
from evenload.planning.packing import run_packs
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions, ReplicaChoice, StepProblem
from evenload.planning.strategies.registry import STRATEGIES, register
from evenload.planning.strategies.skrull import (
    SkrullOptions,
    assign_micro_batches,
    bucket_tokens,
    owned_choices,
    step_documents,
)
from evenload.planning.strategies.strategy import Strategy
from harness import Row, run
from peers import propose_given
from setups import SHARES, K, documents_of, drawn_lengths, planner_for

BUCKETS = {"qwen2.5-0.5b": 26 * K, "qwen2.5-7b": 13 * K}
"""Tokens a rank may hold in the paper (§5); used for the windows of `best_fit`."""
PAPER_MEANS = {"qwen2.5-0.5b": 5.50, "qwen2.5-7b": 2.03}
"""Speed-ups over DeepSpeed, means over the data sets (§5, Figure 3, whose bars have no numbers)."""
PAPER_MEAN, PAPER_MEAN_OVER_SORTED = 3.76, 3.45
"""Of both models, over DeepSpeed and over sorted batching (§5)."""
PAPER_TABLE_3 = 1.40
"""Skrull with roll-back over the baseline: Qwen2.5-0.5B, ChatQA2, DP 1 x CP 8, 64 documents (Table 3)."""
STEPS = 8
ALONE = "one a pass"
STEP_BY_STEP = (ALONE, "sorted", "best_fit", "DACP only", "GDS only", "as published", "skrull")
BATCH_SIZES, BUCKET_SIZES = (8, 16, 32, 64), (8 * K, 16 * K, 26 * K, 32 * K)
LORA_MODELS = ("qwen2.5-7b", "qwen3-14b")


class Setting(NamedTuple):
    """Documents, a replica's `batch` of them a step, on a model in a layout.

    Args:
        bucket: tokens that a rank may hold; None = from the memory model, and packs of any length.
        longest: longer documents are cut; None = at what the bucket holds.
    """

    model: str
    data: str
    dp: int = 4
    cp: int = 8
    batch: int = 64
    bucket: int | None = None
    longest: int | None = None
    lora: LoraConfig | None = None

    def planner(self, as_published: bool = False, shared: bool = False) -> StepPlanner:
        """`shared`: all context ranks share every document, where the strategy does not find owners itself."""
        options = PlanOptions(
            max_pack_tokens=self.bucket and self.bucket * self.cp,
            cp_sharding="per_document" if shared else "mixed",
            strategies=(SkrullOptions(as_published=as_published, bucket_tokens=self.bucket),),
        )
        sizes = {"dp": self.dp, "cp": self.cp}
        return planner_for(self.model, f"h100x{self.dp * self.cp}", sizes, options, lora=self.lora)

    def steps(self) -> list[NDArray[np.int64]]:
        """Lengths of every step."""
        limit = self.longest or (self.bucket or K * K) * self.cp
        count = self.batch * self.dp
        return [np.minimum(drawn_lengths(self.data, count, seed), limit) for seed in range(STEPS)]


def dacp_only(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    """Documents in the order of arrival, dealt in turn; a micro-batch is full when the next does not fit its bucket."""
    step = step_documents(problem, bucket_tokens(problem))
    shares, limit = step.columns.share_tokens().tolist(), step.columns.bucket_tokens
    replicas: list[list[list[int]]] = []
    for rank in range(step.dp):
        groups: list[list[int]] = []
        held = limit
        for index in range(rank, len(shares), step.dp):
            if held + shares[index] > limit:
                groups.append([])
                held = 0
            groups[-1].append(index)
            held += shares[index]
        replicas.append(groups)
    return owned_choices(problem, step, replicas)


def gds_only(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    """GDS's micro-batches; who shares what is the planner's `cp_sharding`."""
    replicas = assign_micro_batches(step_documents(problem, bucket_tokens(problem)))
    assert replicas is not None, "the bucket holds every document"
    return run_packs(problem, replicas)


def register_parts() -> None:
    """Of Skrull, as strategies that exist here only."""
    for name, plan, assigns in (("DACP only", dacp_only, True), ("GDS only", gds_only, False)):
        if name not in STRATEGIES:
            words = "a part of Skrull, for its table"
            register(Strategy(name=name, description=words, plan=plan, assigns_ranks=assigns, needs_one_stage=True))


def step_seconds(planner: StepPlanner, lengths: NDArray[np.int64], strategy: str) -> float:
    """Simulated.

    Raises:
        EvenloadError: refused, or beyond memory.
    """
    if strategy == ALONE:
        dp = planner.layout.dp
        alone = [[[index] for index in range(rank, len(lengths), dp)] for rank in range(dp)]
        proposal = propose_given(planner, lengths, alone)
    else:
        proposal = planner.propose(0, documents_of(lengths), strategy)
    return proposal.require_feasible().predicted.step_time_s


def all_seconds(setting: Setting, way: str) -> float | None:
    """Of all steps, one way of `STEP_BY_STEP`; None, and why is printed, where one does not fit."""
    steps = setting.steps()
    if way == "sorted":
        steps = np.split(np.sort(np.concatenate(steps)), STEPS)
    finds_owners = way in ("DACP only", "as published", "skrull")
    planner = setting.planner(as_published=way == "as published", shared=not finds_owners)
    strategy = {"sorted": ALONE, "as published": "skrull"}.get(way, way)
    try:
        return sum(step_seconds(planner, lengths, strategy) for lengths in steps)
    except EvenloadError as error:
        print(f"{setting}, {way}: {error}")
        return None


def measure(quick: bool) -> Iterator[Row]:
    """Every model and data set."""
    cells = [(name, data) for name in BUCKETS for data in SHARES]
    for name, data in cells[: 1 if quick else None]:
        dp, cp, batch = layout_and_batch(name, data)
        window = BUCKETS[name] * cp
        options = PlanOptions(max_pack_tokens=window, policy="choose", dp_merge=True)
        planner = planner_for(name, "h100x32", {"dp": dp, "cp": cp}, options)
        steps = [np.minimum(drawn_lengths(data, batch * dp, seed), window) for seed in range(STEPS)]
        bound_s = sum(planner.costs.lower_bound_seconds(lengths) for lengths in steps)
        seconds: dict[str, float] = {}
        for strategy in (ALONE, "best_fit", "skrull", "slimpack"):
            case = f"{name} on {data}, {planner.layout.describe()}, {strategy}, simulated"
            try:
                seconds[strategy] = sum(step_seconds(planner, lengths, strategy) for lengths in steps)
            except EvenloadError as error:
                print(f"{case}: {error}")
                continue
            yield Row("skrull", case, "of bound", bound_s / seconds[strategy], "")
            for base in (base for base in (ALONE, "best_fit") if base in seconds):
                yield Row("skrull", case, "speed-up", seconds[base] / seconds[strategy], "x", base)


def layout_and_batch(name: str, data: str) -> tuple[int, int, int]:
    """dp, cp, and documents of a replica (§5)."""
    return (2, 16, 40) if (name, data) == ("qwen2.5-7b", "ChatQA2") else (4, 8, 64)


def measure_steps(quick: bool) -> Iterator[Row]:
    """Skrull's parts, alone and together."""
    register_parts()
    gains: dict[str, dict[str, list[float]]] = {name: {} for name in BUCKETS}
    cells = [(name, data) for name in BUCKETS for data in SHARES]
    for name, data in cells[: 1 if quick else None]:
        setting = Setting(name, data, *layout_and_batch(name, data), bucket=BUCKETS[name])
        base_s = all_seconds(setting, ALONE)
        for way in STEP_BY_STEP:
            seconds = all_seconds(setting, way)
            if base_s is not None and seconds is not None:
                gains[name].setdefault(way, []).append(base_s / seconds)
                yield Row(
                    "skrull steps", f"{name} on {data}, {way}, simulated", "speed-up", base_s / seconds, "x", ALONE
                )
    if quick:
        return
    for way in STEP_BY_STEP:
        for name, of_name in gains.items():
            yield Row("skrull steps", f"{name} mean, {way}, simulated", "speed-up", mean(of_name[way]), "x", ALONE)
    for name, paper in PAPER_MEANS.items():
        yield Row("skrull steps", f"{name} mean, skrull", "speed-up in the paper", paper, "x", "DeepSpeed")
    for way, base in ((ALONE, "DeepSpeed"), ("sorted", "sorted")):
        pairs = [(of_name["skrull"], of_name[way]) for of_name in gains.values()]
        own = mean([ours / its for both in pairs for ours, its in zip(*both, strict=True)])
        paper = PAPER_MEAN if way == ALONE else PAPER_MEAN_OVER_SORTED
        yield Row("skrull steps", "both models, skrull, simulated", "mean speed-up", own, "x", way)
        yield Row("skrull steps", "both models, skrull", "speed-up in the paper", paper, "x", base)


def mean(values: list[float]) -> float:
    """Arithmetic, as the paper's."""
    return float(np.mean(values))


def measure_sizes(quick: bool) -> Iterator[Row]:
    """BatchSize at the paper's BucketSize, then BucketSize at its BatchSize."""
    usual = 26 * K
    cells = [(batch, usual) for batch in BATCH_SIZES] + [(64, bucket) for bucket in BUCKET_SIZES if bucket != usual]
    for batch, bucket in cells[: 1 if quick else None]:
        setting = Setting("qwen2.5-0.5b", "ChatQA2", 1, 8, batch, bucket, longest=min(BUCKET_SIZES) * 8)
        base_s = all_seconds(setting, ALONE)
        for way in ("as published", "skrull"):
            seconds, case = all_seconds(setting, way), f"BatchSize {batch}, BucketSize {bucket // K}K, {way}"
            if base_s is not None and seconds is not None:
                yield Row("skrull sizes", f"{case}, simulated", "speed-up", base_s / seconds, "x", ALONE)
            if (batch, bucket, way) == (64, usual, "as published"):
                yield Row("skrull sizes", case, "speed-up in the paper", PAPER_TABLE_3, "x", "DeepSpeed")


def measure_lora(quick: bool) -> Iterator[Row]:
    """All weights, and adapters alone."""
    for name in LORA_MODELS[: 1 if quick else None]:
        for data in ("ChatQA2",) if quick else ("Wikipedia", "ChatQA2"):
            for what, lora in (("all weights", None), ("LoRA", LoraConfig(rank=16))):
                setting = Setting(name, data, longest=99 * K, lora=lora)
                base_s, seconds = all_seconds(setting, ALONE), all_seconds(setting, "skrull")
                if base_s is not None and seconds is not None:
                    case = f"{name} on {data}, {what}, simulated"
                    yield Row("skrull lora", case, "speed-up", base_s / seconds, "x", ALONE)


PARTS = {"skrull": measure, "steps": measure_steps, "sizes": measure_sizes, "lora": measure_lora}

if __name__ == "__main__":
    run(PARTS)
