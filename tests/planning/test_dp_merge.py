"""A document of twenty times the mean tokens on two and four replicas: no rank waits for it in the plan."""

import functools
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cost_samples
from context_plans import phased_plan
from cost_samples import sample_coefficients, sample_model
from evenload.errors import InvalidPlanError, ScheduleDeadlockError
from evenload.planning.cp_sharding import repriced_choices
from evenload.planning.dp_merge import merge_documents, unequal_merge
from evenload.planning.planner import Proposal, StepPlanner, StepRequest
from evenload.planning.problem import PlanOptions
from evenload.planning.search import search_merged
from evenload.planning.strategies.registry import decide_dp_merge
from evenload.planning.strategies.slimpack import slimpack_rules
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.stepplan.validate import check_replica, validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout
from evenload.types.plan import StepPlan, block_of, seal
from predicted_timeline import predicted_timeline
from strict_queues import waiting_ranks

documents = functools.partial(cost_samples.documents, first_id=50)
"""Ids that are no indices, so that one cannot pass for the other."""

replace = msgspec.structs.replace
LINKS = {"intra_node": LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=1e-4), "devices_per_node": 64}
OUTLIER = [900, 300, *[30] * 40]


def planner(dp: int = 4, pp: int = 1, merge: bool = True, **options) -> StepPlanner:
    fields = {"max_pack_tokens": 1024, "candidates": 3, "dp_merge": merge, **options}
    layout = even_layout(3, dp=dp, pp=pp)
    return StepPlanner(
        sample_model(), sample_coefficients(**LINKS), layout, None, PlanOptions(**fields), host="unlimited"
    )


def merged_plan(lengths=OUTLIER, **layout) -> StepPlan:
    plan = planner(**layout).plan(0, documents(lengths), "slimpack")
    assert any(piece.cp > 1 for packs in plan.pack_plans for pack in packs.forward for piece in pack.slices)
    return plan


@pytest.mark.parametrize("pp", [1, 3])
def test_an_outlier_no_longer_holds_up_the_step(pp: int) -> None:
    apart = planner(pp=pp, merge=False).propose(0, documents(OUTLIER), "slimpack")
    merged = planner(pp=pp).propose(0, documents(OUTLIER), "slimpack")
    assert apart.imbalance_dp > 1.5
    assert merged.imbalance_dp <= 1.05
    assert merged.plan.predicted.step_time_s < apart.plan.predicted.step_time_s
    validate_plan(merged.plan, max_pack_tokens=1024)
    (read,) = decode_plan_file(encode_plan_file([merged.plan]))
    assert read == merged.plan
    assert predicted_timeline(read, sample_model()).memory_bytes.max() == merged.plan.predicted.peak_memory_bytes


def test_groups_by_hand() -> None:
    """Mean work 100: 160 needs 4 replicas to be at most 40 each, 70 needs 2; the others stay alone."""
    problem = planner(dp=4)._problem(0, documents([1, 2, 3, 4, 5, 6, 7, 8]))
    work_s = np.array([160.0, 70.0, 40.0, 35.0, 25.0, 25.0, 25.0, 20.0])
    object.__setattr__(problem, "document_s", work_s)
    problem.costs.document_seconds = lambda tokens, policy=None, ranks=1: work_s[tokens - 1] / ranks  # type: ignore[method-assign]
    merge = merge_documents(problem)
    assert merge is not None
    assert {block: group.tolist() for block, group in merge.blocks.items()} == {(0, 4): [0], (0, 2): [1]}
    assert [block for block in merge.blocks if 1 in block.replicas] == [(0, 4), (0, 2)]
    assert [block for block in merge.blocks if 3 in block.replicas] == [(0, 4)]
    # Work so far 75, 75, 40, 40; 40 and 35 to replicas 2 and 3, 25 to 0, 1 and 3, 20 to 2: all have 100.
    assert [group.tolist() for group in merge.own] == [[4], [5], [2, 7], [3, 6]]


def test_groups_of_any_size_by_hand() -> None:
    """Five replicas, mean work 100: 190 needs two of them, and so does 170; 60 and 80 are left to the fifth and to what
    remains. Of three groups of two the third finds no place, whatever the share: until 150 runs alone."""
    problem = planner(dp=5)._problem(0, documents([1, 2, 3, 4]))

    def merged(work_s: list[float]):
        object.__setattr__(problem, "document_s", np.array(work_s))
        problem.costs.document_seconds = (  # type: ignore[method-assign]
            lambda tokens, policy=None, ranks=1: np.array(work_s)[tokens - 1] / ranks
        )
        merge = unequal_merge(problem)
        assert merge is not None
        return {block: group.tolist() for block, group in merge.blocks.items()}, [g.tolist() for g in merge.own]

    assert merged([190.0, 170.0, 80.0, 60.0]) == ({(0, 2): [0], (2, 2): [1]}, [[], [], [], [], [2, 3]])
    assert merged([160.0, 155.0, 150.0, 35.0])[0] == {(0, 2): [0], (2, 2): [1]}
    assert merged([290.0, 110.0, 60.0, 40.0])[0] == {(0, 3): [0]}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=30), st.integers(2, 16))
def test_groups_of_any_size_lie_side_by_side(lengths, dp) -> None:
    """Every document once, every replica in one group at most, groups that the layout has."""
    problem = planner(dp=dp)._problem(0, documents(lengths))
    merge = unequal_merge(problem)
    if merge is None:
        return
    members = [replica for block in merge.blocks for replica in block.replicas]
    assert len(set(members)) == len(members)
    assert set(members) <= set(range(dp))
    assert all(block.first % block.size == 0 for block in merge.blocks)
    assert {block.size for block in merge.blocks} <= set(problem.layout.block_sizes)
    placed = np.concatenate([*merge.blocks.values(), *merge.own])
    assert sorted(placed.tolist()) == list(range(len(lengths)))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.lists(st.integers(200, 900), min_size=1, max_size=5),
    st.sampled_from([2, 4, 5, 6, 7, 8]),
    st.sampled_from([1, 3]),
    st.sampled_from([merge_documents, unequal_merge]),
)
def test_members_meet_at_every_shared_pack_at_the_same_time(short, long, dp, pp, merged) -> None:
    """The simulator runs replicas apart; were members out of step, a real collective would wait or hang."""
    step = planner(dp=dp, pp=pp)
    problem = step._problem(0, documents([*short, *long]))
    merge = merged(problem)
    if merge is None:
        return
    result = search_merged(problem, merge, slimpack_rules(problem), 0.9)
    assert result is not None
    request = StepRequest(0, documents([*short, *long]), "slimpack")
    choices = repriced_choices(problem, result.choices())  # with later phases in the gaps of earlier ones
    plan = step._step_plan(request, problem, choices, np.zeros(len(request.documents), np.int64))
    validate_plan(plan, max_pack_tokens=1024)
    assert not waiting_ranks(plan)
    timeline = predicted_timeline(plan, sample_model())
    met: dict[tuple, set[tuple[float, float]]] = {}
    for dp_rank, rank, stage, kind, pack, start, end in zip(
        timeline.dp_rank.tolist(),
        timeline.rank.tolist(),
        timeline.stage.tolist(),
        timeline.kind.tolist(),
        timeline.pack.tolist(),
        timeline.start_s.tolist(),
        timeline.end_s.tolist(),
        strict=True,
    ):
        packs = plan.pack_plans[dp_rank]
        slices = (packs.forward if kind == 0 else packs.backward)[pack].slices
        if slices[0].cp > 1:
            met.setdefault((rank, stage, kind, slices), set()).add((start, end))
    assert met
    assert all(len(times) == 1 for times in met.values())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    dp=st.sampled_from([2, 4, 6, 7, 8]),
    sizes=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)]),
    split=st.booleans(),
    ahead=st.booleans(),
)
def test_nobody_waits_in_a_circle(seed, dp, sizes, split, ahead) -> None:
    """Members run a shared pack together, groups of several sizes in turn, with phases in each other's gaps or not;
    also where a pack takes another time than predicted, because nothing here looks at times."""
    blocks = {7: [(0, 5), (5, 1)], 8: [(0, 3), (3, 3), (6, 2)]}.get(dp, [])
    plan = phased_plan(seed, dp=dp, pp=sizes[0], virtual=sizes[1], split=split, ahead=ahead, blocks=blocks)
    validate_plan(plan)
    assert not waiting_ranks(plan)


def one_with_two_actions_swapped(plan: StepPlan) -> StepPlan:
    """Replica 0 runs a shared forward and a shared backward the other way round, where it can, alone."""
    packs, ranks = plan.pack_plans[0], plan.schedules[0].ranks
    for rank, row in enumerate(ranks):
        for at, pair in enumerate(itertools.pairwise(row)):
            listed = [(packs.forward if action.kind == "F" else packs.backward)[action.pack] for action in pair]
            if {action.kind for action in pair} != {"F", "B"} or any(
                block_of(plan, 0, one).size == 1 for one in listed
            ):
                continue
            other = (*row[:at], pair[1], pair[0], *row[at + 2 :])
            schedule = replace(plan.schedules[0], ranks=(*ranks[:rank], other, *ranks[rank + 1 :]))
            try:
                check_replica(plan.layout, packs, schedule)
            except ScheduleDeadlockError:
                continue
            return replace(plan, schedules=(schedule, *plan.schedules[1:]))
    return plan


def one_with_small_groups_first(plan: StepPlan) -> StepPlan:
    """Replica 0 runs its phases in the other order, which for itself alone is as good."""
    packs, rows = plan.pack_plans[0], []

    def size(action) -> int:
        return block_of(plan, 0, (packs.forward if action.kind == "F" else packs.backward)[action.pack]).size

    for row in plan.schedules[0].ranks:
        rows.append(tuple(sorted(row, key=size)))
    return replace(plan, schedules=(replace(plan.schedules[0], ranks=tuple(rows)), *plan.schedules[1:]))


@pytest.mark.parametrize("disordered", [one_with_two_actions_swapped, one_with_small_groups_first])
def test_other_orders_do_wait_in_a_circle(disordered) -> None:
    """Else the test above would say nothing; and a run refuses them."""
    hanging = 0
    for seed in range(12):
        plan = seal(disordered(phased_plan(seed, dp=4, pp=3)))
        if waiting_ranks(plan):
            hanging += 1
            assert "run the packs that they share in different orders" in _offence(plan)
    assert hanging >= 4


def test_merging_is_off_unless_asked_and_never_slower() -> None:
    assert not PlanOptions().dp_merge
    even = documents([100] * 16)
    assert planner().plan(0, even, "slimpack") == planner(merge=False).plan(0, even, "slimpack")
    for lengths in ([900, 10, 10, 10], OUTLIER, [500] * 5):
        times = [
            planner(merge=merge).plan(0, documents(lengths), "slimpack").predicted.step_time_s
            for merge in (True, False)
        ]
        assert times[0] <= times[1]


def _offence(plan: StepPlan) -> str:
    with pytest.raises(InvalidPlanError) as caught:
        validate_plan(plan)
    return str(caught.value)


def _with_replica(plan: StepPlan, dp_rank: int, **changes) -> StepPlan:
    packs = list(plan.pack_plans)
    packs[dp_rank] = replace(packs[dp_rank], **changes)
    return seal(replace(plan, pack_plans=tuple(packs)))


def _reordered(packs, first: int, second: int):
    order = list(packs)
    order[first], order[second] = replace(order[second], index=first), replace(order[first], index=second)
    return tuple(order)


def test_members_in_different_orders_are_refused() -> None:
    """Collectives issued in different orders hang all members; the printed rule has no guard against it."""
    plan = merged_plan([900, 900, 900, *[30] * 40])
    packs = plan.pack_plans[1]
    shared = [pack.index for pack in packs.forward if pack.slices[0].cp > 1]
    assert len(shared) > 1
    swapped = [_reordered(listed, shared[0], shared[1]) for listed in (packs.forward, packs.backward)]
    text = _offence(_with_replica(plan, 1, forward=swapped[0], backward=swapped[1]))
    assert "run the packs that they share in different orders" in text


def test_a_member_without_the_document_is_named() -> None:
    plan = merged_plan()
    packs = plan.pack_plans[3]
    piece = packs.forward[0].slices[0]
    assert piece.cp == 4
    cut = [tuple(replace(p, index=i) for i, p in enumerate(listed[1:])) for listed in (packs.forward, packs.backward)]
    text = _offence(_with_replica(plan, 3, forward=cut[0], backward=cut[1]))
    assert f"document {piece.doc_id} is shared by replicas 0 to 3, but lies on [0, 1, 2]" in text


def test_a_group_that_is_no_aligned_block_is_named() -> None:
    plan = merged_plan()
    packs = plan.pack_plans[0]
    piece = replace(packs.forward[0].slices[0], cp=5)
    changed = replace(packs.forward[0], slices=(piece,))
    text = _offence(_with_replica(plan, 0, forward=(changed, *packs.forward[1:])))
    assert "5 replicas share it, from 0 on, which are no block of dp=4" in text


LINK = LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=1e-4)
KNOWN = sample_coefficients(intra_node=LINK, devices_per_node=8)


@pytest.mark.parametrize("strategy", ["slimpack", "auto"])
@pytest.mark.parametrize("dp", [2, 3, 4, 6])
def test_on_where_replicas_can_share_and_nobody_said_otherwise(strategy, dp) -> None:
    layout = even_layout(3, dp=dp)
    options, output = decide_dp_merge(PlanOptions(max_pack_tokens=7), strategy, sample_model(), layout, KNOWN)
    assert options == PlanOptions(max_pack_tokens=7, dp_merge=True)
    assert "replicas share" in output
    kept, output = decide_dp_merge(PlanOptions(dp_merge=False), strategy, sample_model(), layout, KNOWN)
    assert kept.dp_merge is False
    assert "one replica (plan.options.dp_merge)" in output


def test_off_with_its_reason_where_nothing_can_be_shared() -> None:
    """A default must not refuse runs that went before: costs of one replica know no link."""
    layout = even_layout(3, dp=2)
    unknown, output = decide_dp_merge(PlanOptions(), "slimpack", sample_model(), layout, sample_coefficients())
    assert unknown.dp_merge is False
    assert "know no link" in output


def test_strategies_that_never_share_and_single_replicas_are_left_alone() -> None:
    """`require_trainable` refuses the option where it would do nothing."""
    model = sample_model()
    assert decide_dp_merge(PlanOptions(), "balanced", model, even_layout(3, dp=2), KNOWN) == (PlanOptions(), "")
    assert decide_dp_merge(PlanOptions(), "slimpack", model, even_layout(3), KNOWN) == (PlanOptions(), "")


EVEN = 1.05
TIMES_THE_MEAN = 20
LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2)]
MODEL = sample_model(num_layers=4)
# As on a CPU: attention dear enough that the outlier is half of the work of fifty documents, transfers not free.
COSTS = sample_coefficients(
    intra_node=LinkSpec(bandwidth_bytes_per_s=2e3, latency_s=1e-3),
    devices_per_node=64,
    head_s_per_token=0.3,
    embedding_s_per_token=0.1,
    head_pack_s=1.0,
)


def with_outlier(short: list[int], position: int) -> list[int]:
    """The short documents and one of 20 times the mean of all: x = 20 (S + x) / n."""
    outlier = TIMES_THE_MEAN * sum(short) // (len(short) + 1 - TIMES_THE_MEAN)
    return [*short[:position], outlier, *short[position:]]


def rank_seconds(proposal: Proposal) -> np.ndarray:
    """What every rank computes and sends in the step, without idle time; float64[dp, pp]."""
    rows = []
    for choice in proposal.choices:
        tasks = choice.candidate.tasks
        seconds = tasks.forward_s.sum(axis=0) + tasks.backward_s.sum(axis=0)
        seconds[:-1] += tasks.p2p_forward_s.sum()
        seconds[1:] += tasks.p2p_backward_s.sum()
        rows.append(seconds)
    return np.array(rows)


@pytest.mark.parametrize(("dp", "pp"), LAYOUTS)
@settings(max_examples=12, deadline=None)
@given(short=st.lists(st.integers(5, 60), min_size=25, max_size=120), position=st.integers(0, 120))
def test_ranks_end_together(dp: int, pp: int, short: list[int], position: int) -> None:
    """Where one replica would run the outlier alone for longer than its share, replicas share it."""
    layout, step = even_layout(4, dp=dp, pp=pp), documents(with_outlier(short, position))
    alone, merged = (
        StepPlanner(MODEL, COSTS, layout, None, options, host="unlimited").propose(0, step, "slimpack")
        for options in (PlanOptions(), PlanOptions(dp_merge=True))
    )
    for proposal in (alone, merged):
        validate_plan(proposal.plan)
    assert merged.imbalance_dp <= EVEN
    seconds = rank_seconds(merged)
    assert seconds.max() / seconds.mean() <= EVEN
    assert merged.plan.predicted.step_time_s <= alone.plan.predicted.step_time_s
    assume(alone.imbalance_dp > EVEN)
    assert any(s.cp > 1 for packs in merged.plan.pack_plans for pack in packs.forward for s in pack.slices)
