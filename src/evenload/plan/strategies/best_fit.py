"""`best_fit`: best-fit decreasing by tokens into windows of `max_pack_tokens`; SlimPack's Megatron-LM baseline.

The whole global batch is packed at once and windows are assigned round robin to replicas, 1F1B. O(n log n).
It fills windows almost perfectly and ignores work: a window with one long document takes many times as long as
a window of short ones, and every stage and replica waits for it.
"""

from evenload.plan.packing.bin_packing import best_fit_decreasing
from evenload.plan.packing.whole_packs import assign_in_turn
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.strategies.strategy import Strategy


def plan_best_fit(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    windows = best_fit_decreasing(problem.num_tokens, problem.window_tokens("best_fit"))
    return assign_in_turn(problem, windows)


BEST_FIT = Strategy(
    name="best_fit",
    description="fills packs by tokens, whole documents: a baseline, packs of unequal work",
    plan=plan_best_fit,
    ignores_memory=True,
)
