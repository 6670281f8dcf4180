"""Plans that can be simulated but not run yet are refused by name before anything is computed."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.errors import InvalidPlanError
from evenload.plan.options import PlanOptions
from evenload.plan.planner import StepPlanner
from evenload.runtime.executor import Executor
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.layout import even_layout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_merge": True}, "2 ranks share document 0 .* plan with dp_merge = false"),
        ({"policy": "recompute"}, r"activation policies \['recompute'\]"),
    ],
)
def test_shared_documents_and_policies_are_refused(options: dict[str, Any], message: str) -> None:
    layout = even_layout(3, dp=2)
    link = LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=0.0)
    coefficients = sample_coefficients(intra_node=link, devices_per_node=8)
    planner = StepPlanner(sample_model(), coefficients, layout, None, PlanOptions(**options))
    lengths = [600, *[20] * 10]
    step = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths))
    plan = planner.plan(0, step, "slimpack")
    executor = Executor(cast("Any", None), cast("Any", SimpleNamespace(layout=layout, dp_rank=0)))
    with pytest.raises(InvalidPlanError, match=message):
        executor.run(plan, {})


def test_default_options_plan_what_the_runtime_runs() -> None:
    assert PlanOptions().policy == "replay"
    assert not PlanOptions().dp_merge
