"""Which documents' tokens a data-parallel replica needs for a step.

This is the seam between loading and training: today every rank reads the whole global batch, so the
exchange is a selection. When ranks read their own shares (DESIGN §9), the all-to-all that sends tokens
to the rank that trains them comes here, with the same result.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from evenload.errors import InvalidPlanError
from evenload.types.plan import StepPlan


def documents_for_replica(
    plan: StepPlan, dp_rank: int, tokens: Mapping[int, NDArray[np.int32]]
) -> dict[int, NDArray[np.int32]]:
    """Tokens of the documents with a slice in this replica's packs, in the order of first use.

    A document that several replicas share (DP-Merge) goes whole to each of them.

    Args:
        tokens: int32[num_tokens] by doc_id, of the global batch.

    Raises:
        InvalidPlanError: no such replica, or the plan names a document or length that the batch has not.
    """
    found = [packs for packs in plan.pack_plans if packs.dp_rank == dp_rank]
    if len(found) != 1:
        raise InvalidPlanError(
            f"plan of step {plan.step} has {len(found)} pack plans for dp rank {dp_rank}, "
            f"expected one (of {len(plan.pack_plans)})"
        )
    lengths = {document.doc_id: document.num_tokens for document in plan.documents}
    selected: dict[int, NDArray[np.int32]] = {}
    for pack in (*found[0].forward, *found[0].backward):
        for piece in pack.slices:
            if piece.doc_id in selected:
                continue
            content = tokens.get(piece.doc_id)
            if content is None or len(content) != lengths.get(piece.doc_id):
                have = "is not there" if content is None else f"has {len(content)} tokens"
                raise InvalidPlanError(
                    f"plan of step {plan.step} trains document {piece.doc_id} of {lengths.get(piece.doc_id)} tokens, "
                    f"which {have} in the batch; the plan was made for another batch"
                )
            selected[piece.doc_id] = content
    return selected
