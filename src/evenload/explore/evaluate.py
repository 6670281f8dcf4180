"""Evaluate strategies on sampled batches: one row of figures each, for `evenload plan`, `--json` and the page."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.units import layout_bound_seconds, physical_bound_seconds
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.explore.batches import OnProgress, SampledBatch, no_progress, plan_steps
from evenload.explore.prediction_interval import prediction_interval
from evenload.explore.timelines import split_proposal
from evenload.planning.layouts.flex_planner import FlexPlanner, FlexProposal
from evenload.planning.planner import Proposal, StepPlanner
from evenload.planning.strategies.baselines import BEST_FIT, BestFitOptions
from evenload.planning.strategies.registry import strategy_named
from evenload.types.base import Frozen
from evenload.types.columns import SliceColumns
from evenload.types.layout import ParallelLayout
from evenload.types.run import LayoutDecision
from evenload.types.text import counted
from evenload.types.timeline import TimeSplit, mean_time_split
from evenload.types.tree_columns import lengths_of

_MEANS = ("bubble_fraction", "imbalance_forward", "imbalance_backward", "imbalance_dp")


class StrategyResult(Frozen):
    """Figures of one strategy; None where it could not be planned.

    Figures are means over steps; maxima are `max_pack_tokens`, `peak_memory_bytes` and `peak_host_bytes_per_node`, sums
    `cap_violations`, `deferred_tokens` (each once) and `dropped_tokens`; imbalances are of the worst replica of a step.
    Where the layout changes between steps, step times include the switches, and `layout` is that of most steps.

    Args:
        feasible: fits memory; `why` it does not, or cannot be planned.
        step_time_interval_s: where nine of ten measured step times lie.
        lower_bound_s: all useful work at the cost model's rates on all devices evenly; `physical_bound_s`: all model
            FLOPs at the peak; `layout_bound_s`: the least of any plan in this layout (`cost.units`).
        speedup_over_best_fit: over `best_fit` as requested; `speedup_over_baseline`: over `best_fit` in the windows
            that suit it best (`best_window`).
    """

    name: str
    feasible: bool
    why: str
    step_time_s: tuple[float, ...] = ()
    mean_step_time_s: float | None = None
    step_time_interval_s: tuple[float, float] | None = None
    lower_bound_s: float
    fraction_of_bound: float | None = None
    speedup_over_best_fit: float | None = None
    tokens_per_s_per_device: float | None = None
    bubble_fraction: float | None = None
    imbalance_forward: float | None = None
    imbalance_backward: float | None = None
    imbalance_dp: float | None = None
    max_pack_tokens: int | None = None
    cap_violations: int | None = None
    peak_memory_bytes: int | None = None
    peak_host_bytes_per_node: int | None = None
    num_packs_forward: float | None = None
    num_packs_backward: float | None = None
    plan_time_s: float | None = None
    deferred_tokens: int = 0
    dropped_tokens: int
    mean_token_delay_steps: float = 0.0
    layout: dict[str, int]
    cuts: str | None = None
    schedule: str | None = None
    sharding: str | None = None
    note: str = ""
    time_split: TimeSplit | None = None
    layout_decisions: tuple[LayoutDecision, ...] = ()
    physical_bound_s: float | None = None
    mfu: float | None = None
    layout_bound_s: float | None = None
    fraction_of_layout_bound: float | None = None
    speedup_over_baseline: float | None = None
    window_tokens: int | None = None


@dataclass(frozen=True, eq=False)
class Evaluation:
    """All strategies on the same batches: rows as requested, the fastest feasible one, and the planned steps of each.

    Args:
        baseline: `best_fit` in the windows that suit it best; None where it was not compared or fits memory in none.
    """

    results: tuple[StrategyResult, ...]
    best: str | None
    proposals: dict[str, tuple[Proposal, ...]]
    baseline: StrategyResult | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class StrategyPlanners:
    """What strategies are planned with.

    Args:
        planner: of all strategies that are not in `own`.
        flexible: of strategies that change the layout between steps; starts in the layout of `planner`.
        own: by strategy, where its layout is another.
        baseline: of `best_fit` in other windows; None = as `best_fit`.
        batches: of a part of a large cluster; None = those of the comparison.
        stands_for: the layout of the whole cluster, where the planner's is of every `stride`-th replica, in which a
            device holds `raised_bytes` more. Counts of packs and tokens are then times `stride`, and memory is without
            what was raised.
    """

    planner: StepPlanner
    flexible: FlexPlanner | None = None
    own: Mapping[str, "StrategyPlanners"] = field(default_factory=dict)
    baseline: "StrategyPlanners | None" = None
    batches: tuple[SampledBatch, ...] | None = None
    stands_for: ParallelLayout | None = None
    stride: int = 1
    raised_bytes: int = 0

    def of(self, name: str) -> "StrategyPlanners":
        return self.own.get(name, self)


def evaluate_strategies(
    planners: StrategyPlanners,
    batches: Sequence[SampledBatch],
    strategies: Sequence[str],
    on_progress: OnProgress = no_progress,
) -> Evaluation:
    """Plan every batch with every strategy; `ConfigError` for an unknown strategy, or one that changes the layout
    without a `FlexPlanner`."""
    for name in strategies:
        # A misspelt name is the user's error, not a strategy that cannot be planned.
        if strategy_named(name).changes_layout and planners.of(name).flexible is None:
            raise ConfigError(
                f"strategy {name} needs the costs of other layouts: give evaluate_strategies a FlexPlanner"
            )
    results, proposals = [], {}
    for index, name in enumerate(strategies):
        on_progress(index, len(strategies), name)
        result, proposals[name] = _evaluate(planners.of(name), batches, name)
        results.append(result)
    baseline = None
    if BEST_FIT.name in strategies:
        on_progress(len(strategies) - 1, len(strategies), f"{BEST_FIT.name} in other windows")
        requested = results[list(strategies).index(BEST_FIT.name)]
        baseline = _baseline(planners, batches, requested)
        # A baseline that cannot run is no baseline.
        if requested.feasible:
            results = [_compared(one, requested, "speedup_over_best_fit") for one in results]
            baseline = baseline and _compared(baseline, requested, "speedup_over_best_fit")
        if baseline is not None:
            results = [_compared(one, baseline, "speedup_over_baseline") for one in results]
            baseline = _compared(baseline, baseline, "speedup_over_baseline")
    feasible = [result for result in results if result.feasible and result.mean_step_time_s is not None]
    best = min(feasible, key=lambda result: result.mean_step_time_s or 0.0).name if feasible else None
    return Evaluation(tuple(results), best, proposals, baseline)


def _baseline(
    planners: StrategyPlanners, batches: Sequence[SampledBatch], requested: StrategyResult
) -> StrategyResult | None:
    usual = planners.of(BEST_FIT.name)
    planners = planners.baseline or usual
    planner, batches = planners.planner, planners.batches or batches
    limit, own = planner.options.max_pack_tokens, planner.options.own(BestFitOptions).window_tokens
    if (judged := best_window(planner, batches)) is None:
        return None
    window_tokens = judged.window_tokens
    if window_tokens == (own or limit) and planners is usual:
        return msgspec.structs.replace(requested, window_tokens=window_tokens)
    result, _ = _evaluate(replace(planners, planner=with_window(planner, window_tokens)), batches, BEST_FIT.name)
    return msgspec.structs.replace(result, window_tokens=window_tokens)


def _compared(result: StrategyResult, other: StrategyResult, key: str) -> StrategyResult:
    if result.mean_step_time_s is None or other.mean_step_time_s is None:
        return result
    return msgspec.structs.replace(result, **{key: other.mean_step_time_s / result.mean_step_time_s})


def _evaluate(
    planners: StrategyPlanners, batches: Sequence[SampledBatch], name: str
) -> tuple[StrategyResult, tuple[Proposal, ...]]:
    planner, flexible, batches = planners.planner, planners.flexible, planners.batches or batches
    lower_bound_s = [planner.costs.lower_bound_seconds(*lengths_of(batch.documents)) for batch in batches]
    layout = _sizes(planners.stands_for or planner.layout)
    dropped, stride = sum(batch.dropped_tokens for batch in batches), planners.stride
    note, decisions = "", ()
    try:
        if flexible is not None and flexible.changes_layout_of(name):
            flexed, plan_time_s = _flexed(flexible.with_strategy(name), batches)
            proposals, deferred_tokens = [one.proposal for one in flexed], 0
            layout = dict(_most_steps(tuple(_sizes(proposal.plan.layout).items()) for proposal in proposals))
            note, decisions = _switch_note(flexed), tuple(one.told for one in flexed)
        else:
            proposals, plan_time_s, deferred_tokens = plan_steps(planner, batches, name)
    except (ConfigError, DataError, InfeasiblePlanError) as error:
        # One strategy that does not apply (slices of a bidirectional model, a document beyond the window) must
        # not hide the others; its row says why.
        return StrategyResult(
            name=name,
            feasible=False,
            why=str(error),
            lower_bound_s=float(np.mean(lower_bound_s)),
            dropped_tokens=dropped,
            layout=layout,
        ), ()
    step_time_s = [proposal.plan.predicted.step_time_s for proposal in proposals]
    physical_s, layout_s = (
        [bound(proposal.costs, *lengths_of(proposal.plan.documents)) for proposal in proposals]
        for bound in (physical_bound_seconds, layout_bound_seconds)
    )
    interval = prediction_interval(planner.costs.coefficients, planner.layout)
    trained = sum(document.num_tokens for batch in batches for document in batch.documents)
    planned = [sum(document.num_tokens for document in proposal.plan.documents) for proposal in proposals]
    delays = [proposal.plan.mean_token_delay_steps for proposal in proposals]
    late = sum(num_tokens * delay for num_tokens, delay in zip(planned, delays, strict=True))
    means: dict[str, Any] = {name: float(np.mean([getattr(one, name) for one in proposals])) for name in _MEANS}
    own_note = next((proposal.note for proposal in proposals if proposal.note), "")
    return StrategyResult(
        name=name,
        feasible=all(proposal.feasible for proposal in proposals),
        why=next((proposal.why for proposal in proposals if not proposal.feasible), ""),
        step_time_s=tuple(step_time_s),
        mean_step_time_s=float(np.mean(step_time_s)),
        step_time_interval_s=interval.of(float(np.mean(step_time_s))),
        lower_bound_s=float(np.mean(lower_bound_s)),
        fraction_of_bound=sum(lower_bound_s) / sum(step_time_s),
        physical_bound_s=float(np.mean(physical_s)),
        mfu=sum(physical_s) / sum(step_time_s),
        layout_bound_s=float(np.mean(layout_s)),
        fraction_of_layout_bound=sum(layout_s) / sum(step_time_s),
        tokens_per_s_per_device=trained / sum(step_time_s) / planner.layout.world_size,
        **means,
        max_pack_tokens=max(proposal.max_pack_tokens for proposal in proposals),
        cap_violations=sum(proposal.cap_violations for proposal in proposals) * stride,
        peak_memory_bytes=max(one.plan.predicted.peak_memory_bytes for one in proposals) - planners.raised_bytes,
        peak_host_bytes_per_node=max(proposal.plan.predicted.peak_host_bytes_per_node for proposal in proposals),
        num_packs_forward=_mean_packs(proposals, "forward") * stride,
        num_packs_backward=_mean_packs(proposals, "backward") * stride,
        plan_time_s=float(np.mean(plan_time_s)),
        deferred_tokens=deferred_tokens * stride,
        dropped_tokens=dropped,
        mean_token_delay_steps=late / sum(planned) if sum(planned) else 0.0,
        layout=layout,
        cuts=_most_steps(_cuts_of(proposal) for proposal in proposals),
        schedule=_most_steps(_schedule_of(proposal) for proposal in proposals),
        sharding=_most_steps(_sharding_of(proposal) for proposal in proposals),
        note=note or "; ".join(filter(None, (_part_note(stride), own_note, _outlier_note(proposals[-1])))),
        time_split=mean_time_split([split_proposal(proposal) for proposal in proposals]),
        layout_decisions=decisions,
    ), tuple(proposals)


def _flexed(flexible: FlexPlanner, batches: Sequence[SampledBatch]) -> tuple[list[FlexProposal], list[float]]:
    """Plan every step in the layout chosen for it, and return the seconds that each took to plan."""
    proposals: list[FlexProposal] = []
    plan_time_s: list[float] = []
    state = flexible.initial_state()
    for step, batch in enumerate(batches):
        coming = [later.documents for later in batches[step + 1 : step + flexible.options.known_steps]]
        started = time.perf_counter()
        proposal = flexible.propose(step, batch.documents, batch.left_out, state=state, coming=coming)
        plan_time_s.append(time.perf_counter() - started)
        proposals.append(proposal)
        state = proposal.state
    return proposals, plan_time_s


def _part_note(stride: int) -> str:
    if stride == 1:
        return ""
    of_part = f"packs and deferred tokens are the part's times {stride}, plan time and timelines the part's"
    return f"estimated on one of {stride} replicas and documents; {of_part}"


def _outlier_note(last: Proposal) -> str:
    """Name the lengths of `wlb`'s queues in the last step; "" where there are none."""
    lengths = [f"{length:,}" for length in last.state.outlier_lengths] if last.state else []
    return f"in the last step outliers wait from {' and '.join(lengths)} tokens on" if lengths else ""


def _sizes(layout: ParallelLayout) -> dict[str, int]:
    return {axis: getattr(layout, axis) for axis in ("dp", "cp", "pp", "tp")}


def _switch_note(proposals: Sequence[FlexProposal]) -> str:
    used = Counter(one.proposal.plan.layout.arrangement.describe() for one in proposals)
    layouts = ", ".join(f"{name} ({steps})" for name, steps in used.items())
    switches = sum(one.decision.action == "switch" and one.proposal.feasible for one in proposals)
    switch_s = sum(one.proposal.switch_s for one in proposals)
    saving = sum(one.decision.action == "save memory" for one in proposals)
    steps = counted(len(proposals), "step")
    return f"layout switched {counted(switches, 'time')}, {switch_s:.3g} s of {steps}; steps by layout: {layouts}" + (
        f"; {counted(saving, 'step')} kept it by recomputing or offloading" if saving else ""
    )


_Value = TypeVar("_Value")


def _most_steps(values: Iterable[_Value]) -> _Value:
    """Return the value of most steps, the first of equals."""
    return Counter(values).most_common(1)[0][0]


def _cuts_of(proposal: Proposal) -> str:
    """Return "whole" documents, "symmetric" slices, the same in both directions, or "asymmetric"."""
    used = [choice.candidate.packs for choice in proposal.choices]
    if all((one.forward.start == 0).all() and (one.backward.start == 0).all() for one in used):
        return "whole"

    def slices(columns: SliceColumns) -> NDArray[np.int64]:
        return np.unique(np.stack([columns.doc.astype(np.int64), columns.start, columns.stop], axis=1), axis=0)

    is_symmetric = all(np.array_equal(slices(one.forward), slices(one.backward)) for one in used)
    return "symmetric" if is_symmetric else "asymmetric"


def _schedule_of(proposal: Proposal) -> str:
    """Name the schedules of all replicas that have documents."""
    used = [choice.candidate for choice in proposal.choices if choice.candidate.packs.forward.num_packs]
    return " + ".join(sorted({one.schedule for one in used}))


def _sharding_of(proposal: Proposal) -> str:
    """Name the rules by which ranks share packs, "" where none do; packs with documents whole on a rank are "dacp" if
    the strategy chose the ranks, else "mixed"."""
    rules = set()
    by_rank = "dacp" if strategy_named(proposal.plan.strategy).assigns_ranks else "mixed"
    for packs in proposal.plan.pack_plans:
        shared = [pack for pack in packs.forward if any(piece.cp > 1 for piece in pack.slices)]
        rules |= {pack.sharding if isinstance(pack.sharding, str) else by_rank for pack in shared}
    return " + ".join(sorted(rules))


def _mean_packs(proposals: Sequence[Proposal], direction: str) -> float:
    totals = [sum(len(getattr(packs, direction)) for packs in proposal.plan.pack_plans) for proposal in proposals]
    return float(np.mean(totals))


_MOST_HALVINGS = 8
_SLOWER_HALVINGS = 2  # halvings in a row that are slower than the best, after which no more are tried


class TriedWindow(NamedTuple):
    """A window, and the mean step time with it."""

    window_tokens: int
    mean_step_time_s: float


def with_window(planner: StepPlanner, window_tokens: int) -> StepPlanner:
    """Return a planner whose `best_fit` fills windows of so many tokens."""
    return planner.with_options(planner.options.with_own(BestFitOptions(window_tokens=window_tokens)))


def best_window(planner: StepPlanner, batches: Sequence[SampledBatch]) -> TriedWindow | None:
    """Return the window with which `best_fit` is fastest; None where it fits memory with none, or has no window.

    Smaller windows often shorten a pipeline's ends. Half, a quarter and so on, the user's own, and those between the
    best one and its neighbours are planned on all steps.
    """
    limit = planner.options.max_pack_tokens
    if limit is None:
        return None
    lengths = [document.num_tokens for batch in batches for document in batch.documents]
    median, tried = max(1, int(np.median(lengths))) if lengths else 1, dict[int, float]()

    def judge(window_tokens: int) -> None:
        if window_tokens not in tried:
            tried[window_tokens] = _mean_seconds(with_window(planner, window_tokens), batches)

    def best() -> int:
        # Of equals the largest, because that is the one that was requested.
        return min(tried, key=lambda tokens: (tried[tokens], -tokens))

    for window_tokens in [limit, *(limit >> k for k in range(1, _MOST_HALVINGS + 1) if limit >> k >= median)]:
        judge(window_tokens)
        if tried[best()] < float("inf") and best() not in list(tried)[-_SLOWER_HALVINGS:]:
            break
    if (own := planner.options.own(BestFitOptions).window_tokens) is not None:
        judge(own)
    for window_tokens in sorted({best() * 3 // 4, best() * 3 // 2}):
        if median <= window_tokens <= limit:
            judge(window_tokens)
    return None if np.isinf(tried[best()]) else TriedWindow(best(), tried[best()])


def _mean_seconds(planner: StepPlanner, batches: Sequence[SampledBatch]) -> float:
    try:
        proposals, _, _ = plan_steps(planner, batches, BEST_FIT.name)
    except (ConfigError, DataError, InfeasiblePlanError):
        return float("inf")
    fits = all(proposal.feasible for proposal in proposals)
    return float(np.mean([one.plan.predicted.step_time_s for one in proposals])) if fits else float("inf")
