"""What it costs and saves to compute a pack in two halves that take turns, so that one's tensor-parallel transfers run
beside the other's compute (`runtime/comm/turns.py`).

    costs    the constants of one more pack on every layer: launches, small matrix products, latency of as many
             transfers again; a piece more where a slice is cut; turns, which on a device of its own its host takes:
             they last while the device computes what is queued, and count where the host is behind
    saves    of a half's transfers what the other half's compute is long enough for, but for the first and the last of a
             stage, beside which nothing runs; less what they take from compute (`CostCoefficients.tensor_beside`)

Where packs are cut says `cost.halved_rows`; which ones are, these seconds alone. Of packs that a group shares all ranks
wait for the slowest in either half, and keys and values travel twice, in as many parts each time as in one go; what of
them runs beside attention leaves less room for tensor-parallel transfers, as both have one queue. Round a ring they
stay in one go, and so do those that replicas share and some stage would be slower by: replicas must agree without
simulating each other's steps. Where documents of a pack are recomputed, both halves make the transfers of that, of no
rows where there are none: their latency comes twice. A pack with offloaded documents lasts at least as long as its
copies. Not priced: what hides of the transfers of recomputing, and of keys and values while the other half computes;
backwards find the activations of halves in two pieces where they are cut elsewhere, and copy them together.

O(slices + packs · stages) numpy, three times the price of the packs; for chosen candidates (`plan.sharing.as_run`).
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import RECOMPUTE
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.group_comm import TENSOR_RINGS, recompute_seconds, tensor_ring_seconds
from evenload.cost.halved_rows import in_halves, middles
from evenload.cost.pack_cost import PackCosts
from evenload.cost.ranked_packs import (
    RankedHalves,
    RankedPacks,
    TravellingParts,
    rank_seconds,
    rank_waiting_seconds,
    travelling_parts,
    waiting_in_parts,
)
from evenload.cost.slice_features import policy_tokens, weighted
from evenload.types.columns import SliceColumns
from evenload.types.micropack import Direction


@dataclass(frozen=True, eq=False)
class HalvedPacks:
    """Packs of one direction, priced in halves where these are shorter.

    Args:
        first_rows: int64[num_packs], of the first half; 0 = computed in one go.
        more_s: float64[num_packs, P], what halves take beyond the whole; below 0 on the mean of stages, 0 where there
            are none.
        transfer_s, hidden_s: float64[num_packs, P], the halves' transfers, and of them what runs beside compute.
        context_s, context_hidden_s: the same, of keys and values that travel in parts, beyond those of the whole.
    """

    first_rows: NDArray[np.int64]
    more_s: NDArray[np.float64]
    transfer_s: NDArray[np.float64]
    hidden_s: NDArray[np.float64]
    context_s: NDArray[np.float64]
    context_hidden_s: NDArray[np.float64]

    @classmethod
    def none(cls, num_packs: int, num_stages: int) -> "HalvedPacks":
        """All are computed in one go."""
        return cls(np.zeros(num_packs, np.int64), *np.zeros((5, num_packs, num_stages)))

    def of_packs(self, chosen: NDArray[np.bool_]) -> "HalvedPacks":
        """The same for some packs; the others in one go."""
        columns = (getattr(self, field.name) for field in fields(self))
        return HalvedPacks(*(np.where(chosen.reshape(-1, *[1] * (one.ndim - 1)), one, 0) for one in columns))

    def at(self, packs: NDArray[np.intp], num_packs: int) -> "HalvedPacks":
        """These as some packs of more; the others in one go."""
        found = HalvedPacks.none(num_packs, self.more_s.shape[1])
        for field in fields(self):
            getattr(found, field.name)[packs] = getattr(self, field.name)
        return found


def pays(costs: PackCosts) -> bool:
    """Whether any pack could be halved. None where context ranks share packs, all of them, round a ring."""
    coefficients, layout = costs.coefficients, costs.layout
    beside = coefficients.tensor_beside
    is_ring = layout.cp > 1 and coefficients.context_exchange == "ring"
    return layout.tp > 1 and not is_ring and beside is not None and beside.pays


def least_share(costs: PackCosts) -> float:
    """Of the seconds of any packs in one go, what they take at least in halves: all of the transfers hidden, and none
    of the costs. What bounds are multiplied with that were found in one go."""
    if not pays(costs):
        return 1.0
    coefficients, layers = costs.coefficients, costs.layers()
    in_pack = _share_in_packs(coefficients)
    shares = [1.0]
    for direction in ("forward", "backward"):
        # A pack's features: its tokens have transfers' bytes, and the pack itself their latency.
        token_s, latency_s = tensor_ring_seconds(costs.model, coefficients, costs.layout.tp, TENSOR_RINGS[direction])
        for of_feature, transfer_s in ((0, token_s), (2, latency_s)):
            all_s = costs.stage_seconds[direction][of_feature]
            shares += [1 - in_pack * transfer_s * own / all_s[at] for at, own in enumerate(layers) if all_s[at] > 0]
    return max(0.0, min(shares))


def as_if_halved(costs: PackCosts) -> PackCosts:
    """What packs cost if all of them are computed in halves: twice the constants, and of tokens' transfers only what
    nothing hides. Linear in a pack's features, so a search prices thousands of packings by it as by the packs in one
    go; packs that are too small for halves, or may not have any, look dearer or cheaper than they are, until
    `halved_packs` decides. Room is compared token by token, and slices that halves cut cost nothing; but turns keep the
    device here, too, also where only its host takes them: without that margin against small packs searches find
    steps that are shorter by this price and longer as they run.
    """
    coefficients, layers = costs.coefficients, costs.layers().astype(np.float64)
    beside = coefficients.tensor_beside
    assert beside is not None, "the price of halves is not known"
    in_pack = _share_in_packs(coefficients)
    changed: dict[Direction, NDArray[np.float64]] = {}
    hosts: dict[Direction, NDArray[np.float64]] = {}
    for direction, matrix in costs.stage_seconds.items():
        rings = TENSOR_RINGS[direction]
        token_s, latency_s = tensor_ring_seconds(costs.model, coefficients, costs.layout.tp, rings)
        of_layers = _without_ends(costs, direction)
        inner = in_pack * (1.0 - 1.0 / (rings * np.maximum(layers, 1.0)))
        room_s = np.maximum(0.0, of_layers[0] - in_pack * layers * token_s) / beside.computed_share
        halved = matrix.copy()
        halved[0] -= beside.gained_share * np.minimum(inner * layers * token_s, room_s)
        turns_s = (beside.turns_s + beside.host_turns_s) * layers
        halved[2] += of_layers[2] + turns_s - beside.gained_share * 2 * inner * layers * latency_s
        changed[direction] = np.maximum(halved, 0.0)
        slice_s, pack_s = costs.host_seconds[direction]
        hosts[direction] = np.stack([slice_s, 2 * pack_s + np.where(pack_s > 0, beside.host_turns_s * layers, 0.0)])
    return costs.with_stage_seconds(changed, hosts)


def wanted_cuts(costs: PackCosts, columns: SliceColumns) -> NDArray[np.int64]:
    """Rows of the first halves, if all packs were halved that may be; int64[num_packs]."""
    if not pays(costs):
        return np.zeros(columns.num_packs, np.int64)
    found = middles(columns, costs.coefficients.attention_tile, causal=costs.model.causal)
    return np.where(columns.pack_ranks() > 1, 0, found) if costs.coefficients.context_exchange == "ring" else found


def halved_packs(
    costs: PackCosts,
    columns: SliceColumns,
    direction: Direction,
    policy: NDArray[np.int8] | None = None,
    first_rows: NDArray[np.int64] | None = None,
    ranked: RankedHalves | None = None,
) -> HalvedPacks:
    """Price packs in halves, or decide which of them are.

    Args:
        policy: int8[num_documents], indices into `cost.activation.POLICIES`; None = all replay.
        first_rows: int64[num_packs], of packs that are halved already; None = decide: those that are shorter by it, of
            all that `wanted_cuts` says.
        ranked: the same packs rank by rank, in halves by these rows, or by those wanted; None = those that a group
            shares are computed in one go.
    """
    nothing = HalvedPacks.none(columns.num_packs, costs.layout.num_stages)
    wanted = wanted_cuts(costs, columns) if first_rows is None else first_rows
    if ranked is None:
        wanted = np.where(columns.pack_ranks() > 1, 0, wanted)
        if not wanted.any():
            return nothing
        ranked = RankedHalves(RankedPacks.alone(columns), RankedPacks.alone(in_halves(columns, wanted).columns))
    is_halved = wanted > 0
    part = np.cumsum(1 + is_halved) - (1 + is_halved)  # in `halves` every pack's first half, or itself
    found = nothing
    if is_halved.any():
        parts = ranked.halves.taken(part[is_halved]), ranked.halves.taken(part[is_halved] + 1)
        chosen = np.flatnonzero(is_halved)
        priced = _priced(costs, ranked.whole.taken(chosen), parts, wanted[chosen], direction, policy)
        found = priced.at(chosen, columns.num_packs)
    if first_rows is None:
        is_slower = (found.more_s > 0).any(axis=1) & (ranked.whole.num_ranks() > costs.layout.cp)
        return found.of_packs((found.more_s.sum(axis=1) < 0) & ~is_slower)
    others = np.flatnonzero(~is_halved & (ranked.whole.num_ranks() > 1))
    if len(others):
        # Halves of the other direction cut their rows too.
        both = ranked.halves.taken(part[others]), ranked.whole.taken(others)
        after_s, before_s = (one.slowest(rank_seconds(costs, one, direction, policy)) for one in both)
        found.more_s[others] = after_s - before_s
    return found


def _priced(
    costs: PackCosts,
    whole: RankedPacks,
    halves: tuple[RankedPacks, RankedPacks],
    first_rows: NDArray[np.int64],
    direction: Direction,
    policy: NDArray[np.int8] | None,
) -> HalvedPacks:
    """Packs that are all halved. The halves have the same ranks, in the same order."""
    coefficients, layout, layers = costs.coefficients, costs.layout, costs.layers().astype(np.float64)
    beside = coefficients.tensor_beside
    assert beside is not None, "the price of halves is not known"
    # In what follows a row is a rank of a pack, and halves are the second axis.
    features = costs.features.of_packs(whole.rows)
    of_halves = np.stack([costs.features.of_packs(half.rows) for half in halves], axis=1)
    matrix = _without_ends(costs, direction)
    again_s, more_again_s = _recomputing(costs, halves, direction, policy)
    waits = _waiting(costs, whole, halves, direction)
    token_s, latency_s = tensor_ring_seconds(costs.model, coefficients, layout.tp, TENSOR_RINGS[direction])
    half_s = layers * (of_halves[:, :, :1] * token_s + latency_s)
    in_pack = _share_in_packs(coefficients)
    halves_s = weighted(of_halves.reshape(-1, features.shape[1]), matrix).reshape(half_s.shape)
    # The first transfer and the last of a stage: two of the halves' 2 · rings · layers.
    beside_s = in_pack * half_s * (1.0 - 1.0 / (TENSOR_RINGS[direction] * np.maximum(layers, 1.0)))
    compute_s = (halves_s - in_pack * half_s)[:, ::-1]
    room_s = np.maximum(0.0, compute_s / beside.computed_share - waits.hidden_s[:, ::-1])
    alone_s = np.minimum(beside_s, room_s)
    halves_s = halves_s + waits.halves_s + again_s - beside.gained_share * alone_s
    device_s = weighted(features, costs.stage_seconds[direction])
    delta = of_halves.sum(axis=1) - features
    more_s = weighted(delta, matrix) + beside.turns_s * layers - beside.gained_share * alone_s.sum(axis=1)
    host_s = weighted(of_halves.sum(axis=1)[:, 1:3], _host_seconds(costs, direction)) + beside.host_turns_s * layers
    least_s = weighted(features[:, 1:3], costs.host_seconds[direction])
    copy_s = np.zeros_like(more_s) if policy is None else costs.copy_seconds(whole.rows, policy)
    again_s = again_s.sum(axis=1)
    in_one_go_s = np.maximum(device_s, least_s) + waits.whole_s + again_s
    in_halves_s = np.maximum(device_s + more_s, host_s) + waits.halves_s.sum(axis=1) + again_s + more_again_s
    in_one_go_s, in_halves_s = (whole.slowest(np.maximum(one, copy_s)) for one in (in_one_go_s, in_halves_s))
    # All ranks wait for the slowest in either half, which may be another one.
    in_turn_s = whole.slowest(halves_s[:, 0]) + whole.slowest(halves_s[:, 1]) - whole.slowest(halves_s.sum(axis=1))
    return HalvedPacks(
        first_rows=first_rows,
        more_s=in_halves_s - in_one_go_s + in_turn_s,
        transfer_s=whole.mean((half_s + (beside.stretch - 1) * alone_s).sum(axis=1)),
        hidden_s=whole.mean(beside.stretch * alone_s.sum(axis=1)),
        context_s=whole.mean(waits.context_s.sum(axis=1)) - waits.of_whole.beside_s,
        context_hidden_s=whole.mean(waits.hidden_s.sum(axis=1)) - waits.of_whole.hidden_s,
    )


class _Waiting(NamedTuple):
    """For keys and values, of every rank of a pack.

    Args:
        whole_s, halves_s: float64[n, P] and float64[n, 2, P], beyond attention.
        context_s, hidden_s: float64[n, 2, P], as `context_waiting.beside_seconds`.
        of_whole: the packs in one go.
    """

    whole_s: NDArray[np.float64]
    halves_s: NDArray[np.float64]
    context_s: NDArray[np.float64]
    hidden_s: NDArray[np.float64]
    of_whole: TravellingParts


def _waiting(
    costs: PackCosts, whole: RankedPacks, halves: tuple[RankedPacks, RankedPacks], direction: Direction
) -> _Waiting:
    of_whole = travelling_parts(costs, whole, direction)
    shape = whole.rows.num_packs, 2, costs.layout.num_stages
    if (whole.num_ranks() == 1).all():
        nothing = np.zeros(shape)
        return _Waiting(nothing[:, 0], nothing, nothing, nothing, of_whole)
    of_halves = [waiting_in_parts(costs, half, direction, of_whole.parts) for half in halves]
    waits_s, context_s, hidden_s = (np.stack(one, axis=1) for one in zip(*of_halves, strict=True))
    return _Waiting(rank_waiting_seconds(costs, whole, direction), waits_s, context_s, hidden_s, of_whole)


def _recomputing(
    costs: PackCosts,
    halves: tuple[RankedPacks, RankedPacks],
    direction: Direction,
    policy: NDArray[np.int8] | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What recomputing takes of packs in one go, shared out over their halves, float64[n, 2, P], and what it takes in
    halves beyond that, where some document is recomputed: its constants where both halves have such rows, else the
    latency of transfers of no rows; float64[n, P]."""
    count, stages = halves[0].rows.num_packs, costs.layout.num_stages
    if direction == "forward" or policy is None or not (policy == RECOMPUTE).any():
        return np.zeros((count, 2, stages)), np.zeros((count, stages))
    tokens = np.stack([policy_tokens(half.rows, policy)[:, RECOMPUTE] for half in halves], axis=1)
    again = tokens > 0
    token_s, pack_s = costs.linear_again_s
    is_first = again & (np.cumsum(again, axis=1) == 1)  # which pays the pack's constants
    once_s = tokens[:, :, None] * token_s + is_first[:, :, None] * pack_s
    _, latency_s = recompute_seconds(costs.model, costs.coefficients, costs.layout.tp)
    layers = costs.layers() - np.array(costs.layout.recomputed_counts, np.int64)
    both, one = again.all(axis=1), again.any(axis=1) & ~again.all(axis=1)
    return once_s, np.outer(both, pack_s) + np.outer(one, latency_s * layers)


def _host_seconds(costs: PackCosts, direction: Direction) -> NDArray[np.float64]:
    """Of the host a slice and a pack, beside which it hands turns over; float64[2, P]. Where it was not measured apart
    it is in the constants of device and host together, so it is at most these; 0 where the device is the host."""
    beside, host = costs.coefficients.tensor_beside, costs.host_seconds[direction]
    assert beside is not None, "the price of halves is not known"
    return host if host.any() or not beside.host_turns_s else _without_ends(costs, direction)[1:3]


def _without_ends(costs: PackCosts, direction: Direction) -> NDArray[np.float64]:
    """`stage_seconds` of the layers alone: what embedding and head cost is no layer's."""
    coefficients, layout = costs.coefficients, costs.layout
    matrix = costs.stage_seconds[direction].copy()
    matrix[0, 0] -= coefficients.embedding_s_per_token / layout.tp
    if direction == "backward":
        matrix[0, -1] -= coefficients.head_s_per_token / layout.tp
        matrix[2, -1] -= coefficients.head_pack_s
    return matrix


def _share_in_packs(coefficients: CostCoefficients) -> float:
    """Of transfers, what a pack's seconds hold: all where they were measured, else what a data sheet does not hide."""
    return 1.0 if coefficients.source == "calibrated" else coefficients.tensor_exposed_share
