import pytest

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.host_memory import host_memory
from evenload.data.hub import model_from
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.types.cluster import cluster_from
from evenload.types.document import Document
from evenload.types.layout import even_layout

NEARLY = 1.02
"""Levels are told apart by so much."""


def step_s(lengths: list[int], policy: str, strategy: str, memory: float) -> float:
    model, cluster = model_from("llama-13b"), cluster_from("h100x32")
    layout = even_layout(model.num_layers, cp=2, pp=4, tp=4)
    planner = StepPlanner(
        model,
        analytic_coefficients(model, cluster, layout),
        layout,
        int(memory * cluster.device.usable_bytes),
        PlanOptions(policy=policy),
        host=host_memory(cluster),  # type: ignore[arg-type]
    )
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths))
    proposal = planner.propose(0, documents, strategy)
    return proposal.plan.predicted.step_time_s if proposal.feasible else float("inf")


@pytest.mark.parametrize("strategy", ["slimpack", "auto"])
@pytest.mark.parametrize(
    ("lengths", "memory"),
    [([235_000] * 2 + [50_000] * 4, 1.25), ([220_000] * 3 + [5_000] * 60, 1.1), ([235_000] * 2 + [50_000] * 4, 1.0)],
)
def test_choosing_policies_is_as_fast_as_the_best_single_one(lengths, memory, strategy) -> None:
    """The list schedule fits all activations by holding forwards back; the pipeline then idles a third of the step
    that offloading would fill. Stopping at "everything stored fits" hid that."""
    chosen = step_s(lengths, "choose", strategy, memory)
    single = {policy: step_s(lengths, policy, strategy, memory) for policy in ("replay", "recompute", "offload")}
    assert chosen <= NEARLY * min(single.values())
