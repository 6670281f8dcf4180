"""`PackCosts`: seconds of packs, documents and transfers for one model, one device and one layout.

Every pack is reduced to a few features (tokens, slices, 1, and pairs and prefix of each distinct window); a stage is
a row of coefficients; seconds are one small matrix product. O(slices) numpy per direction, no Python loop.

Details that matter:
- Sliding windows: layers with equal windows share one pair count; each stage counts its own layers.
- Tiles: flash attention computes whole blocks of `attention_tile` query rows. The rows a slice lacks to full
  blocks cost like its last row, which sees `min(stop, window)` keys (WLB §5.2).
- Padding: a slice of a padded pack costs `pad_to` tokens and their attention: that work is really done.
- The first stage carries the embedding in both directions, the last stage's BACKWARD carries the head.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.cost.coefficients import CostCoefficients, PassCoefficients
from evenload.cost.comm import ring_seconds, transfer_seconds
from evenload.cost.flops import slice_pairs
from evenload.cost.memory import parameters_per_rank
from evenload.cost.support import require_supported_layout
from evenload.errors import ConfigError
from evenload.types.columns import SliceColumns
from evenload.types.layout import ParallelLayout
from evenload.types.micropack import Direction
from evenload.types.model import ModelSpec
from evenload.types.work import WorkCurve


class PackCosts:
    """Costs of one (model, coefficients, layout); immutable.

    Raises:
        ConfigError: the layout is not supported yet or belongs to another model.
    """

    def __init__(self, model: ModelSpec, coefficients: CostCoefficients, layout: ParallelLayout) -> None:
        require_supported_layout(model, layout)
        self.model = model
        self.coefficients = coefficients
        self.layout = layout
        self.windows = tuple(sorted(set(model.windows)))
        self._stage_seconds: dict[Direction, NDArray[np.float64]] = {
            "forward": self._stage_matrix("forward"),
            "backward": self._stage_matrix("backward"),
        }

    def pack_seconds(self, columns: SliceColumns, direction: Direction) -> NDArray[np.float64]:
        """Seconds of every pack on every virtual stage; float64[num_packs, P]."""
        return self._features(columns) @ self._stage_seconds[direction]

    def document_seconds(self, num_tokens: ArrayLike) -> NDArray[np.float64]:
        """Forward + backward of whole documents through the whole pipeline of one replica, without the constant
        of the pack they lie in; float64[n]. What DP assignment balances (oracle: time, not forward FLOPs)."""
        tokens = np.asarray(num_tokens, np.int64)
        features = self._slice_features(np.zeros_like(tokens), tokens)
        features[:, 2] = 0.0
        return features @ (self._stage_seconds["forward"] + self._stage_seconds["backward"]).sum(axis=1)

    def forward_work(self, stage: int | None = None) -> WorkCurve:
        """Work of a token range on one virtual stage, for exact cuts; default: the stage slowest per token."""
        return self._work("forward", stage)

    def backward_work(self, stage: int | None = None) -> WorkCurve:
        """As `forward_work`, for backward; by default usually the last stage, which carries the head."""
        return self._work("backward", stage)

    def p2p_seconds(self, columns: SliceColumns) -> NDArray[np.float64]:
        """One hop of every pack's hidden states (or their gradient) to the next stage; float64[num_packs]."""
        if self.layout.num_stages == 1:
            return np.zeros(columns.num_packs)
        return transfer_seconds(
            padded_pack_tokens(columns) * (self.model.hidden_size * self.model.bytes_per_element),
            self.coefficients.p2p_bandwidth_bytes_per_s,
            self.coefficients.p2p_latency_s,
        )

    def reduction_seconds(self) -> float:
        """Reduce-scatter of fp32 gradients and all-gather of weights over data-parallel ranks, fullest rank."""
        parameters = float(parameters_per_rank(self.model, self.layout).max())
        element = self.model.bytes_per_element
        link = (self.coefficients.reduce_bandwidth_bytes_per_s, self.coefficients.reduce_latency_s)
        return ring_seconds(max(element, 4) * parameters, self.layout.dp, *link) + ring_seconds(
            element * parameters, self.layout.dp, *link
        )

    def optimizer_seconds(self) -> float:
        """The update of one rank's shard, fullest rank."""
        parameters = float(parameters_per_rank(self.model, self.layout).max())
        return self.coefficients.optimizer_s_per_parameter * parameters / self.layout.dp

    def lower_bound_seconds(self, num_tokens: ArrayLike) -> float:
        """All useful work of a step on all devices, spread evenly: no recompute, no padding, no tiles, no
        per-slice or per-pack constants, no communication, no optimizer. No schedule can beat it under this
        cost model."""
        tokens = np.asarray(num_tokens, np.int64)
        features = self._slice_features(np.zeros_like(tokens), tokens, tile=1)
        features[:, 1:3] = 0.0
        total = features.sum(axis=0) @ (self._stage_seconds["forward"] + self._stage_seconds["backward"]).sum(axis=1)
        return float(total) / self.layout.world_size

    def _stage_matrix(self, direction: Direction) -> NDArray[np.float64]:
        """Seconds per feature; float64[3 + num_windows, P]."""
        layer = self._pass(direction)
        stages = self.layout.stage_layers
        matrix = np.zeros((3 + 2 * len(self.windows), len(stages)))
        for stage, (first, last) in enumerate(stages):
            layers = last - first
            matrix[:3, stage] = layers * layer.linear_s_per_token, layers * layer.slice_s, layers * layer.pack_s
            for index, window in enumerate(self.windows):
                count = self.model.windows[first:last].count(window)
                matrix[_pairs(index), stage] = count * layer.attention_s_per_pair
                matrix[_prefix(index), stage] = count * layer.prefix_s_per_token
        matrix[0, 0] += self.coefficients.embedding_s_per_token
        if direction == "backward":
            matrix[0, -1] += self.coefficients.head_s_per_token
            matrix[2, -1] += self.coefficients.head_pack_s
        return matrix

    def _pass(self, direction: Direction) -> PassCoefficients:
        return self.coefficients.forward if direction == "forward" else self.coefficients.backward

    def _features(self, columns: SliceColumns) -> NDArray[np.float64]:
        """float64[num_packs, 3 + 2·num_windows]: tokens, slices, 1, then pairs and prefix of each window."""
        if not self.model.causal and columns.start.any():
            raise ConfigError(
                f"model {self.model.name} is bidirectional: every token sees the whole document, so documents "
                "cannot be sliced; use a strategy of whole documents (padded, best_fit, balanced)"
            )
        pack = columns.pack_of_slice()
        stop = columns.stop
        if columns.pad_to.any():
            pad_to = columns.pad_to[pack]
            stop = np.where(pad_to > 0, pad_to, stop)
        slices = self._slice_features(columns.start, stop)
        packs = columns.num_packs
        out = np.empty((packs, slices.shape[1]))
        for column in range(slices.shape[1]):
            out[:, column] = np.bincount(pack, weights=slices[:, column], minlength=packs)
        out[:, 2] = 1.0
        return out

    def _slice_features(self, start: NDArray, stop: NDArray, tile: int | None = None) -> NDArray[np.float64]:
        """float64[num_slices, 3 + 2·num_windows]; column 2 is left 1 for the pack constant."""
        tile = self.coefficients.attention_tile if tile is None else tile
        rows = stop - start
        out = np.ones((len(rows), 3 + 2 * len(self.windows)))
        out[:, 0] = rows
        missing_rows = -rows % tile
        for index, window in enumerate(self.windows):
            last_row_keys = np.minimum(stop, window) if window else stop
            pairs = slice_pairs(start, stop, window, causal=self.model.causal)
            out[:, _pairs(index)] = pairs + missing_rows * last_row_keys
            out[:, _prefix(index)] = np.minimum(start, window) if window else start
        return out

    def _work(self, direction: Direction, stage: int | None) -> WorkCurve:
        matrix = self._stage_seconds[direction]
        chosen = int(matrix[0].argmax()) if stage is None else stage
        return WorkCurve(
            linear_s=float(matrix[0, chosen]),
            attention_s=tuple(
                (float(matrix[_pairs(index), chosen]), window)
                for index, window in enumerate(self.windows)
                if matrix[_pairs(index), chosen]
            ),
            slice_s=float(matrix[1, chosen]),
        )


def _pairs(window_index: int) -> int:
    """Feature column of a window's pairs."""
    return 3 + 2 * window_index


def _prefix(window_index: int) -> int:
    """Feature column of a window's prefix tokens."""
    return 4 + 2 * window_index


def padded_pack_tokens(columns: SliceColumns) -> NDArray[np.int64]:
    """Tokens of every pack as computed, padding included; int64[num_packs]."""
    padded = columns.pad_to * np.diff(columns.pack_offset)
    return np.where(columns.pad_to > 0, padded, columns.pack_tokens())
