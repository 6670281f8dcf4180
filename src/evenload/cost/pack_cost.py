"""`PackCosts`: seconds of packs, documents and transfers for one model, one device and one layout.

Every pack is reduced to a few features (`cost.slice_features`); a stage is a row of rates (`cost.stage_rates`); seconds
are one small matrix product. O(slices) numpy per direction, no Python loop.

Details that matter:
- Padding: a slice of a padded pack costs `pad_to` tokens and their attention: that work is really done.
- A stage's host may take longer to queue a pack than its device to compute it: a pack takes the longer of the two.
- Context parallelism (of the layout, or of a pack under DP-Merge) divides a pack over the ranks that share it. Here a
  pack costs what its ranks take on average. K and V travel for slices that are cut (`cost.group_comm`). That is
  what searches compare; what a plan promises is the slowest rank by its own rows (`cost.ranked_packs`).
- Recomputed layers of the layout (`ParallelLayout.stage_recomputed`): part of what a token and a pack cost in backward.
- Policies (`cost.activation`): a recomputed document pays the matrix products that are made again in backward, which
  is all but the down projection where nobody keeps its output; an offloaded one makes a pack last at least as long as
  its copies to or from the host.
"""

import functools

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload import _native
from evenload.cost.activation import OFFLOAD, RECOMPUTE, activation_bytes_per_token
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.group_comm import context_seconds
from evenload.cost.memory import trained_parameters_per_rank
from evenload.cost.native_table import native_table
from evenload.cost.slice_features import SliceFeatures, pairs_column, policy_tokens, prefix_column, weighted
from evenload.cost.stage_rates import StageRates
from evenload.cost.support import require_supported_layout
from evenload.errors import ConfigError
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns
from evenload.types.layout import ParallelLayout
from evenload.types.micropack import Direction
from evenload.types.model import ModelSpec
from evenload.types.work import WorkCurve


class PackCosts:
    """Costs of one (model, coefficients, layout); immutable.

    Args:
        keeps_short_whole: short slices of a shared pack stay whole on one rank; planners of steps price them as cut.

    Raises:
        ConfigError: the layout is not supported yet or belongs to another model.
    """

    def __init__(
        self,
        model: ModelSpec,
        coefficients: CostCoefficients,
        layout: ParallelLayout,
        *,
        keeps_short_whole: bool = True,
    ) -> None:
        require_supported_layout(model, layout)
        self.keeps_short_whole = keeps_short_whole
        self.model = model
        self.coefficients = coefficients
        self.layout = layout
        self.windows = tuple(sorted(set(model.windows)))
        self.features = SliceFeatures(
            windows=self.windows,
            tile=coefficients.attention_tile,
            causal=model.causal,
            keeps_short_whole=keeps_short_whole,
        )
        self._rates = StageRates(model, coefficients, layout, self.windows)
        self.stage_seconds: dict[Direction, NDArray[np.float64]] = {
            "forward": self._rates.features("forward"),
            "backward": self._rates.features("backward"),
        }
        # Per stage: seconds a token and a pack of the forward's linear work that recomputing a document pays again, and
        # what recomputed layers pay for every document.
        stored = self.layers() - np.array(layout.recomputed_counts, np.int64)
        self.linear_again_s = self._rates.linear_again(stored)
        if any(layout.recomputed_counts):
            token_s, pack_s = self._rates.linear_again(self.layers() - stored)
            self.stage_seconds["backward"][0] += token_s
            self.stage_seconds["backward"][2] += pack_s
        self.host_seconds: dict[Direction, NDArray[np.float64]] = {
            "forward": self._rates.host("forward"),
            "backward": self._rates.host("backward"),
        }

    @functools.cached_property
    def native(self) -> _native.CostTable:
        """The same numbers for the core (`cost.pipeline_tasks`)."""
        return native_table(
            self.model,
            self.coefficients,
            self.layout,
            self.stage_seconds,
            self.host_seconds,
            self.linear_again_s,
            keeps_short_whole=self.keeps_short_whole,
        )

    @functools.cached_property
    def pack_constant_s(self) -> float:
        """Seconds that a pack takes on all stages, forward and backward, whatever is in it; at least the smallest float
        above 0."""
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
    ) -> NDArray[np.float64]:
        """Seconds of every pack on every virtual stage, where it is shared the mean over ranks; float64[num_packs, P].

        Args:
            policy: int8[num_documents], indices into `cost.activation.POLICIES`; None = all replay.
            is_cut: bool[num_documents], in this direction or in the other; None = those cut in these columns.

        Raises:
            ConfigError: slices of a bidirectional model, or a transfer over a link that is not known.
        """
        seconds = self.compute_seconds(columns, direction)
        if (columns.cp > 1).any():
            is_local = ~self.features.is_sharded(columns.slice_tokens(), columns.cp)
            travelling = self._travelling_tokens(columns, is_cut)
            seconds += self.waiting_seconds(columns, direction, columns.pack_ranks(), *travelling, is_local)
        return seconds if policy is None else self.under_policy(seconds, columns, direction, policy)

    def under_policy(
        self, seconds: NDArray[np.float64], columns: SliceColumns, direction: Direction, policy: NDArray[np.int8]
    ) -> NDArray[np.float64]:
        """Seconds of packs whose documents are all replayed -> the same under their policies; float64[num_packs, P]."""
        if not policy.any():
            return seconds
        tokens = policy_tokens(columns, policy)
        if direction == "backward":
            again = tokens[:, RECOMPUTE]
            more_s = np.outer(again, self.linear_again_s[0]) + np.outer(again > 0, self.linear_again_s[1])
            seconds = seconds + more_s
        return np.maximum(seconds, self._copy_seconds(tokens[:, OFFLOAD])) if tokens[:, OFFLOAD].any() else seconds

    def compute_seconds(self, columns: SliceColumns, direction: Direction) -> NDArray[np.float64]:
        """As `pack_seconds` under replay, without waiting for keys and values; float64[num_packs, P]."""
        features = self._features(columns)
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
        """What keys and values of shared documents cost beyond attention: transfers that attention of local documents
        does not hide, and copies; float64[num_packs, P].

        Args:
            ranks, whole_tokens, cut_tokens: of every pack, as `group_comm.context_seconds` takes them.
            is_local: bool[num_slices], of documents that lie whole on the rank.
        """
        tokens = ranks, whole_tokens, cut_tokens
        layer = context_seconds(self.model, self.coefficients, self.layout.tp, *tokens, direction)
        local_s = self._attention_seconds(self._features(columns, is_local), direction)
        if self.coefficients.context_exchange == "ring":
            # All rounds but the last have a transfer under way.
            all_s = self._attention_seconds(self._features(columns), direction)
            local_s = local_s + (all_s - local_s) * ((ranks - 1) / ranks)[:, None]
        layers = self.layers()
        exposed_s = np.outer(layer.transfer_s, layers) - self.coefficients.context_hidden_share * local_s
        return np.maximum(0.0, exposed_s) + np.outer(layer.plain_s, layers)

    def context_seconds(
        self, columns: SliceColumns, direction: Direction
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """K and V of every pack's shared slices: (transfers that attention may hide, copies and transfers that nothing
        hides); float64[num_packs, P] each."""
        ranks = columns.pack_ranks()
        travelling = self._travelling_tokens(columns, None)
        found = context_seconds(self.model, self.coefficients, self.layout.tp, ranks, *travelling, direction)
        return np.outer(found.transfer_s, self.layers()), np.outer(found.plain_s, self.layers())

    def copy_seconds(self, columns: SliceColumns, policy: NDArray[np.int8]) -> NDArray[np.float64]:
        """Copies of every pack's offloaded documents to or from the host, hidden or not; float64[num_packs, P].

        Args:
            policy: int8[num_documents], indices into `cost.activation.POLICIES`.
        """
        tokens = policy_tokens(columns, policy)[:, OFFLOAD]
        return self._copy_seconds(tokens) if tokens.any() else np.zeros((len(tokens), self.layout.num_stages))

    def document_seconds(
        self, num_tokens: ArrayLike, policy: NDArray[np.int8] | None = None, ranks: int | None = None
    ) -> NDArray[np.float64]:
        """Forward + backward of whole documents through the whole pipeline of one replica, without the constant
        of the pack they lie in; float64[n]. What DP assignment balances (oracle: time, not forward FLOPs).

        Args:
            policy: int8[n]; None = all replay.
            ranks: that share each document; default: the context-parallel ranks of the layout.
        """
        tokens = np.asarray(num_tokens, np.int64)
        sharing = np.full(len(tokens), self.layout.cp if ranks is None else ranks, np.int64)
        features = self.features.of_slices(np.zeros_like(tokens), tokens, sharing)
        features[:, 2] = 0.0
        seconds = features @ (self.stage_seconds["forward"] + self.stage_seconds["backward"]).sum(axis=1)
        if policy is not None:
            seconds += (policy == RECOMPUTE) * features[:, 0] * self.linear_again_s[0].sum()
        return seconds

    def forward_work(self, stage: int | None = None) -> WorkCurve:
        """Work of a token range on one virtual stage, for exact cuts; default: the stage slowest per token."""
        return self._work("forward", stage, 0.0)

    def backward_work(self, stage: int | None = None, recomputed_share: float = 0.0) -> WorkCurve:
        """As `forward_work`, for backward; by default usually the last stage, which carries the head.

        Args:
            recomputed_share: of the tokens, those whose documents are recomputed; a curve knows no documents.
        """
        return self._work("backward", stage, recomputed_share)

    def prefix_seconds(self, direction: Direction) -> tuple[tuple[float, int], ...]:
        """(seconds a token, window) of the prefix of a rank's token range, on the stage where it costs most."""
        matrix = self.stage_seconds[direction]
        found = ((float(matrix[prefix_column(index)].max()), window) for index, window in enumerate(self.windows))
        return tuple(term for term in found if term[0])

    def reduction_seconds(self) -> float:
        """Reduce-scatter of fp32 gradients and all-gather of weights over data-parallel ranks, fullest rank, in full:
        for searches, which count latency once and hide nothing. What a plan pays follows from its order and its units
        (`simulate.step_end`)."""
        element = self.model.bytes_per_element
        return max(
            sum(
                self.coefficients.ring_seconds(num_bytes, copies)
                for num_bytes in (max(element, 4) * parameters, element * parameters)
            )
            for copies, parameters in self._fullest_by_copies().items()
        )

    def optimizer_seconds(self) -> float:
        """The update of one rank's shard, fullest rank."""
        seconds = self.coefficients.optimizer_s_per_parameter
        return max(seconds * parameters / copies for copies, parameters in self._fullest_by_copies().items())

    def _fullest_by_copies(self) -> dict[int, float]:
        """Trained parameters of the fullest rank among those whose weights so many ranks hold."""
        found: dict[int, float] = {}
        trained = trained_parameters_per_rank(self.model, self.layout).tolist()
        for copies, parameters in zip(self.layout.data_sizes, trained, strict=True):
            found[copies] = max(found.get(copies, 0.0), float(parameters))
        return found

    def lower_bound_seconds(self, num_tokens: ArrayLike) -> float:
        """All useful work of a step on all devices, spread evenly: no recompute, no padding, no tiles, no
        per-slice or per-pack constants, no communication, no optimizer. No schedule can beat it under this
        cost model, but for one: where tensor-parallel transfers were measured with their layers they are in it."""
        whole = self._rates.features("forward", tp=1) + self._rates.features("backward", tp=1)
        return float(self._useful_features(num_tokens) @ whole.sum(axis=1)) / self.layout.world_size

    def useful_stage_seconds(self, num_tokens: ArrayLike) -> NDArray[np.float64]:
        """As `lower_bound_seconds`, of every virtual stage on one tensor-parallel group, with its transfers;
        float64[P]."""
        return self._useful_features(num_tokens) @ (self._rates.features("forward") + self._rates.features("backward"))

    def _useful_features(self, num_tokens: ArrayLike) -> NDArray[np.float64]:
        """Of all documents together, whole, without tiles and constants."""
        tokens = np.asarray(num_tokens, np.int64)
        features = self.features.of_slices(np.zeros_like(tokens), tokens, tile=1)
        features[:, 1:3] = 0.0
        return features.sum(axis=0)

    def require_sliceable(self, columns: SliceColumns) -> None:
        """Refuse pieces of documents of a bidirectional model, by a `ConfigError`."""
        if not self.model.causal and columns.start.any():
            raise ConfigError(
                f"model {self.model.name} is bidirectional: every token sees the whole document, so documents "
                "cannot be sliced; use a strategy of whole documents (padded, best_fit, balanced)"
            )

    def host_link(self) -> LinkSpec:
        """The link that offloaded activations travel; a `ConfigError` where it is not known."""
        link = self.coefficients.host_link
        if link is None:
            raise ConfigError(
                f"cost coefficients of {self.coefficients.device} have no host_link, so offloaded activations cannot "
                "be costed; set it in the cost file or in the cluster's device, or use policy replay or recompute"
            )
        return link

    def layers(self) -> NDArray[np.int64]:
        """Layers of every virtual stage."""
        return self._rates.layers()

    def _travelling_tokens(
        self, columns: SliceColumns, is_cut: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Tokens of every pack's sharded slices, of documents that are never cut and of others; float64[num_packs]."""
        rows = columns.slice_tokens()
        if is_cut is None:
            is_cut = np.zeros(int(columns.doc.max(initial=-1)) + 1, bool)
            is_cut[columns.doc[columns.start > 0]] = True
        # In a ring a slice's keys and values travel with those of its prefix.
        sent = columns.start + rows if self.coefficients.context_exchange == "ring" else rows
        sent = np.where(self.features.is_sharded(rows, columns.cp), sent, 0)
        return tuple(columns.pack_sums(np.where(is_cut[columns.doc] == cut, sent, 0)) for cut in (False, True))  # type: ignore[return-value]

    def _attention_seconds(self, features: NDArray[np.float64], direction: Direction) -> NDArray[np.float64]:
        """Of packs with these features, without prefixes; float64[num_packs, P]."""
        of_pairs = [pairs_column(index) for index in range(len(self.windows))]
        return weighted(features[:, of_pairs], self.stage_seconds[direction][of_pairs])

    def _copy_seconds(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Copies of offloaded tokens of every pack to or from the host; float64[num_packs, P]."""
        link = self.host_link()
        token_bytes = activation_bytes_per_token(self.model, "replay", self.layout.tp)
        copied_bytes = np.outer(tokens, self.layers() * token_bytes)
        return np.where(copied_bytes > 0, copied_bytes / link.bandwidth_bytes_per_s + link.latency_s, 0.0)

    def _features(self, columns: SliceColumns, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        self.require_sliceable(columns)
        return self.features.of_packs(columns, chosen)

    def _work(self, direction: Direction, stage: int | None, recomputed_share: float) -> WorkCurve:
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
