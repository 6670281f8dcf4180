"""Price packs, documents and transfers of one model, one device and one layout: `PackCosts`.

A pack is reduced to a few features (tokens, slices, 1, then pairs and prefix of each distinct window of the model),
a stage is a column of seconds a feature; seconds are one small matrix product. O(slices) numpy per direction.
`native` hands the same numbers to the core (`native/price.h`).

- Coefficients are of the mean layer; a stage adds up the shares of its layers (`cost.layer_counts.KindShares`).
- Tiles: attention computes whole blocks of `tile` query rows. Rows that a slice lacks to full blocks cost like its
  last row, which sees `min(stop, window)` keys (WLB §5.2). A padded slice costs `pad_to` tokens and their attention.
- Trees of shared prefixes (`types.tree`): a slice costs what its pieces would cost as slices of plain documents at the
  same positions along the path, so columns of slices are priced by pieces (`TreeColumns.pieces`). Ranks share no trees.
- Slices that ranks share: one of at least two tiles a rank is cut into 2·ranks chunks, of which each rank computes
  one near the start and one near the end; a shorter one stays whole on some rank where the sharding allows it. Features
  are the mean over ranks, which searches compare; plans promise the slowest rank by its own rows (`cost.pack_pricing`).
- The first stage carries the embedding in both directions, the last stage's BACKWARD the head. Tensor parallelism
  divides seconds of tokens and pairs by tp and adds its exposed transfers (`cost.group_transfers`).
- A slice costs more where functions carry a state, and a forward stops where a backward slice begins, to keep the state
  there, which costs like a slice (`PackCosts.stops_of`): cuts that coincide cost least.
- Recomputed layers and documents pay the products that are made again in backward; an offloaded document makes a pack
  last at least as long as its copies to or from the host.
"""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload import _native
from evenload.cost.coefficients import CostCoefficients, PassCoefficients
from evenload.cost.group_transfers import (
    context_seconds,
    context_traffic,
    exchanging_layers,
    exposed_ring_seconds,
    ring_home,
    tensor_seconds,
    weight_gather_seconds,
)
from evenload.cost.layer_counts import (
    KEY_GRADIENT_BYTES,
    OFFLOAD,
    POLICIES,
    RECOMPUTE,
    activation_bytes_per_token,
    kind_shares,
    over_kinds,
    require_supported_layout,
    require_trees,
    slice_pairs,
    stage_kinds,
    weight_bytes_per_token,
)
from evenload.cost.memory import HEAD_ROWS, byte_rates, offloaded_state_bytes, trained_parameters_per_rank
from evenload.errors import ConfigError
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns, WorkCurve, cuts_within, keys_before
from evenload.types.document import Direction
from evenload.types.layer_kind import STATE_CHUNK
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.tree_columns import NO_TREES, TreeColumns


@dataclass(frozen=True, kw_only=True)
class SliceFeatures:
    """Compute features of slices of one model.

    Args:
        windows: the distinct ones of its layers, 0 = full, negative = chunks (`AttentionKind.reach`).
        tile: query rows of one attention block; an incomplete block costs a whole one.
        causal: every token sees those before it; else the whole document.
    """

    windows: tuple[int, ...]
    tile: int
    causal: bool

    def of_packs(self, columns: SliceColumns, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Return the features of packs, on one of the ranks that share each, of the slices that are `chosen`
        (bool[num_slices]; None = all); float64[num_packs, num_columns]."""
        pack = columns.pack_of_slice()
        stop = columns.start + columns.slice_tokens()
        slices = self.of_slices(columns.start, stop, columns.cp)
        if chosen is not None:
            slices = slices * chosen[:, None]
        packs = columns.num_packs
        out = np.empty((packs, slices.shape[1]))
        for column in (0, 1, *range(3, slices.shape[1])):
            out[:, column] = np.bincount(pack, weights=slices[:, column], minlength=packs)
        out[:, 2] = 1.0
        return out

    def of_documents(self, num_tokens: NDArray[np.int64], ranks: int, trees: TreeColumns) -> NDArray[np.float64]:
        """Return the features of whole documents, each shared by `ranks`; float64[n, num_columns]."""
        if trees.has_any:
            return _of_trees(self, trees).copy()
        return self.of_slices(np.zeros_like(num_tokens), num_tokens, np.full(len(num_tokens), ranks, np.int64))

    def of_slices(self, start: NDArray, stop: NDArray, ranks: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Return the features of slices, each shared by `ranks` (int64[num_slices]; None = 1); column 2 is left 1 for
        the pack constant; float64[num_slices, num_columns]."""
        rows = stop - start
        out = np.ones((len(rows), pairs_column(len(self.windows))))
        out[:, 0] = rows
        missing_rows = -rows % self.tile
        for index, window in enumerate(self.windows):
            last_row_keys = keys_before(stop, window) if window >= 0 else keys_before(stop - 1, window) + 1
            pairs = slice_pairs(start, stop, window, causal=self.causal)
            out[:, pairs_column(index)] = pairs + missing_rows * last_row_keys
            out[:, prefix_column(index)] = keys_before(start, window)
        if ranks is not None and (shared := ranks > 1).any():
            out[shared] = self._of_shared_slices(start[shared], stop[shared], ranks[shared])
        return out

    def _of_shared_slices(self, start: NDArray, stop: NDArray, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        rows, share = stop - start, 1.0 / ranks
        out = np.ones((len(rows), pairs_column(len(self.windows))))
        out[:, 0], out[:, 1] = rows * share, 2.0
        chunk = -(-rows // (2 * ranks))
        # Chunks i and 2·ranks - 1 - i of a rank begin and end, on average, here: the rows they lack to tiles see so
        # many keys.
        chunk_start = start + rows * (2 * ranks - 1) / (4.0 * ranks)
        chunk_end = start + rows * (2 * ranks + 1) / (4.0 * ranks)
        for index, window in enumerate(self.windows):
            prefix, keys = (keys_before(edge, window) for edge in (chunk_start, chunk_end))
            missing = 2 * (-chunk % self.tile) * keys
            out[:, pairs_column(index)] = slice_pairs(start, stop, window) * share + missing
            out[:, prefix_column(index)] = 2 * prefix
        return out


@functools.lru_cache(maxsize=4)
def _of_trees(features: SliceFeatures, trees: TreeColumns) -> NDArray[np.float64]:
    """Sum the features of documents' ranges; kept, because a step's problems under all policies ask for it."""
    return trees.sums(features.of_slices(trees.depth, trees.depth_stop))


def policy_tokens(columns: SliceColumns, policy: NDArray[np.int8]) -> NDArray[np.float64]:
    """Count the tokens of every pack on one rank by activation policy; float64[num_packs, number of policies]."""
    pack = columns.pack_of_slice()
    tokens = columns.slice_tokens() / columns.cp
    sums = np.bincount(
        pack * len(POLICIES) + policy[columns.doc], weights=tokens, minlength=columns.num_packs * len(POLICIES)
    )
    return sums.astype(np.float64, copy=False).reshape(columns.num_packs, len(POLICIES))


def weighted(features: NDArray[np.float64], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `features @ matrix`, summed in the order of the features: the core's bits on every machine."""
    total = features[:, :1] * matrix[0]
    for feature in range(1, len(matrix)):
        total += features[:, feature, None] * matrix[feature]
    return total


def pairs_column(window_index: int) -> int:
    """Return the column of a window's pairs; of the number of windows, how many columns there are."""
    return 3 + 2 * window_index


def prefix_column(window_index: int) -> int:
    return 4 + 2 * window_index


def _link(link: LinkSpec | None) -> _native.Link:
    return _native.Link(0.0, 0.0) if link is None else _native.Link(link.bandwidth_bytes_per_s, link.latency_s)


class PackCosts:
    """Costs of one (model, coefficients, layout); immutable. Slices of a shared pack are priced as cut over its ranks,
    short ones too. Raises `ConfigError` where the layout does not suit the model."""

    def __init__(self, model: ModelSpec, coefficients: CostCoefficients, layout: ParallelLayout) -> None:
        require_supported_layout(model, layout)
        self.model, self.coefficients, self.layout = model, coefficients, layout
        self.shares, self._kinds = kind_shares(model), stage_kinds(model, layout)
        self.windows = self.shares.reaches
        self.features = SliceFeatures(windows=self.windows, tile=coefficients.attention_tile, causal=model.causal)
        self.stage_seconds: dict[Direction, NDArray[np.float64]] = {
            "forward": self._stage_rates("forward", layout.tp),
            "backward": self._stage_rates("backward", layout.tp),
        }
        # Seconds a token and a pack, stage by stage: what recomputing a document costs, and recomputed layers always.
        always = stage_kinds(model, layout, recomputed=True)
        self.linear_again_s = self._linear_again(self._kinds - always)
        if any(layout.recomputed_counts):
            token_s, pack_s = self._linear_again(always)
            self.stage_seconds["backward"][0] += token_s
            self.stage_seconds["backward"][2] += pack_s
        # The host's seconds a slice and a pack; float64[2, P]. Every rank queues its own, so no axis divides them.
        pieces, layers = over_kinds(self._kinds, self.shares.pieces), np.array(layout.stage_counts, np.int64)
        self.host_seconds: dict[Direction, NDArray[np.float64]] = {
            direction: np.array([pieces * layer.host_slice_s, layers * layer.host_pack_s], np.float64)
            for direction, layer in (("forward", coefficients.forward), ("backward", coefficients.backward))
        }

    def _stage_rates(self, direction: Direction, tp: int) -> NDArray[np.float64]:
        """Return the seconds per feature; float64[features, P]. `tp` 1 gives the whole work, without transfers."""
        layer: PassCoefficients = getattr(self.coefficients, direction)
        kinds, shares, layers = self._kinds, self.shares, np.array(self.layout.stage_counts, np.int64)
        matrix = np.zeros((pairs_column(len(self.windows)), len(layers)))
        token_s, pack_s = tensor_seconds(self.model, self.coefficients, tp, direction)
        matrix[0] = over_kinds(kinds, shares.linear * layer.linear_s_per_token / tp + token_s)
        if direction == "backward" and self.coefficients.measured_on is None:  # else it is in the layers' seconds
            again = shares.repeated + (shares.first if tp > 1 else 0.0)
            matrix[0] += over_kinds(kinds, again * self.coefficients.forward.linear_s_per_token / tp)
        matrix[1] = over_kinds(kinds, shares.pieces) * layer.slice_s
        matrix[2] = layers * layer.pack_s + over_kinds(kinds, pack_s)
        for index, window in enumerate(self.windows):
            pairs, keys = shares.of_reach(shares.attention, window), shares.of_reach(shares.keys, window)
            matrix[pairs_column(index)] = over_kinds(kinds, pairs) * layer.attention_s_per_pair / tp
            matrix[prefix_column(index)] = over_kinds(kinds, keys) * layer.prefix_s_per_token / tp
        # The embedding's rows are split over the vocabulary, its sums scattered over tokens.
        matrix[0, 0] += self.coefficients.embedding_s_per_token / tp
        if direction == "backward":
            matrix[0, -1] += self.coefficients.head_s_per_token / tp
            matrix[2, -1] += self.coefficients.head_pack_s
        return matrix

    def _linear_again(self, kinds: NDArray[np.int64]) -> tuple[NDArray, NDArray]:
        """Return (seconds a token, seconds a pack) of what recomputing makes again in so many layers of every kind and
        stage (int64[P, K]); float64[P] each."""
        tp, layer = self.layout.tp, self.coefficients.forward
        share = self.shares.again - (self.shares.first if tp > 1 else 0.0)  # which every backward runs again
        rings = [exposed_ring_seconds(self.model, self.coefficients, tp, count) for count in (1, 2)]
        repeats_all = [not kind.unread_products for kind in self.model.kinds]
        token_s, pack_s = np.array([rings[whole] for whole in repeats_all]).T
        token_s = over_kinds(kinds, share * layer.linear_s_per_token / tp + token_s)
        return token_s, over_kinds(kinds, share * layer.pack_s + pack_s)

    @functools.cached_property
    def native(self) -> _native.CostTable:
        """Return the same numbers for the core (`cost.pack_pricing`)."""
        model, coefficients, layout = self.model, self.coefficients, self.layout
        table = _native.CostTable()
        table.num_stages, table.num_ranks = layout.num_stages, layout.pipeline_ranks
        table.layout_cp, table.layout_tp = layout.cp, layout.tp
        table.tile, table.causal = coefficients.attention_tile, model.causal
        table.devices_per_node = coefficients.devices_per_node
        table.windows = list(self.windows)
        table.forward, table.backward = (self._pass_table(direction) for direction in ("forward", "backward"))
        table.context_hidden_share = coefficients.context_hidden_share
        table.copy_s_per_byte = coefficients.copy_s_per_byte
        table.context_ring = coefficients.context_exchange == "ring"
        # In the core only groups at stride tp choose between the two, and what they get between nodes does not depend
        # on how many they are: the link of one that leaves its node is that of all.
        between = coefficients.group_link_or_none(coefficients.devices_per_node + 1, layout.tp)
        table.intra_node, table.inter_node = _link(coefficients.intra_node), _link(between)
        table.host = _link(coefficients.host_link)
        table.exchanging_layers = exchanging_layers(model, layout).tolist()
        table.linear_layers, table.tensor_blocks = self.linear_layers().tolist(), self.tensor_blocks().tolist()
        table.linear_again_token_s, table.linear_again_pack_s = (column.tolist() for column in self.linear_again_s)
        offloaded = activation_bytes_per_token(model, "replay", layout.tp)
        table.offload_bytes_per_token = (self._kinds @ offloaded).astype(float).tolist()
        table.p2p_bytes_per_token = model.hidden_size * model.bytes_per_element / layout.tp
        # One stage sends nothing, so nothing has to be known.
        table.p2p = _link(coefficients.stage_link() if layout.num_stages > 1 else None)
        table.stage_to_rank = list(layout.stage_to_rank)
        rates = byte_rates(model, layout)
        table.static_bytes = rates.static_bytes.tolist()
        table.chunk_bytes = rates.chunk.ravel().tolist()
        table.forward_temp_bytes = rates.forward_temp.ravel().tolist()
        table.backward_temp_bytes = rates.backward_temp.ravel().tolist()
        table.kv_bytes, table.kv_gradient_bytes = rates.kv.tolist(), rates.kv_gradient.tolist()
        table.state_bytes, table.cut_multiple = rates.state.tolist(), self.cut_multiple
        table.logits_bytes_per_row = rates.logits_per_row.tolist()
        table.head_rows = HEAD_ROWS
        table.slice_temp_bytes, table.prefix_key_bytes = rates.attention.piece, rates.attention.prefix_key
        table.grouped_key_bytes = rates.attention.grouped_key
        table.grouped_key_head_bytes = rates.attention.grouped_key_head
        table.grouped_key_most_bytes = KEY_GRADIENT_BYTES
        table.gathered_forward_bytes, table.gathered_backward_bytes = rates.gathered_forward, rates.gathered_backward
        table.weight_token_s = coefficients.backward.linear_s_per_token / layout.tp
        table.weight_pack_s = coefficients.backward.pack_s
        table.weight_share = coefficients.split_share(model)
        table.weight_gather_token_s, table.weight_gather_pack_s = weight_gather_seconds(model, coefficients, layout.tp)
        held = self._kinds @ weight_bytes_per_token(model, layout.tp)
        table.weight_held_bytes = table.weight_new_bytes = held.tolist()
        return table

    def _pass_table(self, direction: Direction) -> _native.PassTable:
        model, coefficients, tp = self.model, self.coefficients, self.layout.tp
        whole, cut = (
            _native.ContextTraffic(float(moved.token_bytes), float(moved.rings), float(moved.placed_bytes))
            for is_cut in (False, True)
            for moved in (context_traffic(model, coefficients, tp, direction, is_cut=is_cut),)
        )
        return _native.PassTable(
            self.stage_seconds[direction].ravel().tolist(),
            self.host_seconds[direction].ravel().tolist(),
            whole,
            cut,
            *map(float, ring_home(model, coefficients, tp, direction)),
        )

    @functools.cached_property
    def pack_constant_s(self) -> float:
        """Return the seconds that an empty pack takes on all stages, forward and backward; above 0."""
        constant_s = sum(
            float(np.maximum(matrix[2], self.host_seconds[direction][1]).sum())
            for direction, matrix in self.stage_seconds.items()
        )
        return max(constant_s, np.finfo(np.float64).tiny)

    def pack_seconds(
        self,
        columns: SliceColumns,
        direction: Direction,
        policy: NDArray[np.int8] | None = None,
        is_cut: NDArray[np.bool_] | None = None,
        stops: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float64]:
        """Price every pack on every virtual stage, where it is shared by the mean over its ranks; float64[num_packs,
        P].

        Args:
            policy: int8[num_documents], indices into `cost.layer_counts.POLICIES`; None = all replay.
            is_cut: bool[num_documents], in this direction or in the other; None = those cut in these columns.
            stops: int64[num_packs] of a forward (`stops_of`); None = none.

        Raises:
            ConfigError: slices of a bidirectional model, or a transfer over a link that is not known.
        """
        seconds = self.compute_seconds(columns, direction, stops)
        if (columns.cp > 1).any():
            sent = self._exchanged_tokens(columns, is_cut)
            seconds += self.waiting_seconds(columns, direction, columns.pack_ranks(), *sent, columns.cp == 1)
        return seconds if policy is None else self.under_policy(seconds, columns, direction, policy)

    def under_policy(
        self, seconds: NDArray[np.float64], columns: SliceColumns, direction: Direction, policy: NDArray[np.int8]
    ) -> NDArray[np.float64]:
        """Turn seconds of packs whose documents are all replayed into those under their policies; float64[num_packs,
        P]."""
        if not policy.any():
            return seconds
        tokens = policy_tokens(columns, policy)
        if direction == "backward":
            again = tokens[:, RECOMPUTE]
            more_s = np.outer(again, self.linear_again_s[0]) + np.outer(again > 0, self.linear_again_s[1])
            seconds = seconds + more_s
        return np.maximum(seconds, self._copy_seconds(tokens[:, OFFLOAD])) if tokens[:, OFFLOAD].any() else seconds

    def stops_of(self, forward: SliceColumns, backward: SliceColumns) -> NDArray[np.int64] | None:
        """Count the cuts of backward inside the slices of forward packs, int64[num_packs]: functions that carry a state
        stop there, so each costs like a slice. None where no layer has any."""
        if not self.model.state_functions:
            return None
        return forward.pack_sums(cuts_within(forward, backward)[1]).astype(np.int64)

    @functools.cached_property
    def cut_multiple(self) -> int:
        """Return the multiple of rows at which cuts cost least: of whole blocks of attention and chunks of scans."""
        tile = self.coefficients.attention_tile
        return math.lcm(tile, STATE_CHUNK) if self.model.state_functions else tile

    def compute_seconds(
        self, columns: SliceColumns, direction: Direction, stops: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """Price as `pack_seconds` under replay, without waiting for keys and values; float64[num_packs, P]."""
        features = self._features(columns)
        if stops is not None:
            features[:, 1] += stops
        seconds, host = weighted(features, self.stage_seconds[direction]), self.host_seconds[direction]
        return np.maximum(seconds, weighted(features[:, 1:3], host)) if host.any() else seconds

    def waiting_seconds(
        self,
        columns: SliceColumns,
        direction: Direction,
        ranks: NDArray[np.int64],
        whole_tokens: NDArray[np.float64],
        cut_tokens: NDArray[np.float64],
        is_local: NDArray[np.bool_],
    ) -> NDArray[np.float64]:
        """Price K and V of shared documents: transfers that attention of local documents (`is_local`, bool[num_slices])
        does not hide, and copies; float64[num_packs, P]. `ranks`, `whole_tokens` and `cut_tokens` of every pack as
        `cost.group_transfers.context_seconds` takes them."""
        tokens = ranks, whole_tokens, cut_tokens
        layer = context_seconds(self.model, self.coefficients, self.layout.tp, *tokens, direction)
        local_s = self._attention_seconds(self._features(columns, is_local), direction)
        if self.coefficients.context_exchange == "ring":
            # All rounds but the last have a transfer under way.
            all_s = self._attention_seconds(self._features(columns), direction)
            local_s = local_s + (all_s - local_s) * ((ranks - 1) / ranks)[:, None]
        layers = exchanging_layers(self.model, self.layout)
        exposed_s = np.outer(layer.transfer_s, layers) - self.coefficients.context_hidden_share * local_s
        return np.maximum(0.0, exposed_s) + np.outer(layer.plain_s, layers)

    def context_seconds(
        self, columns: SliceColumns, direction: Direction
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (transfers that attention may hide, copies and transfers that nothing hides) of K and V of every
        pack's shared slices; float64[num_packs, P] each."""
        ranks, sent = columns.pack_ranks(), self._exchanged_tokens(columns, None)
        layer = context_seconds(self.model, self.coefficients, self.layout.tp, ranks, *sent, direction)
        layers = exchanging_layers(self.model, self.layout)
        return np.outer(layer.transfer_s, layers), np.outer(layer.plain_s, layers)

    def copy_seconds(self, columns: SliceColumns, policy: NDArray[np.int8]) -> NDArray[np.float64]:
        """Price the copies of every pack's offloaded documents to or from the host, hidden or not; float64[num_packs,
        P]."""
        tokens = policy_tokens(columns, policy)[:, OFFLOAD]
        return self._copy_seconds(tokens) if tokens.any() else np.zeros((len(tokens), self.layout.num_stages))

    def document_seconds(
        self,
        num_tokens: ArrayLike,
        policy: NDArray[np.int8] | None = None,
        ranks: int | None = None,
        trees: TreeColumns = NO_TREES,
    ) -> NDArray[np.float64]:
        """Price forward + backward of whole documents through the whole pipeline of one replica, without the constant
        of the pack they lie in; float64[n]. This is what replicas are balanced by.

        Args:
            policy: int8[n]; None = all replay.
            ranks: that share each document; default: the context-parallel ranks of the layout.
            trees: ranges of the documents.
        """
        tokens, sharing = np.asarray(num_tokens, np.int64), self.layout.cp if ranks is None else ranks
        features = self.features.of_documents(tokens, sharing, trees)
        features[:, 2] = 0.0
        seconds = features @ (self.stage_seconds["forward"] + self.stage_seconds["backward"]).sum(axis=1)
        if policy is not None:
            seconds += (policy == RECOMPUTE) * features[:, 0] * self.linear_again_s[0].sum()
        return seconds

    def piece_seconds(self, start: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.float64]:
        """Price pieces at positions `[start, stop)` along their paths as `document_seconds`, which is their sum;
        float64[n]."""
        features = self.features.of_slices(start, stop)
        features[:, 2] = 0.0
        return features @ (self.stage_seconds["forward"] + self.stage_seconds["backward"]).sum(axis=1)

    def work_curve(self, direction: Direction, stage: int | None = None, recomputed_share: float = 0.0) -> WorkCurve:
        """Return the work of a token range on one virtual stage, for exact cuts; default: the stage slowest per token.
        Of a backward's tokens `recomputed_share` are recomputed; a curve knows no documents."""
        matrix = self.stage_seconds[direction]
        linear = matrix[0] + recomputed_share * self.linear_again_s[0] if recomputed_share else matrix[0]
        chosen, cp = int(linear.argmax()) if stage is None else stage, self.layout.cp
        return WorkCurve(
            linear_s=float(linear[chosen]) / cp,
            attention_s=tuple(
                (float(matrix[pairs_column(index), chosen]) / cp, window)
                for index, window in enumerate(self.windows)
                if matrix[pairs_column(index), chosen]
            ),
            slice_s=float(matrix[1, chosen]),
        )

    def optimizer_seconds(self) -> float:
        """Price the update of one rank's shard, fullest rank; of state in host memory with its copies there and back,
        or, where that link is not known, as copies of the device."""
        trained = trained_parameters_per_rank(self.model, self.layout).astype(np.float64)
        update_s = self.coefficients.optimizer_s_per_parameter * trained / self.layout.data_sizes
        link, state_bytes = self.coefficients.host_link, offloaded_state_bytes(self.model, self.layout)
        byte_s = self.coefficients.copy_s_per_byte if link is None else 1 / link.bandwidth_bytes_per_s
        return float(np.maximum(update_s, 2 * byte_s * state_bytes).max())

    def lower_bound_seconds(self, num_tokens: ArrayLike, trees: TreeColumns = NO_TREES) -> float:
        """Price all useful work of a step spread evenly over all devices, shared prefixes of trees once: without
        recompute, padding, tiles, constants of packs and slices, keys of prefixes, optimizer, and communication that
        was not measured with its layers."""
        return float(self.useful_stage_seconds(num_tokens, trees, tp=1).sum()) / self.layout.world_size

    def useful_stage_seconds(
        self, num_tokens: ArrayLike, trees: TreeColumns = NO_TREES, tp: int | None = None
    ) -> NDArray[np.float64]:
        """Return as `lower_bound_seconds` that of every virtual stage on one tensor-parallel group (of `tp` ranks;
        default: the layout's), with its transfers; float64[P]."""
        tp = self.layout.tp if tp is None else tp
        features = replace(self.features, tile=1).of_documents(np.asarray(num_tokens, np.int64), 1, trees)
        features[:, 1:3] = features[:, prefix_column(0) :: 2] = 0.0
        return features.sum(axis=0) @ (self._stage_rates("forward", tp) + self._stage_rates("backward", tp))

    def require_trees(self, trees: TreeColumns) -> None:
        """Refuse trees of shared prefixes as `require_trees` of `layer_counts` does."""
        if trees.has_any:
            require_trees(self.model, self.layout)

    def require_sliceable(self, columns: SliceColumns) -> None:
        """Refuse pieces of documents of a model that needs them whole, by a `ConfigError`."""
        if not self.model.may_cut_documents and columns.start.any():
            why = "is bidirectional: every token sees the whole document"
            if self.model.causal:
                why = f"has {', '.join(self.model.mixers)}, which mixes tokens in a way of its own"
            raise ConfigError(
                f"model {self.model.name} {why}, so documents cannot be sliced; use a strategy of whole documents "
                "(padded, best_fit, balanced)"
            )

    def host_link(self) -> LinkSpec:
        """Return the link that offloaded activations travel; raises `ConfigError` where it is not known."""
        link = self.coefficients.host_link
        if link is None:
            raise ConfigError(
                f"cost coefficients of {self.coefficients.device} have no host_link, so offloaded activations cannot "
                "be costed; set it in the cost file or in the cluster's device, or use policy replay or recompute"
            )
        return link

    def linear_layers(self) -> NDArray[np.float64]:
        """Count the layers of every virtual stage, each as its share of the mean layer's matrix products."""
        return over_kinds(self._kinds, self.shares.matrices)

    def tensor_blocks(self) -> NDArray[np.float64]:
        """Count the blocks of every virtual stage that tensor parallelism cuts."""
        return over_kinds(self._kinds, np.array([kind.blocks for kind in self.model.kinds], np.float64))

    def _exchanged_tokens(
        self, columns: SliceColumns, is_cut: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Count the tokens of every pack's shared slices, of documents that are never cut and of others;
        float64[num_packs] each."""
        rows = columns.slice_tokens()
        if is_cut is None:
            is_cut = np.zeros(int(columns.doc.max(initial=-1)) + 1, bool)
            is_cut[columns.doc[columns.start > 0]] = True
        # In a ring a slice's keys and values travel with those of its prefix.
        sent = columns.start + rows if self.coefficients.context_exchange == "ring" else rows
        sent = np.where(columns.cp > 1, sent, 0)
        return tuple(columns.pack_sums(np.where(is_cut[columns.doc] == cut, sent, 0)) for cut in (False, True))  # type: ignore[return-value]

    def _attention_seconds(self, features: NDArray[np.float64], direction: Direction) -> NDArray[np.float64]:
        of_pairs = [pairs_column(index) for index in range(len(self.windows))]
        return weighted(features[:, of_pairs], self.stage_seconds[direction][of_pairs])

    def _copy_seconds(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        link = self.host_link()
        token_bytes = activation_bytes_per_token(self.model, "replay", self.layout.tp)
        copied_bytes = np.outer(tokens, self._kinds @ token_bytes)
        return np.where(copied_bytes > 0, copied_bytes / link.bandwidth_bytes_per_s + link.latency_s, 0.0)

    def _features(self, columns: SliceColumns, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        self.require_sliceable(columns)
        return self.features.of_packs(columns, chosen)
