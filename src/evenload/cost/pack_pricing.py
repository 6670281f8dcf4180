"""Price one replica's packs in one call of the core: seconds, bytes and dependencies, and backwards as I and W.

`forwards_needed[j]` is one more than the last forward pack that holds a slice of a document of backward pack j.
Formulas stand in `cost.pack_cost`, `cost.memory` and here (I and W); `tests/reference/prices.py` agrees to the last
bit. About 50 ns a slice and 10 ns a pack and stage.

W (zero bubble; Qi et al. 2023) is one of the two equal products of every linear layer's backward, dW, and its part
of their constants: the measured share of these seconds, else half. Attention, norms, embedding and head stay in I:
keeping logits for W would cost vocab·(e + 4) bytes a token. Under tensor parallelism W gathers rows again
(`cost.group_transfers.WEIGHT_RINGS`), so I and W together take longer than the whole backward.

From I to W stay, per token and layer (`runtime/replay/weight_products.py`), on top of the forward's chunk until I ends:

    inputs      e·(2·hidden + q + ffn)             of q k v (one for the three), o_proj, gate and up, down
    gradients   e·(2·hidden + q + 2·kv + 2·ffn)    of q k v, o_proj, gate and up, down

Shared packs are priced rank by rank (`PerRankPacks`): a rank takes the seconds of its own rows as a pack of its own,
and what K and V of shared documents cost beyond the attention of its local ones; a pack takes those of its slowest
rank, for ranks wait for each other in every layer's transfers. All layers count as alike. `stepplan.cp_rows` decides
who computes which rows. O(ranges + packs · ranks · stages) numpy.

Causes of a pack's seconds (`PackSplit`) add up to `PackCosts.pack_seconds`. One after the other is taken away, and each
difference is its share; seven times the price of `pack_seconds`:

    as planned ─ copies to the host ─ recompute ─ waiting for K and V ─ tensor-parallel transfers
               ─ tiles, constants and waiting for the host ─ padding = useful work

Those of a shared pack are means over its ranks; what the slowest takes beyond the mean is `cp_imbalance_s`.
"""

import dataclasses
from dataclasses import dataclass, fields

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.cost.group_transfers import weight_gather_seconds
from evenload.cost.layer_counts import OFFLOAD, REPLAY, stage_kinds, weight_bytes_per_token
from evenload.cost.memory import ReplicaPacks
from evenload.cost.pack_cost import PackCosts
from evenload.types.columns import SliceColumns
from evenload.types.document import Direction
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.pipeline import PackBytes, PipelineTasks, SplitBackward


def gather_seconds(costs: PackCosts, backward: SliceColumns) -> NDArray[np.float64]:
    """Return what I and W of every backward pack take beyond the whole backward: tensor-parallel transfers made again
    in W; float64[m_b, P]."""
    token_s, pack_s = weight_gather_seconds(costs.model, costs.coefficients, costs.layout.tp)
    return np.outer(backward.rank_tokens() * token_s + pack_s, costs.tensor_blocks())


def weight_seconds(
    costs: PackCosts, tokens: NDArray[np.int64], backward_s: NDArray[np.float64], copy_s: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Return what W defers of every backward of so many tokens of the rank (int64[m_b]); `backward_s` whole, `copy_s`
    of what comes back from the host (None = nothing); float64[m_b, P] each."""
    share, per_layer = costs.coefficients.split_share(costs.model), costs.coefficients.backward
    layer_s = tokens * (per_layer.linear_s_per_token / costs.layout.tp) + per_layer.pack_s
    weight_s = share * np.outer(layer_s, costs.linear_layers())
    # The head and exposed transfers come on top in I, so W is never more than this share of the whole.
    weight_s = np.minimum(weight_s, share * backward_s)
    # I needs all that comes back from the host; while it waits, a part of W's work is done.
    return weight_s if copy_s is None else np.minimum(weight_s, backward_s - copy_s)


def divide_backward(
    model: ModelSpec,
    layout: ParallelLayout,
    tasks: PipelineTasks,
    backward: SliceColumns,
    input_s: NDArray[np.float64],
    weight_s: NDArray[np.float64],
) -> SplitBackward:
    """Divide the bytes of backwards between I and W, whose seconds are known; float64[m_b, P] each."""
    held = np.outer(backward.rank_tokens(), stage_kinds(model, layout) @ weight_bytes_per_token(model, layout.tp))
    return SplitBackward(
        input_s=input_s,
        weight_s=weight_s,
        input_freed_bytes=tasks.held.backward_freed_bytes - held,
        input_temp_bytes=tasks.held.backward_temp_bytes + held,
        weight_freed_bytes=held,
    )


_SPLIT = tuple(field.name for field in fields(SplitBackward))


def pipeline_tasks(costs: PackCosts, packs: ReplicaPacks, *, split: bool = False) -> PipelineTasks:
    """Price packs of one replica, whose slices are shared by their `cp` ranks.

    Args:
        split: also price backwards as I and W.

    Raises:
        ConfigError: slices of a bidirectional model, or a transfer over a link that is not known.
        ValueError: columns that are no packs of these documents.
    """
    costs.require_trees(packs.trees)
    costs.require_sliceable(packs.forward)
    costs.require_sliceable(packs.backward)
    # The core takes links for granted.
    for ranks in np.unique(np.concatenate([packs.forward.cp, packs.backward.cp])).tolist():
        require_links_of_group(costs, ranks, packs.policy)
    codes = np.empty(0, np.int8) if packs.policy is None else np.ascontiguousarray(packs.policy, np.int8)
    num_tokens = np.ascontiguousarray(packs.num_tokens, np.int64)
    *columns, parts = _native.price_packs(
        costs.native, _arrays(packs.forward), _arrays(packs.backward), num_tokens, packs.trees.arrays(), codes, split
    )
    forward_s, backward_s, p2p_forward_s, p2p_backward_s, needed, kept, forward_temp, freed, backward_temp = columns
    return PipelineTasks(
        forward_s=forward_s,
        backward_s=backward_s,
        p2p_forward_s=p2p_forward_s,
        p2p_backward_s=p2p_backward_s,
        forwards_needed=needed,
        stage_to_rank=np.array(costs.layout.stage_to_rank, np.int32),
        held=PackBytes(
            static_bytes=np.array(costs.native.static_bytes, np.int64),
            forward_kept_bytes=kept,
            forward_temp_bytes=forward_temp,
            backward_freed_bytes=freed,
            backward_temp_bytes=backward_temp,
        ),
        split=None if parts is None else SplitBackward(**dict(zip(_SPLIT, parts, strict=True))),
    )


def require_links_of_group(costs: PackCosts, ranks: int, policy: NDArray[np.int8] | None) -> None:
    """Refuse, as `PackCosts` does, packs that so many ranks share, or copy to the host, over a link that is not
    known."""
    if policy is not None and (policy == OFFLOAD).any():
        costs.host_link()
    if ranks > 1:
        costs.coefficients.group_link(ranks, stride=costs.layout.tp)


def _arrays(columns: SliceColumns) -> tuple[NDArray, ...]:
    return columns.doc, columns.start, columns.stop, columns.pack_offset, columns.pad_to, columns.cp


@dataclass(frozen=True, eq=False)
class PerRankPacks:
    """Hold all packs of one replica and direction, rank by rank.

    Args:
        rows: the token ranges of every pack and rank, as slices of packs: pack p of rank r is `first_rank[p] + r`.
        first_rank: int64[num_packs + 1], where the ranks of every pack begin, and the end.
        is_local, is_cut: bool[ranges of `rows`], of documents whole on one rank, and of those cut in any direction.
        whole_tokens, cut_tokens: float64[num_packs] whose K and V are exchanged, of documents never cut and of others.
    """

    rows: SliceColumns
    first_rank: NDArray[np.int64]
    is_local: NDArray[np.bool_]
    is_cut: NDArray[np.bool_]
    whole_tokens: NDArray[np.float64]
    cut_tokens: NDArray[np.float64]

    def num_ranks(self) -> NDArray[np.int64]:
        return np.diff(self.first_rank)

    def slowest(self, rank_values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Take, of values by rank, the largest of every pack's ranks; float64[num_packs, P]."""
        return self._over_ranks(np.maximum, rank_values)

    def mean(self, rank_values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Take, of values by rank, the mean over every pack's ranks; float64[num_packs, P]."""
        return self._over_ranks(np.add, rank_values) / self.num_ranks()[:, None]

    def _over_ranks(self, operation: np.ufunc, rank_values: NDArray[np.float64]) -> NDArray[np.float64]:
        if not len(rank_values):
            return rank_values
        return operation.reduceat(rank_values, self.first_rank[:-1], axis=0)


def rank_seconds(
    costs: PackCosts, ranked: PerRankPacks, direction: Direction, policy: NDArray[np.int8] | None = None
) -> NDArray[np.float64]:
    """Price every rank of every pack on every virtual stage under activation policies (int8[num_documents]; None = all
    replay); float64[packs of `ranked.rows`, P]. Raises as `PackCosts.pack_seconds`."""
    seconds = costs.compute_seconds(ranked.rows, direction) + rank_waiting_seconds(costs, ranked, direction)
    return seconds if policy is None else costs.under_policy(seconds, ranked.rows, direction, policy)


def rank_waiting_seconds(costs: PackCosts, ranked: PerRankPacks, direction: Direction) -> NDArray[np.float64]:
    """Return, of `rank_seconds`, what K and V of shared documents cost; float64[packs of `ranked.rows`, P]."""
    ranks = ranked.num_ranks()
    whole_tokens, cut_tokens = np.repeat(ranked.whole_tokens, ranks), np.repeat(ranked.cut_tokens, ranks)
    return costs.waiting_seconds(
        ranked.rows, direction, np.repeat(ranks, ranks), whole_tokens, cut_tokens, ranked.is_local
    )


_NOT_USEFUL = ("prefix_s_per_token", "slice_s", "pack_s", "host_slice_s", "host_pack_s")  # Of `PassCoefficients`


@dataclass(frozen=True, eq=False, kw_only=True)
class PackSplit:
    """Hold the seconds of packs by cause; float64[num_packs, P] each, names as in `TimeSplit`."""

    useful_s: NDArray[np.float64]
    kernels_s: NDArray[np.float64]
    padding_s: NDArray[np.float64]
    recompute_s: NDArray[np.float64]
    offload_s: NDArray[np.float64]
    tp_communication_s: NDArray[np.float64]
    cp_communication_s: NDArray[np.float64]
    cp_imbalance_s: NDArray[np.float64]


def split_pack_seconds(
    costs: PackCosts,
    columns: SliceColumns,
    direction: Direction,
    policy: NDArray[np.int8] | None = None,
    ranked: PerRankPacks | None = None,
    stops: NDArray[np.int64] | None = None,
) -> PackSplit:
    """Split the seconds of every pack on every virtual stage by cause, under activation policies (int8[num_documents];
    None = all replay). `ranked`: the same packs rank by rank; None = nobody shares them, or the mean that searches
    compare; `stops` as in `PackCosts.pack_seconds`, of packs that nobody shares."""
    coefficients, layout = costs.coefficients, costs.layout
    without_tp = msgspec.structs.replace(coefficients, tensor_exposed_share=0.0)
    passes = {
        name: msgspec.structs.replace(getattr(coefficients, name), **dict.fromkeys(_NOT_USEFUL, 0.0))
        for name in ("forward", "backward")
    }
    ideal = msgspec.structs.replace(without_tp, attention_tile=1, head_pack_s=0.0, **passes)
    rows = columns if ranked is None else ranked.rows
    mean = (lambda rank_s: rank_s) if ranked is None else ranked.mean
    bare = layout.arrangement
    ideal_costs = PackCosts(costs.model, ideal, bare)
    ideal_s = mean(ideal_costs.compute_seconds(rows, direction))
    # Ideal work divides evenly, so that its mean over ranks needs no rows.
    unpadded = dataclasses.replace(columns, pad_to=np.zeros_like(columns.pad_to))
    useful_s = ideal_costs.compute_seconds(unpadded, direction) if columns.pad_to.any() else ideal_s
    rank_all_s = rank_compute_s = costs.compute_seconds(rows, direction, stops)
    if bare != layout:
        rank_compute_s = PackCosts(costs.model, coefficients, bare).compute_seconds(rows, direction, stops)
    compute_s = mean(rank_compute_s)
    without_tp_s = mean(PackCosts(costs.model, without_tp, bare).compute_seconds(rows, direction, stops))
    if ranked is None:
        rank_waiting_s = costs.pack_seconds(columns, direction, stops=stops) - rank_all_s
    else:
        rank_waiting_s = rank_waiting_seconds(costs, ranked, direction)
    replayed_s = rank_compute_s + rank_waiting_s
    recomputed_s = planned_s = rank_all_s + rank_waiting_s
    if policy is not None:
        kept = np.where(policy == OFFLOAD, REPLAY, policy).astype(np.int8)
        recomputed_s, planned_s = (costs.under_policy(recomputed_s, rows, direction, codes) for codes in (kept, policy))
    slowest_s = planned_s if ranked is None else ranked.slowest(planned_s)
    return PackSplit(
        useful_s=useful_s,
        kernels_s=without_tp_s - ideal_s,
        padding_s=ideal_s - useful_s,
        recompute_s=mean(recomputed_s - replayed_s),
        offload_s=mean(planned_s - recomputed_s),
        tp_communication_s=compute_s - without_tp_s,
        cp_communication_s=mean(rank_waiting_s),
        cp_imbalance_s=slowest_s - mean(planned_s),
    )
