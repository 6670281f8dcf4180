"""Order of transfers: no plan deadlocks, however strictly transfers wait for each other, and few tensors are kept."""

import graphlib
from collections import defaultdict
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import evenload.stepplan.transfer_order as freed_sends_module
import strict_queues
from context_plans import merged_plan, phased_plan
from evenload.errors import InvalidPlanError
from evenload.schedule.simulate import simulate
from evenload.schedule.static_schedules import gpipe, interleaved_one_f_one_b, one_f_one_b
from evenload.stepplan.resimulation import timed_tasks
from evenload.stepplan.transfer_order import LAG, action_places, freed_sends
from evenload.stepplan.validate import validate_plan
from evenload.types.document import Slice
from evenload.types.layout import even_layout, sending_channels
from evenload.types.pipeline import action_columns
from evenload.types.plan import PackTimes, StepPlan
from plan_building import pack_plan, step_plan, word_schedule
from strict_queues import node_names, plan_events, stuck_ranks
from varied_plans import varied_plan

LAYOUTS = [(2, 1), (3, 1), (4, 1), (6, 1), (2, 2), (3, 2), (2, 3)]
SCHEDULES = ["static", "list", "list_split", "zb_h1", "1f1b", "gpipe"]


def scheduled_plan(seed: int, layout: tuple[int, int], schedule: str, num_documents: int, **options) -> StepPlan:
    """Random packs and seconds under a schedule; with several stages on a rank under one that can run them."""
    pp, virtual = layout
    if virtual > 1 and schedule not in ("list", "list_split"):
        schedule = "list_split"
    fixed = {"1f1b": one_f_one_b, "gpipe": gpipe}.get(schedule)
    plan = varied_plan(
        seed, num_layers=12, pp=pp, virtual=virtual, schedule="static" if fixed else schedule, max_tokens=4,
        num_documents=num_documents, max_budget=6, **options,
    )  # fmt: skip
    if fixed is None:
        return plan
    return msgspec.structs.replace(plan, schedules=(fixed(timed_tasks(plan, 0)).to_schedule(),))


def interleaved_plan(seed: int, pp: int, virtual: int, num_packs: int) -> StepPlan:
    """Whole documents, a pack each, under interleaved 1F1B; random seconds."""
    numbers = np.random.default_rng(seed)
    layout = even_layout(12, pp=pp, virtual=virtual)
    lengths = dict.fromkeys(range(num_packs), 3)
    listed = [[(doc, 0, n)] for doc, n in lengths.items()]
    times = PackTimes(
        forward_s=tuple(map(tuple, numbers.uniform(0.5, 2, (num_packs, layout.num_stages)).tolist())),
        backward_s=tuple(map(tuple, numbers.uniform(1, 4, (num_packs, layout.num_stages)).tolist())),
        p2p_forward_s=tuple(numbers.uniform(0, 0.2, num_packs).tolist()),
        p2p_backward_s=tuple(numbers.uniform(0, 0.2, num_packs).tolist()),
    )
    packs = pack_plan(0, listed, listed)
    nothing = word_schedule(packs, pp, list(range(1, num_packs + 1)), [0] * pp)
    plan = msgspec.structs.replace(step_plan(layout, lengths, [packs], [nothing]), times=(times,))
    schedule = interleaved_one_f_one_b(timed_tasks(plan, 0)).to_schedule()
    return msgspec.structs.replace(plan, schedules=(schedule,))


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    layout=st.sampled_from(LAYOUTS),
    schedule=st.sampled_from(SCHEDULES),
    num_documents=st.integers(1, 40),
    lag=st.sampled_from([0, LAG]),
)
def test_no_plan_deadlocks_if_a_rank_runs_one_transfer_at_a_time(seed, layout, schedule, num_documents, lag):
    plan = scheduled_plan(seed, layout, schedule, num_documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freed_sends_module, "LAG", lag)  # 0: the least slack that is still right
        events = plan_events(plan)
    assert not stuck_ranks(events, one_queue=True)
    assert not stuck_ranks(events, one_queue=False)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.sampled_from([(2, 1), (3, 1), (2, 2), (2, 3)]),
    schedules=st.tuples(*[st.sampled_from(SCHEDULES)] * 2),
    counts=st.tuples(*[st.integers(1, 20)] * 2),
)
def test_sums_of_gradients_in_the_same_queue_do_not_deadlock(seed, sizes, schedules, counts):
    """Of two replicas, each with packs and an order of its own, as soon as a stage is complete."""
    parts = [
        scheduled_plan(seed + at, sizes, schedule, count)
        for at, (schedule, count) in enumerate(zip(schedules, counts, strict=True))
    ]
    plan = beside_each_other(parts)
    assert not stuck_ranks(plan_events(plan, sums="downwards"), one_queue=True)


def beside_each_other(parts: list[StepPlan]) -> StepPlan:
    """Plans of one pipeline as replicas of a step."""
    layout = msgspec.structs.replace(parts[0].layout, dp=len(parts))
    fields = ("pack_plans", "schedules", "times")
    joined = {name: tuple(getattr(part, name)[0] for part in parts) for name in fields}
    packs = tuple(msgspec.structs.replace(one, dp_rank=at) for at, one in enumerate(joined["pack_plans"]))
    return msgspec.structs.replace(parts[0], layout=layout, **{**joined, "pack_plans": packs})


def test_sums_in_each_replicas_own_order_do_deadlock(monkeypatch):
    """W's may complete the stages of a rank in another order than its twin's; else the test above would say nothing."""
    whole = scheduled_plan(1, (2, 2), "list", 12)
    parts = [split_with_last_weights(whole, stages) for stages in ((0, 1), (2, 3))]
    plan = beside_each_other(parts)
    assert not stuck_ranks(plan_events(plan, sums="downwards"), one_queue=True)
    monkeypatch.setattr(strict_queues, "completing_actions", each_stage_with_its_last_action)
    assert stuck_ranks(plan_events(plan, sums="as complete"), one_queue=True)


def split_with_last_weights(plan: StepPlan, stages: tuple[int, ...]) -> StepPlan:
    """Every backward as I, and all W's at the end of the rows, those of these stages last."""
    (times,) = plan.times
    half = tuple(tuple(s / 2 for s in row) for row in times.backward_s)
    rows = []
    for row in plan.schedules[0].ranks:
        weights = [msgspec.structs.replace(action, kind="W") for action in row if action.kind == "B"]
        inputs = [msgspec.structs.replace(action, kind="I") if action.kind == "B" else action for action in row]
        rows.append((*inputs, *sorted(weights, key=lambda action: action.stage in stages)))
    schedule = msgspec.structs.replace(plan.schedules[0], ranks=tuple(rows))
    split = msgspec.structs.replace(times, input_s=half, weight_s=half)
    return msgspec.structs.replace(plan, schedules=(schedule,), times=(split,))


def each_stage_with_its_last_action(
    actions: Iterable[tuple[str, int]], num_before_sums: int = 0
) -> dict[int, tuple[int, ...]]:
    last = {stage: at for at, (kind, stage) in enumerate(actions) if kind != "F"}
    return {at: (stage,) for stage, at in last.items()}


@pytest.mark.parametrize(("pp", "virtual"), [(2, 2), (2, 3), (3, 2), (4, 3)])
def test_interleaved_plans_do_not_deadlock_either(pp, virtual):
    for seed in range(5):
        plan = interleaved_plan(seed, pp, virtual, num_packs=pp * (1 + seed))
        assert not stuck_ranks(plan_events(plan), one_queue=True)


@pytest.mark.parametrize("lag", [0, LAG])
def test_replicas_that_share_packs_do_not_deadlock(monkeypatch, lag):
    """They meet in shared actions, also where their predictions disagree."""
    monkeypatch.setattr(freed_sends_module, "LAG", lag)
    for seed in range(12):
        plan = merged_plan(seed, dp=4, pp=2 + seed % 2)
        for one in (plan, with_other_seconds(plan, seed)):
            assert not stuck_ranks(plan_events(one), one_queue=True)
            assert not stuck_ranks(plan_events(one, sums="behind"), one_queue=True)
            assert not stuck_ranks(plan_events(one, sums="downwards"), one_queue=True)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    dp=st.sampled_from([2, 4, 5, 6, 8]),
    sizes=st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (2, 3), (3, 2)]),
    split=st.booleans(),
    ahead=st.booleans(),
    own=st.sampled_from([1.0, 0.5, 0.1]),
)
def test_sums_behind_shared_packs_do_not_deadlock(seed, dp, sizes, split, ahead, own):
    """Groups of several sizes, all or some of whose members have packs of their own, in the gaps of shared ones: ranks
    meet in packs and in sums, whatever waits for whatever."""
    blocks = {5: [(0, 2), (2, 2)], 8: [(0, 3), (3, 3), (6, 2)]}.get(dp, [])
    shape = {"dp": dp, "pp": sizes[0], "virtual": sizes[1], "blocks": blocks}
    plan = phased_plan(seed, **shape, split=split, ahead=ahead, own=own)
    validate_plan(plan)
    events = plan_events(plan, sums="downwards")
    assert not stuck_ranks(events, one_queue=True)
    assert not stuck_ranks(events, one_queue=False)


@pytest.mark.parametrize(
    ("seed", "pp", "virtual", "own"), [(8, 2, 2, 1.0), (10, 3, 1, 1.0), (14, 3, 2, 1.0), (1, 1, 1, 0.5), (1, 3, 1, 0.5)]
)
def test_sums_among_shared_packs_do_deadlock(seed, pp, virtual, own):
    """Else the test above would say nothing: here a rank waits in a sum, and others for it in a pack."""
    plan = phased_plan(seed, dp=4, pp=pp, virtual=virtual, own=own)
    assert stuck_ranks(plan_events(plan, sums="at once"), one_queue=True)
    assert not stuck_ranks(plan_events(plan, sums="downwards"), one_queue=True)


def with_other_seconds(plan: StepPlan, seed: int) -> StepPlan:
    """Every replica predicts its own seconds of every pack, some of them 0."""
    numbers = np.random.default_rng(seed)
    times = tuple(
        msgspec.structs.replace(
            one,
            forward_s=tuple(tuple(s * numbers.choice([0, 1, 9]) for s in row) for row in one.forward_s),
            backward_s=tuple(tuple(s * numbers.choice([0, 1, 9]) for s in row) for row in one.backward_s),
        )
        for one in plan.times
    )
    return msgspec.structs.replace(plan, times=times)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(LAYOUTS), st.sampled_from(SCHEDULES))
def test_transfers_stand_in_the_order_of_predicted_ends(seed, layout, schedule):
    """So that none stands behind one that is sent later, as long as ranks run as predicted."""
    plan = scheduled_plan(seed, layout, schedule, 20)
    end_s = simulate(timed_tasks(plan, 0), action_columns(plan.schedules[0])).end_s
    places = action_places(plan, 0)
    assert sorted(places.tolist()) == list(range(len(places)))
    assert (np.diff(end_s[np.argsort(places)]) >= 0).all()


def test_all_members_of_a_block_have_one_order_of_what_they_share():
    """Each rank makes the order itself."""
    shared = 0
    for seed in range(6):
        plan = with_other_seconds(merged_plan(seed, dp=4, pp=2), seed)
        places: dict[tuple, int] = {}
        for dp_rank in range(4):
            mine = action_places(plan, dp_rank).tolist()
            for name, place in zip(node_names(plan, dp_rank).values(), mine, strict=True):
                shared += name in places
                assert places.setdefault(name, place) == place or name[1] == 1
    assert shared > 50


def test_shared_packs_in_other_orders_are_refused():
    """Replica 0 meets 1, 2 and 3 first and then 1, replica 1 the other way round: both would wait for ever."""
    layout = even_layout(1, dp=4)
    lengths = {0: 8, 1: 8}  # document 0 on all replicas, document 1 on the first two

    def packs(dp_rank: int, documents: list[int]):
        listed = [[(doc, 0, 8)] for doc in documents]
        made = pack_plan(dp_rank, listed, listed)

        def shared(pack):
            pieces = tuple(Slice(doc_id=s.doc_id, start=0, stop=8, cp=4 if s.doc_id == 0 else 2) for s in pack.slices)
            return msgspec.structs.replace(pack, slices=pieces)

        return msgspec.structs.replace(
            made, forward=tuple(map(shared, made.forward)), backward=tuple(map(shared, made.backward))
        )

    def plan_of(orders: list[list[int]]) -> StepPlan:
        made = [packs(dp_rank, documents) for dp_rank, documents in enumerate(orders)]
        schedules = [word_schedule(one, 1, list(range(1, len(one.forward) + 1)), [0]) for one in made]
        return step_plan(layout, lengths, made, schedules)

    assert len(action_places(plan_of([[0, 1], [0, 1], [0], [0]]), 3)) == 2
    with pytest.raises(InvalidPlanError, match="wait for each other in a circle"):
        action_places(plan_of([[0, 1], [1, 0], [0], [0]]), 3)


def sends_on(action, channel) -> bool:
    kind, stage = channel
    return action.kind in ("F" if kind == "F" else "BI") and stage == action.stage + (1 if kind == "F" else -1)


SENDING_LAYOUTS = [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3), (1, 3)]


def receives_of(plan: StepPlan, channel, dp_rank: int) -> list[tuple[int, int]]:
    """(rank, place in its list) of every action that receives on a channel, in pack order."""
    kind, stage = channel
    rank = plan.layout.stage_to_rank[stage]
    kinds = "F" if kind == "F" else "BI"
    row = plan.schedules[dp_rank].ranks[rank]
    return [(rank, at) for at, action in enumerate(row) if action.stage == stage and action.kind in kinds]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(SENDING_LAYOUTS),
    st.sampled_from(["list", "list_split", "zb_h1", "static"]),
    st.integers(1, 40),
)
def test_waits_for_sends_never_close_a_circle(seed, layout, schedule, num_documents):
    pp, virtual = layout
    if virtual > 1 and schedule in ("zb_h1", "static"):
        schedule = "list"
    plan = varied_plan(
        seed, num_layers=12, pp=pp, virtual=virtual, schedule=schedule, max_tokens=4, num_documents=num_documents,
        max_budget=6,
    )  # fmt: skip
    require_no_circle(plan)


def require_no_circle(plan: StepPlan) -> int:
    """Order on a rank, data, and every wait for a send: one order of all actions obeys them all, so whatever the real
    durations are, some rank can always go on. A send is over when its receiver has done all that stands before the
    receiving action; a shared action is one action of all members. Returns the number of waits."""
    waited, needs = 0, defaultdict(set)
    for dp_rank, schedule in enumerate(plan.schedules):
        names = node_names(plan, dp_rank)
        for rank, row in enumerate(schedule.ranks):
            channels = sending_channels(plan.layout, rank)
            sends = {
                channel: [at for at, action in enumerate(row) if sends_on(action, channel)] for channel in channels
            }
            for at, waits in zip(range(len(row)), freed_sends(plan, dp_rank, rank), strict=True):
                before = needs[names[rank, at]]
                before |= {names[rank, at - 1]} if at else set()
                for channel, count in waits:
                    waited += 1
                    receiver, place = receives_of(plan, channel, dp_rank)[count - 1]
                    before |= {names[receiver, place - 1]} if place else set()
                    assert sends[channel][count - 1] < at, "only what has been sent is waited for"
            for channel, sent in sends.items():
                for at, receive in zip(sent, receives_of(plan, channel, dp_rank), strict=True):
                    needs[names[receive]].add(names[rank, at])
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError
    return waited


def test_waits_close_no_circle_through_packs_that_replicas_share(monkeypatch):
    """A shared action is one action of all members: they meet in its transfers."""
    monkeypatch.setattr(freed_sends_module, "LAG", 0)  # small plans, and the least slack that is still right
    assert sum(require_no_circle(merged_plan(seed, dp=4, pp=3)) for seed in range(60)) > 100
    # Also where members predict different seconds of what they share.
    plans = [phased_plan(seed, dp=4, pp=3, virtual=1, own=1.0) for seed in range(20)]
    assert sum(require_no_circle(with_other_seconds(plan, seed)) for seed, plan in enumerate(plans)) > 500
