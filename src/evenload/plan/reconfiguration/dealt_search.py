"""Stages with different numbers of devices in HBSA's search: FlexPipe's mappings such as (1, 1, 2, 1, 1, 1, 1) (§5.1).

A depth that does not divide the devices leaves up to P - 1 of them idle where all stages have floor(devices / P). Here
each of these goes to one stage. The pipeline is then one (no replicas), whose packs every stage deals to its devices in
turn (`types.layout`); a device of a stage with g of them runs ceil(n / g) of n micro-batches:

    T = sum_i u_i + max_i c_i (W_i - u_i) + max_i (reduction and optimizer of stage i)

with c_i = (ceil(n / g_i) - 1) / (n - 1), in the words of `mapping_cost`, whose T this is where all g are 1. Which
stages of a depth are wide and where they are cut is found by dynamic programming over (stage, wide ones so far, layer)
in numpy: the least maximum over stages of rest, reduction and optimizer together, within memory. What is left out:
numbers of devices that differ by more than one, and that the two maxima may lie on different stages;
`tests/plan/test_dealt_search.py` holds it against all mappings. O(depth · wide stages · layers²) a depth, and depths
whose bound is hopeless beside what is known are not looked at.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory import optimizer_bytes_per_parameter
from evenload.plan.reconfiguration.mapping_cost import BatchCosts, MappingCosts
from evenload.types.model import ModelSpec


@dataclass(frozen=True)
class DealtMapping:
    """Layers and devices of stages, with the most that any stage adds to the step."""

    edges: tuple[int, ...]
    devices: tuple[int, ...]


class DealtCosts(MappingCosts):
    """Prices mappings of one depth and number of micro-batches whose stages have different numbers of devices.

    Args:
        coefficients: of any layout of as many devices, for the links.
        micro_batches: of the one pipeline.
        cap_bytes: of a device; None = no limit.
    """

    def __init__(
        self,
        model: ModelSpec,
        coefficients: CostCoefficients,
        batch: BatchCosts,
        *,
        depth: int,
        micro_batches: int,
        cap_bytes: int | None,
    ) -> None:
        super().__init__(
            model, coefficients, batch, depth=depth, dp=1, micro_batches=micro_batches, cap_bytes=cap_bytes
        )
        self._links, self._state_bytes = coefficients, optimizer_bytes_per_parameter(model)

    @cached_property
    def _held_bytes(self) -> NDArray[np.float64]:
        """Of activations of a layer, of so many micro-batches at once."""
        count = self.micro_batches
        mean_bytes = self._batch.kept_bytes / count
        in_flight = np.full(count, mean_bytes)
        largest = np.maximum(self._batch.kept_longest_first[:count], mean_bytes)
        in_flight[: len(largest)] = largest
        return np.concatenate([[0.0], np.cumsum(in_flight)])

    def share(self, devices: int) -> float:
        """Of the rest of a stage's work what its busiest device has."""
        count = self.micro_batches
        return (math.ceil(count / devices) - 1) / (count - 1) if count > 1 else 0.0

    def least_dealt_seconds(self, devices: Iterable[int]) -> float:
        """No mapping to stages of so many devices takes less: work spread evenly over them, nothing to reduce."""
        shares = [self.share(count) for count in devices]
        spread = 0.0 if not all(shares) else self._whole_rest_s / sum(1 / share for share in shares)
        return self.seconds_of(spread, 0)

    def dealt_seconds(self, edges: tuple[int, ...], devices: tuple[int, ...]) -> float:
        """Estimated T of a mapping."""
        stages = [(first, last, count) for (first, last), count in zip(pairwise(edges), devices, strict=True)]
        rest_s = max(self.share(count) * (self.rest_s[last] - self.rest_s[first]) for first, last, count in stages)
        return self.seconds_of(rest_s, 0) + max(self.after_seconds(*stage) for stage in stages)

    def after_seconds(self, first: int, last: int, devices: int) -> float:
        """Gradient reduction, gathering of weights and optimizer of one stage."""
        parameters = self.trained_parameters(first, last)
        links, gradient_bytes = self._links, max(self._weight_bytes, 4)
        ring_s = sum(
            links.ring_seconds(float(num_bytes * parameters), devices)
            for num_bytes in (gradient_bytes, self._weight_bytes)
        )
        return ring_s + links.optimizer_s_per_parameter * parameters / devices

    def dealt_excess_bytes(self, edges: tuple[int, ...], devices: tuple[int, ...]) -> float:
        """Above the memory of the fullest device; 0 = fits."""
        if self.cap_bytes is None:
            return 0.0
        fullest = 0.0
        for stage, ((first, last), count) in enumerate(zip(pairwise(edges), devices, strict=True)):
            held = self.in_flight_bytes(count, sum(devices[stage + 1 :]))
            fullest = max(fullest, self.static_stage_bytes(first, last, count) + (last - first) * held)
        return max(0.0, fullest - self.cap_bytes)

    def in_flight_bytes(self, devices: int, later: int) -> float:
        """Activations of one layer on a device of a stage, of the micro-batches that it holds at once, estimated
        (`schedule.dealt`).

        Args:
            later: devices of the stages behind it.
        """
        held = min(-(-later // devices) + 1, math.ceil(self.micro_batches / devices))
        return float(self._held_bytes[held])

    def static_stage_bytes(self, first: int, last: int, devices: int) -> float:
        """Peak of one device of a stage without activations, estimated."""
        logits = self._logits_bytes if last == self.num_layers else 0.0
        trained_bytes = max(self._weight_bytes, 4) + self._state_bytes / devices
        held = self.parameters(first, last) * self._weight_bytes
        return held + self.trained_parameters(first, last) * trained_bytes + self._temp_bytes + logits


def best_dealt_mapping(price: DealtCosts, devices: int) -> DealtMapping | None:
    """Which stages of a depth get one device more than the others, and their layers; None where nothing fits memory.

    Args:
        devices: of all stages; more than the depth, and not a multiple of it.
    """
    depth, layers = price.depth, price.num_layers
    least, wide = divmod(devices, depth)
    tables = [_StageTable(price, least + more) for more in (0, 1)]
    # Least maximum up to every layer, by wide stages so far; and where each came from.
    best = np.full((wide + 1, layers + 1), np.inf)
    best[0, 0] = 0.0
    came_from: list[NDArray[np.int64]] = []
    for stage in range(depth):
        following = np.full_like(best, np.inf)
        source = np.zeros((wide + 1, layers + 1, 2), np.int64)  # wide stages before, layer before
        for more in (0, 1):
            # Wide stages so far, with this one; as many as are left must still find a stage.
            now = np.arange(max(more, wide - (depth - stage - 1)), min(stage + 1, wide) + 1)
            if not len(now):
                continue
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
    return DealtMapping(tuple(reversed(edges)), tuple(reversed(of_stages)))


class _StageTable:
    """What a stage of so many devices adds, by its first and last layer; infinite beyond memory."""

    def __init__(self, price: DealtCosts, devices: int) -> None:
        layers, rest_s = price.num_layers, np.array(price.rest_s)
        self._price, self._devices = price, devices
        # Both are linear in layers but for the ends, so a few prices make all of them.
        self._seconds = price.share(devices) * (rest_s[None, :] - rest_s[:, None]) + _by_layers(
            layers, lambda first, last: price.after_seconds(first, last, devices)
        )
        self._static_bytes = None
        if price.cap_bytes is not None:
            self._static_bytes = _by_layers(layers, lambda first, last: price.static_stage_bytes(first, last, devices))
        edge = np.arange(layers + 1)
        self._counts = edge[None, :] - edge[:, None]
        self._seconds[self._counts < 1] = np.inf

    def seconds(self, later: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64[1 or len(later), layers + 1, layers + 1], where so many devices stand behind it."""
        if self._static_bytes is None or self._price.cap_bytes is None:
            return self._seconds[None]
        held = np.array([self._price.in_flight_bytes(self._devices, count) for count in later.tolist()])
        within = self._static_bytes + held[:, None, None] * self._counts <= self._price.cap_bytes
        return np.where(within, self._seconds, np.inf)


def _by_layers(layers: int, of_stage: Callable[[int, int], float]) -> NDArray[np.float64]:
    """`of_stage(first, last)` of all pairs, which is linear in the number of layers but for the first and the last."""
    edge = np.arange(layers + 1)
    counts = (edge[None, :] - edge[:, None]).astype(np.float64)
    if layers < 4:
        table = np.zeros((layers + 1, layers + 1))
        for first in range(layers):
            for last in range(first + 1, layers + 1):
                table[first, last] = of_stage(first, last)
        return table
    one, two = of_stage(1, 2), of_stage(1, 3)
    table = one + (two - one) * (counts - 1)
    table[0, :] += of_stage(0, 2) - two
    table[:, layers] += of_stage(layers - 2, layers) - two
    table[0, layers] = of_stage(0, layers)
    return table
