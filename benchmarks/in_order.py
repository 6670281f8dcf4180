"""`in_order`: documents as they come, into a pack until the next one does not fit; what engines with a packing of their
own do (Megatron-LM's data for fine-tuning and its `dp_balanced`). Packs are dealt to replicas in turn. O(n).

Registered here only, for baselines of `engine_steps.py`.
"""

from evenload.plan.packing import assign_in_turn
from evenload.plan.problem import ReplicaChoice, StepProblem
from evenload.plan.strategies.strategy import Strategy
from evenload.schedule.registry import register


def packs_in_order(num_tokens: list[int], max_pack_tokens: int) -> list[list[int]]:
    """Document indices of every pack."""
    packs: list[list[int]] = []
    room = 0
    for index, tokens in enumerate(num_tokens):
        if tokens > room:
            packs.append([])
            room = max_pack_tokens
        packs[-1].append(index)
        room -= tokens
    return packs


def plan_in_order(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    return assign_in_turn(problem, packs_in_order(problem.num_tokens.tolist(), problem.window_tokens("in_order")))


IN_ORDER = Strategy(
    name="in_order",
    description="documents as they come, into a pack until the next one does not fit: a baseline of benchmarks",
    plan=plan_in_order,
    ignores_memory=True,
    # No solver, but what has a limit runs where it is named only: `auto` must not choose among more than users have.
    solver_limit_s=lambda options: 0.0,
)
register(IN_ORDER)
