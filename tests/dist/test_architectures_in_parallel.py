"""Every architecture under plans as planners emit them: cut documents, pipelines, replicas, virtual stages, activation
policies, split backwards, documents that ranks share; and the memory model's bytes for each."""

import pytest

from context_plans import RULES, context_plan, merged_plan
from dist_equality import assert_plans_equal_plain
from evenload.plan.cp_sharding import ShardingCost
from evenload.types.model import model_from_hf_config
from evenload.types.work import WorkCurve
from reference_training import tiny_config
from varied_plans import SCHEDULES, predicted_kind_bytes, varied_plan

KINDS = ["gemma", "gemma2", "gemma3", "olmo2", "mixtral", "qwen3_moe"]
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}


def assert_bytes_match_the_memory_model(plan, model, measured):
    for dp_rank in range(plan.layout.dp):
        for pp_rank, predicted in enumerate(predicted_kind_bytes(plan, model, dp_rank)):
            stored = measured[plan.layout.global_rank(pp_rank=pp_rank, dp_rank=dp_rank)]
            for name, column in stored.after_kinds.items():
                assert column == predicted[name]["after"], (pp_rank, name)
                highest = max([*predicted[name]["running"], *predicted[name]["after"]], default=0)
                assert stored.peak_by_kind[name] == highest, (pp_rank, name)


@pytest.mark.parametrize(
    ("pp", "dp", "virtual", "tied"), [(1, 1, 1, False), (2, 1, 1, False), (2, 2, 1, True), (2, 1, 2, True)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_plans_equal_plain_training_and_hold_what_is_predicted(gloo_pool, kind, pp, dp, virtual, tied):
    changes = {"tied": tied} | (BALANCED if kind in ("mixtral", "qwen3_moe") and not tied else {})
    schedules = [name for name in SCHEDULES if virtual == 1 or name not in ("word", "zero bubble")]
    plans = [
        varied_plan(
            31 * pp + 17 * dp + virtual + 7 * index,
            num_layers=4,
            pp=pp,
            dp=dp,
            virtual=virtual,
            policies=policies,
            schedule=schedules[index % len(schedules)],
            whole=index == 2,
            max_tokens=30,
            num_documents=5,
        )
        for index, policies in enumerate(["replay", "mixed", "recompute", "mixed"])
    ]
    model = model_from_hf_config(tiny_config(kind).to_dict(), kind, 8)
    for plan, measured in zip(
        plans, assert_plans_equal_plain(gloo_pool, plans, kind=kind, changes=changes), strict=True
    ):
        assert_bytes_match_the_memory_model(plan, model, measured)


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_documents_equal_plain_training(gloo_pool, kind, exchange):
    """Context parallelism and DP-Merge, in a pipeline; ranks that share a document add up its counts of experts."""
    cost = ShardingCost(WorkCurve(1.0, ((0.05, 0),), 0.5), tile=4, gather_s_per_token=0.1)
    shared = [context_plan(500 + i, cp=2, pp=2, dp=1, rule=RULES[i % len(RULES)]) for i in range(2)]
    merged = [merged_plan(600 + i, dp=2, pp=2, cp=1, rule="per_document") for i in range(1)]
    # A ring refuses windows; capped scores go round it.
    changes = {"layer_types": ["full_attention"] * 4} if exchange == "ring" and kind in ("gemma2", "gemma3") else {}
    changes |= BALANCED if kind in ("mixtral", "qwen3_moe") else {}
    for plans in (shared, merged):
        assert_plans_equal_plain(gloo_pool, plans, kind=kind, changes=changes, exchange=exchange, sharding_cost=cost)
