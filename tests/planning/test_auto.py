"""`auto`: never worse than any strategy, always valid, deterministic; and the moves it is made of."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cost_samples import documents, sample_coefficients, sample_model
from evenload.config.keys import plan_options
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.memory import host_memory
from evenload.data.hub import model_from
from evenload.errors import EvenloadError
from evenload.planning.planner import Proposal, StepPlanner
from evenload.planning.problem import Effort, PlanOptions, SlowerPlanError
from evenload.planning.strategies.registry import STRATEGIES
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout
from predicted_timeline import predicted_timeline
from sweeps import spread

LENGTH_TABLES = dict(np.load(Path(__file__).parent / "data" / "length_tables.npz"))
RIVALS = [one for one in STRATEGIES.values() if not (one.tries_others or one.needs_solver)]


def tiny_planner(
    dp: int, pp: int, *, virtual: int = 1, cap: int | None = None, auto: dict | None = None, **options
) -> StepPlanner:
    fields = {"max_pack_tokens": 256, "candidates": 3, "auto": {"max_candidates": 40, **(auto or {})}, **options}
    return StepPlanner(
        sample_model(num_layers=6),
        sample_coefficients(),
        even_layout(6, dp=dp, pp=pp, virtual=virtual),
        cap,
        plan_options(fields),
        host="unlimited",
    )


def beats_all(planner: StepPlanner, lengths, *, flat: bool = False) -> Proposal:
    """Check `auto` against every other strategy; its proposal."""
    step = documents(lengths)
    result = planner.propose(0, step, "auto")
    validate_plan(result.plan, max_pack_tokens=planner.options.max_pack_tokens)
    for name in [one.name for one in RIVALS if flat or not one.needs_one_stage]:
        try:
            other = planner.propose(0, step, name)
        except EvenloadError:
            continue  # the strategy does not apply to this step
        if other.feasible:
            assert result.feasible, name
            assert result.plan.predicted.step_time_s <= other.plan.predicted.step_time_s, name
    return result


PLACES = [
    (2, 4, 1, "llama-7b", 16_384),
    (4, 2, 1, "qwen2.5-7b", 131_072),
    (8, 1, 1, "qwen2.5-0.5b", 32_768),
    (2, 1, 4, "llama-7b", 32_768),
]
"""dp, pp, tp, model, context."""


@pytest.mark.parametrize(
    ("table", "dp", "pp", "tp", "model", "context"),
    spread([(table, *PLACES[(i + turn) % 4]) for turn in range(4) for i, table in enumerate(LENGTH_TABLES)], 17),
)
def test_never_worse_than_any_strategy_on_every_table(table, dp, pp, tp, model, context) -> None:
    """Within memory, with every activation policy and documents that replicas share, as `evenload plan` does."""
    lengths = np.minimum(LENGTH_TABLES[table].astype(np.int64), context)[:256]
    spec, cluster = model_from(model), cluster_from("h100x8")
    layout = even_layout(spec.num_layers, dp=dp, pp=pp, tp=tp)
    planner = StepPlanner(
        spec,
        analytic_coefficients(spec, cluster, layout),
        layout,
        cluster.device.usable_bytes,
        PlanOptions(max_pack_tokens=context, policy="choose", dp_merge=True),
        host=host_memory(cluster),
    )
    beats_all(planner, lengths, flat=pp == 1)


LENGTHS = st.one_of(
    st.lists(st.integers(1, 256), max_size=24),
    st.lists(st.sampled_from([1, 255, 256]), max_size=12),
    st.lists(st.integers(1, 4), max_size=30).map(lambda short: [256, *short]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(LENGTHS, st.integers(1, 4), st.sampled_from([(1, 1), (3, 1), (3, 2)]), st.booleans(), st.booleans())
def test_never_worse_on_adversarial_lengths_and_always_valid(lengths, dp, stages, split, is_limited) -> None:
    """Also virtual stages, and a memory limit that nothing meets, the static bytes."""
    pp, virtual = stages
    empty = tiny_planner(dp, pp, virtual=virtual).propose(0, (), "padded").plan
    cap = empty.predicted.peak_memory_bytes if is_limited else None
    planner = tiny_planner(dp, pp, virtual=virtual, cap=cap, auto={"split_backward": split})
    result = beats_all(planner, lengths)
    (again,) = decode_plan_file(encode_plan_file([result.plan]))
    assert msgspec.structs.replace(again) == result.plan
    timeline = predicted_timeline(result.plan, planner.costs.model)
    assert timeline.peak_bytes() == result.plan.predicted.peak_memory_bytes
    assert timeline.end_s.max(initial=0.0) == max(result.plan.predicted.per_replica_s)


def long_tailed(count: int) -> np.ndarray:
    return np.minimum(np.random.default_rng(1).lognormal(3, 1.4, count).astype(np.int64) + 1, 256)


def test_split_backwards_are_used_and_pay() -> None:
    lengths = long_tailed(80)
    whole = beats_all(tiny_planner(2, 3, auto={"split_backward": False}), lengths)
    split = beats_all(tiny_planner(2, 3, auto={"split_backward": True}), lengths)
    kinds = {action.kind for schedule in split.plan.schedules for row in schedule.ranks for action in row}
    assert {"I", "W"} <= kinds
    assert split.plan.predicted.step_time_s < whole.plan.predicted.step_time_s
    assert split.plan.times[0].input_s


def test_more_candidates_are_never_worse_and_plans_do_not_depend_on_the_clock() -> None:
    lengths = long_tailed(60)
    few, many = (tiny_planner(3, 3, auto={"max_candidates": count}) for count in (4, 120))
    times = [planner.propose(0, documents(lengths), "auto").plan.predicted.step_time_s for planner in (few, many)]
    assert times[1] <= times[0]
    plans = [many.propose(0, documents(lengths), "auto").plan for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("dp", [2, 4])
def test_rivals_that_stop_early_change_no_plan(monkeypatch, dp) -> None:
    """They stop at the first replica that alone is no better than the plan that is known."""
    own, stopped = Effort.faster, []

    def noting(effort, choices):
        try:
            return own(effort, choices)
        except SlowerPlanError:
            stopped.append(effort)
            raise

    def plans():
        return [tiny_planner(dp, 3).propose(0, documents(long_tailed(count)), "auto").plan for count in (12, 60)]

    monkeypatch.setattr(Effort, "faster", noting)
    early = plans()
    assert stopped
    monkeypatch.setattr(Effort, "faster", lambda effort, choices: tuple(choices))
    assert plans() == early


def test_time_budget_ends_the_search() -> None:
    """Out of time it still has a valid plan, not worse than any strategy."""
    beats_all(tiny_planner(3, 3, auto={"time_budget_s": 1e-9}), long_tailed(60))
