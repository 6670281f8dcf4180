import numpy as np
import pytest

from cost_samples import documents, sample_coefficients, sample_model
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.layer_counts import OFFLOAD, RECOMPUTE, REPLAY
from evenload.cost.memory import host_memory
from evenload.data.hub import model_from
from evenload.planning.activation_policy import policies_in_order, policies_within_host
from evenload.planning.planner import Proposal, StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import LinkSpec, cluster_from
from evenload.types.layout import even_layout
from predicted_timeline import predicted_timeline

LENGTHS = [250, 240, 230, *[20] * 30]


def propose(policy, cap=None, strategy="slimpack", host=True, **layout) -> Proposal:
    link = LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=1e-3) if host else None
    planner = StepPlanner(
        sample_model(),
        sample_coefficients(host_link=link),
        even_layout(3, **{"dp": 2, "pp": 1, **layout}),
        cap,
        PlanOptions(max_pack_tokens=256, candidates=3, policy=policy),
        host="unlimited",
    )
    step = documents(LENGTHS, 100)
    return planner.propose(0, step, strategy)


def test_levels_take_long_documents_first() -> None:
    lengths = np.array([10, 60, 10, 20])
    levels = policies_in_order(lengths, "choose", can_offload=True)
    assert levels[0] is None
    assert levels[1] is not None
    assert levels[1].tolist() == [REPLAY, OFFLOAD, REPLAY, REPLAY]  # 60 of 100 tokens
    assert [level.tolist() for level in levels if level is not None and (level == level[0]).all()] == [
        [RECOMPUTE] * 4,
        [OFFLOAD] * 4,
    ]
    without = policies_in_order(lengths, "choose", can_offload=False)
    assert not any((level == OFFLOAD).any() for level in without if level is not None)
    assert [policies_in_order(lengths, name, can_offload=True)[0] is None for name in ("replay", "offload")] == [
        True,
        False,
    ]


def test_host_memory_is_for_the_longest_documents_that_fit_it() -> None:
    lengths = np.array([10, 60, 10, 20, 30])
    every = np.full(5, OFFLOAD, np.int8)
    stored, again = policies_within_host(lengths, every, 0.85)  # 60 + 30 + 20 of 130
    assert stored.tolist() == [REPLAY, OFFLOAD, REPLAY, OFFLOAD, OFFLOAD]
    assert again.tolist() == [RECOMPUTE, OFFLOAD, RECOMPUTE, OFFLOAD, OFFLOAD]
    # Documents that were not offloaded stay as they were.
    mixed = np.array([RECOMPUTE, OFFLOAD, REPLAY, OFFLOAD, OFFLOAD], np.int8)
    stored, again = policies_within_host(lengths, mixed, 0.55)
    assert stored.tolist() == [RECOMPUTE, OFFLOAD, REPLAY, REPLAY, REPLAY]
    assert again.tolist() == [RECOMPUTE, OFFLOAD, REPLAY, RECOMPUTE, RECOMPUTE]
    assert policies_within_host(lengths, mixed, 0.54) == []  # of 110 tokens the longest has 60
    assert policies_within_host(lengths, mixed, 1.0) == []  # all that was offloaded


@pytest.mark.parametrize("strategy", ["padded", "best_fit", "balanced", "slimpack"])
def test_steps_beyond_memory_fit_with_a_chosen_policy(strategy) -> None:
    """A user who sees 'not feasible' where recomputing would do buys machines they do not need."""
    free = propose("replay", strategy=strategy)
    assert not any(packs.policies for packs in free.plan.pack_plans)
    cap = propose("recompute", strategy=strategy).plan.predicted.peak_memory_bytes
    assert not propose("replay", cap, strategy).feasible
    chosen = propose("choose", cap, strategy)
    assert chosen.feasible
    assert chosen.plan.predicted.peak_memory_bytes <= cap
    assert any(packs.policies for packs in chosen.plan.pack_plans)
    assert chosen.plan.predicted.step_time_s <= propose("recompute", cap, strategy).plan.predicted.step_time_s
    validate_plan(chosen.plan, max_pack_tokens=256)


def test_policies_survive_the_plan_file_and_the_timeline() -> None:
    """Bytes are not stored in a plan; a reader who forgot the policies would draw replay's memory."""
    result = propose("recompute")
    (read,) = decode_plan_file(encode_plan_file([result.plan]))
    assert read == result.plan
    assert {name for packs in read.pack_plans for name in packs.policies.values()} == {"recompute"}
    assert sum(len(packs.policies) for packs in read.pack_plans) == len(LENGTHS)
    timeline = predicted_timeline(read, sample_model())
    assert timeline.memory_bytes.max() == result.plan.predicted.peak_memory_bytes
    assert timeline.memory_bytes.max() < propose("replay").plan.predicted.peak_memory_bytes


NEARLY = 1.02
"""Levels are told apart by so much."""


def step_s(lengths: list[int], policy: str, strategy: str, memory: float) -> float:
    model, cluster = model_from("llama-13b"), cluster_from("h100x32")
    layout = even_layout(model.num_layers, cp=2, pp=4, tp=4)
    planner = StepPlanner(
        model,
        analytic_coefficients(model, cluster, layout),
        layout,
        int(memory * cluster.device.usable_bytes),
        PlanOptions(policy=policy),
        host=host_memory(cluster),  # type: ignore[arg-type]
    )
    proposal = planner.propose(0, documents(lengths), strategy)
    return proposal.plan.predicted.step_time_s if proposal.feasible else float("inf")


@pytest.mark.parametrize("strategy", ["slimpack", "auto"])
@pytest.mark.parametrize(
    ("lengths", "memory"),
    [([235_000] * 2 + [50_000] * 4, 1.25), ([220_000] * 3 + [5_000] * 60, 1.1), ([235_000] * 2 + [50_000] * 4, 1.0)],
)
def test_choosing_policies_is_as_fast_as_the_best_single_one(lengths, memory, strategy) -> None:
    """The list schedule fits all activations by holding forwards back; the pipeline then idles a third of the step
    that offloading would fill. Stopping at "everything stored fits" hid that."""
    chosen = step_s(lengths, "choose", strategy, memory)
    single = {policy: step_s(lengths, policy, strategy, memory) for policy in ("replay", "recompute", "offload")}
    assert chosen <= NEARLY * min(single.values())
