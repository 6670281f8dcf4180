"""Search every strategy's own best layout within a time for all of them: `search_strategies`.

Strategies whose plans are cheap come first; every one may use its even share of the time that is left, and begins with
the layouts that were fast before. A plan that has begun is ended, and at least one layout that fits is looked for.
"""

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.host_memory import HostMemory
from evenload.cost.memory import static_bytes
from evenload.errors import ConfigError
from evenload.explore.batches import OnProgress, SampledBatch, no_progress
from evenload.explore.evaluate import StrategyPlanners, judged_window
from evenload.explore.layout_search import (
    NOT_LOOKED_AT,
    QUICK_CANDIDATES,
    LayoutResult,
    coarse_coefficients,
    coarse_problems,
    layouts_of,
    planned_layout,
    search_layouts,
)
from evenload.explore.stage_layers import usable_bytes
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.plan.strategies.auto import AutoOptions
from evenload.plan.strategies.registry import strategy_named
from evenload.types.base import Frozen
from evenload.types.cluster import ClusterSpec
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

BASELINE_LAYOUTS = 3
"""Of the layouts that suit `best_fit` best, in which its windows are tried."""


class StrategyLayouts(Frozen):
    """The layouts of a cluster under one strategy.

    Args:
        layouts: the fastest that fit first, then those that are out.
        planned: of them; too_large: weights and optimizer alone exceed memory; ruled_out: known not to be among the
            best without a plan; not_looked_at: time was up.
    """

    strategy: str
    layouts: tuple[LayoutResult, ...]
    planned: int
    too_large: int
    ruled_out: int
    not_looked_at: int

    @property
    def best(self) -> LayoutResult:
        return self.layouts[0]


def search_strategies(
    model: ModelSpec,
    cluster: ClusterSpec,
    batches: Sequence[SampledBatch],
    coefficients_of: Callable[[ParallelLayout], CostCoefficients],
    strategies: Sequence[str],
    options: PlanOptions,
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    on_progress: OnProgress = no_progress,
) -> tuple[StrategyLayouts, ...]:
    """In the order of `strategies`.

    Args:
        limit_s: for all strategies together; what was not looked at for it is counted.
        clock: seconds that only rise.
    """
    end_s = clock() + limit_s
    found: dict[str, StrategyLayouts] = {}
    # Packs of whole documents are planned fast, a search over strategies is dearest.
    records = {name: strategy_named(name) for name in strategies}
    order = sorted(records, key=lambda name: (records[name].tries_others, records[name].cuts_documents))
    for place, name in enumerate(order):
        started_s = clock()
        own_s = max(0.0, (end_s - started_s) / (len(strategies) - place))
        layouts = search_layouts(
            model,
            cluster,
            batches,
            coefficients_of,
            strategy=name,
            options=options,
            on_progress=on_progress,
            spent=lambda started_s=started_s, own_s=own_s: (clock() - started_s) / own_s if own_s else float("inf"),
            first=_fast_before(tuple(found.values())),
        )
        late = sum(result.why == NOT_LOOKED_AT for result in layouts)
        planned, too_large = (sum(getattr(one, name) for one in layouts) for name in ("is_planned", "is_too_large"))
        found[name] = StrategyLayouts(
            strategy=name,
            layouts=layouts,
            planned=planned,
            too_large=too_large,
            ruled_out=len(layouts) - planned - too_large - late,
            not_looked_at=late,
        )
    return tuple(found[name] for name in strategies)


def _fast_before(found: Sequence[StrategyLayouts]) -> list[dict[str, int]]:
    times_s: dict[tuple[int, ...], float] = {}
    sizes: dict[tuple[int, ...], dict[str, int]] = {}
    for result in (result for one in found for result in one.layouts if result.feasible):
        key = tuple(result.layout.values())
        sizes[key] = result.layout
        times_s[key] = min(times_s.get(key, float("inf")), result.mean_step_time_s or float("inf"))
    return [sizes[key] for key in sorted(times_s, key=times_s.__getitem__)]


def planners_in(
    found: LayoutResult,
    model: ModelSpec,
    coefficients: CostCoefficients,
    batches: Sequence[SampledBatch],
    options: PlanOptions,
    *,
    room_bytes: int,
    host: HostMemory,
) -> StrategyPlanners:
    """Return what plans batches in the layout that was found, on as much of them as it was found on."""
    layout = found.parallel_layout()
    if found.stride == 1:
        return StrategyPlanners(planner=StepPlanner(model, coefficients, layout, room_bytes, options, host=host))
    parts = coarse_problems(model, layout, batches, room_bytes)
    coefficients = coarse_coefficients(coefficients, layout, parts[0].layout)
    planner = StepPlanner(model, coefficients, parts[0].layout, parts[0].room_bytes, options, host=host)
    return StrategyPlanners(
        planner=planner,
        batches=tuple(part.batch for part in parts),
        stands_for=layout,
        stride=found.stride,
        raised_bytes=parts[0].raised_bytes,
    )


def fair_planners(
    layouts: Sequence[LayoutResult],
    planners_of: Callable[[LayoutResult], StrategyPlanners],
    batches: Sequence[SampledBatch],
) -> StrategyPlanners | None:
    """Return, of the first few layouts of `best_fit`, the one in which its best windows make it fastest; None where
    none fits."""
    judged = []
    for result in [one for one in layouts if one.is_planned][:BASELINE_LAYOUTS]:
        planners = planners_of(result)
        if (window := judged_window(planners.planner, planners.batches or batches)) is not None:
            judged.append((window.mean_step_time_s, len(judged), planners))
    return min(judged)[2] if judged else None


# `fitting_layouts`: a few layouts that hold a batch where the requested one does not, without a search: at most
# `MOST_TRIED` spread evenly over the sorted static bytes are planned (the leanest hold every batch and are slow).

MOST_TRIED = 12


class FittingLayouts(Frozen):
    """Layouts that fit, the fastest on the first batch first, and how many were tried of how many the model allows."""

    layouts: tuple[LayoutResult, ...]
    num_tried: int
    num_all: int


def fitting_layouts(
    model: ModelSpec,
    cluster: ClusterSpec,
    batch: SampledBatch,
    coefficients_of: Callable[[ParallelLayout], CostCoefficients],
    *,
    strategy: str,
    options: PlanOptions,
    on_progress: OnProgress = no_progress,
) -> FittingLayouts:
    """Look for layouts that hold a batch; the strategy "auto" is best at fitting memory."""
    every, room_bytes = layouts_of(model, cluster), usable_bytes(cluster)
    held_bytes = {layout: int(static_bytes(model, layout).max()) for layout in every}
    roomy = sorted((layout for layout in every if held_bytes[layout] < room_bytes), key=held_bytes.__getitem__)
    search = options.own(AutoOptions)
    quick = options.with_own(
        msgspec.structs.replace(search, max_candidates=min(search.max_candidates, QUICK_CANDIDATES))
    )
    at = np.unique(np.linspace(0, len(roomy) - 1, MOST_TRIED).round().astype(int)) if roomy else ()
    tried = [roomy[i] for i in at]
    found = []
    for done, layout in enumerate(tried):
        on_progress(done, len(tried), f"looking for layouts that fit: {layout.describe()}")
        try:
            result = planned_layout(model, cluster, layout, [batch], coefficients_of, strategy, quick)
        except ConfigError:
            continue  # a layout that this strategy or these costs do not know
        if result.feasible:
            found.append(result)
    found.sort(key=lambda result: result.mean_step_time_s or 0.0)
    return FittingLayouts(layouts=tuple(found), num_tried=len(tried), num_all=len(every))
