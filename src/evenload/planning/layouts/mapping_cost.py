"""Estimate seconds and bytes of mappings of layers to stages in microseconds: `MappingCosts` (FlexPipe §5.1).

A search over mappings prices thousands of them, so a batch is reduced once to sums per layer; a stage is then a
difference of two sums, and bytes and parameters are the mean layer's where layers differ. With u_i of the longest
micro-batch and W_i of its replica on stage i, the step is

    T = sum_i u_i + max_i (W_i - u_i) + p2p transfers + gradient reduction + optimizer

which for micro-batches of equal work t is FlexPipe's eq. 1 in its right reading, sum_i t_i + (n - 1) · max_i t_i + ...
Memory of stage i (eq. 2): weights; gradients and optimizer shard of what is trained; activations of min(P - i, n)
micro-batches in flight, the longest documents of a replica among them; temporaries of the largest. Both only choose
what is planned and simulated. Price: O(n log n) per batch and policy, O(stages) per mapping.
"""

import functools
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any

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
        self._trains_all = not model.has_adapters
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
        latency_s = coefficients.ring_seconds(0.0, copies)
        moved_s = coefficients.ring_seconds(float(max(element, 4) + element), copies) - latency_s
        self._s_per_parameter = moved_s + coefficients.optimizer_s_per_parameter / copies
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
