"""Packs in two halves that take turns inside a tensor-parallel group: equal to plain training, whatever is cut where;
no transfer more than without, and no byte."""

import msgspec
import pytest

from context_plans import RULES, in_parts, merged_plan, with_context
from dist_equality import assert_plans_equal_plain
from evenload.cost.group_comm import TENSOR_RINGS, WEIGHT_RINGS
from evenload.errors import InvalidPlanError
from evenload.stepplan.validate import validate_plan
from evenload.types.hf_config import model_from_hf_config
from evenload.types.layout import even_layout
from evenload.types.micropack import MicroPack, PackPlan
from evenload.types.plan import StepPlan, encode_plan, seal
from halved_plans import halved_and_valid
from plan_building import pack_plan, step_plan, word_schedule
from reference_training import tiny_config
from stored_bytes import assert_bytes_match_the_memory_model
from sweeps import LOOKS_FURTHER
from tensor_transfer_cases import hidden_transfers_by_action, transfer_accounts
from varied_plans import SCHEDULES, varied_plan

LAYERS = 4


def halved_plans(tp, pp, dp, virtual, count):
    """Cuts, policies and schedules by turns, whole documents in every third; halves even and uneven."""
    schedules = SCHEDULES if virtual == 1 else ("list_split",)
    policies = ("mixed", "recompute", "offload", "replay", "kept")
    return [
        halved_and_valid(
            varied_plan(
                41 * index + 7 * tp + 3 * pp + dp,
                num_layers=LAYERS,
                pp=pp,
                dp=dp,
                tp=tp,
                virtual=virtual,
                policies=policies[index % len(policies)],
                schedule=schedules[(index + 1) % len(schedules)],
                whole=index % 3 == 1,
                num_documents=6,
            ),
            share=(0.5, 0.2, 0.8)[index % 3],
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(("tp", "pp", "dp", "virtual"), [(4, 1, 1, 1), (2, 2, 1, 2), (2, 1, 2, 1)])
def test_halves_equal_plain_training_and_hold_what_the_model_says(gloo_pool, tp, pp, dp, virtual):
    """Weight gradients are summed in another order: to 1e-10 in float64, as everywhere."""
    changes = {"num_key_value_heads": 4} if tp == 4 else {}
    plans = halved_plans(tp, pp, dp, virtual, 9 if LOOKS_FURTHER else 3)
    model = model_from_hf_config(tiny_config("llama", **changes).to_dict(), "llama", 8)
    for plan, measured in zip(plans, assert_plans_equal_plain(gloo_pool, plans, changes=changes), strict=True):
        assert_bytes_match_the_memory_model(plan, model, measured)


@pytest.mark.parametrize("kind", ["gemma2", "qwen3"])
def test_norms_and_windows_of_other_architectures(gloo_pool, kind):
    """Gemma 2 norms what a block returns, so its products are made again under recompute."""
    assert_plans_equal_plain(gloo_pool, halved_plans(2, 1, 1, 1, 2), kind=kind)


def test_every_action_makes_the_transfers_it_is_charged(gloo_pool):
    forward, backward = (TENSOR_RINGS[direction] for direction in ("forward", "backward"))
    charged = {"F": forward, "B": backward, "I": backward, "W": WEIGHT_RINGS}
    for counts in gloo_pool.run(2, hidden_transfers_by_action, 3, 10):
        assert counts == pytest.approx(charged)


@pytest.mark.parametrize("first_rows", [0, 4, 12, 20])
def test_half_of_a_pack_has_recomputed_rows_and_the_other_makes_the_transfers_of_none(gloo_pool, first_rows):
    """12 of 24 rows: the cut is in them, behind them, and in the others."""
    forward, backward = (TENSOR_RINGS[direction] for direction in ("forward", "backward"))
    charged = {"F": forward, "B": backward + 0.5, "I": backward + 0.5, "W": WEIGHT_RINGS}
    for counts in gloo_pool.run(2, hidden_transfers_by_action, 3, first_rows, 12):
        assert counts == pytest.approx(charged)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_packs_of_mixed_policies_in_halves_equal_plain_training(gloo_pool, kind, share):
    """Gemma 2's down projections are made again too, with a turn of their own in each half."""
    sizes = {"num_layers": LAYERS, "pp": 1, "dp": 1, "tp": 2, "policies": "mixed", "num_documents": 6}
    plans = [
        halved_and_valid(varied_plan(seed, whole=whole, **sizes), share) for seed, whole in ((58, True), (35, False))
    ]
    for plan in plans:
        assert any(_is_mixed(pack, packs) for packs in plan.pack_plans for pack in packs.backward)
    assert_plans_equal_plain(gloo_pool, plans, kind=kind)


def _is_mixed(pack: MicroPack, packs: PackPlan) -> bool:
    """Whether its halves recompute different documents, or one of them none."""
    policies = {packs.policies.get(piece.doc_id, "replay") for piece in pack.slices}
    return pack.first_rows > 0 and len(policies) > 1 and "recompute" in policies


def shared_by_context_ranks(rule: str, index: int) -> StepPlan:
    """Cuts, policies and split backwards by turns; whole documents in every third."""
    plan = varied_plan(
        17 * index + len(rule),
        num_layers=LAYERS,
        pp=1,
        tp=2,
        policies=("mixed", "recompute", "offload")[index % 3],
        schedule="list_split" if index % 2 else "list",
        whole=index % 3 == 1,
        num_documents=6,
    )
    return with_context(plan, cp=2, rule=rule)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("rule", RULES)
def test_packs_that_context_ranks_share_equal_plain_training_in_halves(gloo_pool, kind, rule):
    """Also where ranks have rows of one half only, and of documents that lie whole on a rank."""
    plans = [halved_and_valid(shared_by_context_ranks(rule, i), (0.5, 0.2, 0.8)[i % 3]) for i in range(3)]
    assert_plans_equal_plain(gloo_pool, plans, kind=kind)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rule", ["per_document", "owners"])
def test_packs_that_replicas_share_equal_plain_training_in_halves(gloo_pool, rule, parts):
    """Beside each replica's own; keys and values in so many parts, each of some key heads."""
    plans = [
        halved_and_valid(in_parts(merged_plan(index, dp=2, tp=2, rule=rule), parts), share)
        for index, share in enumerate((0.5, 0.3, 0.7))
    ]
    assert any(pack.first_rows and pack.slices[0].cp > 1 for plan in plans for pack in plan.pack_plans[0].backward)
    assert_plans_equal_plain(gloo_pool, plans, changes={"num_key_value_heads": 4})


def test_the_accounts_of_a_shared_pack_have_both_kinds_of_transfers(gloo_pool):
    """Those of the tensor-parallel group between turns, and keys and values in parts: none without halves and parts."""
    plan = merged_plan(0, dp=2, tp=2)
    halved = halved_and_valid(in_parts(plan, 2))
    changes = {"num_key_value_heads": 4}
    for (no_halves, no_parts), (halves, parts) in gloo_pool.run(
        4, transfer_accounts, changes, [encode_plan(plan), encode_plan(halved)]
    ):
        assert no_halves == no_parts == 0
        assert halves > 0
        assert parts > 0


def test_packs_round_a_ring_are_not_halved(gloo_pool):
    plan = halved_and_valid(merged_plan(0, dp=2, tp=2))
    with pytest.raises(RuntimeError, match="is planned in two halves, but keys and values travel round the ranks"):
        assert_plans_equal_plain(gloo_pool, [plan], exchange="ring")


@pytest.mark.parametrize(
    ("first_rows", "sizes", "message"),
    [
        (5, {"tp": 2}, "forward pack 0 has 5 of 5 rows in its first half"),
        (-1, {"tp": 2}, "forward pack 0 has -1 of 5 rows in its first half"),
        (2, {}, "which hide tensor-parallel transfers, and tp is 1"),
        (2, {"cp": 2}, "which hide tensor-parallel transfers, and tp is 1"),
    ],
)
def test_what_cannot_be_halved_is_refused(first_rows, sizes, message):
    layout, pieces = even_layout(LAYERS, **sizes), [[(0, 0, 3), (1, 0, 2)]]
    packs = pack_plan(0, pieces, pieces)
    forward = (msgspec.structs.replace(packs.forward[0], first_rows=first_rows),)
    plan = step_plan(layout, {0: 3, 1: 2}, [packs], [word_schedule(packs, 1, [1], [0])])
    packs = msgspec.structs.replace(packs, forward=forward)
    with pytest.raises(InvalidPlanError, match=message):
        validate_plan(seal(msgspec.structs.replace(plan, pack_plans=(packs,))))
