"""`StageRates`: seconds that a feature of a pack (`cost.slice_features`) costs on every virtual stage of one layout.

The first stage carries the embedding in both directions, the last stage's BACKWARD carries the head. Tensor parallelism
divides tokens' and pairs' seconds by tp and adds its exposed transfers (`cost.group_comm`). Who shares a pack, and
policies, are `cost.pack_cost`'s.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.flops import recomputed_share
from evenload.cost.group_comm import recompute_seconds, tensor_seconds
from evenload.cost.slice_features import num_columns, pairs_column, prefix_column
from evenload.types.layout import ParallelLayout
from evenload.types.micropack import Direction
from evenload.types.model import ModelSpec


@dataclass(frozen=True)
class StageRates:
    """Of one model, device and layout.

    Args:
        windows: the distinct ones of the model's layers, 0 = full; in the order of a pack's features.
    """

    model: ModelSpec
    coefficients: CostCoefficients
    layout: ParallelLayout
    windows: tuple[int, ...]

    def features(self, direction: Direction, tp: int | None = None) -> NDArray[np.float64]:
        """Seconds per feature; float64[features, P]. `tp` 1 gives the whole work, without transfers."""
        tp = self.layout.tp if tp is None else tp
        layer = self.coefficients.of_pass(direction)
        stages = self.layout.stage_layers
        matrix = np.zeros((num_columns(len(self.windows)), len(stages)))
        matrix[0], matrix[2] = self._linear(direction, tp)
        for stage, (first, last) in enumerate(stages):
            matrix[1, stage] = (last - first) * layer.slice_s
            for index, window in enumerate(self.windows):
                count = self.model.windows[first:last].count(window)
                matrix[pairs_column(index), stage] = count * layer.attention_s_per_pair / tp
                matrix[prefix_column(index), stage] = count * layer.prefix_s_per_token / tp
        # The embedding's rows are split over the vocabulary, its sums scattered over tokens.
        matrix[0, 0] += self.coefficients.embedding_s_per_token / tp
        if direction == "backward":
            matrix[0, -1] += self.coefficients.head_s_per_token / tp
            matrix[2, -1] += self.coefficients.head_pack_s
        return matrix

    def host(self, direction: Direction) -> NDArray[np.float64]:
        """Seconds of the host a slice and a pack; float64[2, P]. No axis divides them: every rank queues its own."""
        layer = self.coefficients.of_pass(direction)
        return np.outer((layer.host_slice_s, layer.host_pack_s), self.layers())

    def linear_again(self, layers: NDArray[np.int64]) -> tuple[NDArray, NDArray]:
        """Of what recomputing makes again in so many layers of every stage: (seconds a token, seconds a pack);
        float64[P] each."""
        model, tp = self.model, self.layout.tp
        layer, share = self.coefficients.forward, recomputed_share(model)
        token_s, pack_s = recompute_seconds(model, self.coefficients, tp)
        return layers * (share * layer.linear_s_per_token / tp + token_s), layers * (share * layer.pack_s + pack_s)

    def layers(self) -> NDArray[np.int64]:
        """Layers of every virtual stage."""
        return np.array(self.layout.stage_counts, np.int64)

    def _linear(self, direction: Direction, tp: int) -> tuple[NDArray, NDArray]:
        """Of every stage's layers without attention: (seconds a token, seconds a pack); float64[P] each."""
        layer, layers = self.coefficients.of_pass(direction), self.layers()
        token_s, pack_s = tensor_seconds(self.model, self.coefficients, tp, direction)
        return layers * (layer.linear_s_per_token / tp + token_s), layers * (layer.pack_s + pack_s)
