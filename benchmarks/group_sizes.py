"""Groups of any size that share documents (DP-Merge), against sizes that divide the replicas. Simulated.

`slimpack`, llama-7b on H100 within 80 GB with tp 8, without a pipeline and with four ranks; 2 and 8 documents a
replica, four tables of lengths, two batches each.

    python benchmarks/group_sizes.py [--quick] [--append]
"""

import itertools
import statistics
from collections.abc import Iterator
from unittest import mock

from evenload.planning.problem import PlanOptions
from evenload.planning.strategies import slimpack
from harness import Row, run
from setups import batch_of, planner_for

GROUPED, TP = (3, 4, 5, 6, 7, 8), 8
GROUP_TABLES = {"github_dirs": 131_072, "commoncrawl_like": 262_144, "books": 131_072, "stdlib": 65_536}


def step_seconds(dp: int, pp: int, table: str, context: int, count: int, seed: int) -> float:
    """Of a step of this many documents, predicted."""
    options = PlanOptions(max_pack_tokens=context, policy="choose", dp_merge=True)
    planner = planner_for("llama-7b", f"h100x{dp * pp * TP}", {"dp": dp, "pp": pp, "tp": TP}, options)
    return planner.propose(0, batch_of(table, count, context, seed), "slimpack").plan.predicted.step_time_s


def compare_groups(quick: bool) -> Iterator[Row]:
    """By number of replicas: the geometric mean of all cells, and the best and the worst."""
    batches = list(itertools.product((1, 4), GROUP_TABLES.items(), (2, 8), range(2)))[: 2 if quick else None]
    for dp in GROUPED[: 1 if quick else None]:
        faster = []
        for pp, (table, context), of_replica, seed in batches:
            cell = dp, pp, table, context, dp * of_replica, seed
            with mock.patch.object(slimpack, "unequal_merge", return_value=None):
                equal_s = step_seconds(*cell)
            faster.append(equal_s / step_seconds(*cell))
        case = f"dp {dp}, {len(batches)} cells, llama-7b, slimpack, simulated: groups of any size"
        for name, value in (("mean", statistics.geometric_mean(faster)), ("most", max(faster)), ("least", min(faster))):
            yield Row("group_sizes", case, f"speed-up, {name}", value, "x", "of sizes that divide the replicas")


PARTS = {"group_sizes": compare_groups}

if __name__ == "__main__":
    run(PARTS)
