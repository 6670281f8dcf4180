"""Plans in layouts whose stages have different numbers of devices: valid, priced by the byte, explained."""

import msgspec
import pytest

from cost_samples import documents, reduction_seconds, sample_coefficients, sample_model
from evenload.cost.memory import static_bytes
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError, InvalidPlanError
from evenload.explore.timelines import detailed_timeline, split_planned_step, split_proposal
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.plan.strategies.registry import STRATEGIES
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout
from evenload.types.plan import decode_plan, encode_plan, seal

LINK = LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=0.001)
COEFFICIENTS = sample_coefficients(
    intra_node=LINK,
    inter_node=LINK,
    devices_per_node=8,
    host_link=LINK,
    reduce_bandwidth_bytes_per_s=1e6,
    reduce_latency_s=0.001,
    p2p_bandwidth_bytes_per_s=1e6,
    p2p_latency_s=0.001,
)
LAYOUT = even_layout(8, pp=3, devices=[1, 2, 1])
BATCH = documents([40, 10, 70, 20, 20, 90, 30, 10, 10, 60, 50, 20])


def planner_of(layout=LAYOUT, cap_bytes: int | None = None, **options) -> StepPlanner:
    model = sample_model(num_layers=layout.num_layers, tied_embeddings=True)
    settings = PlanOptions(**{"max_pack_tokens": 200, "candidates": 2} | options)
    return StepPlanner(model, COEFFICIENTS, layout, cap_bytes, settings, host="unlimited")


@pytest.mark.parametrize("strategy", ["balanced", "flexpipe"])
@pytest.mark.parametrize("policy", ["replay", "recompute", "offload"])
def test_plans_are_valid_and_every_device_has_its_turns(strategy, policy) -> None:
    proposal = planner_of(policy=policy).propose(0, BATCH, strategy)
    plan = decode_plan(encode_plan(proposal.plan))
    validate_plan(plan, max_pack_tokens=200)
    (schedule,), (packs,) = plan.schedules, plan.pack_plans
    assert len(schedule.ranks) == 4
    count = len(packs.forward)
    for rank, row in enumerate(schedule.ranks):
        (stage,) = LAYOUT.stages_of_rank(rank)
        own = [pack for pack in range(count) if LAYOUT.rank_of_pack(stage, pack) == rank]
        for kind in "FB":
            assert [(a.stage, a.pack) for a in row if a.kind == kind] == [(stage, pack) for pack in own]
    assert (
        plan.predicted.peak_memory_bytes > static_bytes(sample_model(num_layers=8, tied_embeddings=True), LAYOUT).max()
    )


def test_where_its_time_goes_adds_up_and_its_timeline_has_a_row_a_device() -> None:
    planner = planner_of()
    proposal = planner.propose(0, BATCH, "balanced")
    for split in (split_proposal(proposal), split_planned_step(proposal.plan, planner.costs)):
        assert sum(msgspec.structs.asdict(split).values()) == pytest.approx(proposal.plan.predicted.step_time_s)
    timeline = detailed_timeline(proposal.plan, planner.costs)
    assert set(timeline.rank.tolist()) == {0, 1, 2, 3}
    assert timeline.peak_bytes() == proposal.plan.predicted.peak_memory_bytes
    assert timeline.bubble_fraction() == pytest.approx(proposal.bubble_fraction)
    sends = timeline.side.kind == 3  # send_forward
    assert set(zip(timeline.side.rank[sends].tolist(), timeline.side.peer[sends].tolist(), strict=True)) == {
        (0, 1), (0, 2), (1, 3), (2, 3)
    }  # fmt: skip


def test_gradients_are_reduced_and_shards_cut_by_stage() -> None:
    """The middle stage's four layers on two devices; each end has one, which reduces nothing."""
    model = sample_model(num_layers=8)
    costs = PackCosts(model, COEFFICIENTS, LAYOUT)
    layers = 4 * 592
    ring_s = sum(COEFFICIENTS.ring_seconds(size * layers, 2) for size in (4, 2))
    assert reduction_seconds(costs) == pytest.approx(ring_s)
    ends = max(2 * 592 + 256, 2 * 592 + 256 + 8)
    assert costs.optimizer_seconds() == pytest.approx(COEFFICIENTS.optimizer_s_per_parameter * max(layers / 2, ends))
    held = static_bytes(model, LAYOUT)
    assert held[1] == held[2] == layers * (2 + 4) + 12 * layers / 2
    assert held[0] == (2 * 592 + 256) * (2 + 4 + 12)


def test_other_strategies_and_schedules_are_refused() -> None:
    for name, strategy in STRATEGIES.items():
        if not strategy.deals_packs:
            with pytest.raises(ConfigError, match=r"only balanced and flexpipe deal packs|has a pipeline and"):
                planner_of().propose(0, BATCH, name)
    for schedule in ("gpipe", "zb_h1", "static", "list", "interleaved"):
        with pytest.raises(ConfigError, match="it is of one rank a stage"):
            planner_of(schedule=schedule).propose(0, BATCH, "balanced")


def test_a_plan_that_cuts_a_document_or_changes_packs_on_the_way_back_is_refused() -> None:
    plan = planner_of().propose(0, BATCH, "balanced").plan
    (packs,) = plan.pack_plans
    swapped = tuple(
        msgspec.structs.replace(pack, slices=packs.backward[1 - at].slices) if at < 2 else pack
        for at, pack in enumerate(packs.backward)
    )
    broken = msgspec.structs.replace(plan, pack_plans=(msgspec.structs.replace(packs, backward=swapped),))
    with pytest.raises(InvalidPlanError, match="backward packs are not the forward packs"):
        validate_plan(seal(broken))
    moved = msgspec.structs.replace(plan, layout=even_layout(8, pp=3))
    with pytest.raises(InvalidPlanError, match="the schedule has 4 ranks, stages are on 3"):
        validate_plan(seal(moved))
