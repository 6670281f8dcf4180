"""A document of twenty times the mean tokens on two and four replicas: no rank waits for it in the plan."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cost_samples import documents, sample_coefficients, sample_model
from evenload.plan.planner import Proposal, StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout

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


def propose(planner: StepPlanner, lengths: list[int], strategy: str = "slimpack") -> Proposal:
    step = documents(lengths)
    proposal = planner.propose(0, step, strategy)
    validate_plan(proposal.plan, max_pack_tokens=planner.options.max_pack_tokens)
    return proposal


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


def most_ranks(proposal: Proposal) -> int:
    return max(s.cp for packs in proposal.plan.pack_plans for pack in packs.forward for s in pack.slices)


def max_over_mean(seconds: np.ndarray) -> float:
    return float(seconds.max() / seconds.mean())


@pytest.mark.parametrize(("dp", "pp"), LAYOUTS)
@settings(max_examples=12, deadline=None)
@given(short=st.lists(st.integers(5, 60), min_size=25, max_size=120), position=st.integers(0, 120))
def test_ranks_end_together(dp: int, pp: int, short: list[int], position: int) -> None:
    """Where one replica would run the outlier alone for longer than its share, replicas share it."""
    lengths = with_outlier(short, position)
    layout = even_layout(4, dp=dp, pp=pp)
    alone, merged = (
        propose(StepPlanner(MODEL, COSTS, layout, None, options, host="unlimited"), lengths)
        for options in (PlanOptions(), PlanOptions(dp_merge=True))
    )
    assert merged.imbalance_dp <= EVEN
    assert max_over_mean(rank_seconds(merged)) <= EVEN
    assert merged.plan.predicted.step_time_s <= alone.plan.predicted.step_time_s
    assume(alone.imbalance_dp > EVEN)
    assert most_ranks(merged) > 1
