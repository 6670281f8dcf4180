"""A stream of global batches through a delaying strategy, as the loader drives it."""

from collections.abc import Iterator, Sequence

import msgspec

from evenload.plan.deferral import DelayState
from evenload.plan.planner import Proposal, StepPlanner
from evenload.types.document import Document
from evenload.types.plan import DEFERRED


def plan_stream(
    planner: StepPlanner, strategy: str, batches: Sequence[Sequence[int]], *, flush: bool = True
) -> Iterator[tuple[tuple[Document, ...], Proposal]]:
    """Documents at hand and proposal of every step; the state goes through its encoding each time.

    Args:
        batches: lengths of every batch; ids count up.
        flush: at the end, a step without new documents plans what still waits.
    """
    state, carried, next_id = DelayState(), (), 0
    for step in range(len(batches) + flush):
        is_last = step == len(batches)
        lengths = () if is_last else batches[step]
        new = tuple(
            Document(doc_id=next_id + i, num_tokens=int(n), num_label_tokens=int(n) - 1) for i, n in enumerate(lengths)
        )
        next_id += len(new)
        documents = (*carried, *new)
        if is_last and not documents:
            return
        proposal = planner.propose(step, documents, strategy, state=state, is_last=is_last)
        assert proposal.state is not None
        state = msgspec.json.decode(msgspec.json.encode(proposal.state), type=DelayState)
        assert state == proposal.state
        put_off = {left.doc_id for left in proposal.plan.left_out if left.reason == DEFERRED}
        assert put_off == {waiting.doc_id for waiting in state.waiting}
        carried = tuple(document for document in documents if document.doc_id in put_off)
        yield documents, proposal
