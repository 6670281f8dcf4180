"""Find the dp × cp × pp × tp × virtual stages in which strategies train fastest: simulate every layout of the devices.

Every layout that uses all devices is planned on a batch with little search, the best few with more virtual stages a
rank too, and the best of all these again on all batches with the whole search. Price: layouts × a short plan (0.05-0.5
s) + finalists × batches × a plan.

    tp        powers of two inside a node that divide the heads      cp        powers of two
    pp        divisors of the devices up to the number of layers     virtual   1; for the best where pp > 1 also 2, and
    dp        the rest                                                         up to 12 that divide the layers evenly

Layouts come by the least time of any plan in them (`cost.units`), then with most replicas; before all those in which
another strategy was fast. One is left out unplanned only where that least time is more than as many others take as go
on, or where time is up. Layers go to stages by cost (`explore.stage_layers`), evenly where that does not fit.

Above `LARGE_CLUSTER` devices layouts are rated on every k-th replica and, of documents sorted by length, the middle one
of every k, with the longest: replicas are much alike. Only `dp` is small: the rest of a rank's memory, and the seconds
of reductions, gathers and updates, are the whole's.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.layer_counts import require_supported_layout
from evenload.cost.memory import HostMemory, static_bytes
from evenload.cost.units import sizes_bound_seconds
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.explore.batches import OnProgress, SampledBatch, no_progress
from evenload.explore.evaluate import StrategyPlanners, best_window
from evenload.explore.stage_layers import balanced_layout
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.auto import AUTO, AutoOptions
from evenload.planning.strategies.registry import strategy_named
from evenload.types.base import Frozen
from evenload.types.cluster import ClusterSpec, LinkSpec
from evenload.types.layout import ParallelLayout, even_layout, split_layout
from evenload.types.model import ModelSpec
from evenload.types.text import format_bytes
from evenload.types.tree_columns import lengths_of

QUICK_CANDIDATES = 24  # schedules of the first pass; enough to tell layouts apart by a few percent
FINALISTS = 8  # layouts with one stage a rank that are planned on all batches, and as many with several
FINAL_CANDIDATES = 768  # schedules of the second pass, at least: a layout is chosen once for a run
RATING_SHARE = 0.6  # of a limited time, for rating layouts with one stage a rank
DEEPER_SHARE = 0.75  # of it, until those with several are rated too; the rest is for the finalists
BOUND_STEP = 0.02  # of the least bound: bounds that are closer do not tell which layout is faster
MOST_VIRTUAL_STAGES = 12  # stages a rank that the best layouts are tried with, at most
BASELINE_LAYOUTS = 3  # of the layouts that suit `best_fit` best, in which its windows are tried
MOST_TRIED = 12  # layouts that `few` plans on the first batch
TRIED_DOCUMENTS = 6_000  # of all those plans together, but for `LEAST_TRIED` layouts: some seconds
LEAST_TRIED = 4
NEAR_SHARE, MOST_NEAR = 0.05, 3  # layouts within this share of the fastest, the plainest of which are planned again
COMPARED_BATCHES = 4  # on which they are, at most
PLAINER_SHARE = 0.02  # by which a layout with fewer kinds of parallelism may be slower
LARGE_CLUSTER = 512  # devices up to which layouts are rated on whole batches
LEAST_REPLICAS, LEAST_DOCUMENTS = 16, 64  # that stand for those of a large cluster
NOT_LOOKED_AT = "not looked at: the time for the search was up"


class LayoutResult(Frozen):
    """Figures of one layout; times are None where it cannot be planned or does not fit.

    Args:
        layout: sizes of the dimensions, and "virtual" stages a rank.
        stage_layers: layers of every virtual stage.
        why: why it is out; "" when it fits.
        mean_step_time_s, fraction_of_bound: over the batches it was planned on.
        num_batches: all, or 1 where the first batch showed that others are faster.
        stride: figures are of every so many-th replica and document of a large cluster.
        is_planned: false where it was left out unplanned, by `why`; where weights and optimizer alone exceed memory,
            `peak_memory_bytes` is theirs.
        label: how the slowest replica of the first batch is cut and scheduled.
    """

    layout: dict[str, int]
    feasible: bool
    why: str
    mean_step_time_s: float | None = None
    fraction_of_bound: float | None = None
    peak_memory_bytes: int | None = None
    num_batches: int = 0
    label: str = ""
    stage_layers: tuple[int, ...]
    stride: int = 1
    is_planned: bool = True

    @property
    def is_too_large(self) -> bool:
        """Whether weights and optimizer alone exceed memory, so that it was not planned."""
        return not self.is_planned and self.peak_memory_bytes is not None

    def parallel_layout(self) -> ParallelLayout:
        sizes = {axis: size for axis, size in self.layout.items() if axis != "virtual"}
        return split_layout(self.stage_layers, devices=None, **sizes)


class StrategyLayouts(Frozen):
    """The layouts of a cluster under one strategy.

    Args:
        layouts: the fastest that fit first, then those that are out.
        planned: how many; too_large: weights and optimizer alone exceed memory; ruled_out: known not to be among the
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
        """The fastest layout that fits, or the one that is out by least."""
        return self.layouts[0]


class FewLayouts(Frozen):
    """The layouts of a few that fit, the one to take first, and how many were tried of how many the model allows; the
    first `num_compared` were planned on up to `COMPARED_BATCHES`, the others on the first."""

    layouts: tuple[LayoutResult, ...]
    num_compared: int
    num_tried: int
    num_all: int

    @property
    def compared(self) -> tuple[LayoutResult, ...]:
        return self.layouts[: self.num_compared]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutSearch:
    """Ranks the layouts of all devices of a cluster on sampled batches, most on the first alone, with the costs of
    every layout, and what a device and, to offloaded activations, a node offers."""

    model: ModelSpec
    cluster: ClusterSpec
    batches: Sequence[SampledBatch]
    coefficients_of: Callable[[ParallelLayout], CostCoefficients]
    options: PlanOptions
    memory_bytes: int
    host: HostMemory
    on_progress: OnProgress = no_progress

    def __post_init__(self) -> None:
        if not self.batches:
            raise ConfigError("layout search: give at least one batch")

    def strategies(
        self, names: Sequence[str], *, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> tuple[StrategyLayouts, ...]:
        """Rank layouts for every strategy, in the order of `names`, within `limit_s` seconds of a clock.

        Strategies whose plans are cheap come first; every one may use its even share of the time that is left, and
        begins with the layouts that were fast before. A plan that has begun is ended, and at least one layout that fits
        is looked for.
        """
        end_s = clock() + limit_s
        results: dict[str, StrategyLayouts] = {}
        # Packs of whole documents are planned fast, a search over strategies is dearest.
        records = {name: strategy_named(name) for name in names}
        order = sorted(records, key=lambda name: (records[name].tries_others, records[name].cuts_documents))
        for place, name in enumerate(order):
            started_s = clock()
            own_s = max(0.0, (end_s - started_s) / (len(names) - place))
            layouts = self.rank(
                name,
                spent=lambda started_s=started_s, own_s=own_s: (clock() - started_s) / own_s if own_s else float("inf"),
                first=_fast_before(results.values()),
            )
            late = sum(result.why == NOT_LOOKED_AT for result in layouts)
            planned, too_large = (
                sum(getattr(one, trait) for one in layouts) for trait in ("is_planned", "is_too_large")
            )
            results[name] = StrategyLayouts(
                strategy=name,
                layouts=layouts,
                planned=planned,
                too_large=too_large,
                ruled_out=len(layouts) - planned - too_large - late,
                not_looked_at=late,
            )
        return tuple(results[name] for name in names)

    def rank(
        self,
        strategy: str = AUTO.name,
        *,
        spent: Callable[[], float] = lambda: 0.0,
        first: Sequence[dict[str, int]] = (),
    ) -> tuple[LayoutResult, ...]:
        """Rate all layouts under one strategy, the fastest that fit first, then those that are out.

        Args:
            spent: the share of its time that the search has used; it stops after something that fits.
            first: sizes of layouts that are rated first, because others were fast in them.
        """
        rated = self._rated(strategy, spent, first)
        best = [layout for layout, result in rated[:FINALISTS] if result.feasible]
        deeper: list[tuple[ParallelLayout, LayoutResult]] = []
        every_virtual = [sizes for layout in best for sizes in with_virtual_stages(self.model, layout)]
        for done, sizes in enumerate(every_virtual):
            if deeper and spent() >= DEEPER_SHARE:
                break
            self.on_progress(done, len(every_virtual), f"{strategy}: virtual stages: {sizes.describe()}")
            layout = self._balanced(sizes)
            deeper.append((layout, self.plan(layout, strategy, self.batches[:1], self._quick)))
        deeper.sort(key=lambda pair: _order(pair[1]))
        best += [layout for layout, result in deeper[:FINALISTS] if result.feasible]
        long = self._with_candidates(max(self.options.own(AutoOptions).max_candidates, FINAL_CANDIDATES))
        final: list[LayoutResult] = []
        for layout in best:
            if final and spent() >= 1:
                break
            self.on_progress(len(final), len(best), f"{strategy}: the best again: {layout.describe()}")
            final.append(self.plan(layout, strategy, self.batches, long))
        planned_again = best[: len(final)]
        rest = [result for layout, result in (*rated, *deeper) if layout not in planned_again]
        # Those planned on all batches stay in front: a time on one batch is no match for a mean.
        fitting = sorted((result for result in final if result.feasible), key=_order)
        return (*fitting, *sorted((result for result in (*rest, *final) if result not in fitting), key=_order))

    def _rated(
        self, strategy: str, spent: Callable[[], float], first: Sequence[dict[str, int]]
    ) -> list[tuple[ParallelLayout, LayoutResult]]:
        """Rate layouts with one stage a rank on the first batch; the best first."""
        places = {tuple(sizes.values()): place for place, sizes in enumerate(first)}
        every = sorted(
            self._by_least_time, key=lambda pair: places.get(tuple(layout_sizes(pair[1]).values()), len(places))
        )
        rated: list[tuple[ParallelLayout, LayoutResult]] = []
        for done, (least_s, sizes) in enumerate(every):
            self.on_progress(done, len(every), f"{strategy}: layout {sizes.describe()}")
            times_s = sorted(result.mean_step_time_s or 0.0 for _, result in rated if result.feasible)
            why = ""
            if times_s and spent() >= RATING_SHARE:
                why = NOT_LOOKED_AT
            elif len(times_s) >= FINALISTS and least_s > times_s[FINALISTS - 1]:
                why = f"no plan in it takes less than {least_s:.3g} s, and {FINALISTS} layouts do"
            left_out = sizes, _result_of(sizes)(feasible=False, why=why, is_planned=False)
            rated.append(left_out if why else self._rate(sizes, strategy))
        return sorted(rated, key=lambda pair: _order(pair[1]))

    def _rate(self, sizes: ParallelLayout, strategy: str) -> tuple[ParallelLayout, LayoutResult]:
        """Plan the first batch with little search, with layers by cost or, where that does not fit, evenly."""
        layout = self._balanced(sizes)
        result = self.plan(layout, strategy, self.batches[:1], self._quick)
        if not result.feasible and not layout.is_even:
            layout, result = sizes, self.plan(sizes, strategy, self.batches[:1], self._quick)
        return layout, result

    @functools.cached_property
    def _by_least_time(self) -> list[tuple[float, ParallelLayout]]:
        """Layouts with the seconds that no plan of the first batch is faster than; 0 where a layout has no costs."""
        lengths, bounds = lengths_of(self.batches[0].documents), []
        for layout in layouts_of(self.model, self.cluster):
            try:
                bounds.append((sizes_bound_seconds(self.model, self.coefficients_of(layout), layout, *lengths), layout))
            except ConfigError:
                bounds.append((0.0, layout))
        # Within a few percent other things decide than what bounds see: those equal to `BOUND_STEP` are equal.
        least_s = min((bound_s for bound_s, _ in bounds if bound_s > 0), default=1.0)
        return sorted(bounds, key=lambda pair: (round(pair[0] / least_s / BOUND_STEP), -pair[1].dp))

    def _with_candidates(self, count: int) -> PlanOptions:
        own = self.options.own(AutoOptions)
        return self.options.with_own(msgspec.structs.replace(own, max_candidates=count))

    @property
    def _quick(self) -> PlanOptions:
        return self._with_candidates(min(self.options.own(AutoOptions).max_candidates, QUICK_CANDIDATES))

    def _balanced(self, sizes: ParallelLayout) -> ParallelLayout:
        """Give stages layers by cost, where they can be costed."""
        tokens = [document.num_tokens for batch in self.batches for document in batch.documents]
        try:
            costs = self.coefficients_of(sizes)
            num_steps, memory_bytes = len(self.batches), self.memory_bytes
            return balanced_layout(self.model, costs, sizes, tokens, num_steps=num_steps, memory_bytes=memory_bytes)
        except ConfigError:
            return sizes

    def plan(
        self, layout: ParallelLayout, strategy: str, batches: Sequence[SampledBatch], options: PlanOptions
    ) -> LayoutResult:
        """Plan batches in one layout, of a large cluster a part of them."""
        result, held = _result_of(layout), static_bytes(self.model, layout)
        if held.max() > self.memory_bytes:
            why = f"weights and optimizer alone: {self._over(held)}"
            return result(feasible=False, why=why, peak_memory_bytes=int(held.max()), is_planned=False)
        try:
            planners = self.part_planners(layout, batches, options)
            planner, batches = planners.planner, planners.batches or batches
            proposals = [
                planner.propose(step, batch.documents, strategy, batch.left_out) for step, batch in enumerate(batches)
            ]
        except (ConfigError, DataError, InfeasiblePlanError) as error:
            return result(feasible=False, why=str(error))
        bounds_s = [planner.costs.lower_bound_seconds(*lengths_of(batch.documents)) for batch in batches]
        peaks = [np.max([c.candidate.simulation.peak_bytes for c in one.choices], axis=0) for one in proposals]
        peak = np.max(peaks, axis=0) - planners.raised_bytes
        step_s = [proposal.plan.predicted.step_time_s for proposal in proposals]
        slowest = max(proposals[0].choices, key=lambda choice: choice.candidate.makespan_s)
        reasons = [proposal.why for proposal in proposals if not proposal.feasible]
        why = self._over(peak) if reasons and peak.max() > self.memory_bytes else next(iter(reasons), "")
        return result(
            feasible=not reasons,
            why=why,
            mean_step_time_s=float(np.mean(step_s)),
            fraction_of_bound=sum(bounds_s) / sum(step_s),
            peak_memory_bytes=int(peak.max()),
            num_batches=len(batches),
            label=slowest.candidate.label,
            stride=planners.stride,
        )

    def planners(self, result: LayoutResult) -> StrategyPlanners:
        """Return what plans all batches in a layout, or as much of them as stands for it."""
        return self.part_planners(result.parallel_layout(), self.batches, self.options)

    def part_planners(
        self, layout: ParallelLayout, batches: Sequence[SampledBatch], options: PlanOptions
    ) -> StrategyPlanners:
        """Plan the whole where the cluster is not large or batches are small; else a part, where fewer replicas share
        the optimizer's state: a rank has as much more memory, and memory is reported without it."""
        strides = {_stride(layout, len(batch.documents)) for batch in batches}
        stride, coefficients = strides.pop() if len(strides) == 1 else 1, self.coefficients_of(layout)
        if stride == 1:
            return StrategyPlanners(planner=self._planner(coefficients, layout, options))
        part = split_layout(layout.stage_counts, dp=layout.dp // stride, cp=layout.cp, pp=layout.pp, tp=layout.tp)
        raised = int(static_bytes(self.model, part).max() - static_bytes(self.model, layout).max())
        return StrategyPlanners(
            planner=self._planner(part_coefficients(coefficients, layout, part), part, options, raised),
            batches=tuple(_every(batch, stride) for batch in batches),
            stands_for=layout,
            stride=stride,
            raised_bytes=raised,
        )

    def _planner(
        self, coefficients: CostCoefficients, layout: ParallelLayout, options: PlanOptions, raised_bytes: int = 0
    ) -> StepPlanner:
        memory_bytes = self.memory_bytes + raised_bytes
        return StepPlanner(self.model, coefficients, layout, memory_bytes, options, host=self.host)

    def few(self, strategy: str) -> FewLayouts:
        """Find a layout to take without a search: of those whose weights and optimizer fit, up to `MOST_TRIED` are
        planned on the first batch, of every tp in turn by the least time of any plan in them, and where none of these
        fits as many others, from the largest to the leanest. The best of them, and the one with the fewest kinds of
        parallelism, are planned on a few batches; of layouts that are nearly as fast the plainest comes first."""
        every = [layout for _, layout in self._by_least_time]
        held_bytes = {layout: int(static_bytes(self.model, layout).max()) for layout in every}
        holding = [layout for layout in every if held_bytes[layout] < self.memory_bytes]
        turn = {layout: sum(other.tp == layout.tp for other in holding[:at]) for at, layout in enumerate(holding)}
        holding.sort(key=turn.__getitem__)
        most = min(MOST_TRIED, max(LEAST_TRIED, TRIED_DOCUMENTS // max(1, len(self.batches[0].documents))))
        leaner = sorted(holding[most:], key=held_bytes.__getitem__, reverse=True)
        spread = np.unique(np.linspace(0, len(leaner) - 1, MOST_TRIED).round().astype(int)) if leaner else ()
        rated: list[tuple[ParallelLayout, LayoutResult]] = []
        for tried in (holding[:most], [leaner[index] for index in spread]):
            for sizes in tried:
                self.on_progress(len(rated), most, f"layout {sizes.describe()}")
                rated.append(self._rate(sizes, strategy))
            if any(result.feasible for _, result in rated):
                break
        fitting = sorted((pair for pair in rated if pair[1].feasible), key=lambda pair: _order(pair[1]))
        near = [layout for layout, result in fitting if _seconds(result) <= _seconds(fitting[0][1]) * (1 + NEAR_SHARE)]
        plainest = min(fitting, key=lambda pair: (_num_dimensions(pair[0]), _seconds(pair[1])), default=None)
        near = [*near[:1], *sorted(near[1:], key=_num_dimensions)][:MOST_NEAR]
        near += [plainest[0]] if plainest is not None and plainest[0] not in near else []
        batches = self.batches[:COMPARED_BATCHES]
        if len(near) == len(batches) == 1:
            planned = [fitting[0][1]]
        else:
            planned = [self.plan(layout, strategy, batches, self.options) for layout in near]
        again = sorted(zip(near, planned, strict=True), key=lambda pair: _order(pair[1]))
        again = [pair for pair in again if pair[1].feasible]
        plain = [pair for pair in again if _seconds(pair[1]) <= _seconds(again[0][1]) * (1 + PLAINER_SHARE)]
        first = min(plain, key=lambda pair: _num_dimensions(pair[0]), default=None)
        compared = [result for _, result in sorted(again, key=lambda pair: pair is not first)]
        rest = [result for layout, result in fitting if layout not in near]
        return FewLayouts(
            layouts=(*compared, *rest), num_compared=len(compared), num_tried=len(rated), num_all=len(every)
        )

    def _over(self, held_bytes: np.ndarray) -> str:
        rank = int(held_bytes.argmax())
        over = format_bytes(held_bytes[rank] - self.memory_bytes)
        return f"pipeline rank {rank} needs {format_bytes(held_bytes[rank])}, {over} over"


def best_baseline_planners(
    layouts: Sequence[LayoutResult],
    planners_of: Callable[[LayoutResult], StrategyPlanners],
    batches: Sequence[SampledBatch],
) -> StrategyPlanners | None:
    """Return, of the first few layouts of `best_fit`, the one where its best windows are fastest; None: none fits."""
    judged = []
    for result in [one for one in layouts if one.is_planned][:BASELINE_LAYOUTS]:
        planners = planners_of(result)
        if (window := best_window(planners.planner, planners.batches or batches)) is not None:
            judged.append((window.mean_step_time_s, len(judged), planners))
    return min(judged)[2] if judged else None


def layouts_of(model: ModelSpec, cluster: ClusterSpec) -> tuple[ParallelLayout, ...]:
    """Return every layout over all devices that the model allows, with one stage a rank."""
    devices = cluster.num_devices
    powers = [2**k for k in range(devices.bit_length()) if devices % 2**k == 0]
    depths = [pp for pp in range(1, min(devices, model.num_layers) + 1) if devices % pp == 0]
    layouts = []
    for tp, cp, pp in itertools.product(powers, powers, depths):
        if devices % (tp * cp * pp) or tp > cluster.devices_per_node or (tp > 1 and model.tensor_refusal):
            continue
        layout = even_layout(model.num_layers, dp=devices // (tp * cp * pp), cp=cp, pp=pp, tp=tp)
        try:
            require_supported_layout(model, layout)
        except ConfigError:
            continue  # heads that tp does not divide: no layout of this model
        layouts.append(layout)
    return tuple(layouts)


def with_virtual_stages(model: ModelSpec, layout: ParallelLayout) -> Iterator[ParallelLayout]:
    """Return the same sizes with more stages a rank: two, and numbers that give every stage as many layers; none where
    there is no pipeline or too few layers."""
    if layout.pp == 1:
        return
    for count in range(2, MOST_VIRTUAL_STAGES + 1):
        stages = layout.pp * count
        if stages <= model.num_layers and (count == 2 or model.num_layers % stages == 0):
            yield even_layout(model.num_layers, devices=None, **(layout_sizes(layout) | {"virtual": count}))


def layout_sizes(layout: ParallelLayout) -> dict[str, int]:
    """Return the sizes of the dimensions, and "virtual" stages a rank."""
    sizes = {axis: getattr(layout, axis) for axis in ("dp", "cp", "pp", "tp")}
    return {**sizes, "virtual": layout.num_stages // layout.pp}


def _result_of(layout: ParallelLayout) -> Callable[..., LayoutResult]:
    return functools.partial(LayoutResult, layout=layout_sizes(layout), stage_layers=layout.stage_counts)


def _order(result: LayoutResult) -> tuple[bool, float, float]:
    """Fitting ones by time, then the others by how much they need."""
    time_s = result.mean_step_time_s if result.feasible else None
    return not result.feasible, time_s or 0.0, float(result.peak_memory_bytes or 2**62)


def _seconds(result: LayoutResult) -> float:
    return result.mean_step_time_s or 0.0


def _num_dimensions(layout: ParallelLayout) -> int:
    """Count the kinds of parallelism besides replicas."""
    return sum(getattr(layout, axis) > 1 for axis in ("cp", "pp", "tp"))


def _fast_before(results: Iterable[StrategyLayouts]) -> list[dict[str, int]]:
    feasible = [result for one in results for result in one.layouts if result.feasible]
    fastest_first = sorted(feasible, key=lambda result: result.mean_step_time_s or float("inf"))
    return [dict(sizes) for sizes in dict.fromkeys(tuple(result.layout.items()) for result in fastest_first)]


def _stride(layout: ParallelLayout, documents: int) -> int:
    if layout.world_size <= LARGE_CLUSTER or layout.has_replicated_stages:
        return 1
    most = min(layout.dp // LEAST_REPLICAS, documents // LEAST_DOCUMENTS)
    return max((stride for stride in range(1, most + 1) if layout.dp % stride == 0), default=1)


def _every(batch: SampledBatch, stride: int) -> SampledBatch:
    """Take the longest document and the middle one of every `stride` others, in order of arrival."""
    longest_first = sorted(batch.documents, key=lambda document: -document.num_tokens)
    taken = [longest_first[0], *longest_first[stride + stride // 2 :: stride]]
    kept = {document.doc_id for document in taken}
    documents = tuple(document for document in batch.documents if document.doc_id in kept)
    return SampledBatch(documents, (), batch.dropped_tokens)


def part_coefficients(coefficients: CostCoefficients, whole: ParallelLayout, small: ParallelLayout) -> CostCoefficients:
    """Return coefficients with which reductions, gathers and the update take as long over the small layout's replicas
    as over the whole's."""
    many, few = max(whole.data_sizes), max(small.data_sizes)
    if many == few:
        return coefficients
    steps, share = (many - 1) / (few - 1), (many - 1) / many / ((few - 1) / few)
    bandwidth, gather = coefficients.reduce_bandwidth_bytes_per_s, coefficients.gather_link
    return msgspec.structs.replace(
        coefficients,
        reduce_bandwidth_bytes_per_s=None if bandwidth is None else bandwidth / share,
        reduce_latency_s=coefficients.reduce_latency_s * steps,
        gather_link=None
        if gather is None
        else LinkSpec(bandwidth_bytes_per_s=gather.bandwidth_bytes_per_s / share, latency_s=gather.latency_s * steps),
        optimizer_s_per_parameter=coefficients.optimizer_s_per_parameter * few / many,
    )
