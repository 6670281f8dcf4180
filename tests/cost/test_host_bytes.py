"""Memory of a whole process, added up by hand."""

from cost_samples import sample_coefficients, sample_model
from evenload.cost.host_memory import ALLOCATOR_SHARE, FIRST_USE_BYTES, process_bytes
from evenload.cost.memory import static_bytes
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.model import ModelSpec
from evenload.types.plan import StepPlan

FIXED = 300_000_000


def planned(model: ModelSpec, tokens: int, **sizes: int) -> StepPlan:
    step = tuple(Document(doc_id=i, num_tokens=tokens, num_label_tokens=tokens - 1) for i in range(2))
    options = PlanOptions(max_pack_tokens=tokens)
    return StepPlanner(model, sample_coefficients(), even_layout(3, **sizes), None, options, host="unlimited").plan(
        0, step, "best_fit"
    )


def test_activations_carry_the_allocators_share() -> None:
    model = sample_model()
    plan = planned(model, 5000)
    static = int(static_bytes(model, plan.layout).max())
    activations = plan.predicted.peak_memory_bytes - static
    expected = FIXED + FIRST_USE_BYTES + static + round((1 + ALLOCATOR_SHARE) * activations)
    assert process_bytes(model, plan, FIXED) == expected


def test_after_the_pipeline_the_update_may_need_more() -> None:
    """A large model on a few tokens: fp64 norms of the largest unit; of replicas also gloo's copy."""
    model = sample_model(vocab_size=50_000)  # the embedding, 400,000 weights, is the largest unit
    alone = planned(model, 2)
    static = int(static_bytes(model, alone.layout).max())
    assert process_bytes(model, alone, FIXED) == FIXED + FIRST_USE_BYTES + static + 8 * 400_000
    two = planned(model, 2, dp=2)
    static = int(static_bytes(model, two.layout).max())
    after = 8 * 200_000 + 4 * 400_000
    assert process_bytes(model, two, FIXED) == FIXED + FIRST_USE_BYTES + static + after
