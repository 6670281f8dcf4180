"""What it costs and saves to compute a pack in two halves that take turns, so that one's tensor-parallel transfers run
beside the other's compute (`runtime/comm/turns.py`).

    costs    the constants of one more pack on every layer: launches, small matrix products, latency of as many
             transfers again; a piece more where a slice is cut; turns, which on a device of its own its host takes:
             they last while the device computes what is queued, and count where the host is behind
    saves    of a half's transfers what the other half's compute is long enough for, but for the first and the last of a
             stage, beside which nothing runs; less what they take from compute (`CostCoefficients.tensor_beside`)

Halves are even in rows, because transfers are, and fall between slices where that is near enough; else a slice is cut
at a whole number of attention's tiles. Which packs are halved follows from these seconds alone; packs that a group
shares are not. Where documents of a pack are recomputed, both halves make the transfers of that, of no rows where there
are none: their latency comes twice. A pack with offloaded documents lasts at least as long as its copies. Not priced:
what hides of the transfers of recomputing; backwards find the activations of halves in two pieces where they are cut
elsewhere, and copy them together.

O(slices + packs · stages) numpy, three times the price of the packs; for chosen candidates (`plan.sharing.as_run`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import RECOMPUTE
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.group_comm import TENSOR_RINGS, recompute_seconds, tensor_ring_seconds
from evenload.cost.pack_cost import PackCosts
from evenload.cost.slice_features import weighted
from evenload.types.columns import SliceColumns
from evenload.types.micropack import Direction

_NEAR = 8
"""A cut between slices is taken where it is within so small a part of the pack's rows from its middle."""


@dataclass(frozen=True, eq=False)
class HalvedPacks:
    """Packs of one direction, priced in halves where these are shorter.

    Args:
        first_rows: int64[num_packs], of the first half; 0 = computed in one go.
        more_s: float64[num_packs, P], what halves take beyond the whole; below 0 on the mean of stages, 0 where there
            are none.
        transfer_s, hidden_s: float64[num_packs, P], the halves' transfers, and of them what runs beside compute.
    """

    first_rows: NDArray[np.int64]
    more_s: NDArray[np.float64]
    transfer_s: NDArray[np.float64]
    hidden_s: NDArray[np.float64]


def pays(costs: PackCosts) -> bool:
    """Whether any pack could be halved. None where context ranks share packs: there they share all."""
    beside, layout = costs.coefficients.tensor_beside, costs.layout
    return layout.tp > 1 and layout.cp == 1 and beside is not None and beside.pays


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


def halved_packs(
    costs: PackCosts,
    columns: SliceColumns,
    direction: Direction,
    policy: NDArray[np.int8] | None = None,
    first_rows: NDArray[np.int64] | None = None,
) -> HalvedPacks:
    """Decide which packs are halved, and price them.

    Args:
        policy: int8[num_documents], indices into `cost.activation.POLICIES`; None = all replay.
        first_rows: int64[num_packs], of packs that are halved already; None = decide.
    """
    m, stages = columns.num_packs, costs.layout.num_stages
    nothing = HalvedPacks(np.zeros(m, np.int64), *(np.zeros((m, stages)) for _ in range(3)))
    if not m or (not pays(costs) if first_rows is None else not first_rows.any()):
        return nothing
    wanted = _middles(columns, costs.coefficients.attention_tile, costs.model.causal)
    is_wanted = _may_be_halved(columns) & (wanted > 0) if first_rows is None else first_rows > 0
    chosen = np.flatnonzero(is_wanted)
    if not len(chosen):
        return nothing
    cut = (wanted if first_rows is None else first_rows)[chosen]
    packs = _chosen_packs(columns, chosen)
    more_s, transfer_s, hidden_s = _halves_seconds(costs, packs, cut, direction, policy)
    taken = more_s.sum(axis=1) < 0 if first_rows is None else np.ones(len(chosen), bool)
    nothing.first_rows[chosen] = np.where(taken, cut, 0)
    for of_all, of_chosen in (
        (nothing.more_s, more_s),
        (nothing.transfer_s, transfer_s),
        (nothing.hidden_s, hidden_s),
    ):
        of_all[chosen] = np.where(taken[:, None], of_chosen, 0.0)
    return nothing


def _halves_seconds(
    costs: PackCosts,
    packs: SliceColumns,
    first_rows: NDArray[np.int64],
    direction: Direction,
    policy: NDArray[np.int8] | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(more, transfers, hidden) seconds of packs that are halved; float64[num_packs, P] each."""
    coefficients, layout, layers = costs.coefficients, costs.layout, costs.layers().astype(np.float64)
    beside = coefficients.tensor_beside
    assert beside is not None, "the price of halves is not known"
    whole = costs.features.of_packs(packs)
    # Halves of pack i are packs 2i and 2i + 1.
    parts = _in_halves(packs, first_rows)
    halves = costs.features.of_packs(parts).reshape(len(first_rows), 2, -1)
    delta = halves.sum(axis=1) - whole
    matrix = _without_ends(costs, direction)
    more_s = weighted(delta, matrix) + beside.turns_s * layers
    if direction == "backward" and policy is not None:
        more_s += _recomputing_again(costs, parts, policy)
    token_s, latency_s = tensor_ring_seconds(costs.model, coefficients, layout.tp, TENSOR_RINGS[direction])
    half_s = layers * (halves[:, :, :1] * token_s + latency_s)
    in_pack = _share_in_packs(coefficients)
    compute_s = weighted(halves.reshape(-1, whole.shape[1]), matrix).reshape(half_s.shape) - in_pack * half_s
    # The first transfer and the last of a stage: two of the halves' 2 · rings · layers.
    beside_s = in_pack * half_s * (1.0 - 1.0 / (TENSOR_RINGS[direction] * np.maximum(layers, 1.0)))
    room_s = np.maximum(0.0, compute_s[:, ::-1]) / beside.computed_share
    alone_s = np.minimum(beside_s, room_s)
    hidden_s = beside.stretch * alone_s.sum(axis=1)
    more_s -= beside.gained_share * alone_s.sum(axis=1)
    copy_s = np.zeros_like(more_s) if policy is None else costs.copy_seconds(packs, policy)
    host_s = weighted(halves.sum(axis=1)[:, 1:3], _host_seconds(costs, direction)) + beside.host_turns_s * layers
    if host_s.any() or copy_s.any():
        device_s = weighted(whole, costs.stage_seconds[direction])
        least_s = np.maximum(copy_s, weighted(whole[:, 1:3], costs.host_seconds[direction]))
        more_s = np.maximum(device_s + more_s, np.maximum(copy_s, host_s)) - np.maximum(device_s, least_s)
    return more_s, (half_s - alone_s).sum(axis=1) + hidden_s, hidden_s


def _host_seconds(costs: PackCosts, direction: Direction) -> NDArray[np.float64]:
    """Of the host a slice and a pack, beside which it hands turns over; float64[2, P]. Where it was not measured apart
    it is in the constants of device and host together, so it is at most these; 0 where the device is the host."""
    beside, host = costs.coefficients.tensor_beside, costs.host_seconds[direction]
    assert beside is not None, "the price of halves is not known"
    return host if host.any() or not beside.host_turns_s else _without_ends(costs, direction)[1:3]


def _without_ends(costs: PackCosts, direction: Direction) -> NDArray[np.float64]:
    """`stage_seconds` of the layers alone: what embedding and head cost is no layer's."""
    coefficients, layout = costs.coefficients, costs.layout
    slowness = np.array([(costs.slowness or (1.0,) * layout.pipeline_ranks)[rank] for rank in layout.stage_to_rank])
    matrix = costs.stage_seconds[direction].copy()
    matrix[0] -= slowness * np.eye(1, layout.num_stages)[0] * coefficients.embedding_s_per_token / layout.tp
    if direction == "backward":
        last = slowness * np.eye(1, layout.num_stages, layout.num_stages - 1)[0]
        matrix[0] -= last * coefficients.head_s_per_token / layout.tp
        matrix[2] -= last * coefficients.head_pack_s
    return matrix


def _share_in_packs(coefficients: CostCoefficients) -> float:
    """Of transfers, what a pack's seconds hold: all where they were measured, else what a data sheet does not hide."""
    return 1.0 if coefficients.source == "calibrated" else coefficients.tensor_exposed_share


def _may_be_halved(columns: SliceColumns) -> NDArray[np.bool_]:
    """bool[num_packs]."""
    return np.bincount(columns.pack_of_slice(), weights=columns.cp > 1, minlength=columns.num_packs) == 0


def _recomputing_again(costs: PackCosts, halves: SliceColumns, policy: NDArray[np.int8]) -> NDArray[np.float64]:
    """What recomputing takes in halves beyond the whole pack, where some document is recomputed: its constants where
    both halves have such rows, else the latency of transfers of no rows; float64[num_packs, P].

    Args:
        halves: packs 2i and 2i + 1 are those of pack i.
    """
    is_again = policy[halves.doc] == RECOMPUTE
    again = np.bincount(halves.pack_of_slice()[is_again], minlength=halves.num_packs).reshape(-1, 2) > 0
    _, latency_s = recompute_seconds(costs.model, costs.coefficients, costs.layout.tp)
    layers = costs.layers() - np.array(costs.layout.recomputed_counts, np.int64)
    both_s = np.outer(again.all(axis=1), costs.linear_again_s[1])
    return both_s + np.outer(again.any(axis=1) & ~again.all(axis=1), latency_s * layers)


def _middles(columns: SliceColumns, tile: int, causal: bool) -> NDArray[np.int64]:
    """Where every pack would be halved; 0 = nowhere. int64[num_packs]."""
    rows = columns.slice_tokens()
    ends = np.cumsum(rows)
    found = np.zeros(columns.num_packs, np.int64)
    for pack, (first, stop) in enumerate(zip(columns.pack_offset[:-1], columns.pack_offset[1:], strict=True)):
        if first == stop:
            continue
        before = int(ends[first] - rows[first])
        total = int(ends[stop - 1]) - before
        middle = total // 2
        at = first + int(np.searchsorted(ends[first:stop] - before, middle, side="right"))
        edges = [int(ends[i]) - before for i in (at - 1, at) if first <= i < stop - 1]
        nearest = min(edges, key=lambda edge: abs(2 * edge - total), default=0)
        if nearest and _NEAR * abs(2 * nearest - total) <= 2 * total:
            found[pack] = nearest
        elif causal and at < stop:
            start = int(ends[at] - rows[at]) - before
            found[pack] = start + (middle - start) // tile * tile
        else:
            found[pack] = nearest
    return found


def _in_halves(columns: SliceColumns, first_rows: NDArray[np.int64]) -> SliceColumns:
    """Packs 2i and 2i + 1 are the halves of pack i; without padding, which the rows have already."""
    rows = columns.slice_tokens()
    start, stop, pack = columns.start, columns.start + rows, columns.pack_of_slice()
    before = np.cumsum(rows) - rows
    first_row = before - np.repeat(before[columns.pack_offset[:-1]], np.diff(columns.pack_offset))
    edge = np.clip(start + first_rows[pack] - first_row, start, stop)
    starts, stops = np.stack([start, edge], axis=1), np.stack([edge, stop], axis=1)
    place = 2 * pack[:, None] + np.array([0, 1])
    used = (stops > starts).ravel()
    order = np.argsort(place.ravel()[used], kind="stable")
    count = np.bincount(place.ravel()[used], minlength=2 * columns.num_packs)
    return SliceColumns(
        doc=np.repeat(columns.doc, 2)[used][order],
        start=starts.ravel()[used][order],
        stop=stops.ravel()[used][order],
        pack_offset=np.concatenate([[0], np.cumsum(count)]).astype(np.int64),
        pad_to=np.zeros(2 * columns.num_packs, np.int64),
        cp=np.ones(int(used.sum()), np.int64),
    )


def _chosen_packs(columns: SliceColumns, packs: NDArray[np.intp]) -> SliceColumns:
    """Some packs, in their order."""
    if len(packs) == columns.num_packs:
        return columns
    count = np.diff(columns.pack_offset)[packs]
    ends = np.cumsum(count)
    chosen = np.arange(int(ends[-1])) + np.repeat(columns.pack_offset[packs] - (ends - count), count)
    return SliceColumns(
        doc=columns.doc[chosen],
        start=columns.start[chosen],
        stop=columns.stop[chosen],
        pack_offset=np.concatenate([[0], ends]).astype(np.int64),
        pad_to=columns.pad_to[packs],
        cp=columns.cp[chosen],
    )
