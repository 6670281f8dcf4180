"""Find the dp × cp × pp × tp × virtual stages that trains a run fastest: every layout of the devices, simulated.

Every layout that uses all devices is planned on a batch with little search, the best few with more virtual stages a
rank too, and the best of all these again on all batches with the whole search. Price: layouts × a short plan (0.05-0.5
s) + finalists × batches × a plan.

    tp        powers of two inside a node that divide the heads      cp        powers of two
    pp        divisors of the devices up to the number of layers     virtual   1; for the best where pp > 1 also 2, and
    dp        the rest                                                         up to 12 that divide the layers evenly

Layouts come by the least time of any plan in them (`cost.units`), then with most replicas; before all those in which
another strategy was fast. One is left out unplanned only where that least time is more than as many others take as go
on, or where time is up. Above `LARGE_CLUSTER` devices layouts are rated on a part of the replicas and documents. Layers
go to stages by cost (`explore.stage_layers`), evenly where that does not fit. Refused layouts say why.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.host_memory import host_memory
from evenload.cost.layer_counts import require_supported_layout
from evenload.cost.memory import static_bytes
from evenload.cost.units import sizes_bound_seconds
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.explore.batches import OnProgress, SampledBatch, no_progress
from evenload.explore.stage_layers import balanced_layout, usable_bytes
from evenload.plan.planner import Proposal, StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.plan.strategies.auto import AUTO, AutoOptions
from evenload.types.base import Frozen
from evenload.types.cluster import ClusterSpec, LinkSpec
from evenload.types.layout import ParallelLayout, even_layout, split_layout
from evenload.types.model import ModelSpec
from evenload.types.text import format_bytes

QUICK_CANDIDATES = 24
"""Schedules of the first pass; enough to tell layouts apart by a few percent."""
FINALISTS = 8
"""Layouts with one stage a rank that are planned on all batches, and as many with several."""
FINAL_CANDIDATES = 768
"""Schedules of the second pass, at least: a layout is chosen once for a run."""
RATING_SHARE = 0.6
"""Of a limited time, for rating layouts with one stage a rank."""
DEEPER_SHARE = 0.75
"""The same, when those with several have been rated, too; the rest is for the finalists."""
BOUND_STEP = 0.02
"""Of the least bound: bounds that are closer say nothing about which layout is faster."""
MOST_VIRTUAL_STAGES = 12
"""Stages a rank that the best layouts are tried with, at most."""


class LayoutResult(Frozen):
    """Hold one layout's figures; times are None where it cannot be planned or does not fit.

    Args:
        layout: sizes of the dimensions, and "virtual" stages a rank.
        stage_layers: layers of every virtual stage.
        why: why it is out; "" when it fits.
        mean_step_time_s, fraction_of_bound: over the batches it was planned on.
        num_batches: all, or 1 where the first batch showed that others are faster, or the cluster is large.
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
        """Refused for its weights and optimizer, before anything was planned."""
        return not self.is_planned and self.peak_memory_bytes is not None

    def parallel_layout(self) -> ParallelLayout:
        sizes = {axis: size for axis, size in self.layout.items() if axis != "virtual"}
        return split_layout(self.stage_layers, devices=None, **sizes)


def search_layouts(
    model: ModelSpec,
    cluster: ClusterSpec,
    batches: Sequence[SampledBatch],
    coefficients_of: Callable[[ParallelLayout], CostCoefficients],
    *,
    strategy: str = AUTO.name,
    options: PlanOptions,
    on_progress: OnProgress = no_progress,
    spent: Callable[[], float] = lambda: 0.0,
    first: Sequence[dict[str, int]] = (),
) -> tuple[LayoutResult, ...]:
    """Rate all layouts of the cluster, the fastest that fit first, then those that are out; memory is the device's.

    Args:
        spent: the share of its time that the search has used; at `RATING_SHARE` no more layouts are rated, at
            `DEEPER_SHARE` none with more stages a rank, and at 1 no more finalists are planned. Something that fits is
            looked for anyway.
        first: sizes of layouts that are rated first, because others found them fast.
    """
    if not batches:
        raise ConfigError("layout search: give at least one batch")
    search = options.own(AutoOptions)
    quick, long = (
        options.with_own(msgspec.structs.replace(search, max_candidates=count))
        for count in (min(search.max_candidates, QUICK_CANDIDATES), max(search.max_candidates, FINAL_CANDIDATES))
    )
    plan = functools.partial(_coarsely_planned, model, cluster, coefficients_of=coefficients_of, strategy=strategy)
    balance = functools.partial(_balanced, model, cluster, batches=batches, coefficients_of=coefficients_of)
    found: list[tuple[ParallelLayout, LayoutResult]] = []
    every = _by_least_time(model, coefficients_of, layouts_of(model, cluster), batches[0])
    places = {tuple(sizes.values()): place for place, sizes in enumerate(first)}
    every.sort(key=lambda pair: places.get(tuple(layout_sizes(pair[1]).values()), len(places)))
    for done, (least_s, sizes) in enumerate(every):
        on_progress(done, len(every), f"{strategy}: layout {sizes.describe()}")
        times_s = sorted(result.mean_step_time_s or 0.0 for _, result in found if result.feasible)
        if times_s and spent() >= RATING_SHARE:
            found.append((sizes, _unplanned(sizes, NOT_LOOKED_AT)))
            continue
        if len(times_s) >= FINALISTS and least_s > times_s[FINALISTS - 1]:
            why = f"no plan in it takes less than {least_s:.3g} s, and {FINALISTS} layouts do"
            found.append((sizes, _unplanned(sizes, why)))
            continue
        layout = balance(sizes)
        result = plan(layout, batches[:1], options=quick)
        if not result.feasible and not layout.is_even:
            layout = sizes
            result = plan(layout, batches[:1], options=quick)
        found.append((layout, result))
    found.sort(key=lambda pair: _order(pair[1]))
    best = [layout for layout, result in found[:FINALISTS] if result.feasible]
    deeper: list[tuple[ParallelLayout, LayoutResult]] = []
    every_virtual = [virtual for layout in best for virtual in with_virtual_stages(model, layout)]
    for done, sizes in enumerate(every_virtual):
        if deeper and spent() >= DEEPER_SHARE:
            break
        on_progress(done, len(every_virtual), f"{strategy}: virtual stages: {sizes.describe()}")
        layout = balance(sizes)
        deeper.append((layout, plan(layout, batches[:1], options=quick)))
    deeper.sort(key=lambda pair: _order(pair[1]))
    found += deeper
    best += [layout for layout, result in deeper[:FINALISTS] if result.feasible]
    final: list[LayoutResult] = []
    for layout in best:
        if final and spent() >= 1:
            break
        on_progress(len(final), len(best), f"{strategy}: the best again: {layout.describe()}")
        final.append(plan(layout, batches, options=long))
    looked_at = best[: len(final)]
    rest = [result for layout, result in found if layout not in looked_at]
    # Those planned on all batches stay in front: a time on one batch is no match for a mean.
    fitting = sorted((result for result in final if result.feasible), key=_order)
    return (*fitting, *sorted((result for result in (*rest, *final) if result not in fitting), key=_order))


NOT_LOOKED_AT = "not looked at: the time for the search was up"


def _by_least_time(
    model: ModelSpec,
    coefficients_of: Callable[[ParallelLayout], CostCoefficients],
    layouts: Sequence[ParallelLayout],
    batch: SampledBatch,
) -> list[tuple[float, ParallelLayout]]:
    """Pair layouts with the seconds that no plan of the batch is faster than; 0 where a layout has no costs."""
    tokens = np.array([document.num_tokens for document in batch.documents], np.int64)
    found = []
    for layout in layouts:
        try:
            found.append((sizes_bound_seconds(model, coefficients_of(layout), layout, tokens), layout))
        except ConfigError:
            found.append((0.0, layout))
    # What is within a few percent is decided by what no bound sees: equal bounds to `BOUND_STEP` are equal.
    least_s = min((bound_s for bound_s, _ in found if bound_s > 0), default=1.0)
    return sorted(found, key=lambda pair: (round(pair[0] / least_s / BOUND_STEP), -pair[1].dp))


def _unplanned(sizes: ParallelLayout, why: str) -> LayoutResult:
    return LayoutResult(
        layout=layout_sizes(sizes), stage_layers=sizes.stage_counts, feasible=False, why=why, is_planned=False
    )


def _coarsely_planned(
    model: ModelSpec,
    cluster: ClusterSpec,
    layout: ParallelLayout,
    batches: Sequence[SampledBatch],
    coefficients_of: Callable[[ParallelLayout], CostCoefficients],
    strategy: str,
    options: PlanOptions,
) -> LayoutResult:
    """Plan as `planned_layout`, a large cluster on a part of its replicas, under the layout's own links."""
    room = usable_bytes(cluster)
    if static_bytes(model, layout).max() > room:
        return planned_layout(model, cluster, layout, batches, coefficients_of, strategy, options)
    parts = coarse_problems(model, layout, batches, room)
    if parts[0].stride == 1:
        return planned_layout(model, cluster, layout, batches, coefficients_of, strategy, options)
    try:
        coefficients = coarse_coefficients(coefficients_of(layout), layout, parts[0].layout)
    except ConfigError as error:
        return LayoutResult(
            layout=layout_sizes(layout), stage_layers=layout.stage_counts, feasible=False, why=str(error)
        )
    found = planned_layout(
        model,
        cluster,
        parts[0].layout,
        [part.batch for part in parts],
        lambda _: coefficients,
        strategy,
        options,
        parts[0].raised_bytes,
    )
    return msgspec.structs.replace(found, layout=layout_sizes(layout), stride=parts[0].stride)


def layouts_of(model: ModelSpec, cluster: ClusterSpec) -> tuple[ParallelLayout, ...]:
    """Every layout over all devices that the model allows, with one stage a rank."""
    devices = cluster.num_devices
    powers = [2**k for k in range(devices.bit_length()) if devices % 2**k == 0]
    depths = [pp for pp in range(1, min(devices, model.num_layers) + 1) if devices % pp == 0]
    layouts = []
    for tp, cp, pp in itertools.product(powers, powers, depths):
        if devices % (tp * cp * pp) or tp > cluster.devices_per_node:
            continue
        layout = even_layout(model.num_layers, dp=devices // (tp * cp * pp), cp=cp, pp=pp, tp=tp)
        try:
            require_supported_layout(model, layout)
        except ConfigError:
            continue  # heads that tp does not divide: no layout of this model
        layouts.append(layout)
    return tuple(layouts)


def _balanced(
    model: ModelSpec,
    cluster: ClusterSpec,
    sizes: ParallelLayout,
    batches: Sequence[SampledBatch],
    coefficients_of: Callable[[ParallelLayout], CostCoefficients],
) -> ParallelLayout:
    """Give the same sizes layers by cost, where they can be costed."""
    try:
        return balanced_layout(
            model,
            coefficients_of(sizes),
            sizes,
            [document.num_tokens for batch in batches for document in batch.documents],
            num_steps=len(batches),
            memory_bytes=usable_bytes(cluster),
        )
    except ConfigError:
        return sizes


def with_virtual_stages(model: ModelSpec, layout: ParallelLayout) -> Iterator[ParallelLayout]:
    """The same sizes with more stages a rank: two, and numbers that give every stage as many layers; none where there
    is no pipeline or too few layers."""
    if layout.pp == 1:
        return
    for count in range(2, MOST_VIRTUAL_STAGES + 1):
        stages = layout.pp * count
        if stages <= model.num_layers and (count == 2 or model.num_layers % stages == 0):
            yield even_layout(model.num_layers, devices=None, **(layout_sizes(layout) | {"virtual": count}))


def planned_layout(
    model: ModelSpec,
    cluster: ClusterSpec,
    layout: ParallelLayout,
    batches: Sequence[SampledBatch],
    coefficients_of: Callable[[ParallelLayout], CostCoefficients],
    strategy: str,
    options: PlanOptions,
    raised_bytes: int = 0,
) -> LayoutResult:
    """Plan one layout with one strategy.

    Args:
        raised_bytes: what a device holds more here than in the whole that this layout is a part of: it has as much more
            room, and memory is reported without it.
    """
    result = functools.partial(LayoutResult, layout=layout_sizes(layout), stage_layers=layout.stage_counts)
    room = usable_bytes(cluster)
    held = static_bytes(model, layout) - raised_bytes
    if held.max() > room:
        why = f"weights and optimizer alone: {_over(held, room)}"
        return result(feasible=False, why=why, peak_memory_bytes=int(held.max()), is_planned=False)
    proposals: list[Proposal] = []
    bounds_s: list[float] = []
    try:
        coefficients, host = coefficients_of(layout), host_memory(cluster)
        planner = StepPlanner(model, coefficients, layout, room + raised_bytes, options, host=host)
        for step, batch in enumerate(batches):
            proposals.append(planner.propose(step, batch.documents, strategy, batch.left_out))
            tokens = np.array([document.num_tokens for document in batch.documents], np.int64)
            bounds_s.append(planner.costs.lower_bound_seconds(tokens))
    except (ConfigError, DataError, InfeasiblePlanError) as error:
        return result(feasible=False, why=str(error))
    peaks = [np.max([c.candidate.simulation.peak_bytes for c in one.choices], axis=0) for one in proposals]
    peak = np.max(peaks, axis=0) - raised_bytes
    step_s = [proposal.plan.predicted.step_time_s for proposal in proposals]
    slowest = max(proposals[0].choices, key=lambda choice: choice.candidate.makespan_s)
    reasons = [proposal.why for proposal in proposals if not proposal.feasible]
    why = _over(peak, room) if reasons and peak.max() > room else next(iter(reasons), "")
    return result(
        feasible=not reasons,
        why=why,
        mean_step_time_s=float(np.mean(step_s)),
        fraction_of_bound=sum(bounds_s) / sum(step_s),
        peak_memory_bytes=int(peak.max()),
        num_batches=len(batches),
        label=slowest.candidate.label,
    )


def layout_sizes(layout: ParallelLayout) -> dict[str, int]:
    sizes = {axis: getattr(layout, axis) for axis in ("dp", "cp", "pp", "tp")}
    return {**sizes, "virtual": layout.num_stages // layout.pp}


def _over(held_bytes: np.ndarray, room_bytes: int) -> str:
    rank = int(held_bytes.argmax())
    return (
        f"pipeline rank {rank} needs {format_bytes(held_bytes[rank])}, "
        f"{format_bytes(held_bytes[rank] - room_bytes)} over"
    )


def _order(result: LayoutResult) -> tuple[bool, float, float]:
    """Fitting ones by time, then the others by how much they need."""
    time_s = result.mean_step_time_s if result.feasible else None
    return not result.feasible, time_s or 0.0, float(result.peak_memory_bytes or 2**62)


# `coarse_problem`: a small problem that stands for a layout with very many replicas, which are much alike: every k-th
# replica, and of documents sorted by length the middle one of every k, with the longest. Only `dp` is small: the rest
# of a rank's memory, and the seconds of reductions, gathers and updates, are the whole's.

LARGE_CLUSTER = 512
"""Devices up to which layouts are rated on whole batches."""
LEAST_REPLICAS = 16
LEAST_DOCUMENTS = 64


class CoarseProblem(NamedTuple):
    """Every `stride`-th replica and document; `room_bytes` leaves activations the room that they have in the whole.

    Args:
        raised_bytes: by which that is more than a device has, because fewer replicas share the optimizer's state.
    """

    layout: ParallelLayout
    batch: SampledBatch
    room_bytes: int
    stride: int
    raised_bytes: int = 0


def coarse_problem(model: ModelSpec, layout: ParallelLayout, batch: SampledBatch, room_bytes: int) -> CoarseProblem:
    """The whole where the cluster is not large, or there is nothing to leave out."""
    stride = _stride(layout, len(batch.documents))
    if stride == 1:
        return CoarseProblem(layout, batch, room_bytes, 1)
    small = split_layout(layout.stage_counts, dp=layout.dp // stride, cp=layout.cp, pp=layout.pp, tp=layout.tp)
    raised = int(static_bytes(model, small).max() - static_bytes(model, layout).max())
    longest_first = sorted(batch.documents, key=lambda document: -document.num_tokens)
    taken = [longest_first[0], *longest_first[stride + stride // 2 :: stride]]
    kept = {document.doc_id for document in taken}
    documents = tuple(document for document in batch.documents if document.doc_id in kept)
    part = SampledBatch(documents, (), batch.dropped_tokens)
    return CoarseProblem(small, part, room_bytes + raised, stride, raised)


def coarse_problems(
    model: ModelSpec, layout: ParallelLayout, batches: Sequence[SampledBatch], room_bytes: int
) -> tuple[CoarseProblem, ...]:
    found = tuple(coarse_problem(model, layout, batch, room_bytes) for batch in batches)
    if len({one.stride for one in found}) == 1:
        return found
    return tuple(CoarseProblem(layout, batch, room_bytes, 1) for batch in batches)


def coarse_coefficients(
    coefficients: CostCoefficients, whole: ParallelLayout, small: ParallelLayout
) -> CostCoefficients:
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


def _stride(layout: ParallelLayout, documents: int) -> int:
    if layout.world_size <= LARGE_CLUSTER or layout.has_wide_stages:
        return 1
    most = min(layout.dp // LEAST_REPLICAS, documents // LEAST_DOCUMENTS)
    return max((stride for stride in range(1, most + 1) if layout.dp % stride == 0), default=1)
