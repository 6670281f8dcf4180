"""Search stages, layers and devices per stage and memory policy: FlexPipe's bounded HBSA (§5.2, Alg. 1).

    every depth P ─► memory of P stages within P devices? (lines 3-6) ─► even split ─► bounded Search ─► Mapping

For a depth the layers of a stage lie between floor(L / P) and floor(L / P) + L mod P (lines 9-10), at the ends less
what embedding or head weigh in layers, elsewhere as many more. `Search` places stage after stage and cuts a branch when

    its stage is beyond memory (n_max of line 10; more layers only need more)
    its remaining layers cannot be spread within the bounds
    the mapping so far plus an even spread of the rest is no faster than the best known one (the even split at first)
    another branch came to the same layer with no more of anything that counts

The last two lose nothing: a step's estimate depends on a mapping only through three maxima over stages (work,
parameters, bytes received). Unlike the paper we search every depth, not the least that fits: gradient reduction across
nodes can cost more than a deeper pipeline, and a depth that does not fit may recompute or offload.

**Stages with different numbers of devices**, such as (1, 1, 2, 1, 1, 1, 1) (§5.1), where a depth does not divide the
devices. The pipeline is then one, whose packs every stage takes to its devices in turn; a device of a stage with g of
them runs ceil(n / g) of n micro-batches:

    T = sum_i u_i + max_i c_i (W_i - u_i) + max_i (reduction and optimizer of stage i)

with c_i = (ceil(n / g_i) - 1) / (n - 1), in the terms of the estimate below. Which stages are replicated and where they
are cut is found by dynamic programming over (stage, replicated ones so far, layer), with both maxima on one stage and
numbers of devices that differ by one at most. O(depth · replicated stages · layers²) a depth.

**Estimates** (`MappingCosts`) take microseconds, as a search prices thousands of mappings: a batch is reduced once to
sums per layer; a stage is then a difference of two sums, and bytes and parameters are the mean layer's where layers
differ. With u_i of the longest micro-batch and W_i of its replica on stage i, the step is

    T = sum_i u_i + max_i (W_i - u_i) + p2p transfers + gradient reduction + optimizer

which for micro-batches of equal work t is FlexPipe's eq. 1 in its right reading, sum_i t_i + (n - 1) · max_i t_i + ...
Memory of stage i (eq. 2): weights; gradients and optimizer shard of what is trained; activations of min(P - i, n)
micro-batches in flight, the longest documents of a replica among them; temporaries of the largest. Both only choose
what is planned and simulated. Price: O(n log n) per batch and policy, O(stages) per mapping.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.layer_counts import (
    OFFLOAD,
    POLICIES,
    RECOMPUTE,
    REPLAY,
    activation_bytes_per_token,
    kv_bytes_per_token,
    mean_of_layers,
    recomputed_width,
)
from evenload.cost.memory import (
    OFFLOAD_BUFFERED_LAYERS,
    backward_temp_estimate,
    embedding_parameters,
    layer_parameters,
    optimizer_bytes_per_parameter,
    trained_layer_parameters,
)
from evenload.cost.pack_cost import PackCosts
from evenload.planning.layouts.moves import ReceiveSeconds
from evenload.types.columns import SliceColumns, whole_document_columns
from evenload.types.layout import even_layout
from evenload.types.model import ModelSpec

Edge = int | NDArray[np.int64]  # A layer where a stage begins or ends, or many
ESTIMATE_TOLERANCE = 0.1  # Of a device's memory: mappings whose estimate is beyond it by less may fit when simulated


@dataclass(frozen=True)
class Mapping:
    """Hold layers of stages, replicas, micro-batches, the number of a policy (`policies_in_order`), and estimates.

    Args:
        edges: layers where stages begin, and the end; excess_bytes: above the memory of the fullest device.
        devices: of every stage, where they differ in number; () = `dp` times cp·tp each.
    """

    edges: tuple[int, ...]
    dp: int
    micro_batches: int
    policy: int
    step_s: float
    excess_bytes: float
    switch_s: float = 0.0
    devices: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        return len(self.edges) - 1


def layer_costs(model: ModelSpec, coefficients: CostCoefficients, *, cp: int = 1, tp: int = 1) -> PackCosts:
    """Return the costs of a layout with every layer as a stage."""
    return PackCosts(model, coefficients, even_layout(model.num_layers, pp=model.num_layers, cp=cp, tp=tp))


class BatchLengths:
    """Hold what of a batch (int64[n], at least one document) is the same under all policies, computed when needed, by
    the costs of every layer as a stage (`layer_costs`)."""

    def __init__(self, costs: PackCosts, num_tokens: NDArray[np.int64]) -> None:
        self.costs, self.num_tokens = costs, num_tokens
        self.longest_tokens = -(-int(num_tokens.max()) // costs.layout.cp)
        self._packs: dict[int, tuple[SliceColumns, NDArray[np.float64], NDArray[np.float64]]] = {}

    def packs(self, heaviest: int) -> tuple[SliceColumns, NDArray[np.float64], NDArray[np.float64]]:
        """Price packs of all documents, of the heaviest alone and of none, all replayed; return them with forward and
        backward seconds, float64[3, layers] each."""
        if heaviest not in self._packs:
            everyone = list(range(len(self.num_tokens)))
            columns = whole_document_columns([everyone, [heaviest], []], self.num_tokens, self.costs.layout.cp)
            forward_s = self.costs.pack_seconds(columns, "forward")
            self._packs[heaviest] = columns, forward_s, self.costs.pack_seconds(columns, "backward")
        return self._packs[heaviest]

    @cached_property
    def temp_bytes(self) -> NDArray[np.int64]:
        """Estimate a backward pack of no tokens and one of the longest document, layer by layer; int64[2, layers]."""
        lengths = np.array([0, self.longest_tokens], np.int64)
        return backward_temp_estimate(self.costs.model, self.costs.layout, lengths)


class BatchCosts:
    """Sum up one batch per layer under one policy (int8[n]; None = all replay)."""

    def __init__(self, lengths: BatchLengths, policy: NDArray[np.int8] | None) -> None:
        costs, num_tokens = lengths.costs, lengths.num_tokens
        model = self.model = costs.model
        cp, tp = self.cp, self.tp = costs.layout.cp, costs.layout.tp
        self.num_documents, self.whole_tokens = len(num_tokens), int(num_tokens.sum())
        document_s = costs.document_seconds(num_tokens, policy)
        columns, forward_s, backward_s = lengths.packs(int(document_s.argmax()))
        if policy is not None:
            forward_s = costs.under_policy(forward_s, columns, "forward", policy)
            backward_s = costs.under_policy(backward_s, columns, "backward", policy)
        seconds = forward_s + backward_s
        # An empty pack is what every micro-batch costs on top of its documents.
        self.whole_s = _running(seconds[0] - seconds[2])
        self.longest_s = _running(seconds[1] - seconds[2])
        self.pack_s = _running(seconds[2])
        self.tokens = -(-self.whole_tokens // cp)
        self.longest_tokens = lengths.longest_tokens
        mean_bytes = functools.partial(mean_of_layers, model)
        activation_bytes = np.array([mean_bytes(activation_bytes_per_token(model, name, tp)) for name in POLICIES])
        codes = np.zeros(len(num_tokens), np.int8) if policy is None else policy
        kept = -(-num_tokens // cp) * (activation_bytes + mean_bytes(kv_bytes_per_token(model, tp)))[codes]
        self.kept_bytes = float(kept.sum())
        self.kept_longest_first = np.sort(kept)[::-1].astype(float)
        temp = lengths.temp_bytes
        self._logits_bytes = float((temp[1, -1] - temp[1, 0]) if model.num_layers > 1 else 0)
        per_token = float(temp[1, 0]) / self.longest_tokens
        if (codes == RECOMPUTE).any():
            per_token += model.bytes_per_element * mean_bytes(recomputed_width(model, tp))
        if (codes == OFFLOAD).any():
            per_token += min(OFFLOAD_BUFFERED_LAYERS, model.num_layers) * int(activation_bytes[REPLAY])
        self._temp_bytes_per_token = per_token
        # The same for the hundred mappings that are priced for a batch: parameters of a device, bytes a parameter.
        self.layer, self.embedding = mean_bytes(layer_parameters(model, tp)), embedding_parameters(model, tp)
        self.trained_layer = mean_bytes(trained_layer_parameters(model, tp))
        self.optimizer_bytes = optimizer_bytes_per_parameter(model)

    def temp_bytes(self, pack_tokens: float) -> tuple[float, float]:
        """Return the bytes held while a pack runs on any stage, and what the last stage has on top."""
        return self._temp_bytes_per_token * pack_tokens, self._logits_bytes


class MappingCosts:
    """Price mappings of one depth, dp and number of micro-batches (of a replica, at least 1) for one batch under one
    policy; `coefficients` of that depth and dp, for the links."""

    def __init__(
        self,
        batch: BatchCosts,
        coefficients: CostCoefficients,
        *,
        depth: int,
        dp: int,
        micro_batches: int,
        cap_bytes: int | None,
    ) -> None:
        model = batch.model
        self._links, self._trains_all = coefficients, not model.has_adapters
        self._is_tied_whole = model.tied_embeddings and depth == 1
        self._norm, self._positions = model.norm_parameters, model.position_parameters
        self.num_layers, self.depth, self.dp, self.cap_bytes = model.num_layers, depth, dp, cap_bytes
        n = self.micro_batches = max(1, min(micro_batches, -(-batch.num_documents // dp)))
        # Of most numbers of micro-batches only the bound is read, which needs sums over all layers alone.
        self._batch = batch
        longest_s, pack_s = float(batch.longest_s[-1]), float(batch.pack_s[-1])
        replica_s = max(float(batch.whole_s[-1]) / dp, longest_s)
        largest_s = max(replica_s / n, longest_s)
        self._whole_rest_s = replica_s - largest_s + (n - 1) * pack_s
        tokens = max(batch.tokens / (dp * n), float(batch.longest_tokens))
        p2p_s = 0.0
        if depth > 1:
            p2p_bytes = tokens * model.hidden_size * model.bytes_per_element / batch.tp
            link = coefficients.stage_link()
            p2p_s = p2p_bytes / link.bandwidth_bytes_per_s + link.latency_s
        element, copies = model.bytes_per_element, dp * batch.cp
        self._weight_bytes = element
        self._trained_bytes = max(element, 4) + batch.optimizer_bytes / copies
        # Gradient reduction, gathering of weights and optimizer are linear in what the fullest rank trains.
        latency_s, self._s_per_parameter = coefficients.update_seconds(element, copies)
        self._fixed_s = largest_s + pack_s + 2 * (depth - 1) * p2p_s + 2 * latency_s
        self.even_edges = _even_edges(self.num_layers, depth)
        self._temp_bytes, self._logits_bytes = batch.temp_bytes(tokens)

    @cached_property
    def rest_s(self) -> list[float]:
        """Return the work below every layer that waits while the largest micro-batch passes the other stages."""
        batch, dp, n = self._batch, self.dp, self.micro_batches
        # Work of the slowest replica and of its largest micro-batch, up to every layer.
        whole, longest = batch.whole_s / dp, batch.longest_s
        replica = whole if whole[-1] >= longest[-1] else longest
        largest = replica / n if replica[-1] / n >= longest[-1] else longest
        return (replica - largest + (n - 1) * batch.pack_s).tolist()

    @cached_property
    def _in_flight_bytes(self) -> list[float]:
        return self.held_bytes(min(self.depth, self.micro_batches)).tolist()

    def held_bytes(self, most: int) -> NDArray[np.float64]:
        """Return the activations of a layer, of 0, 1, …, `most` micro-batches at once, the largest first."""
        batch, dp, n = self._batch, self.dp, self.micro_batches
        mean_bytes = batch.kept_bytes / (dp * n)
        largest_first = np.maximum(batch.kept_longest_first[::dp][:n], mean_bytes)
        in_flight = np.full(most, mean_bytes)
        in_flight[: len(largest_first)] = largest_first[:most]
        return np.concatenate([[0.0], np.cumsum(in_flight)])

    def trained_parameters(self, first: Edge, last: Edge) -> Any:
        return self.parameters(first, last) if self._trains_all else (last - first) * self._batch.trained_layer

    def parameters(self, first: Edge, last: Edge) -> Any:
        batch = self._batch
        at_first = (first == 0) * (batch.embedding + self._positions)
        at_last = (last == self.num_layers) * (self._norm + (0 if self._is_tied_whole else batch.embedding))
        return (last - first) * batch.layer + at_first + at_last

    def stage_bytes(self, stage: int, first: int, last: int) -> float:
        in_flight = self._in_flight_bytes[min(self.depth - stage, len(self._in_flight_bytes) - 1)]
        logits = self._logits_bytes if last == self.num_layers else 0.0
        weights_bytes = self.parameters(first, last) * self._weight_bytes
        trained_bytes = self.trained_parameters(first, last) * self._trained_bytes
        return weights_bytes + trained_bytes + (last - first) * in_flight + self._temp_bytes + logits

    def fits(self, stage: int, first: int, last: int) -> bool:
        return self.cap_bytes is None or self.stage_bytes(stage, first, last) <= self.cap_bytes

    def excess_bytes(self, edges: tuple[int, ...]) -> float:
        if self.cap_bytes is None:
            return 0.0
        fullest = max(self.stage_bytes(stage, *pair) for stage, pair in enumerate(pairwise(edges)))
        return max(0.0, fullest - self.cap_bytes)

    def can_fit(self) -> bool:
        """Check by estimate whether weights, gradients and optimizer state of all stages are within memory."""
        if self.cap_bytes is None:
            return True
        held, trained = self.parameters(0, self.num_layers), self.trained_parameters(0, self.num_layers)
        static_bytes = held * self._weight_bytes + trained * self._trained_bytes
        return static_bytes <= (1 + ESTIMATE_TOLERANCE) * self.depth * self.cap_bytes

    def total_bytes(self) -> float:
        """Return the bytes of all stages of one replica, layers split evenly: FlexPipe's M_peak."""
        return sum(self.stage_bytes(stage, *pair) for stage, pair in enumerate(pairwise(self.even_edges)))

    def seconds_of(self, most_rest_s: float, most_parameters: int) -> float:
        """Return the seconds of a step from the two figures in which mappings of these sizes differ."""
        return self._fixed_s + most_rest_s + self._s_per_parameter * most_parameters

    def least_seconds(self) -> float:
        """Return a lower bound of all mappings: work spread evenly over stages, nothing to reduce."""
        return self.seconds_of(self._whole_rest_s / self.depth, 0)

    def step_seconds(self, edges: tuple[int, ...]) -> float:
        rest_s = max(self.rest_s[last] - self.rest_s[first] for first, last in pairwise(edges))
        return self.seconds_of(rest_s, max(self.trained_parameters(*pair) for pair in pairwise(edges)))


@cache
def _even_edges(num_layers: int, depth: int) -> tuple[int, ...]:
    return (0, *(last for _, last in even_layout(num_layers, pp=depth).stage_layers))


def _running(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([0.0, *accumulate(values.tolist())])


# Mappings slower than the best of the depths before by this factor are not searched: estimates are not that far off.
HOPELESS = 1.25
# (depth, number of the policy) to prices, one for every number of micro-batches tried.
PricesOf = Callable[[int, int], Sequence[MappingCosts]]


@dataclass(frozen=True)
class MappingSearch:
    """Hold one mapping per depth, those that fit first, by T + switch, then by bytes beyond memory; and how many
    complete mappings were priced."""

    mappings: tuple[Mapping, ...]
    num_priced: int


class LayerBounds(NamedTuple):
    """Hold the fewest and most layers of every stage of one depth."""

    low: tuple[int, ...]
    high: tuple[int, ...]


def layer_bounds(num_layers: int, depth: int, *, embedding_layers: int, head_layers: int) -> LayerBounds:
    """Bound layers by lines 9-10; the ends weigh so many layers, rounded up, on top of theirs."""
    share, rest = divmod(num_layers, depth)
    if depth == 1:
        return LayerBounds((num_layers,), (num_layers,))
    low = [share] * depth
    low[0], low[-1] = max(1, share - embedding_layers), max(1, share - head_layers)
    more = -(-(num_layers + embedding_layers + head_layers) // depth)
    return LayerBounds(tuple(low), (min(num_layers, max(share + rest, more)),) * depth)


def search_mappings(
    depths: Iterable[int],
    num_policies: int,
    prices_of: PricesOf,
    receive_of: Callable[[int], ReceiveSeconds | None],
    *,
    switch_weight: float = 1.0,
    least_depth_only: bool = False,
) -> MappingSearch:
    """Search the best mapping of every depth under policies, the fastest first.

    Args:
        depths: ascending.
        receive_of: depth to the seconds a stage's devices receive; None = nothing to move from.
        switch_weight: of switch seconds against step seconds; 1 / n where the gain counts for n steps.
        least_depth_only: stop at the first depth that fits, as published.
    """
    mappings: list[Mapping] = []
    best_s, num_priced = float("inf"), 0
    for depth in depths:
        receive = receive_of(depth)
        closest: Mapping | None = None
        for policy in range(num_policies):
            prices = prices_of(depth, policy)
            hopeful = [one for one in prices if one.least_seconds() < HOPELESS * best_s]
            if not hopeful and closest is not None:
                continue
            # All replay is the least work, so what is hopeless then stays it; and where weights alone are beyond
            # memory, no policy helps.
            is_last = not policy and (not hopeful or not prices[0].can_fit())
            # A hopeless depth is priced all the same: it may be the only one that fits.
            tried = [(priced_mapping(one, one.even_edges, policy, receive), one) for one in hopeful or prices[:1]]
            tried.sort(key=lambda pair: mapping_order(pair[0], switch_weight))
            num_priced += len(tried)
            start = tried[0][0]
            for even, price in tried:
                if price.cap_bytes is not None and price.total_bytes() > depth * price.cap_bytes:
                    continue  # lines 3-6
                limit_s = HOPELESS * best_s if even.excess_bytes else min(_cost(even, switch_weight), HOPELESS * best_s)
                # Memory may ask for stages beyond the bounds: few layers with the head, say.
                for bounded in (True, False) if even.excess_bytes else (True,):
                    search = _Search(price, policy, receive, switch_weight, limit_s, bounded=bounded)
                    result = search.run()
                    num_priced += search.num_priced
                    if result is not None:
                        start = result
                        break
                if not start.excess_bytes:
                    break  # other numbers of micro-batches only where the layers cannot be moved into memory
            if closest is None or mapping_order(start, switch_weight) < mapping_order(closest, switch_weight):
                closest = start
            if is_last or (not policy and not start.excess_bytes):
                break  # the other policies pay time for memory that is not needed
        assert closest is not None, "there is at least one policy"
        mappings.append(closest)
        if not closest.excess_bytes:
            best_s = min(best_s, _cost(closest, switch_weight))
            if least_depth_only:
                break
    return MappingSearch(tuple(sorted(mappings, key=lambda one: mapping_order(one, switch_weight))), num_priced)


def _cost(mapping: Mapping, switch_weight: float) -> float:
    return mapping.step_s + switch_weight * mapping.switch_s


def mapping_order(mapping: Mapping, switch_weight: float) -> tuple[float, float, int]:
    return mapping.excess_bytes, _cost(mapping, switch_weight), mapping.depth


def priced_mapping(price: MappingCosts, edges: tuple[int, ...], policy: int, receive: ReceiveSeconds | None) -> Mapping:
    switch_s = 0.0
    if receive is not None:
        switch_s = max(receive.of_stage(stage, *pair) for stage, pair in enumerate(pairwise(edges)))
    step_s, excess_bytes = price.step_seconds(edges), price.excess_bytes(edges)
    return Mapping(edges, price.dp, price.micro_batches, policy, step_s, excess_bytes, switch_s)


class _Search:
    """Search by lines 14-26 for one depth, policy and number of micro-batches what costs less than `limit_s`, with
    layers of a stage within the bounds of lines 9-10 (`bounded`), or any."""

    def __init__(
        self,
        price: MappingCosts,
        policy: int,
        receive: ReceiveSeconds | None,
        switch_weight: float,
        limit_s: float,
        *,
        bounded: bool,
    ) -> None:
        self._price, self._policy, self._receive = price, policy, receive
        self._weight, self._best_s = switch_weight, limit_s
        self._best: tuple[int, ...] | None = None
        self._seen: dict[tuple[int, int], list[tuple[float, int, float]]] = {}
        layers, depth = price.num_layers, price.depth
        ends = {"embedding_layers": _end_layers(price, 0), "head_layers": _end_layers(price, layers - 1)}
        any_split = LayerBounds((1,) * depth, (layers,) * depth)
        self._bounds = layer_bounds(layers, depth, **ends) if bounded else any_split
        self._least_after = [sum(self._bounds.low[stage:]) for stage in range(depth + 1)]
        self._most_after = [sum(self._bounds.high[stage:]) for stage in range(depth + 1)]
        self.num_priced = 0

    def run(self) -> Mapping | None:
        self._place((0,), 0.0, 0, 0.0)
        if self._best is None:
            return None
        return priced_mapping(self._price, self._best, self._policy, self._receive)

    def _place(self, edges: tuple[int, ...], rest_s: float, parameters: int, receive_s: float) -> None:
        price, stage, first = self._price, len(edges) - 1, edges[-1]
        left = price.num_layers - first
        if stage == price.depth:
            self.num_priced += 1
            cost_s = price.seconds_of(rest_s, parameters) + self._weight * receive_s
            if cost_s < self._best_s:
                self._best_s, self._best = cost_s, edges
            return
        low = max(self._bounds.low[stage], left - self._most_after[stage + 1])
        high = min(self._bounds.high[stage], left - self._least_after[stage + 1])
        for count in range(low, high + 1):
            last = first + count
            if not price.fits(stage, first, last):
                break
            most_s = max(rest_s, price.rest_s[last] - price.rest_s[first])
            most_parameters = max(parameters, price.trained_parameters(first, last))
            after = price.depth - stage - 1
            least_s = max(most_s, (price.rest_s[-1] - price.rest_s[last]) / after) if after else most_s
            least_cost_s = price.seconds_of(least_s, most_parameters)
            if least_cost_s + self._weight * receive_s >= self._best_s:
                continue
            most_receive_s = receive_s
            if self._receive is not None:
                most_receive_s = max(receive_s, self._receive.of_stage(stage, first, last))
            if least_cost_s + self._weight * most_receive_s >= self._best_s or self._is_dominated(
                (stage + 1, last), (most_s, most_parameters, most_receive_s)
            ):
                continue
            self._place((*edges, last), most_s, most_parameters, most_receive_s)

    def _is_dominated(self, place: tuple[int, int], figures: tuple[float, int, float]) -> bool:
        """Check whether a branch came here with no more of anything; else remember this one."""
        seen = self._seen.setdefault(place, [])
        if any(all(a <= b for a, b in zip(other, figures, strict=True)) for other in seen):
            return True
        seen.append(figures)
        return False


def _end_layers(price: MappingCosts, layer: int) -> int:
    """Return what embedding or head add to their layer, in layers: by work or by parameters, whichever is more."""
    middle = price.num_layers // 2
    layer_s = price.rest_s[middle + 1] - price.rest_s[middle]
    more_s = price.rest_s[layer + 1] - price.rest_s[layer] - layer_s
    inner = price.parameters(middle, middle + 1) if 0 < middle < price.num_layers - 1 else 0
    more = price.parameters(layer, layer + 1) - inner if inner else 0
    by_work = more_s / layer_s if layer_s > 0 else 0.0
    return -int(-max(by_work, more / inner if inner else 0.0, 0.0) // 1)


class ReplicatedStageCosts(MappingCosts):
    """Price mappings of one depth and number of micro-batches whose stages have different numbers of devices;
    `dp` is 1, and `coefficients` of any layout of as many devices, for the links."""

    @cached_property
    def _held_bytes(self) -> NDArray[np.float64]:
        return self.held_bytes(self.micro_batches)

    def share(self, devices: int) -> float:
        """Return the share of the rest of a stage's work that its busiest device has."""
        count = self.micro_batches
        return (math.ceil(count / devices) - 1) / (count - 1) if count > 1 else 0.0

    def least_replicated_seconds(self, devices: Iterable[int]) -> float:
        """Return a lower bound of mappings to stages of so many devices: work spread evenly, nothing to reduce."""
        shares = [self.share(count) for count in devices]
        spread = 0.0 if not all(shares) else self._whole_rest_s / sum(1 / share for share in shares)
        return self.seconds_of(spread, 0)

    def replicated_seconds(self, edges: tuple[int, ...], devices: tuple[int, ...]) -> float:
        stages = [(first, last, count) for (first, last), count in zip(pairwise(edges), devices, strict=True)]
        rest_s = max(self.share(count) * (self.rest_s[last] - self.rest_s[first]) for first, last, count in stages)
        return self.seconds_of(rest_s, 0) + max(self.after_seconds(*stage) for stage in stages)

    def after_seconds(self, first: Edge, last: Edge, devices: int) -> Any:
        latency_s, parameter_s = self._links.update_seconds(self._weight_bytes, devices)
        return 2 * latency_s + parameter_s * self.trained_parameters(first, last)

    def replicated_excess_bytes(self, edges: tuple[int, ...], devices: tuple[int, ...]) -> float:
        if self.cap_bytes is None:
            return 0.0
        fullest = 0.0
        for stage, ((first, last), count) in enumerate(zip(pairwise(edges), devices, strict=True)):
            held = self.in_flight_bytes(count, sum(devices[stage + 1 :]))
            fullest = max(fullest, self.static_stage_bytes(first, last, count) + (last - first) * held)
        return max(0.0, fullest - self.cap_bytes)

    def in_flight_bytes(self, devices: int, later: int) -> float:
        """Estimate the activations of one layer on a device of a stage with so many `later` devices behind it, of the
        micro-batches that it holds at once (`schedule.static_schedules`)."""
        held = min(-(-later // devices) + 1, math.ceil(self.micro_batches / devices))
        return float(self._held_bytes[held])

    def static_stage_bytes(self, first: Edge, last: Edge, devices: int) -> Any:
        logits = (last == self.num_layers) * self._logits_bytes
        trained_bytes = max(self._weight_bytes, 4) + self._batch.optimizer_bytes / devices
        held = self.parameters(first, last) * self._weight_bytes
        return held + self.trained_parameters(first, last) * trained_bytes + self._temp_bytes + logits


Edges = tuple[int, ...]  # layers where stages begin, and the end
Devices = tuple[int, ...]  # of every stage


def best_replicated_mapping(
    price: ReplicatedStageCosts, devices: int, allowed: Sequence[Devices] | None = None
) -> tuple[Edges, Devices] | None:
    """Choose which stages of a depth get one device more than the others, as one of `allowed` says (None = any); return
    the edges of their layers and their devices, None where nothing fits memory. `devices` in all are more than the
    depth, and not a multiple of it."""
    tables = [_StageTable(price, devices // price.depth + more) for more in (0, 1)]
    if allowed is None:
        return _cut(price, tables, devices, [(0, 1)] * price.depth)
    least = devices // price.depth
    cuts = (_cut(price, tables, devices, [(count - least,) for count in one]) for one in allowed)
    fitting = [one for one in cuts if one is not None]
    return min(fitting, key=lambda one: price.replicated_seconds(*one), default=None)


def _cut(
    price: ReplicatedStageCosts, tables: Sequence["_StageTable"], devices: int, more_of: Sequence[tuple[int, ...]]
) -> tuple[Edges, Devices] | None:
    """Cut layers into stages that have one device more than the least, or not, as `more_of` each allows."""
    depth, layers = price.depth, price.num_layers
    least, wide = divmod(devices, depth)
    # Least maximum up to every layer, by wide stages so far; and where each came from.
    best = np.full((wide + 1, layers + 1), np.inf)
    best[0, 0] = 0.0
    came_from: list[NDArray[np.int64]] = []
    for stage in range(depth):
        following = np.full_like(best, np.inf)
        source = np.zeros((wide + 1, layers + 1, 2), np.int64)  # wide stages before, layer before
        for more in more_of[stage]:
            # Wide stages so far, with this one; as many as are left must still find a stage.
            now = np.arange(max(more, wide - (depth - stage - 1)), min(stage + 1, wide) + 1)
            later = devices - least * (stage + 1) - now
            reached = np.maximum(best[now - more][:, :, None], tables[more].seconds(later))
            at = reached.argmin(axis=1)
            seconds = np.take_along_axis(reached, at[:, None], axis=1)[:, 0]
            better = seconds < following[now]
            following[now] = np.where(better, seconds, following[now])
            source[now, :, 0] = np.where(better, now[:, None] - more, source[now, :, 0])
            source[now, :, 1] = np.where(better, at, source[now, :, 1])
        best = following
        came_from.append(source)
    if not np.isfinite(best[wide, layers]):
        return None
    edges, of_stages, now, layer = [layers], [], wide, layers
    for source in reversed(came_from):
        before, layer_before = source[now, layer].tolist()
        of_stages.append(least + now - before)
        edges.append(layer_before)
        now, layer = before, layer_before
    return tuple(reversed(edges)), tuple(reversed(of_stages))


class _StageTable:
    """Price a stage of so many devices by its first and last layer; infinite beyond memory."""

    def __init__(self, price: ReplicatedStageCosts, devices: int) -> None:
        self._price, self._devices, rest_s = price, devices, np.array(price.rest_s)
        last = np.arange(price.num_layers + 1)
        first = last[:, None]
        self._counts = last - first
        self._seconds = price.share(devices) * (rest_s - rest_s[:, None]) + price.after_seconds(first, last, devices)
        self._static_bytes = price.static_stage_bytes(first, last, devices)
        self._seconds[self._counts < 1] = np.inf

    def seconds(self, later: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float64[1 or len(later), layers + 1, layers + 1] for a stage with so many devices behind it."""
        if self._price.cap_bytes is None:
            return self._seconds[None]
        held = np.array([self._price.in_flight_bytes(self._devices, count) for count in later.tolist()])
        within = self._static_bytes + held[:, None, None] * self._counts <= self._price.cap_bytes
        return np.where(within, self._seconds, np.inf)
