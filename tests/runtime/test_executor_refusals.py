"""Plans that this run cannot run are refused by name before anything is computed."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from context_plans import context_plan
from evenload.errors import InvalidPlanError
from evenload.runtime.executor import Executor
from evenload.types.layout import ParallelLayout
from evenload.types.plan import StepPlan


def refusal(plan: StepPlan, layout: ParallelLayout) -> str:
    group = SimpleNamespace(rank=0, moved_bytes=0)
    mesh = SimpleNamespace(layout=layout, dp_rank=0, pp_rank=0, device=torch.device("cpu"), context={})
    executor = Executor(cast("Any", {0: SimpleNamespace()}), cast("Any", mesh))
    executor._groups = cast("Any", {(0, 1): group})
    with pytest.raises(InvalidPlanError) as refused:
        executor.prepare(plan, {})
    return str(refused.value)


def test_a_plan_of_another_layout_is_refused() -> None:
    plan = context_plan(1, cp=2, rule="per_document")
    assert "planned for cp=2, this run is cp=3" in refusal(plan, context_plan(1, cp=3, rule="per_document").layout)


def test_a_sharding_that_predicted_seconds_decide_needs_them() -> None:
    plan = context_plan(1, cp=2, rule="mixed", lengths={0: 30})
    assert "give the executor a ShardingCost" in refusal(plan, plan.layout)
