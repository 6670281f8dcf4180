"""The layout that `evenload plan` plans in: given, a run's, the best of a few or of a search."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from evenload.cli.first_lines import option_of
from evenload.cli.options import progress_bar
from evenload.cli.plan_inputs import PlanInputs
from evenload.cost.memory import static_bytes
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.explore.batches import OnProgress, SampledBatch, no_progress
from evenload.explore.evaluate import StrategyPlanners
from evenload.explore.layout_search import (
    LARGE_CLUSTER,
    FewLayouts,
    LayoutResult,
    LayoutSearch,
    StrategyLayouts,
    best_baseline_planners,
    layouts_of,
)
from evenload.explore.stage_layers import STATIC_SHARE, balanced_layout
from evenload.planning.layouts.flex_planner import FlexPlanner
from evenload.planning.planner import StepPlanner
from evenload.planning.strategies.auto import AUTO
from evenload.planning.strategies.baselines import BEST_FIT
from evenload.planning.strategies.registry import strategy_named
from evenload.types.cluster import ClusterSpec
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.text import format_bytes, format_seconds

_MOST_NAMED = 3
"""Layouts that a message names; the JSON file has all."""


def layout_of_plan(
    inputs: PlanInputs, batches: Sequence[SampledBatch], names: tuple[str, ...] | None, *, is_of_engine: bool
) -> tuple[ParallelLayout, FewLayouts | None]:
    """Return the layout that was given, of which a run's stages keep their layers and others get them by cost; else the
    best of a few for the strategies `names` (None = all), and these few; of an engine the shallowest that fits.
    `InfeasiblePlanError` where none fits."""
    model, costs = inputs.costs.model, inputs.costs
    few = None
    if (layout := inputs.layout) is None and is_of_engine:
        layout = _layout_of_engine(model, inputs.cluster)
    elif layout is None:
        few = few_layouts(inputs, batches, names)
        if not few.layouts:
            raise InfeasiblePlanError(f"no layout of {inputs.cluster_name} fits {model.name}: {fitting_text(few)}")
        return few.layouts[0].parallel_layout(), few
    if inputs.run_layouts:
        return layout, None
    lengths = [document.num_tokens for batch in batches for document in batch.documents]
    return balanced_layout(
        model, costs.of(layout), layout, lengths, num_steps=len(batches), memory_bytes=inputs.memory_cap_bytes
    ), None


def _layout_of_engine(model: ModelSpec, cluster: ClusterSpec) -> ParallelLayout:
    plain = (layout for layout in layouts_of(model, cluster) if layout.cp == layout.tp == 1)
    held_bytes = {layout: int(static_bytes(model, layout).max()) for layout in plain}
    limit_bytes = STATIC_SHARE * cluster.device.usable_bytes
    if not (fitting := [layout for layout, num_bytes in held_bytes.items() if num_bytes <= limit_bytes]):
        raise InfeasiblePlanError(
            f"weights, gradients and optimizer of {model.name} take {format_bytes(min(held_bytes.values()))} a device "
            f"or more without cp and tp, and may take {format_bytes(limit_bytes)} of a device of {cluster.name}; name "
            "a larger cluster, or --layout"
        )
    return min(fitting, key=lambda layout: layout.pp)


def few_layouts(
    inputs: PlanInputs, batches: Sequence[SampledBatch], names: tuple[str, ...] | None, best: str | None = None
) -> FewLayouts:
    """Plan a few layouts of the cluster with the strategy that was the `best` in another one, else with `auto` or,
    where that is not among those to plan, with the first of `names`."""
    names = (best,) if best is not None else names or ()
    stays = [name for name in names if not strategy_named(name).changes_layout]
    with progress_bar() as on_progress:
        strategy = AUTO.name if AUTO.name in stays or not stays else stays[0]
        return _layout_search(inputs, batches, on_progress).few(strategy)


def planners_of_layout(inputs: PlanInputs, layout: ParallelLayout) -> StrategyPlanners:
    costs, options = inputs.costs, inputs.options
    planner = StepPlanner(costs.model, costs.of(layout), layout, inputs.memory_cap_bytes, options, host=inputs.host)
    return StrategyPlanners(planner=planner, flexible=_flex_planner(inputs, planner))


def _flex_planner(inputs: PlanInputs, planner: StepPlanner) -> FlexPlanner:
    layouts = inputs.run_layouts if len(inputs.run_layouts) > 1 else None
    return FlexPlanner(planner, inputs.costs.of, layouts=layouts, layers_move=inputs.layers_move)


@dataclass(frozen=True)
class SearchedLayouts:
    """The layouts that a search of at most `limit_s` ranked for every strategy."""

    results: tuple[StrategyLayouts, ...]
    limit_s: float

    @property
    def fastest(self) -> StrategyLayouts:
        return min(self.results, key=lambda one: (not one.best.feasible, one.best.mean_step_time_s or 0.0))

    def of(self, strategy: str) -> StrategyLayouts:
        return next(one for one in self.results if one.strategy == strategy)

    def require_whole(self, strategy: str, what: str) -> None:
        """Refuse plans of a part of a large cluster, which are not the cluster's."""
        if (best := self.of(strategy).best).stride > 1:
            raise ConfigError(
                f"{what}: the search judged {strategy} on one of {best.stride} replicas and documents, because the "
                f"cluster has more than {LARGE_CLUSTER} devices, so there are no plans of whole steps; plan with its "
                f"layout instead of a search: --layout {option_of(best.layout)}"
            )

    def summary(self) -> Iterator[str]:
        """Name every strategy's layout, and say what was planned and what was not."""
        results = self.results
        named = "; ".join(
            f"{one.strategy} {option_of(one.best.layout)} ({format_seconds(one.best.mean_step_time_s)})"
            if one.best.feasible
            else f"{one.strategy} none"
            for one in results
        )
        yield f"layout of each strategy: {named}"
        best, *others = self.fastest.layouts
        # Seconds of the first batch alone, of layouts that were slower there, are not comparable.
        if others := [one for one in others if one.feasible and one.num_batches == best.num_batches]:
            yield f"next fastest under {self.fastest.strategy}: {_named(others)}; --json lists all"
        yield (
            f"layouts planned: {sum(one.planned for one in results)}; too large in weights and optimizer alone: "
            f"{sum(one.too_large for one in results)}; not needed, because no plan in them can be among the best: "
            f"{sum(one.ruled_out for one in results)}"
        )
        late = [f"{one.strategy} {one.not_looked_at} of {len(one.layouts)}" for one in results if one.not_looked_at]
        if late:
            yield (
                f"not looked at, because the {self.limit_s:g} s of --search-seconds were up: {', '.join(late)}; more "
                "time may find faster layouts"
            )
        if any(one.best.stride > 1 for one in results):
            strides = ", ".join(f"{one.strategy} {one.best.stride}" for one in results)
            yield (
                f"estimates: more than {LARGE_CLUSTER} devices are judged on a part, every so many-th replica and "
                f"document ({strides}); --layout {option_of(self.fastest.best.layout)} plans the whole"
            )

    def planners(self, inputs: PlanInputs, batches: Sequence[SampledBatch]) -> StrategyPlanners:
        """Plan every strategy in its own best layout; `best_fit` in other windows in the one that is best for it."""
        search = _layout_search(inputs, batches)

        def planners_of(result: LayoutResult) -> StrategyPlanners:
            planners = search.planners(result)
            if planners.stands_for is not None:
                return planners  # A part has no other layouts to change to.
            return replace(planners, flexible=_flex_planner(inputs, planners.planner))

        own = {one.strategy: planners_of(one.best) for one in self.results}
        baseline = None
        if BEST_FIT.name in own:
            baseline = best_baseline_planners(self.of(BEST_FIT.name).layouts, planners_of, batches)
        return replace(own[self.fastest.strategy], own=own, baseline=baseline)


def search_all_layouts(
    inputs: PlanInputs, batches: Sequence[SampledBatch], names: tuple[str, ...], limit_s: float
) -> SearchedLayouts:
    with progress_bar() as on_progress:
        results = _layout_search(inputs, batches, on_progress).strategies(names, limit_s=limit_s)
    searched = SearchedLayouts(results, limit_s)
    fastest = searched.fastest
    if not fastest.best.feasible:
        closest = f"the closest, {option_of(fastest.best.layout)}: {fastest.best.why}"
        raise InfeasiblePlanError(f"no layout of {inputs.cluster_name} fits; {closest}")
    return searched


def _layout_search(
    inputs: PlanInputs, batches: Sequence[SampledBatch], on_progress: OnProgress = no_progress
) -> LayoutSearch:
    return LayoutSearch(
        model=inputs.costs.model,
        cluster=inputs.cluster,
        batches=batches,
        coefficients_of=inputs.costs.of,
        options=inputs.options,
        memory_bytes=inputs.memory_cap_bytes,
        host=inputs.host,
        on_progress=on_progress,
    )


def fitting_text(few: FewLayouts) -> str:
    """Name the layouts of a few that fit."""
    if not few.num_tried:
        return (
            f"in all {few.num_all} layouts of the cluster weights, gradients and optimizer alone are more than a "
            "device holds; take more devices, devices with more memory, or LoRA adapters (evenload init --lora)"
        )
    tried = f"{few.num_tried} of the cluster's {few.num_all} layouts tried"
    if not few.layouts:
        return f"no layout was found that fits ({tried}); --search-layout tries all of them"
    return f"these fit by prediction ({tried}): {_named(few.layouts)}; --search-layout ranks all"


def _named(layouts: Sequence[LayoutResult]) -> str:
    """Name the first few layouts, as options with their predicted seconds."""
    few = layouts[:_MOST_NAMED]
    return ", ".join(f"--layout {option_of(one.layout)} ({format_seconds(one.mean_step_time_s)} a step)" for one in few)
