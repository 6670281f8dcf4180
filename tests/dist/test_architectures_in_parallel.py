"""Every architecture under random cuts in virtual stages, policies and split backwards, with the memory model's bytes.
(Planned cuts on every layout, and documents that ranks share: test_matrix.)"""

import pytest

from context_plans import RULES, context_plan, merged_plan
from dist_equality import assert_plans_equal_plain
from evenload.types.model import model_from_hf_config
from matrix import BALANCED
from reference_training import KINDS, tiny_config
from stored_bytes import assert_bytes_match_the_memory_model
from sweeps import spread, sweep
from varied_plans import varied_plan


@pytest.mark.parametrize("kind", spread(KINDS, 4))
def test_random_cuts_equal_plain_training_and_hold_what_is_predicted(gloo_pool, kind):
    """Tied weights, two stages on each of two ranks."""
    plans = [
        varied_plan(
            81 + 7 * index,
            num_layers=4,
            pp=2,
            virtual=2,
            policies=policies,
            schedule=("list", "list_split")[index % 2],
            whole=index == 2,
            max_tokens=30,
            num_documents=5,
        )
        for index, policies in sweep(list(enumerate(["replay", "mixed", "mixed", "recompute"])), 3)
    ]
    model = model_from_hf_config(tiny_config(kind).to_dict(), kind, 8)
    changes = {"tied": True}
    found = assert_plans_equal_plain(gloo_pool, plans, kind=kind, changes=changes)
    for plan, measured in zip(plans, found, strict=True):
        assert_bytes_match_the_memory_model(plan, model, measured)


@pytest.mark.parametrize(
    ("kind", "exchange", "changes"),
    sweep(
        [
            ("qwen3_moe", "ring", BALANCED),
            # A ring refuses windows, which this model has by turns; its capped scores go round.
            ("gemma2", "ring", {"layer_types": ["full_attention"] * 4}),
            ("mixtral", "all_gather", BALANCED),
        ],
        1,
    ),
)
def test_random_cuts_of_shared_documents_equal_plain_training(gloo_pool, kind, exchange, changes):
    """Context parallelism and DP-Merge, in a pipeline; ranks that share a document add up its counts of experts."""
    shared = [context_plan(500 + i, cp=2, pp=2, dp=1, rule=RULES[i % len(RULES)]) for i in sweep(range(2), 1)]
    merged = [merged_plan(600 + i, dp=2, pp=2, cp=1, rule="per_document") for i in range(1)]
    for plans in (shared, merged):
        assert_plans_equal_plain(gloo_pool, plans, kind=kind, changes=changes, exchange=exchange)
