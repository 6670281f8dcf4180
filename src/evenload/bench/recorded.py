"""`BenchInputs`: what the plans of a comparison were made from, so that a later version makes and predicts them again.

Together with the cost file it decides every plan and every prediction: planning is pure. Whether a later version still
makes the plan that was measured is told by the plan's digest; only then can its prediction be held against the
measurement.
"""

from typing import Any

import msgspec

from evenload.config.keys import plan_options
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.host_memory import HostMemory
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.plan.strategies.merge_default import decide_dp_merge
from evenload.types.base import Frozen
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.plan import StepPlan


class RecordedBatch(Frozen):
    """A global batch.

    Args:
        step: its number in the run, which is part of a plan's digest.
        documents: (id, tokens, tokens with labels) in the order of arrival.
    """

    step: int
    documents: tuple[tuple[int, int, int], ...]


class BenchInputs(Frozen):
    """Everything but the costs.

    Args:
        options: the tables of `plan.options` in a configuration, the limit of packs filled in.
        memory_cap_bytes: of one process.
        host: main memory of a machine for what is offloaded; None = recorded before it was written down, so predicted
            again without a limit: where that lets more be offloaded than was, the plan's digest tells.
        batches: numbered as in the result.
    """

    model: ModelSpec
    layout: ParallelLayout
    options: dict[str, Any]
    memory_cap_bytes: int
    batches: tuple[RecordedBatch, ...]
    host: HostMemory | None = None


def recorded_batch(plan: StepPlan) -> RecordedBatch:
    """Of a plan that trains its whole batch."""
    rows = ((one.doc_id, one.num_tokens, one.num_label_tokens) for one in plan.documents)
    return RecordedBatch(step=plan.step, documents=tuple(rows))


def option_tables_of(options: PlanOptions) -> dict[str, Any]:
    """As a configuration writes them down: own options of strategies in tables of their names."""
    shared = msgspec.to_builtins(options)
    own = {one.pop("strategy"): one for one in shared.pop("strategies")}
    return shared | own


def plan_again(inputs: BenchInputs, coefficients: CostCoefficients, strategy: str, batch: int) -> StepPlan:
    """What the running version plans and predicts for a recorded batch.

    Raises:
        ConfigError, DataError, InfeasiblePlanError: it cannot be planned any more.
    """
    options, _ = decide_dp_merge(plan_options(inputs.options), strategy, inputs.layout, coefficients)
    host = inputs.host or "unlimited"
    planner = StepPlanner(inputs.model, coefficients, inputs.layout, inputs.memory_cap_bytes, options, host=host)
    found = inputs.batches[batch]
    documents = tuple(
        Document(doc_id=doc_id, num_tokens=num_tokens, num_label_tokens=num_label_tokens)
        for doc_id, num_tokens, num_label_tokens in found.documents
    )
    return planner.plan(found.step, documents, strategy)
