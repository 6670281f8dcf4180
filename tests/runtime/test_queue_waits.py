"""What transfers cost by waiting for each other in one queue, in simulated seconds."""

import itertools
import statistics
from collections import defaultdict

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from evenload.schedule.simulate import simulate
from evenload.stepplan.plan_tasks import timed_tasks
from evenload.stepplan.transfer_order import LAG, action_places
from evenload.types.pipeline import action_columns
from evenload.types.plan import StepPlan
from varied_plans import varied_plan


def makespan_s(
    plan: StepPlan, places: NDArray[np.int64], factors: NDArray[np.float64], *, queued: bool = True
) -> float:
    """The step when actions take `factors` times their predicted seconds and each pair of ranks is one strict queue: a
    transfer starts when it is sent, its receive is posted and the one before it is over.

    Args:
        queued: False = a transfer waits for nothing.
    """
    times, ranks = plan.times[0], plan.layout.stage_to_rank
    seconds = {"F": times.forward_s, "B": times.backward_s, "I": times.input_s, "W": times.weight_s}
    offsets = action_columns(plan.schedules[0]).rank_offset.tolist()
    rows = [places[lo:hi] for lo, hi in itertools.pairwise(offsets)]
    actions = [(rank, at, a) for rank, row in enumerate(plan.schedules[0].ranks) for at, a in enumerate(row)]
    ended: dict[tuple[int, int], float] = defaultdict(float)  # by rank and number of action
    there: dict[tuple[str, int, int], float] = {}  # inputs, by kind, stage and pack
    free: dict[frozenset[int], float] = defaultdict(float)  # when a pair's queue is
    sent: dict[tuple[int, str, int], list[float]] = defaultdict(list)  # when sends of a rank's channel are over
    for node in np.argsort(places).tolist():  # follows the plan, so all that an action needs is known
        rank, at, action = actions[node]
        start = ended[rank, at - 1]
        kind, step = ("F", 1) if action.kind == "F" else ("B", -1)
        if action.kind != "W":
            start = max(start, there.get((kind, action.stage, action.pack), 0.0))
        if queued:
            start = max([start, *(over[-LAG - 1] for key, over in sent.items() if key[0] == rank and len(over) > LAG)])
        end = ended[rank, at] = start + seconds[action.kind][action.pack][action.stage] * factors[node]
        target = action.stage + step
        if action.kind == "W" or not 0 <= target < len(ranks):
            continue
        there[kind, target, action.pack] = end
        if (receiver := ranks[target]) != rank:
            pair = frozenset((rank, receiver))
            posted = ended[receiver, int(np.searchsorted(rows[receiver], places[node])) - 1]
            p2p_s = (times.p2p_forward_s if kind == "F" else times.p2p_backward_s)[action.pack]
            free[pair] = (max(end, posted, free[pair]) if queued else end) + p2p_s
            there[kind, target, action.pack] = free[pair]
            sent[rank, kind, target].append(free[pair])
    return max(ended.values())


def with_equal_seconds(plan: StepPlan) -> StepPlan:
    """An order of this plan counts actions."""
    times = plan.times[0]

    def ones(rows):
        return tuple((1.0,) * len(row) for row in rows)

    equal = {name: ones(getattr(times, name)) for name in ("forward_s", "backward_s", "input_s", "weight_s")}
    return msgspec.structs.replace(plan, times=(msgspec.structs.replace(times, **equal),))


@pytest.mark.parametrize(("pp", "virtual", "schedule"), [(4, 1, "list"), (2, 2, "list_split"), (3, 1, "zb_h1")])
def test_queues_cost_little_in_the_order_of_predicted_ends(pp, virtual, schedule):
    """Against transfers that wait for nothing: as predicted, and with durations off by 30 %. In an order that counts
    actions they wait for packs that take long."""
    costs = defaultdict(list)
    for seed in range(20):
        plan = varied_plan(
            seed, num_layers=12, pp=pp, virtual=virtual, schedule=schedule, num_documents=80, max_tokens=4,
            max_budget=6, whole=schedule == "zb_h1",
        )  # fmt: skip
        num_actions = len(action_columns(plan.schedules[0]).kind)
        noisy, places = np.random.default_rng(seed).lognormal(0, 0.3, num_actions), action_places(plan, 0)
        cases = {
            "as predicted": (places, np.ones(num_actions)),
            "noise": (places, noisy),
            "by count": (action_places(with_equal_seconds(plan), 0), np.ones(num_actions)),
        }
        for name, (order, factors) in cases.items():
            without = makespan_s(plan, order, factors, queued=False)
            costs[name].append(makespan_s(plan, order, factors) / without)
        predicted = simulate(timed_tasks(plan, 0), action_columns(plan.schedules[0])).makespan_s
        assert makespan_s(plan, places, np.ones(num_actions), queued=False) == pytest.approx(predicted)
    medians = {name: statistics.median(found) for name, found in costs.items()}
    assert medians["as predicted"] < 1.003
    assert medians["noise"] < 1.01
    assert medians["by count"] > medians["as predicted"]
