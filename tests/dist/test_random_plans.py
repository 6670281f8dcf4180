"""Plans that no planner makes, through the real executor: random cuts, orders, policies, replicas with and without
documents, documents that ranks share. Every gradient equals plain training, and ranks hold what the memory model says.
(Planned ones, with every pair of features: test_matrix.)"""

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import pytest
import torch

from context_plans import RULES, context_plan, merged_plan, with_context
from dist_equality import assert_plans_equal_plain
from evenload.data.hub import model_from_config
from evenload.stepplan.transfer_order import LAG
from evenload.stepplan.validate import validate_plan
from evenload.types.layout import even_layout
from evenload.types.plan import StepPlan, seal
from matrix import BALANCED
from plan_building import random_plan
from reference_training import KINDS, tiny_config
from stored_bytes import assert_bytes_match_the_memory_model
from sweeps import LOOKS_FURTHER, spread
from varied_plans import SCHEDULES, varied_plan

TIED = {"tied": True}
FOUR_HEADS = {"num_key_value_heads": 4}
SHORT = {"num_documents": 20, "max_tokens": 10, "max_budget": 10}
"""Many packs, so that sent tensors are let go while others are on their way."""


class Case(NamedTuple):
    """Plans of one layout and the model that runs them.

    Args:
        is_held: bytes of every rank are those of the memory model; of documents that no ranks share.
        before: sizes of the layout in which the run began; {} = in that of the plans.
    """

    plans: Callable[[], list[StepPlan]]
    changes: Mapping[str, object] = {}
    kind: str = "llama"
    exchange: str = "all_gather"
    channels: str = "directed"
    dtype: torch.dtype = torch.float64
    is_held: bool = True
    before: Mapping[str, int] = {}


def varied(count: int = 1, *, num_layers: int = 4, virtual: int = 1, **options) -> list[StepPlan]:
    """Under every schedule that the stages allow; some documents are never cut."""
    schedules = SCHEDULES if virtual == 1 else ("list", "list_split")
    options |= {"num_layers": num_layers, "virtual": virtual}
    plans = [
        varied_plan(7919 * seed + 131 * at, schedule=name, whole=seed == 1, **options)
        for seed, (at, name) in itertools.product(range(count), enumerate(schedules))
    ]
    assert virtual > 1 or any("I" in plan.schedules[0].grid() for plan in plans), "backwards are really split"
    return plans


def recomputing(counts: tuple[int, ...], **options) -> list[StepPlan]:
    """So many layers of every stage recompute for all documents: FlexPipe's O_plan."""
    plans = varied(policies="replay", **options)
    return [seal(msgspec.structs.replace(plan, layout=plan.layout.recomputing(counts))) for plan in plans]


def in_context(cp: int, **options) -> list[StepPlan]:
    """Every sharding rule; documents recomputed or offloaded on each of their ranks, collectives inside I."""
    plans = varied(**options)
    return [with_context(plan, cp=cp, rule=rule) for plan, rule in zip(plans, itertools.cycle(RULES), strict=False)]


def shared(**sizes: int) -> list[StepPlan]:
    """Packs of static context parallelism under every rule, with documents of fewer tokens than ranks."""
    return [context_plan(1000 * sizes["cp"] + at, rule=rule, **sizes) for at, rule in enumerate(RULES)]


def merged(**sizes: int) -> list[StepPlan]:
    """Documents of all replicas, of blocks inside and of single replicas in one step."""
    return [merged_plan(100 * sizes["dp"] + at, rule=rule, **sizes) for at, rule in enumerate(RULES[1:])]


def orders(count: int, **sizes: int) -> list[StepPlan]:
    """Any legal numbers of forwards before a backward; replicas with many packs, few or none."""
    return [random_plan(1000 * sizes["pp"] + at, num_layers=4, **sizes) for at in range(count)]


CASES = {
    "pp2 dp2": Case(lambda: varied(2, pp=2, dp=2)),
    "pp2 virtual2, tied, float32": Case(lambda: varied(pp=2, virtual=2), TIED, dtype=torch.float32),
    "pp1 virtual2, tied": Case(lambda: varied(pp=1, virtual=2), TIED),
    "pp2 virtual6, fifo": Case(
        lambda: varied(num_layers=12, pp=2, virtual=6, num_documents=12), {"num_hidden_layers": 12}, channels="fifo"
    ),
    "pp3 virtual2, fifo": Case(
        lambda: varied(2, num_layers=6, pp=3, virtual=2, num_documents=12), {"num_hidden_layers": 6}, channels="fifo"
    ),
    "pp4, fifo": Case(lambda: varied(pp=4, **SHORT), channels="fifo"),
    "dp3, any order": Case(lambda: orders(4, pp=1, dp=3), is_held=False),
    "pp4 dp2, any order": Case(lambda: orders(3, pp=4, dp=2), is_held=False),
    "pp2 dp2, layers recompute": Case(lambda: recomputing((0, 1), pp=2, dp=2)),
    "tp2, layers recompute": Case(lambda: recomputing((3,), pp=1, tp=2)[:2]),
    "tp4": Case(lambda: varied(pp=1, tp=4)[2:3], FOUR_HEADS),
    "pp2 tp2 virtual2, tied": Case(lambda: varied(pp=2, tp=2, virtual=2), TIED),
    "tp2, biases behind sums, padding word": Case(
        lambda: varied(pp=1, tp=2), {"attention_bias": True, "mlp_bias": True, "tied": True, "pad_token_id": 60}
    ),
    "dp2 pp2 virtual2, tied, from pp4": Case(lambda: varied(pp=2, dp=2, virtual=2), TIED, before={"pp": 4}),
    "pp3, from dp3": Case(lambda: varied(num_layers=6, pp=3), {"num_hidden_layers": 6}, before={"dp": 3}),
    "cp3, ring": Case(lambda: shared(cp=3), exchange="ring", is_held=False),
    "pp2 cp2, ring, policies": Case(lambda: in_context(2, pp=2), exchange="ring", is_held=False),
    "pp2 cp2 tp2": Case(lambda: shared(pp=2, cp=2, tp=2), is_held=False),
    "dp4, merged": Case(lambda: merged(dp=4), is_held=False),
    "dp2 cp2, merged, ring": Case(lambda: merged(dp=2, cp=2), exchange="ring", is_held=False),
    "pp2 dp2, merged, fifo": Case(lambda: merged(dp=2, pp=2), channels="fifo", is_held=False),
    "dp2 pp2 cp2 tp2": Case(lambda: shared(dp=2, pp=2, cp=2, tp=2)[:1], is_held=False),
    "pp2 cp2, experts, ring": Case(lambda: shared(pp=2, cp=2)[:1], BALANCED, "qwen3_moe", "ring", is_held=False),
    **{
        f"pp2 virtual2, {kind}": Case(lambda: varied(pp=2, virtual=2, max_tokens=30, num_documents=5), TIED, kind)
        for kind in spread([kind for kind in KINDS if kind != "gemma4"], 4)  # whose layers lie on one stage
    },
}
MORE = {
    "tp4, all schedules": Case(lambda: varied(pp=1, tp=4), FOUR_HEADS),
    "tp2, layers recompute, all schedules": Case(lambda: recomputing((3,), pp=1, tp=2)),
    "cp4": Case(lambda: shared(cp=4), is_held=False),
    "dp2 pp2 tp2": Case(lambda: varied(pp=2, dp=2, tp=2)),
    "dp2 cp2 tp2": Case(lambda: shared(dp=2, cp=2, tp=2), is_held=False),
    "dp2 pp2 tp2, from pp4 tp2": Case(lambda: varied(pp=2, dp=2, tp=2), before={"pp": 4, "tp": 2}),
    "pp2 cp2 tp2, tied, from dp2 cp2 tp2": Case(
        lambda: shared(pp=2, cp=2, tp=2), TIED, is_held=False, before={"dp": 2, "cp": 2, "tp": 2}
    ),
    "dp2 pp2 tp2, merged": Case(lambda: merged(dp=2, pp=2, tp=2), is_held=False),
    "pp2 dp2 virtual2, fifo": Case(lambda: varied(2, pp=2, dp=2, virtual=2, **SHORT), channels="fifo"),
    "virtual2, layers recompute": Case(lambda: recomputing((2, 0), pp=1, virtual=2)),
    "cp3 virtual2, ring, policies": Case(lambda: in_context(3, pp=1, virtual=2), exchange="ring", is_held=False),
    "pp2 cp2 virtual2, policies": Case(lambda: in_context(2, pp=2, virtual=2), is_held=False),
    "dp3, merged": Case(lambda: merged(dp=3), is_held=False),
    "pp2 dp2, merged, ring": Case(lambda: merged(dp=2, pp=2), exchange="ring", is_held=False),
    "pp2 dp2, merged, experts": Case(lambda: merged(dp=2, pp=2), BALANCED, "mixtral", is_held=False),
    # A ring refuses windows, which this model has by turns; its capped scores go round.
    "cp2, capped scores, ring": Case(
        lambda: shared(cp=2), {"layer_types": ["full_attention"] * 4}, "gemma2", exchange="ring", is_held=False
    ),
}
"""The same at other sizes, and on up to sixteen processes."""


@pytest.mark.parametrize("name", CASES | MORE if LOOKS_FURTHER else CASES)
def test_gradients_equal_plain_training(gloo_pool, name):
    case = (CASES | MORE)[name]
    plans = case.plans()
    for plan in plans:
        validate_plan(plan)
    measured = assert_plans_equal_plain(
        gloo_pool,
        plans,
        kind=case.kind,
        changes=case.changes,
        dtype=case.dtype,
        channels=case.channels,
        exchange=case.exchange,
        before=even_layout(plans[0].layout.num_layers, **case.before) if case.before else None,
    )
    if case.channels == "fifo":
        assert all(rank.most_sends_kept <= LAG + 1 for ranks in measured for rank in ranks)
    if case.is_held:
        element_bytes = 4 if case.dtype == torch.float32 else 8
        model = model_from_config(tiny_config(case.kind, **case.changes).to_dict(), case.kind, element_bytes)
        for plan, ranks in zip(plans, measured, strict=True):
            assert_bytes_match_the_memory_model(plan, model, ranks)
