"""`flexpipe` inside one layout: what `plan.flex_planner` plans every step with once the layout is chosen.

FlexPipe changes the pipeline, not the packing; the number of its micro-batches follows the batch (§7.1). So documents
stay whole, go to replicas and micro-batches of equal predicted time, longest first, and run in 1F1B: the micro-batches
of `balanced`. O(candidates · n log n).
"""

from evenload.plan.balanced import plan_balanced
from evenload.plan.problem import ReplicaChoice, StepProblem


def plan_flexpipe(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    """One choice per replica, in the layout of the problem.

    Raises:
        DataError: a document longer than `max_pack_tokens`.
    """
    problem.require_whole_documents_fit("flexpipe")
    return plan_balanced(problem)
