"""Choose the layouts to plan for the coming batches, the most promising first.

Layouts that a run declares (`plan.layouts`) are estimated one by one; without such a list HBSA searches all depths over
all devices, also with different numbers of devices a stage where the strategy deals packs to them.

A run that declares none takes what HBSA finds among a few *shapes*, depths with the devices of their stages, within a
number of process groups, which are made before anything is measured or read (`enumerated_layouts`): first depths that
divide the processes, the nearest to that in which the run starts before others; then depths whose stages have different
numbers of processes, where the strategy deals packs to them, else with processes left idle. Layers need no groups, so
they are cut for every batch. Price: O(processes · layouts).
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CostCoefficients
from evenload.errors import ConfigError
from evenload.planning.activation_policy import policies_in_order
from evenload.planning.layouts.mapping_search import (
    ESTIMATE_TOLERANCE,
    HOPELESS,
    BatchCosts,
    BatchLengths,
    Mapping,
    MappingCosts,
    MappingSearch,
    ReplicatedStageCosts,
    best_replicated_mapping,
    layer_costs,
    mapping_order,
    priced_mapping,
    search_mappings,
)
from evenload.planning.layouts.moves import ReceiveSeconds
from evenload.planning.packing import pack_counts
from evenload.planning.planner import StepPlanner
from evenload.planning.strategies.flexpipe import FlexOptions
from evenload.types.layout import ParallelLayout, even_layout, split_layout


def enumerated_layouts(
    start: ParallelLayout, most_layouts: int, most_groups: int, *, part_pipelines: bool
) -> tuple[ParallelLayout, ...]:
    """List other layouts of the same processes, cp and tp, layers split evenly, the most promising first; none where
    there is one depth.

    Args:
        most_layouts: `start` included.
        most_groups: process groups needed on top of those of `start`.
        part_pipelines: stages may have different numbers of processes; else some processes are idle.
    """
    devices, layers = start.dp * start.pipeline_ranks, start.num_layers
    depths = sorted(range(1, min(devices, layers) + 1), key=lambda pp: (abs(math.log(pp / start.pp)), pp))
    replicated = part_pipelines and start.cp * start.tp == 1

    def layouts() -> Iterator[ParallelLayout]:
        for pp in sorted(depths, key=lambda pp: devices % pp and (1 if replicated else devices % pp)):
            if devices % pp and replicated:
                yield from (even_layout(layers, pp=pp, devices=of_stages) for of_stages in _spread(devices, pp))
            else:
                yield even_layout(layers, dp=devices // pp, pp=pp, cp=start.cp, tp=start.tp)

    result = [start.arrangement]
    own_groups = num_groups(result)
    for layout in layouts():
        if len(result) == most_layouts:
            break
        if layout not in result and num_groups([*result, layout]) - own_groups <= most_groups:
            result.append(layout)
    return tuple(result[1:])


def _spread(devices: int, depth: int) -> list[tuple[int, ...]]:
    """Return devices of stages that differ by one: more at the end, where the head is, or at the start, where most
    activations are held."""
    least, wide = divmod(devices, depth)
    ascending = (least,) * (depth - wide) + (least + 1,) * wide
    return [ascending, ascending[::-1]]


def num_groups(layouts: Sequence[ParallelLayout]) -> int:
    """Count the process groups that layouts need together, directed channels; `runtime.comm.mesh` makes the n-th group
    of the same ranks once for all of them."""
    most: Counter[tuple[int, ...]] = Counter()
    processes = max(layout.world_size for layout in layouts)
    for layout in layouts:
        most |= Counter(_groups_of(layout, processes))
    return most.total()


def _groups_of(layout: ParallelLayout, processes: int) -> list[tuple[int, ...]]:
    """List the ranks of every group of one layout, as `runtime.comm.mesh` makes them."""
    grid = np.arange(layout.world_size).reshape(layout.pipeline_ranks, layout.dp, layout.cp, layout.tp)
    groups: list[list[int]] = [[idle] for idle in range(layout.world_size, processes)]
    for first, t in itertools.product(dict.fromkeys(layout.leading_ranks), range(layout.tp)):
        same = [rank for rank, leading in enumerate(layout.leading_ranks) if leading == first]
        groups.append(grid[same, :, :, t].ravel().tolist())
    for p, t in np.ndindex(layout.pipeline_ranks, layout.tp):
        for size in (1, *layout.block_sizes):
            if size * layout.cp > 1:
                blocks = range(0, layout.dp - size + 1, size)
                groups += [grid[p, first : first + size, :, t].ravel().tolist() for first in blocks]
    for d, c in np.ndindex(layout.dp, layout.cp):
        if layout.tp > 1:
            groups += [grid[p, d, c].tolist() for p in range(layout.pipeline_ranks)]
        for t in range(layout.tp):
            holders = grid[:, d, c, t].tolist()
            for stage in range(layout.num_stages - 1):
                pairs = [sorted((holders[a], holders[b])) for a, b in layout.linked_ranks(stage) if a != b]
                groups += [pair for pair in pairs for _ in ("forward", "backward")]
            ends = layout.ranks_of_stage(0), layout.ranks_of_stage(layout.num_stages - 1)
            groups += [sorted({holders[rank] for rank in itertools.chain(*ends)})] if ends[0] != ends[1] else []
    return [tuple(ranks) for ranks in groups]


CoefficientsOf = Callable[[ParallelLayout], CostCoefficients]
_KEPT_RECEIVES = 256  # Depths of a few layouts to switch from


class LayoutCandidates:
    """Search layouts for the batches of one run that starts in the layout of a planner, whose devices, cp and tp stay,
    and may take those `given` (generation 0; None = any; `layers_move`: with any layers in their stages), or ones whose
    stages have different numbers of devices.

    Raises:
        ConfigError: a given layout has other cp or tp, more devices, or another number of layers.
    """

    def __init__(
        self,
        start: StepPlanner,
        coefficients_of: CoefficientsOf,
        options: FlexOptions,
        given: Sequence[ParallelLayout] | None = None,
        *,
        layers_move: bool = False,
        runs_replicated_stages: bool = False,
    ) -> None:
        self._deals_packs = runs_replicated_stages and options.part_pipelines
        self._start, self._options = start, options
        self._model, self._layout = start.costs.model, start.layout
        self._devices = start.layout.dp * start.layout.pipeline_ranks
        self.coefficients_of, self._coefficients = coefficients_of, dict[tuple[int, ...], CostCoefficients]()
        self._layer_costs = layer_costs(self._model, start.costs.coefficients, cp=self._layout.cp, tp=self._layout.tp)
        # Made once: search asks for the same layouts hundreds of times.
        layers, cp, tp = self._model.num_layers, self._layout.cp, self._layout.tp
        self._dealt_layout = cache(lambda devices: even_layout(layers, pp=len(devices), devices=devices))
        self._even = cache(lambda depth, dp: even_layout(layers, dp=dp, pp=depth, cp=cp, tp=tp))
        self._receive = lru_cache(_KEPT_RECEIVES)(
            lambda even, current: ReceiveSeconds(self._model, self.coefficients(even), current, even)
        )
        self.given, self.layers_move = None if given is None else tuple(dict.fromkeys(given)), layers_move
        for layout in self.given or ():
            self._require_takeable(layout)
        shapes = [one for one in self.given or () if layers_move and one.num_stages == one.pp]
        depths = {one.pp for one in shapes if not one.has_replicated_stages}
        self._depths = sorted(depths) if shapes else range(1, min(layers, self._devices) + 1)
        """Of pipelines with as many devices on every stage."""
        self._of_stages = [one.devices for one in shapes if one.has_replicated_stages] if shapes else None
        """Devices of stages where they differ; None = any."""

    def coefficients(self, layout: ParallelLayout) -> CostCoefficients:
        key = layout.dp, layout.pp, *(layout.devices if layout.has_replicated_stages else ())
        if key not in self._coefficients:
            self._coefficients[key] = self.coefficients_of(layout)
        return self._coefficients[key]

    def promising_layouts(self, result: Sequence[MappingSearch], current: ParallelLayout) -> list[ParallelLayout]:
        """List layouts other than the current one, with the generation of a switch, the most promising first: the best
        of every known batch, then the second, …; all that may fit, or else the closest few."""
        cap, generation = self._start.memory_cap_bytes, current.generation + 1
        by_place = itertools.zip_longest(*(search.mappings for search in result))
        ordered = [one for place in by_place for one in place if one is not None]
        near = [one for one in ordered if cap is None or one.excess_bytes <= ESTIMATE_TOLERANCE * cap]
        # Estimates know one stage a rank; declared layouts with several are few, and all of them are planned.
        layouts = [one for one in self.given or () if one.num_stages > one.pp]
        layouts += [self._layout_of(one) for one in near or ordered[: self._options.finalists]]
        return [
            msgspec.structs.replace(layout, generation=generation)
            for layout in dict.fromkeys(layouts)
            if layout != current.arrangement
        ]

    def search(self, num_tokens: NDArray[np.int64], current: ParallelLayout) -> MappingSearch:
        """Search one batch: HBSA, or the given layouts by their estimates; `current` is the layout to switch from."""
        if not len(num_tokens):
            return MappingSearch((), 0)
        start = self._start
        can_offload = start.costs.coefficients.host_link is not None
        policies = policies_in_order(num_tokens, start.options.policy, can_offload=can_offload)
        lengths = BatchLengths(self._layer_costs, num_tokens)
        batches = [cache(partial(BatchCosts, lengths, policy)) for policy in policies]
        weight = 1.0 / self._options.known_steps
        if self.given is not None and not self.layers_move:
            return self._estimated(batches, current, weight)
        result = search_mappings(
            self._depths,
            len(policies),
            lambda depth, policy: self.prices(batches[policy](), depth),
            lambda depth: self.receive_seconds(depth, current),
            switch_weight=weight,
            least_depth_only=self._options.least_depth_only,
        )
        if not self._deals_packs or self._options.least_depth_only or self._layout.cp * self._layout.tp > 1:
            return result
        return self._with_replicated(result, batches, current, weight)

    def prices(self, batch: BatchCosts, depth: int, dp: int | None = None) -> list[MappingCosts]:
        """Return the costs of mappings of one depth, one for every number of micro-batches that is tried; by default as
        many replicas as the devices make."""
        options, cap_bytes = self._start.options, self._start.memory_cap_bytes
        dp = self._devices // depth if dp is None else dp
        counts = pack_counts(-(-batch.whole_tokens // dp), depth, options.candidates, options.max_pack_tokens)
        most, coefficients = -(-batch.num_documents // dp), self.coefficients(self._even(depth, dp))
        return [
            MappingCosts(batch, coefficients, depth=depth, dp=dp, micro_batches=count, cap_bytes=cap_bytes)
            for count in sorted({min(count, most) for count in counts})
        ]

    def receive_seconds(self, depth: int, current: ParallelLayout, dp: int | None = None) -> ReceiveSeconds:
        even = self._even(depth, self._devices // depth if dp is None else dp)
        return self._receive(even, current)  # type: ignore[bad-argument-type]  # frozen structs hash

    def _with_replicated(
        self, result: MappingSearch, batches: Sequence[Callable[[], BatchCosts]], current: ParallelLayout, weight: float
    ) -> MappingSearch:
        """Add mappings of depths that would leave devices idle, were all stages to have as many of them."""
        devices = self._devices
        fitting = [one.step_s + weight * one.switch_s for one in result.mappings if not one.excess_bytes]
        best_s, more = min(fitting, default=float("inf")), []
        allowed = self._of_stages
        depths = range(2, min(self._model.num_layers, devices - 1) + 1)
        for depth in depths if allowed is None else sorted({len(one) for one in allowed}):
            if devices % depth == 0:
                continue
            of_stages = None if allowed is None else [one for one in allowed if len(one) == depth]
            for policy, batch in enumerate(batches):
                prices = self._replicated_prices(batch(), depth, devices, best_s)
                hopeful = [price for bound_s, price in prices if bound_s < best_s]
                searched = ((price, best_replicated_mapping(price, devices, of_stages)) for price in hopeful)
                fits = next(((price, one) for price, one in searched if one is not None), None)
                if fits is not None:
                    mapping = self._replicated_mapping(fits[0], *fits[1], policy, current)
                    best_s = min(best_s, mapping.step_s + weight * mapping.switch_s)
                    more.append(mapping)
                if fits is not None or not hopeful:
                    break  # the other policies pay time for memory that is not needed, or cannot win either
        order = sorted((*result.mappings, *more), key=lambda one: mapping_order(one, weight))
        return MappingSearch(tuple(order), result.num_priced + len(more))

    def _replicated_prices(
        self, batch: BatchCosts, depth: int, devices: int, limit_s: float = float("inf")
    ) -> list[tuple[float, ReplicatedStageCosts]]:
        """Return the costs of mappings of one depth over so many devices, one for every number of micro-batches that is
        tried, each with its least seconds; the most promising first. None where these are hopeless within a limit."""
        options, (least, wide) = self._start.options, divmod(devices, depth)
        of_stages = (*(least + 1,) * wide, *(least,) * (depth - wide))
        coefficients, cap_bytes = self.coefficients(self._dealt_layout(of_stages)), self._start.memory_cap_bytes
        counts = pack_counts(batch.whole_tokens, devices, options.candidates, options.max_pack_tokens)
        result: list[tuple[float, ReplicatedStageCosts]] = []
        for count in sorted({min(count, batch.num_documents) for count in counts}, reverse=True):
            of_count = {"depth": depth, "dp": 1, "micro_batches": count}
            price = ReplicatedStageCosts(batch, coefficients, **of_count, cap_bytes=cap_bytes)
            result.append((price.least_replicated_seconds(of_stages), price))
            if result[0][0] >= HOPELESS * limit_s:
                return []  # with the most micro-batches devices have the evenest shares
        return sorted(result, key=lambda pair: pair[0])

    def _replicated_mapping(
        self,
        price: ReplicatedStageCosts,
        edges: tuple[int, ...],
        devices: tuple[int, ...],
        policy: int,
        current: ParallelLayout,
    ) -> Mapping:
        layout = split_layout([b - a for a, b in pairwise(edges)], pp=price.depth, devices=devices)
        receive = ReceiveSeconds(self._model, self.coefficients(layout), current, layout)
        return Mapping(
            edges,
            1,
            price.micro_batches,
            policy,
            price.replicated_seconds(edges, devices),
            price.replicated_excess_bytes(edges, devices),
            max(receive.of_stage(stage, *pair) for stage, pair in enumerate(pairwise(edges))),
            devices,
        )

    def _estimated(
        self, batches: Sequence[Callable[[], BatchCosts]], current: ParallelLayout, weight: float
    ) -> MappingSearch:
        result = []
        for layout in self.given or ():
            if layout.num_stages > layout.pp:
                continue
            edges = (0, *(last for _, last in layout.stage_layers))
            priced: list[Mapping] = []
            for policy, batch in enumerate(batches):
                priced += self._priced(layout, edges, batch(), policy, current)
                if not all(one.excess_bytes for one in priced):
                    break  # the other policies pay time for memory that is not needed
            result.append(min(priced, key=lambda one: (one.excess_bytes, one.step_s)))
        result.sort(key=lambda one: mapping_order(one, weight))
        return MappingSearch(tuple(result), len(result))

    def _priced(
        self, layout: ParallelLayout, edges: tuple[int, ...], batch: BatchCosts, policy: int, current: ParallelLayout
    ) -> Iterator[Mapping]:
        if layout.has_replicated_stages:
            for _, price in self._replicated_prices(batch, layout.pp, layout.pipeline_ranks):
                yield self._replicated_mapping(price, edges, layout.devices, policy, current)
            return
        receive = self.receive_seconds(layout.pp, current, layout.dp)
        for price in self.prices(batch, layout.pp, layout.dp):
            yield priced_mapping(price, edges, policy, receive)

    def _layout_of(self, mapping: Mapping) -> ParallelLayout:
        if mapping.devices:
            counts = [last - first for first, last in pairwise(mapping.edges)]
            return split_layout(counts, pp=mapping.depth, devices=mapping.devices)
        even = self._even(mapping.depth, mapping.dp)
        return msgspec.structs.replace(even, stage_layers=tuple(pairwise(mapping.edges)))

    def _require_takeable(self, layout: ParallelLayout) -> None:
        start = self._layout
        if (layout.cp, layout.tp) != (start.cp, start.tp):
            raise ConfigError(
                f"plan.layouts: {layout.describe()} has cp={layout.cp} tp={layout.tp}, the run starts with "
                f"cp={start.cp} tp={start.tp}; only pp, dp and the layers of stages may change between steps"
            )
        if layout.world_size > start.world_size or layout.num_layers != start.num_layers:
            raise ConfigError(
                f"plan.layouts: {layout.describe()} has {layout.world_size} devices and {layout.num_layers} layers, "
                f"the run {start.world_size} and {start.num_layers}"
            )
