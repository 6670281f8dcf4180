"""Choose the layers of every stage (`balanced_layout`).

The head costs as much as several layers (2.3 in qwen2.5-7b), so equal numbers of layers leave other ranks waiting. A
split is rated by the slowest rank's forward + backward of the step's documents plus the gradient reduction and
optimizer of the fullest rank, without constants of packs and slices.

With one stage a rank it is exact: for falling limits on a rank's trained parameters, dynamic programming over (stages,
layers) finds the least bottleneck; of the best limit's splits the one with the least sum of squares is taken, then the
one with fewer layers on early stages. O(limits · pp · L²). With more stages a rank it is steepest descent, one layer
from any stage to any other, from that split and from the even one; O(moves · stages²), at most 5 % above the optimum.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory import (
    embedding_parameters,
    layer_parameters,
    optimizer_bytes_per_parameter,
    trained_layer_parameters,
)
from evenload.cost.pack_cost import PackCosts
from evenload.types.columns import whole_document_columns
from evenload.types.layout import ParallelLayout, even_layout, split_layout
from evenload.types.model import ModelSpec

STATIC_SHARE = 0.5  # of a device's memory; the rest is for activations
TICKS = 2**28  # seconds of all layers, as whole numbers: equal layers are exactly equal, and squares fit 64 bits


def balanced_layout(
    model: ModelSpec,
    coefficients: CostCoefficients,
    even: ParallelLayout,
    num_tokens: ArrayLike,
    *,
    num_steps: int = 1,
    memory_bytes: int | None = None,
) -> ParallelLayout:
    """Split layers so that the slowest rank has the least to do; `ConfigError` where the model does not support the
    sizes.

    Args:
        even: the layout with layers split evenly (`even_layout`); coefficients: of a layout of these sizes.
        num_tokens: int[n], lengths of the documents of all replicas in `num_steps` steps; none gives the even split.
        memory_bytes: of a device; None = no limit.
    """
    tokens, virtual = np.asarray(num_tokens, np.int64), even.num_stages // even.pp
    if even.pp == 1 or len(tokens) == 0 or even.has_replicated_stages:
        return even
    problem = _problem(model, coefficients, tokens, even, num_steps, memory_bytes)
    counts = problem.solve(virtual)
    if virtual > 1:
        # Of two local optima the better one is taken.
        rounds = np.arange(virtual)[:, None]
        spread = (counts // virtual + (rounds < counts % virtual)).ravel()  # earlier rounds take the remainder
        starts = np.array(even.stage_counts, np.int64), spread
        counts = min((problem.descend(start) for start in starts), key=lambda one: problem.values(one[None, :])[0])
    return split_layout(counts.tolist(), dp=even.dp, cp=even.cp, pp=even.pp, tp=even.tp)


@dataclass(frozen=True, eq=False)
class _SplitProblem:
    """What decides a split: int64[L + 1] ticks of the first layers (embedding and head are in the first and the last);
    trained parameters; bytes of weights, gradients and optimizer state, times the ranks that share the latter, to be
    whole, and their limit on a rank, which the even split keeps; ticks after the pipeline of a trained parameter."""

    pp: int
    running: NDArray[np.int64]
    trained: "_Amounts"
    held: "_Amounts"
    ticks_per_parameter: float
    max_held: int

    @property
    def num_layers(self) -> int:
        return len(self.running) - 1

    def solve(self, least: int = 1) -> NDArray[np.int64]:
        limit, best, chosen = np.iinfo(np.int64).max, np.inf, None
        while True:
            bottleneck, counts = _cheapest_path(self._stage_ticks(limit, least), np.maximum)
            if bottleneck >= best:  # infinite where no split keeps the limit
                break
            fullest = int(self.trained.of_ranks(counts[None, :], self.pp).max())
            total = bottleneck + self.ticks_per_parameter * fullest
            if total < best:
                best, chosen = total, (bottleneck, fullest)
            limit = fullest - 1
        assert chosen is not None, "the even split keeps the limit"
        bottleneck, fullest = chosen
        stage_ticks = self._stage_ticks(fullest, least)
        squares = np.where(stage_ticks <= bottleneck, stage_ticks.astype(np.float64) ** 2, np.inf)
        return _cheapest_path(squares, np.add)[1]

    def descend(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Improve the layers of every virtual stage, many a rank, from a first split; int64[stages]."""
        stages = len(counts)
        sources, targets = np.nonzero(~np.eye(stages, dtype=bool))
        rows = np.arange(len(sources))
        value = self.values(counts[None, :])[0]
        while True:
            moved = np.repeat(counts[None, :], len(rows), axis=0)
            moved[rows, sources] -= 1
            moved[rows, targets] += 1
            moved[(moved < 1).any(axis=1)] = counts
            values = self.values(moved)
            best = min(range(len(moved)), key=lambda row: values[row])
            if values[best] >= value:
                return counts
            counts, value = moved[best], values[best]

    def values(self, counts: NDArray[np.int64]) -> list[tuple[float, float, float]]:
        edges = np.concatenate([np.zeros((len(counts), 1), np.int64), np.cumsum(counts, axis=1)], axis=1)
        stage_ticks = np.diff(self.running[edges], axis=1)
        rank_ticks = stage_ticks.reshape(len(counts), -1, self.pp).sum(axis=1)
        cost = rank_ticks.max(axis=1) + self.ticks_per_parameter * self.trained.of_ranks(counts, self.pp).max(axis=1)
        cost[self.held.of_ranks(counts, self.pp).max(axis=1) > self.max_held] = np.inf
        squares = (rank_ticks.astype(np.float64) ** 2).sum(axis=1), (stage_ticks.astype(np.float64) ** 2).sum(axis=1)
        return list(zip(cost.tolist(), squares[0].tolist(), squares[1].tolist(), strict=True))

    def _stage_ticks(self, limit: int, least: int) -> NDArray[np.float64]:
        """Return the ticks of stages of layers `[from, to)`, infinite where impossible; float64[pp, L + 1, L + 1]."""
        layers = np.arange(self.num_layers + 1)
        count = layers[None, :] - layers[:, None]
        ticks = (self.running[None, :] - self.running[:, None]).astype(np.float64)
        out = np.repeat(np.where(count >= least, ticks, np.inf)[None], self.pp, axis=0)
        for stage in range(self.pp):
            out[stage][self.trained.of_stage(stage, self.pp) > limit] = np.inf
            out[stage][self.held.of_stage(stage, self.pp) > self.max_held] = np.inf
        return out


@dataclass(frozen=True, eq=False)
class _Amounts:
    """What a rank has of something: int64[L + 1] of the first layers; on top, on the first and last stage's ranks."""

    running: NDArray[np.int64]
    first: int
    last: int

    def of_stage(self, stage: int, pp: int) -> NDArray[np.int64]:
        """Return the amount of a stage of layers `[from, to)`; int64[L + 1, L + 1]."""
        held = self.running[None, :] - self.running[:, None]
        return held + (self.first if stage == 0 else 0) + (self.last if stage == pp - 1 else 0)

    def of_ranks(self, counts: NDArray[np.int64], pp: int) -> NDArray[np.int64]:
        """Return the amount of every rank under splits int64[k, stages]; int64[k, pp]."""
        edges = np.concatenate([np.zeros((len(counts), 1), np.int64), np.cumsum(counts, axis=1)], axis=1)
        out = np.diff(self.running[edges], axis=1).reshape(len(counts), -1, pp).sum(axis=1)
        out[:, 0] += self.first
        out[:, -1] += self.last
        return out


def _problem(
    model: ModelSpec,
    coefficients: CostCoefficients,
    num_tokens: NDArray[np.int64],
    even: ParallelLayout,
    num_steps: int,
    memory_bytes: int | None,
) -> _SplitProblem:
    one_each = even_layout(model.num_layers, pp=model.num_layers, cp=even.cp, tp=even.tp)
    costs = PackCosts(model, coefficients, one_each)
    # All documents as one pack; an empty pack has the constants that are left out.
    columns = whole_document_columns([list(range(len(num_tokens))), []], num_tokens, even.cp)
    seconds = costs.pack_seconds(columns, "forward") + costs.pack_seconds(columns, "backward")
    layer_s = (seconds[0] - seconds[1]) / (even.dp * num_steps)
    ticks_per_s = TICKS / float(layer_s.sum())
    running = np.concatenate([[0], np.cumsum(np.rint(layer_s * ticks_per_s).astype(np.int64))])

    copies, element = even.dp * even.cp, model.bytes_per_element
    _, after_s = coefficients.update_seconds(element, copies)
    vocabulary = embedding_parameters(model, even.tp)
    embedding, head = vocabulary + model.position_parameters, vocabulary + model.norm_parameters
    stored = _Amounts(_running(model, layer_parameters(model, even.tp)), embedding, head)
    trained = stored
    if model.has_adapters:
        trained = _Amounts(_running(model, trained_layer_parameters(model, even.tp)), 0, 0)
    weight, state = element * copies, max(element, 4) * copies + optimizer_bytes_per_parameter(model)
    held = _Amounts(
        weight * stored.running + state * trained.running,
        weight * stored.first + state * trained.first,
        weight * stored.last + state * trained.last,
    )
    max_held = np.iinfo(np.int64).max
    if memory_bytes is not None:
        evenly = np.array([even.stage_counts], np.int64)
        max_held = max(int(held.of_ranks(evenly, even.pp).max()), int(STATIC_SHARE * memory_bytes * copies))
    return _SplitProblem(even.pp, running, trained, held, after_s * ticks_per_s, max_held)


def _running(model: ModelSpec, of_kinds: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(of_kinds[np.array(model.layers)])])


def _cheapest_path(cost: NDArray[np.float64], join: np.ufunc) -> tuple[float, NDArray[np.int64]]:
    """Return the least cost of stages from no layer to all, and their layers, int64[pp]; of equals, late stages take
    the most layers. `cost` is float64[pp, L + 1, L + 1] of stage s with layers from i to j, `join` adds a stage's."""
    pp, ends, _ = cost.shape
    best = cost[0, 0]
    came_from = np.zeros((pp, ends), np.int64)
    for stage in range(1, pp):
        joined = join(best[:, None], cost[stage])
        came_from[stage] = joined.argmin(axis=0)
        best = joined.min(axis=0)
    edges = [ends - 1]
    for stage in range(pp - 1, 0, -1):
        edges.append(int(came_from[stage, edges[-1]]))
    return float(best[-1]), np.diff([0, *reversed(edges)])
