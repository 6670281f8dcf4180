"""Plans as planners emit them where time or memory is short: recomputed and offloaded documents, backwards split into
I and W, several stages on a rank; alone and together, through the real executor."""

import itertools

import pytest

from dist_equality import assert_plans_equal_plain
from evenload.types.model import model_from_hf_config
from reference_training import tiny_config
from varied_plans import SCHEDULES, predicted_kind_bytes, varied_plan

LAYERS = 4
# (pp, dp, virtual); 4 layers.
LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (2, 2, 2)]


def plans_of(pp, dp, virtual, policies, count, **options):
    """Plans under all schedules of a layout."""
    schedules = [name for name in SCHEDULES if virtual == 1 or name not in ("word", "zero bubble")]
    return [
        varied_plan(
            7919 * seed + 131 * pp + 17 * dp + virtual,
            num_layers=LAYERS,
            pp=pp,
            dp=dp,
            virtual=virtual,
            policies=policies,
            schedule=name,
            whole=seed % 3 == 0,
            **options,
        )
        for seed, name in itertools.product(range(count), schedules)
    ]


def assert_bytes_match_the_memory_model(plan, kind, measured):
    """What the stores counted is what the simulator expects: after every action, and at the peak of each kind."""
    model = model_from_hf_config(tiny_config(kind).to_dict(), kind, 8)
    for dp_rank in range(plan.layout.dp):
        for pp_rank, predicted in enumerate(predicted_kind_bytes(plan, model, dp_rank)):
            stored = measured[plan.layout.global_rank(pp_rank=pp_rank, dp_rank=dp_rank)]
            for name, column in stored.after_kinds.items():
                assert column == predicted[name]["after"], (pp_rank, name)
                highest = max([*predicted[name]["running"], *predicted[name]["after"]], default=0)
                assert stored.peak_by_kind[name] == highest, (pp_rank, name)


@pytest.mark.parametrize("policies", ["recompute", "offload", "mixed", "replay"])
@pytest.mark.parametrize(("pp", "dp", "virtual"), LAYOUTS)
def test_policies_and_splits_equal_plain_training(gloo_pool, pp, dp, virtual, policies):
    plans = plans_of(pp, dp, virtual, policies, 3 if policies == "mixed" else 2)
    assert any("I" in plan.schedules[0].grid() for plan in plans), "backwards are really split"
    for plan, measured in zip(plans, assert_plans_equal_plain(gloo_pool, plans), strict=True):
        assert_bytes_match_the_memory_model(plan, "llama", measured)
