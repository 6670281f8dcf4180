"""Plans that this run cannot run are refused by name before anything is computed."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from context_plans import context_plan
from evenload.errors import InvalidPlanError
from evenload.runtime.step_source import prepare_step
from evenload.types.layout import ParallelLayout
from evenload.types.plan import StepPlan


def refusal(plan: StepPlan, layout: ParallelLayout) -> str:
    mesh = SimpleNamespace(layout=layout, dp_rank=0, pp_rank=0, device=torch.device("cpu"), context={})
    with pytest.raises(InvalidPlanError) as refused:
        prepare_step(plan, {}, cast("Any", mesh))
    return str(refused.value)


def test_a_plan_of_another_layout_is_refused() -> None:
    plan = context_plan(1, cp=2, rule="per_document")
    assert "planned for cp=2, this run is cp=3" in refusal(plan, context_plan(1, cp=3, rule="per_document").layout)


def test_a_sharding_that_does_not_say_who_computes_what_is_refused() -> None:
    plan = context_plan(1, cp=2, rule="mixed", lengths={0: 30})
    assert "choose per_sequence, per_document or the owner of every slice" in refusal(plan, plan.layout)
