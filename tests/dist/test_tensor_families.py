"""Tensor parallelism of families with experts and without, against plain training: see docs/limits.md for others."""

import numpy as np
import pytest
import torch

from evenload.types.plan import encode_plan
from matrix import Row
from matrix_plans import plan_of
from reference_training import plain_loss_and_gradients, relative_error
from tensor_families import FamilyTask, run_families, weights_of, whole_model

LIMIT = 1e-9
DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "granite", "ministral3", "smollm3",
         "cohere2")  # fmt: skip
WITH_EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe")


def plan_for(layout, strategy="slimpack", *, policy="mixed", schedule="own", virtual="1", **more):
    """A plan of documents of 1 to 64 tokens, some of which `slimpack` cuts, in other places in backward."""
    shared = "cp" in layout
    defaults = {"dp_merge": "off", "channels": "directed", "overlap": "on", "switch": "off", "model": "llama"}
    defaults |= {"sharding": "per_document" if shared else "none", "exchange": "all_gather" if shared else "none"}
    row = Row(strategy=strategy, layout=layout, virtual=virtual, policy=policy, schedule=schedule, **defaults | more)
    return plan_of(row), row.num_layers


def assert_equal_plain(pool, tasks, plan):
    ranks = pool.run(plan.layout.world_size, run_families, tasks)
    for index, task in enumerate(tasks):
        config = task.config()
        weights = weights_of(whole_model(task))
        loss, expected = plain_loss_and_gradients(config, weights, task.tokens(), torch.float64)
        results = [rank[index] for rank in ranks]
        assert sum(one[0] for one in results) == pytest.approx(loss, rel=LIMIT), f"{task.family}: loss"
        ours = {name: torch.from_numpy(gradient) for one in results for name, gradient in one[1].items()}
        assert ours.keys() == expected.keys(), task.family
        for _, own, norm, _ in results:
            for name, gradient in own.items():
                error = relative_error(torch.from_numpy(gradient), expected[name])
                assert error <= LIMIT, f"{task.family}: {name} differs by {error:.1e}"
            assert norm == pytest.approx(np.sqrt(sum(g.square().sum().item() for g in expected.values())), rel=LIMIT)


@pytest.mark.parametrize("strategy", ["slimpack", "balanced"])
@pytest.mark.parametrize("family", [*DENSE, *WITH_EXPERTS])
def test_gradients_equal_plain_training(gloo_pool, family, strategy):
    """Of documents that are cut, elsewhere in backward, and whole; under every activation policy."""
    plan, num_layers = plan_for("tp2", strategy)
    assert_equal_plain(gloo_pool, [FamilyTask(family, num_layers, encode_plan(plan))], plan)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp2 tp2", {}),
        ("pp2 tp2", {"virtual": "2", "schedule": "list_split"}),
        ("pp2 tp2", {"schedule": "zb_h1", "strategy": "balanced"}),
        ("cp2 tp2", {}),
    ],
    ids=["dp2", "virtual stages, split backwards", "zero bubble", "cp2"],
)
def test_experts_with_every_dimension(gloo_pool, layout, options):
    plan, num_layers = plan_for(layout, **options)
    tasks = [FamilyTask(family, num_layers, encode_plan(plan)) for family in WITH_EXPERTS]
    assert_equal_plain(gloo_pool, tasks, plan)
