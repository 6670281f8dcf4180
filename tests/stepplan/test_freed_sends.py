"""When ranks wait for their own sends: never in a circle, and early enough that few tensors are kept."""

import graphlib

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

import evenload.stepplan.transfer_order as freed_sends_module
from context_plans import merged_plan
from evenload.stepplan.transfer_order import freed_sends
from evenload.types.layout import sending_channels
from evenload.types.plan import StepPlan
from strict_queues import node_names
from varied_plans import varied_plan

LAYOUTS = [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3), (1, 3)]


def receives_of(plan: StepPlan, channel, dp_rank: int = 0) -> list[tuple[int, int]]:
    """(rank, place in its list) of every action that receives on a channel, in pack order."""
    kind, stage = channel
    rank = plan.layout.stage_to_rank[stage]
    kinds = "F" if kind == "F" else "BI"
    row = plan.schedules[dp_rank].ranks[rank]
    return [(rank, at) for at, action in enumerate(row) if action.stage == stage and action.kind in kinds]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(LAYOUTS),
    st.sampled_from(["list", "list_split", "zb_h1", "static"]),
    st.integers(1, 40),
)
def test_waits_for_sends_never_close_a_circle(seed, layout, schedule, num_documents):
    """Order on a rank, data, and every wait for a send: one order of all actions obeys them all, so whatever the real
    durations are, some rank can always go on. A send is over when its receiver has done all that stands before the
    receiving action."""
    pp, virtual = layout
    if virtual > 1 and schedule in ("zb_h1", "static"):
        schedule = "list"
    plan = varied_plan(
        seed, num_layers=12, pp=pp, virtual=virtual, schedule=schedule, max_tokens=4, num_documents=num_documents,
        max_budget=6,
    )  # fmt: skip
    needs: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for rank, row in enumerate(plan.schedules[0].ranks):
        for at in range(len(row)):
            needs[rank, at] = {(rank, at - 1)} if at else set()
        frees = freed_sends(plan, 0, rank)
        assert len(frees) == len(row)
        for at, waits in enumerate(frees):
            for channel, count in waits:
                receiver, place = receives_of(plan, channel)[count - 1]
                needs[rank, at] |= {(receiver, place - 1)} if place else set()
                sent = [i for i, a in enumerate(row) if sends_on(a, channel)]
                assert sent[count - 1] < at, "only what has been sent is waited for"
    for rank in range(pp):
        for kind, stage in sending_channels(plan.layout, rank):
            sends = [(rank, i) for i, a in enumerate(plan.schedules[0].ranks[rank]) if sends_on(a, (kind, stage))]
            for send, receive in zip(sends, receives_of(plan, (kind, stage)), strict=True):
                needs[receive].add(send)
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError


def sends_on(action, channel) -> bool:
    kind, stage = channel
    return (action.kind == "F" and stage == action.stage + 1) if kind == "F" else (
        action.kind in "BI" and stage == action.stage - 1
    )  # fmt: skip


def test_waits_close_no_circle_through_packs_that_replicas_share(monkeypatch):
    """A shared action is one action of all members: they meet in its transfers."""
    monkeypatch.setattr(freed_sends_module, "LAG", 0)  # small plans, and the least slack that is still right
    waited = 0
    for seed in range(60):
        plan = merged_plan(seed, dp=4, pp=3)
        needs: dict[tuple, set[tuple]] = {}
        for dp_rank in range(plan.layout.dp):
            names = node_names(plan, dp_rank)
            for rank, row in enumerate(plan.schedules[dp_rank].ranks):
                for at, waits in enumerate(freed_sends(plan, dp_rank, rank)):
                    before = needs.setdefault(names[rank, at], set())
                    before |= {names[rank, at - 1]} if at else set()
                    for channel, count in waits:
                        waited += 1
                        receiver, place = receives_of(plan, channel, dp_rank)[count - 1]
                        before |= {names[receiver, place - 1]} if place else set()
                for kind, stage in sending_channels(plan.layout, rank):
                    sends = [names[rank, i] for i, a in enumerate(row) if sends_on(a, (kind, stage))]
                    for send, receive in zip(sends, receives_of(plan, (kind, stage), dp_rank), strict=True):
                        needs.setdefault(names[receive], set()).add(send)
        graphlib.TopologicalSorter(needs).prepare()  # raises CycleError
    assert waited > 100


def test_replicas_that_predict_different_times_of_shared_packs_wait_for_no_send(monkeypatch):
    """Then there is no one order of all actions to go by."""
    monkeypatch.setattr(freed_sends_module, "LAG", 0)
    plan = merged_plan(3, dp=2, pp=3)
    assert any(piece.cp == 2 for pack in plan.pack_plans[0].forward for piece in pack.slices)
    assert any(any(freed_sends(plan, 0, rank)) for rank in range(3))
    slower = tuple(tuple(2 * seconds for seconds in row) for row in plan.times[1].forward_s)
    times = plan.times[0], msgspec.structs.replace(plan.times[1], forward_s=slower)
    plan = msgspec.structs.replace(plan, times=times)
    assert not any(any(freed_sends(plan, 0, rank)) for rank in range(3))
