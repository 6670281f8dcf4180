"""Skrull's settings: its models, layouts and data sets, simulated, beside the speed-ups it reports.

EVERYTHING HERE IS SIMULATED by Evenload's analytic cost model of H100; Skrull measured on H100. Lengths are drawn from
the shares of its Table 1, log-uniform between the published lengths (the shape inside a bin is our assumption).
DP 4 x CP 8 with 64 documents a replica; Qwen2.5-7B on ChatQA2 has DP 2 x CP 16 with 40 (§5).

    one a pass   every document is a micro-batch of its own, sharded over all context ranks: what the paper's DeepSpeed
                 baseline comes to when its batches are not packed
    best_fit     documents packed into windows of the bucket times cp: a baseline that packs
    skrull       GDS and DACP, bucket from our memory model
    slimpack     in the same layout

    python benchmarks/paper_skrull.py [--quick] [--append]
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from evenload.errors import EvenloadError
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from harness import Row, run
from peers import propose_given
from setups import SHARES, K, documents_of, drawn_lengths, planner_for

BUCKETS = {"qwen2.5-0.5b": 26 * K, "qwen2.5-7b": 13 * K}
"""Tokens a rank may hold in the paper (§5); used for the windows of `best_fit`."""
STEPS = 8
ALONE = "one a pass"


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


def measure(quick: bool) -> Iterator[Row]:
    """Every model and data set."""
    cells = [(name, data) for name in BUCKETS for data in SHARES]
    for name, data in cells[: 1 if quick else None]:
        dp, cp, batch = (2, 16, 40) if (name, data) == ("qwen2.5-7b", "ChatQA2") else (4, 8, 64)
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


PARTS = {"skrull": measure}

if __name__ == "__main__":
    run(PARTS)
