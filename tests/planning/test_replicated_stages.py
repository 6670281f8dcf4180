"""Plans in layouts whose stages have different numbers of devices: valid, priced by the byte, explained."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import documents, reduction_seconds, sample_coefficients, sample_model
from evenload.cost.memory import static_bytes
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError, InvalidPlanError
from evenload.explore.timelines import detailed_timeline, split_proposal, split_step_of_plan
from evenload.planning.layouts.flex_planner import FlexPlanner
from evenload.planning.layouts.mapping_search import (
    BatchCosts,
    BatchLengths,
    MappingCosts,
    ReplicatedStageCosts,
    best_replicated_mapping,
    layer_costs,
)
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.registry import STRATEGIES
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout, split_layout
from evenload.types.plan import decode_plan, encode_plan, seal
from flex_cases import make

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
    for split in (split_proposal(proposal), split_step_of_plan(proposal.plan, planner.costs)):
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
        if not strategy.runs_replicated_stages:
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


LAYERS = 7
SLOW_LINK = LinkSpec(bandwidth_bytes_per_s=1e4, latency_s=0.1)
SLOW = sample_coefficients(intra_node=SLOW_LINK, inter_node=SLOW_LINK, devices_per_node=4)
GAP = 0.05
"""Most by which a mapping that the search leaves out may be better."""


def price_of(
    lengths: list[int], depth: int, count: int, cap_bytes: int | None = None, **changes
) -> ReplicatedStageCosts:
    batch = batch_costs(lengths, **changes)
    return ReplicatedStageCosts(batch, SLOW, depth=depth, dp=1, micro_batches=count, cap_bytes=cap_bytes)


def batch_costs(lengths: list[int], **changes) -> BatchCosts:
    costs = layer_costs(sample_model(num_layers=LAYERS, **changes), SLOW)
    return BatchCosts(BatchLengths(costs, np.array(lengths, np.int64)), None)


def all_splits(layers: int, depth: int) -> list[tuple[int, ...]]:
    return [(0, *cuts, layers) for cuts in itertools.combinations(range(1, layers), depth - 1)]


LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.integers(100, 400)), min_size=6, max_size=16)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(2, 5), st.integers(3, 8), st.sampled_from([None, 60_000, 200_000]), st.booleans())
def test_what_is_found_is_near_the_best_of_all_mappings_of_its_devices(
    lengths, depth, devices, cap_bytes, tied
) -> None:
    """Every split of the layers, and every way to give the stages all devices, not only one more to some."""
    if devices <= depth or devices % depth == 0:
        return
    price = price_of(lengths, depth, devices, cap_bytes, tied_embeddings=tied)
    fitting = [
        price.replicated_seconds(edges, of_stages)
        for edges in all_splits(LAYERS, depth)
        for of_stages in itertools.product(range(1, devices), repeat=depth)
        if sum(of_stages) == devices
        and max(of_stages) - min(of_stages) <= 1
        and not price.replicated_excess_bytes(edges, of_stages)
    ]
    result = best_replicated_mapping(price, devices)
    assert (result is None) == (not fitting)
    least, wide = divmod(devices, depth)
    ways = sorted(set(itertools.permutations([least + 1] * wide + [least] * (depth - wide))))
    by_way = {one: best_replicated_mapping(price, devices, [one]) for one in ways}
    assert all(one is None or one[1] == of_stages for of_stages, one in by_way.items())
    among_all = best_replicated_mapping(price, devices, ways)
    assert (among_all is None) == (result is None)
    if result is not None and among_all is not None:
        assert price.replicated_seconds(*among_all) <= price.replicated_seconds(*result)
        edges, of_stages = result
        assert sum(of_stages) == devices
        assert (edges[0], edges[-1]) == (0, LAYERS)
        assert not price.replicated_excess_bytes(edges, of_stages)
        seconds = price.replicated_seconds(edges, of_stages)
        assert seconds >= price.least_replicated_seconds(of_stages)
        assert seconds <= min(fitting) * (1 + GAP)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_one_device_a_stage_is_the_pipeline_of_equal_stages(count) -> None:
    """T and memory are those of `MappingCosts`, to rounding."""
    lengths = [30, 20, 50, 20, 5, 40, 10, 10, 20, 30]
    dealt = price_of(lengths, 3, count, 10**6)
    usual = MappingCosts(batch_costs(lengths), SLOW, depth=3, dp=1, micro_batches=count, cap_bytes=10**6)
    for edges in all_splits(LAYERS, 3):
        assert dealt.replicated_seconds(edges, (1, 1, 1)) == pytest.approx(usual.step_seconds(edges))
        for stage, (first, last) in enumerate(itertools.pairwise(edges)):
            held = dealt.static_stage_bytes(first, last, 1) + (last - first) * dealt.in_flight_bytes(1, 2 - stage)
            assert held == pytest.approx(usual.stage_bytes(stage, first, last))


def test_static_bytes_are_those_of_the_layout() -> None:
    """As `cost.memory` counts them for plans; activations of one token aside."""
    price = price_of([1] * 8, 3, 8, 10**9)
    layout = split_layout([2, 4, 1], pp=3, devices=[1, 2, 1])
    held = static_bytes(sample_model(num_layers=LAYERS), layout)
    for stage, (first, last) in enumerate(layout.stage_layers):
        result = price.static_stage_bytes(first, last, layout.devices[stage])
        rank = layout.stage_to_rank[stage]
        assert held[rank] - 12 < result < 1.3 * held[rank]


def test_flexpipe_searches_them_and_plans_in_them() -> None:
    """Three devices that hold no replica of four layers: two stages of one device idle the third, 2 + 1 use all."""
    flex, batch = make(1, 3, 50_000, part_pipelines=True), [20] * 24
    result = flex.candidates.search(np.array(batch), flex.layout)
    best = result.mappings[0]
    assert (best.depth, best.devices, best.edges, best.excess_bytes) == (2, (2, 1), (0, 3, 4), 0)
    assert best.step_s < min(one.step_s for one in result.mappings[1:] if not one.excess_bytes)
    (chosen,) = (one for one in flex.candidates.promising_layouts([result], flex.layout)[:1])
    assert chosen == msgspec.structs.replace(split_layout([3, 1], pp=2, devices=[2, 1]), generation=1)
    proposals = {
        layout.describe(): flex.planner_of(layout).propose(0, documents(batch), "flexpipe")
        for layout in (chosen, even_layout(4, pp=2), even_layout(4, pp=3))
    }
    for proposal in proposals.values():
        validate_plan(proposal.plan)
    seconds = {name: proposal.plan.predicted.step_time_s for name, proposal in proposals.items()}
    assert min(seconds, key=seconds.__getitem__) == "pp=2 devices=2+1"
    assert best.step_s == pytest.approx(seconds["pp=2 devices=2+1"], rel=0.1), "estimated and simulated"
    # A change to it needs room for old and new state side by side, which so little memory has not.
    assert flex.propose(0, documents(batch)).proposal.plan.layout.arrangement == flex.layout.arrangement


def test_a_declared_layout_of_them_is_estimated_as_the_search_does() -> None:
    flex, batch = make(1, 3, 50_000, part_pipelines=True), np.array([20] * 24)
    wide = split_layout([3, 1], pp=2, devices=[2, 1])
    declared = FlexPlanner(flex.start, flex.candidates.coefficients_of, flex.options, layouts=(flex.layout, wide))
    mapping = next(one for one in declared.candidates.search(batch, flex.layout).mappings if one.devices)
    assert mapping == flex.candidates.search(batch, flex.layout).mappings[0]
    assert declared.candidates.promising_layouts([declared.candidates.search(batch, flex.layout)], flex.layout)[0] == (
        msgspec.structs.replace(wide, generation=1)
    )
