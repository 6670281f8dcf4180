import msgspec
import numpy as np
import pytest

from evenload.data.exchange import documents_for_replica
from evenload.errors import InvalidPlanError
from evenload.types.document import Document, Slice
from evenload.types.layout import even_layout
from evenload.types.micropack import MicroPack, PackPlan
from evenload.types.plan import Prediction, StepPlan


def pack(index, direction, *slices):
    return MicroPack(
        index=index,
        direction=direction,
        slices=tuple(Slice(doc_id=doc, start=start, stop=stop) for doc, start, stop in slices),
    )


@pytest.fixture
def plan():
    """Replica 0: document 5 cut in two, and 3; replica 1: document 4 and a part of 5 (DP-Merge)."""
    return StepPlan(
        step=0,
        strategy="test",
        layout=even_layout(1, dp=2),
        documents=tuple(Document(doc_id=d, num_tokens=d, num_label_tokens=d - 1) for d in (3, 4, 5)),
        num_label_tokens=9,
        pack_plans=(
            PackPlan(
                dp_rank=0,
                forward=(pack(0, "forward", (5, 0, 2)), pack(1, "forward", (5, 2, 5), (3, 0, 3))),
                backward=(pack(0, "backward", (5, 0, 5), (3, 0, 3)),),
            ),
            PackPlan(
                dp_rank=1,
                forward=(pack(0, "forward", (5, 2, 5), (4, 0, 4)),),
                backward=(pack(0, "backward", (5, 2, 5), (4, 0, 4)),),
            ),
        ),
        schedules=(),
        times=(),
        predicted=Prediction(step_time_s=0.0, per_replica_s=(), peak_memory_bytes=0),
    )


TOKENS = {doc: np.arange(doc, dtype=np.int32) + 10 * doc for doc in (3, 4, 5)}


def test_each_replica_gets_its_documents_whole_in_order_of_use(plan):
    for rank, expected in ((0, [5, 3]), (1, [5, 4])):
        chosen = documents_for_replica(plan, rank, TOKENS)
        assert list(chosen) == expected
        for doc, tokens in chosen.items():
            assert tokens.tolist() == TOKENS[doc].tolist()


def test_a_plan_of_another_batch_is_refused(plan):
    with pytest.raises(InvalidPlanError, match="document 5 of 5 tokens, which is not there"):
        documents_for_replica(plan, 0, {3: TOKENS[3]})
    with pytest.raises(InvalidPlanError, match="has 6 tokens"):
        documents_for_replica(plan, 0, TOKENS | {5: np.zeros(6, np.int32)})
    with pytest.raises(InvalidPlanError, match="dp rank 2"):
        documents_for_replica(plan, 2, TOKENS)
    with pytest.raises(InvalidPlanError, match="document 5"):
        documents_for_replica(msgspec.structs.replace(plan, documents=plan.documents[:2]), 0, TOKENS)
