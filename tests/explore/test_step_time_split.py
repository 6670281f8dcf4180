import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.config.keys import plan_options
from evenload.explore.timelines import split_step_of_plan, split_step_time
from evenload.plan.planner import StepPlanner
from evenload.plan.strategies.registry import STRATEGIES
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout, even_layout
from sweeps import spread

LINK = LinkSpec(bandwidth_bytes_per_s=2.0, latency_s=0.1)
HOST = LinkSpec(bandwidth_bytes_per_s=20.0, latency_s=0.1)
LAYOUTS = [
    even_layout(3, dp=2, pp=3),
    even_layout(4, dp=2, pp=2, virtual=2),
    even_layout(3, dp=2, cp=2, tp=2),
    even_layout(3, dp=4, cp=1),
    even_layout(3, dp=9, pp=3),  # replicas without documents
    even_layout(3, dp=2, pp=3, tp=2),  # I and W take longer than the whole backward
]


def propose(layout: ParallelLayout, strategy: str, lengths: list[int], **options):
    coefficients = sample_coefficients(
        source="analytic", intra_node=LINK, inter_node=LINK, host_link=HOST, devices_per_node=64, attention_tile=4
    )
    model = sample_model(num_layers=layout.num_layers)
    settings = {"max_pack_tokens": 400, "dp_merge": True, "fixed_exact": {"solver_time_limit_s": 1.0}} | options
    planner = StepPlanner(model, coefficients, layout, None, plan_options(settings), host="unlimited")
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n) for i, n in enumerate(lengths))
    return planner, planner.propose(0, documents, strategy)


def random_lengths(seed: int) -> list[int]:
    return np.ceil(np.random.default_rng(seed).lognormal(3.0, 1.2, 12)).clip(1, 400).astype(int).tolist()


@pytest.mark.parametrize(
    ("layout", "strategy"),
    spread(
        [(one, name) for one in LAYOUTS for name in STRATEGIES if one.pp == 1 or not STRATEGIES[name].needs_one_stage],
        23,
    ),
    ids=lambda value: value if isinstance(value, str) else value.describe(),
)
@pytest.mark.parametrize("policy", ["replay", "recompute", "offload"])
def test_causes_add_up_to_the_step_time(layout, strategy, policy) -> None:
    """Every strategy, layout and policy: the parts are the step time to 1e-9, none is negative."""
    for seed in range(2):
        lengths = random_lengths(seed)
        planner, proposal = propose(layout, strategy, lengths, policy=policy)
        split = split_step_time(planner.costs, proposal.choices)
        step_s = proposal.plan.predicted.step_time_s
        assert split.total_s() == pytest.approx(step_s, rel=1e-9)
        for cause, seconds in split.parts():
            assert seconds >= -1e-9 * step_s, cause
        again = split_step_of_plan(proposal.plan, planner.costs)
        for field in again.__struct_fields__:
            assert getattr(again, field) == pytest.approx(getattr(split, field), abs=1e-9 * step_s), field
        assert split.useful_s == pytest.approx(planner.costs.lower_bound_seconds(np.array(lengths)), rel=1e-9)


def test_each_cause_shows_where_it_is_made() -> None:
    """One plan for each: padding, recompute, offload, tp and cp transfers, cp and dp imbalance, hops, bubbles."""
    long_and_short = [150, 90, 60, 30, 20, *([3] * 12)]
    plain = even_layout(3, dp=2, pp=3)
    cases = {
        "padding_s": (plain, "padded", long_and_short, {}),
        "recompute_s": (plain, "balanced", long_and_short, {"policy": "recompute"}),
        "offload_s": (plain, "balanced", long_and_short, {"policy": "offload"}),
        "tp_communication_s": (even_layout(3, tp=2), "balanced", long_and_short, {}),
        "cp_communication_s": (even_layout(3, cp=2), "balanced", [150], {"cp_sharding": "per_document"}),
        "cp_imbalance_s": (even_layout(3, cp=2), "skrull", [40, 3, 3], {}),
        "dp_imbalance_s": (plain, "best_fit", long_and_short, {}),
        "p2p_s": (plain, "balanced", long_and_short, {}),
        "imbalance_s": (plain, "balanced", long_and_short, {}),
        "stage_imbalance_s": (plain, "slimpack", [*([40] * 40)], {}),
        "dependency_s": (plain, "balanced", long_and_short, {}),
        "warmup_s": (plain, "slimpack", long_and_short, {}),
        "cooldown_s": (plain, "slimpack", long_and_short, {}),
    }
    for cause, (layout, strategy, lengths, options) in cases.items():
        planner, proposal = propose(layout, strategy, lengths, **options)
        assert getattr(split_step_time(planner.costs, proposal.choices), cause) > 0, cause


def test_a_step_without_documents_is_reduction_and_optimizer() -> None:
    planner, proposal = propose(even_layout(3, dp=2, pp=3), "balanced", [])
    split = split_step_time(planner.costs, proposal.choices)
    assert split.total_s() == pytest.approx(split.reduction_s + split.optimizer_s)
    assert split.total_s() == pytest.approx(proposal.plan.predicted.step_time_s)
