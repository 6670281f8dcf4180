"""Rules that choose how ranks share packs, held against the fixed ones by the step time that plans promise."""

import msgspec
import numpy as np
import pytest

from cost_samples import documents
from evenload.cost.analytic import analytic_coefficients
from evenload.data.hub import model_from
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout
from sweeps import sweep

RULES = ("per_sequence", "per_document", "adaptive", "mixed")
MODELS = ("llama-7b", "wlb-550m", "wlb-70b", "qwen3-0.6b", "gemma3-27b")
LAYOUTS = (
    {"cp": 2}, {"cp": 8}, {"cp": 4, "tp": 2}, {"cp": 2, "tp": 4}, {"cp": 4, "tp": 8}, {"cp": 2, "pp": 2},
    {"cp": 2, "pp": 4, "tp": 2}, {"cp": 4, "pp": 4, "tp": 8}, {"cp": 2, "dp": 2, "pp": 2}, {"cp": 4, "dp": 2, "tp": 2},
)  # fmt: skip
STRATEGIES = ("sequential", "best_fit", "fixed_greedy", "balanced", "wlb", "slimpack", "auto")


def drawn_lengths(draw: np.random.Generator) -> list[int]:
    """A batch: what a loader cuts at a window, few long documents beside many short ones, or all alike."""
    kind = draw.integers(3)
    if kind == 0:
        return (
            np.minimum(np.ceil(draw.lognormal(np.log(1200), 1.756, draw.integers(8, 160))), 65_536).astype(int).tolist()
        )
    if kind == 1:
        long = draw.integers(8_000, 65_536, draw.integers(1, 5))
        return draw.permutation([*long, *draw.integers(8, 1_500, draw.integers(10, 200))]).tolist()
    return draw.integers(*draw.choice([[64, 512], [500, 4_000], [6_000, 30_000]]), draw.integers(4, 40)).tolist()


def seconds_of(rule: str, seed: int) -> float:
    """Of the step that seed draws."""
    draw = np.random.default_rng(seed)
    sizes, strategy = LAYOUTS[draw.integers(len(LAYOUTS))], STRATEGIES[draw.integers(len(STRATEGIES))]
    model = model_from(MODELS[draw.integers(len(MODELS))])
    while any(heads % sizes.get("tp", 1) for one in model.attentions for heads in (one.heads, one.kv_heads)):
        model = model_from(MODELS[draw.integers(len(MODELS))])
    layout = even_layout(model.num_layers, **sizes)
    coefficients = analytic_coefficients(model, cluster_from("h100x128"), layout)
    if draw.random() < 0.25:
        coefficients = msgspec.structs.replace(coefficients, context_exchange="ring")
    merges = bool(draw.random() < 0.3)
    lengths = drawn_lengths(draw)
    options = PlanOptions(max_pack_tokens=65_536, cp_sharding=rule, dp_merge=merges, policy="replay")
    planner = StepPlanner(model, coefficients, layout, None, options, host="unlimited")
    plan = planner.propose(0, documents(lengths), strategy).plan
    validate_plan(plan)
    return plan.predicted.step_time_s


PAPER = (("wlb-7b", 131_072, 2, 8), ("wlb-30b", 131_072, 4, 8), ("wlb-70b", 65_536, 4, 16), ("wlb-70b", 131_072, 4, 16))
"""Model, context, cp and tp of settings in WLB-LLM's Table 1, with four stages (`benchmarks/paper_wlb.py`)."""


@pytest.mark.parametrize(("name", "context", "cp", "tp"), PAPER, ids=str)
@pytest.mark.parametrize("strategy", ["sequential", "fixed_greedy", "wlb", "slimpack"])
def test_what_is_chosen_is_no_slower_in_wlb_llms_settings(strategy, name, context, cp, tp) -> None:
    """By the plan's own price, which differs from the one that the choice begins with where a document lies whole on a
    rank, or tensor-parallel halves add their transfers."""
    model = model_from(name)
    layout = even_layout(model.num_layers, cp=cp, pp=4, tp=tp)
    coefficients = analytic_coefficients(model, cluster_from(f"h100x{layout.world_size}"), layout)
    draw = np.random.default_rng(0)
    lengths = np.minimum(np.ceil(draw.lognormal(np.log(1200), 1.756, 64)).astype(int), context).tolist()
    seconds = []
    for rule in RULES:
        options = PlanOptions(max_pack_tokens=context, cp_sharding=rule)
        planner = StepPlanner(model, coefficients, layout, None, options, host="unlimited")
        seconds.append(planner.propose(0, documents(lengths), strategy).plan.predicted.step_time_s)
    per_sequence, per_document, adaptive, mixed = seconds
    fixed = min(per_sequence, per_document)
    assert adaptive <= fixed
    assert mixed <= min(adaptive, fixed)
    assert len(set(seconds)) > 1, "the rules differ on these lengths"


@pytest.mark.parametrize("seed", sweep(range(40), 16))
def test_what_is_chosen_is_no_slower_than_a_fixed_rule(seed) -> None:
    per_sequence, per_document, adaptive, mixed = (seconds_of(rule, seed) for rule in RULES)
    assert adaptive <= 1.01 * min(per_sequence, per_document)
    assert mixed <= 1.01 * min(per_sequence, per_document, adaptive)
