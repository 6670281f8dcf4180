"""Offloaded activations in the main memory of nodes: counted by hand, limited, and chosen otherwise where too many."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cost_samples import documents, sample_coefficients, sample_model
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.layer_counts import POLICIES, activation_bytes_per_token
from evenload.cost.memory import (
    HostMemory,
    ReplicaPacks,
    Unlimited,
    fullest_node_bytes,
    host_memory,
    offloaded_state_bytes,
    peak_host_bytes,
    static_kinds,
)
from evenload.data.lengths import read_length_table
from evenload.errors import InfeasiblePlanError
from evenload.explore.batches import BatchRule
from evenload.planning.activation_policy import host_excess_bytes, ordered_within_host
from evenload.planning.planner import Proposal, StepPlanner
from evenload.planning.problem import PlanOptions, ReplicaChoice, StepProblem
from evenload.schedule.simulate import simulate
from evenload.types.cluster import LinkSpec, cluster_from
from evenload.types.columns import SliceColumns
from evenload.types.layout import even_layout
from evenload.types.model import MODELS
from evenload.types.pipeline import ActionColumns
from evenload.types.timeline import KINDS

MODEL = sample_model()
LENGTHS_TABLE = Path(__file__).resolve().parents[2] / "examples" / "lengths" / "github_dirs.npy.gz"
LENGTHS = [250, 240, 230, *[20] * 30]
LINK = LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=1e-3)


def planned(
    policy: str,
    host: HostMemory | Unlimited | None,
    cap: int | None = None,
    strategy: str = "slimpack",
    *,
    pp: int = 1,
    limit: int = 256,
) -> tuple[StepPlanner, Proposal]:
    options = PlanOptions(max_pack_tokens=limit, candidates=3, policy=policy)
    costs, layout = sample_coefficients(host_link=LINK), even_layout(3, dp=2, pp=pp)
    planner = StepPlanner(MODEL, costs, layout, cap, options, host=host)
    return planner, planner.propose(0, documents(LENGTHS), strategy)


def propose(policy: str, host: HostMemory | None, *arguments) -> Proposal:
    return planned(policy, host, *arguments)[1]


def test_a_rank_holds_offloaded_rows_from_a_forward_to_the_backward_of_its_first_token() -> None:
    packs = SliceColumns.from_ranges([[(0, 0, 10)], [(1, 0, 6)], [(2, 0, 4)]])
    order = ActionColumns.of_ranks([(list(map(KINDS.index, "FFBFBB")), [0] * 6, [0, 1, 0, 2, 1, 2])])
    rate = 3 * activation_bytes_per_token(MODEL, "replay")
    lengths = np.array([10, 6, 4])
    for policy, tokens in (([2, 2, 2], 16), ([2, 0, 2], 10), ([0, 2, 2], 10), ([0, 0, 2], 4), ([0, 1, 0], 0)):
        result = peak_host_bytes(
            MODEL, even_layout(3), ReplicaPacks(packs, packs, lengths, np.array(policy, np.int8)), order
        )
        assert result.tolist() == [tokens * rate], policy
    assert peak_host_bytes(MODEL, even_layout(3), ReplicaPacks(packs, packs, lengths), order).tolist() == [0]


def test_a_node_holds_what_its_neighbours_in_rank_order_hold() -> None:
    """Pipeline rank, then replica, then tensor rank: 2 x 2 x 2 devices on nodes of four are one pipeline rank each."""
    peaks = [np.array([5, 1]), np.array([3, 7])]
    layout = even_layout(4, dp=2, pp=2, tp=2)
    by_node = {1: 7, 2: 14, 3: 14, 4: 16, 8: 32, 16: 32}  # of devices 5 5 3 3 1 1 7 7; a last node may be part full
    for devices, expected in by_node.items():
        assert fullest_node_bytes(layout, peaks, devices) == expected


def test_a_plan_says_what_lies_in_host_memory() -> None:
    result = propose("offload", HostMemory(1, None))
    rate = 3 * activation_bytes_per_token(MODEL, "replay")
    assert result.feasible
    assert result.plan.predicted.peak_host_bytes_per_node >= max(LENGTHS) * rate
    assert propose("offload", HostMemory(2, None)).plan.predicted.peak_host_bytes_per_node > (
        result.plan.predicted.peak_host_bytes_per_node
    )
    assert propose("recompute", HostMemory(1, None)).plan.predicted.peak_host_bytes_per_node == 0


def test_optimizer_state_in_host_memory_is_counted_there_and_not_on_the_device() -> None:
    offloading = msgspec.structs.replace(MODEL, offloaded_state=(1,))
    layout = even_layout(3, dp=2, pp=2)
    state, none = (static_kinds(MODEL, layout)[:, 2].tolist(), offloaded_state_bytes(MODEL, layout).tolist())
    assert none == [0, 0]
    assert static_kinds(offloading, layout)[:, 2].tolist() == [state[0], 0]
    assert offloaded_state_bytes(offloading, layout).tolist() == [0, state[1]]

    def plan(limit_bytes: int | None) -> Proposal:
        costs, host = sample_coefficients(host_link=LINK), HostMemory(4, limit_bytes)
        return StepPlanner(offloading, costs, layout, None, host=host).propose(0, documents([10] * 4), "balanced")

    assert plan(None).plan.predicted.peak_host_bytes_per_node == 2 * state[1]
    assert plan(2 * state[1]).feasible
    with pytest.raises(InfeasiblePlanError, match="host memory on the fullest node of 4 devices"):
        plan(2 * state[1] - 1).require_feasible()


def test_a_plan_beyond_host_memory_is_refused_with_the_reason() -> None:
    needed = propose("offload", HostMemory(2, None)).plan.predicted.peak_host_bytes_per_node
    assert propose("offload", HostMemory(2, needed)).feasible
    refused = propose("offload", HostMemory(2, needed - 1))
    with pytest.raises(InfeasiblePlanError, match="host memory on the fullest node of 2 devices"):
        refused.require_feasible()


def test_what_host_memory_there_is_is_used() -> None:
    """A node that lacks a tenth of what it takes to offload everything offloads nearly everything (0.69 of the bound
    where the shares of `policies_in_order` were all there was)."""
    model, cluster = MODELS["llama-150b"], cluster_from("h100x256")
    layout = even_layout(model.num_layers, dp=16, pp=2, tp=8, virtual=2)
    rule = BatchRule(num_documents=1024, context=65_536, overlong="truncate")
    (batch,) = rule.sample(read_length_table(str(LENGTHS_TABLE)).lengths, steps=1, seed=0)
    options, host = PlanOptions(max_pack_tokens=65_536, policy="choose", dp_merge=True), host_memory(cluster)
    costs = analytic_coefficients(model, cluster, layout)
    planner = StepPlanner(model, costs, layout, cluster.device.usable_bytes, options, host=host)
    result = planner.propose(0, batch.documents, "auto").require_feasible().predicted
    assert host.limit_bytes is not None
    assert 0.7 * host.limit_bytes < result.peak_host_bytes_per_node <= host.limit_bytes
    bound_s = planner.costs.lower_bound_seconds(np.array([one.num_tokens for one in batch.documents]))
    assert bound_s > 0.87 * result.step_time_s


def test_shared_phases_are_ordered_for_host_memory_alike_on_all_their_replicas() -> None:
    """Long documents that four replicas share would be offloaded beyond the node; fewer of them in flight fit."""
    model, cluster = MODELS["llama-7b"], cluster_from("h100x32")
    layout, host = even_layout(model.num_layers, dp=8, pp=4), host_memory(cluster)
    rule = BatchRule(num_documents=2_048, context=131_072, overlong="truncate")
    (batch,) = rule.sample(read_length_table(str(LENGTHS_TABLE)).lengths, steps=1, seed=0)
    options, costs = PlanOptions(max_pack_tokens=131_072, dp_merge=True), analytic_coefficients(model, cluster, layout)
    planner = StepPlanner(model, costs, layout, cluster.device.usable_bytes, options, host=host)
    result = planner.propose(0, batch.documents, "slimpack")
    held = result.require_feasible().predicted.peak_host_bytes_per_node
    assert host.limit_bytes is not None
    assert 0.7 * host.limit_bytes < held <= host.limit_bytes
    orders = []
    for choice in result.choices[:4]:
        one = choice.candidate
        assert one.label.split("; then ")[0].endswith("ordered for host memory")
        shared = int((one.packs.forward.cp[one.packs.forward.pack_offset[:-1]] == 4).sum())
        assert 0 < shared == int((one.packs.backward.cp[one.packs.backward.pack_offset[:-1]] == 4).sum())
        ranks = [one.actions.of_rank(rank) for rank in range(layout.pp)]
        columns = [(one.actions.kind[at], one.actions.pack[at]) for at in ranks]
        orders.append([[(k, p) for k, p in zip(*map(list, pair), strict=True) if p < shared] for pair in columns])
    assert all(order == orders[0] for order in orders)


def under_limit(policy: str, limit: int | None) -> tuple[StepProblem, tuple[ReplicaChoice, ...]]:
    """A step whose devices may offload so much, and what `slimpack` makes of it without a limit."""
    planner, result = planned(policy, "unlimited", pp=3, limit=128)
    codes = np.full(len(LENGTHS), POLICIES.index(policy), np.int8)
    places, lengths = np.arange(len(LENGTHS)), np.array(LENGTHS)
    problem = StepProblem(places, lengths, planner.costs, None, planner.options, policy=codes, host_device_bytes=limit)
    return problem, result.choices


def test_an_order_that_holds_less_keeps_the_packs() -> None:
    """Between what any order holds and what this one does the packs are ordered anew, or that is not found."""
    problem, choices = under_limit("offload", 2**62)
    for choice in choices:
        before = choice.candidate
        assert ordered_within_host(problem, choice) is choice
        peak = host_excess_bytes(replace(problem, host_device_bytes=0), before)
        outcomes = []
        for share in (0.99, 0.9, 0.8, 0.7, 0.6, 0.4, 0.05):
            limited = replace(problem, host_device_bytes=int(share * peak))
            assert host_excess_bytes(limited, before) == peak - int(share * peak)
            result = ordered_within_host(limited, choice)
            outcomes.append(result is not None)
            if result is None:
                continue
            after = result.candidate
            assert host_excess_bytes(limited, after) == 0
            assert after.excess_bytes <= before.excess_bytes
            assert after.packs is before.packs
            assert after.tasks is before.tasks
            again = simulate(after.tasks, after.actions)
            assert after.makespan_s == again.makespan_s
            assert (
                sorted(zip(after.actions.kind, after.actions.stage, after.actions.pack, strict=True))
                == sorted(zip(before.actions.kind, before.actions.stage, before.actions.pack, strict=True))
                or after.schedule != before.schedule
            )
        assert outcomes[0]
        assert not outcomes[-1], "a document's own activations need more"
        assert outcomes == sorted(outcomes, reverse=True)


@pytest.mark.parametrize("strategy", ["best_fit", "balanced", "slimpack", "auto"])
def test_another_policy_is_chosen_where_offloaded_activations_do_not_fit(strategy) -> None:
    least = propose("recompute", None, None, strategy).plan.predicted.peak_memory_bytes
    free = propose("choose", HostMemory(2, None), least, strategy)
    limit = free.plan.predicted.peak_host_bytes_per_node // 2
    result = propose("choose", HostMemory(2, limit), least, strategy)
    assert result.feasible
    assert result.plan.predicted.peak_host_bytes_per_node <= limit
    assert result.plan.predicted.peak_memory_bytes <= least


def test_devices_share_the_bandwidth_of_their_nodes_memory() -> None:
    cluster = cluster_from("h100x8")
    assert cluster.host_link() == cluster.device.host_link  # 614 GB/s of eight sockets' channels are enough for PCIe
    slow = msgspec.structs.replace(cluster, host_memory_bytes_per_s=160e9)
    assert slow.host_link().bandwidth_bytes_per_s == 20e9
    assert analytic_coefficients(MODELS["llama-7b"], slow, even_layout(32)).host_link == slow.host_link()
