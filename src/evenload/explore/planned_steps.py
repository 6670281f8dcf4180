"""`planned_steps`: every step of an evaluation under one strategy in one layout, with what waits handed on."""

import time
from collections.abc import Sequence

from evenload.explore.sampled_batches import SampledBatch
from evenload.plan.deferral.delay import DelayState
from evenload.plan.planner import Proposal, StepPlanner
from evenload.types.document import Document
from evenload.types.plan import DEFERRED


def planned_steps(
    planner: StepPlanner, batches: Sequence[SampledBatch], name: str
) -> tuple[list[Proposal], list[float], int]:
    """Every step in one layout; seconds each took to plan; tokens deferred. Raises as `StepPlanner.propose`."""
    proposals: list[Proposal] = []
    plan_time_s: list[float] = []
    state, carried, deferred_tokens = DelayState(), (), 0
    for step, batch in enumerate(batches):
        documents: tuple[Document, ...] = (*carried, *batch.documents)
        is_last = step == len(batches) - 1
        started = time.perf_counter()
        proposal = planner.propose(step, documents, name, batch.left_out, state=state, is_last=is_last)
        plan_time_s.append(time.perf_counter() - started)
        proposals.append(proposal)
        state = proposal.state or DelayState()
        put_off = {left.doc_id for left in proposal.plan.left_out if left.reason == DEFERRED}
        deferred_tokens += sum(document.num_tokens for document in batch.documents if document.doc_id in put_off)
        carried = tuple(document for document in documents if document.doc_id in put_off)
    return proposals, plan_time_s, deferred_tokens
