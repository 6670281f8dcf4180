"""Shared documents of random cuts under policies, split backwards and virtual stages, and what ranks hold of them.
(Planned ones with everything else: test_matrix.)"""

import itertools

import pytest

from context_plans import RULES, with_context
from dist_equality import assert_plans_equal_plain
from evenload.stepplan.validate import validate_plan
from evenload.types.model import model_from_hf_config
from reference_training import tiny_config
from sweeps import sweep
from varied_plans import SCHEDULES, predicted_kind_bytes, varied_plan


def shared_plans(cp, pp=1, dp=1, virtual=1, count=2, rules=RULES, policies="mixed", **options):
    """Under all schedules of the layout and all sharding rules in turn."""
    schedules = [name for name in SCHEDULES if virtual == 1 or name not in ("static", "zb_h1")]
    turn = itertools.cycle(rules)
    plans = []
    for seed, name in itertools.product(sweep(range(count), 1), schedules):
        plan = varied_plan(
            7919 * seed + 131 * pp + virtual, num_layers=4, pp=pp, dp=dp, virtual=virtual, policies=policies,
            schedule=name, whole=seed % 2 == 1, **options,
        )  # fmt: skip
        plans.append(with_context(plan, cp=cp, rule=next(turn)))
        validate_plan(plans[-1])
    return plans


@pytest.mark.parametrize(
    ("cp", "pp", "dp", "virtual", "exchange"),
    sweep([(2, 2, 1, 1, "ring"), (3, 1, 1, 2, "ring"), (2, 2, 1, 2, "all_gather")], 1),
)
def test_policies_splits_and_virtual_stages_equal_plain_training(gloo_pool, cp, pp, dp, virtual, exchange):
    """A document recomputed or offloaded on each of its ranks; collectives inside I and none in W."""
    plans = shared_plans(cp, pp, dp, virtual)
    assert virtual > 1 or any("I" in plan.schedules[0].grid() for plan in plans)
    assert_plans_equal_plain(gloo_pool, plans, exchange=exchange)


@pytest.mark.parametrize(("cp", "pp"), sweep([(2, 2), (3, 1), (2, 1)], 1))
def test_every_rank_holds_at_most_what_the_memory_model_says(gloo_pool, cp, pp):
    """Equal rows a rank, to a token a document; all keys, values and their gradients of a document that is cut."""
    plans = shared_plans(cp, pp, rules=["per_document"], max_tokens=200, num_documents=4, policies="replay")
    model = model_from_hf_config(tiny_config("llama").to_dict(), "llama", 8)
    measured = assert_plans_equal_plain(gloo_pool, plans)
    for plan, ranks in zip(plans, measured, strict=True):
        is_cut = any(s.start for p in plan.pack_plans for pack in (*p.forward, *p.backward) for s in pack.slices)
        for pp_rank, predicted in enumerate(predicted_kind_bytes(plan, model, 0)):
            here = [ranks[plan.layout.global_rank(pp_rank=pp_rank, dp_rank=0, cp_rank=rank)] for rank in range(cp)]
            for name in here[0].after_kinds:
                expected = predicted[name]["after"]
                fullest = [max(values) for values in zip(*(rank.after_kinds[name] for rank in here), strict=True)]
                if not is_cut:
                    assert all(have <= most for have, most in zip(fullest, expected, strict=True)), name
                # A cut document's rows are freed by the cell, not by the slice; its cells may each have a row more.
                assert max(fullest, default=0) <= 1.1 * max(expected, default=0), name
                assert max(fullest, default=0) >= 0.8 * max(expected, default=0), name
