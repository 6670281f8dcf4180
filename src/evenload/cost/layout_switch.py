"""Count bytes and seconds of changing the layout between two steps (FlexPipe §4; T(S'Pi_G' -> S Pi_G) of its §5).

Of every unit (embedding, one layer, head) a device holds the weights where it is in its stage, and an equal share of
the optimizer state over the ranks that hold it. Devices keep their numbers, so both layouts say what each must
receive:

    weights     units of its new stage that were not of its old one, from any device that holds them, one of its own
                node if there is one
    optimizer   its new share of every unit of its new stage, less what it holds already, from the one owner; of
                adapters alone where the model's own weights are frozen (LoRA)

A tied embedding is the embedding's unit alone, which the first and the last stage both hold with a whole optimizer
state. A link takes bytes / bandwidth on the busiest device, NVLink and network at once, both ways at once. Weights move
before the step, optimizer state during it (`runtime.stages.twin_layer`): T(switch) is the sum of both waits. Switches
by copies (`CopySpec`) are priced from their moves (`plan.layouts.switch_prices`). O(devices · units) numpy.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory import optimizer_bytes_per_parameter, unit_parameters
from evenload.errors import ConfigError
from evenload.types.cluster import LinkSpec
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


def switch_seconds(
    model: ModelSpec, coefficients: CostCoefficients, old: ParallelLayout, new: ParallelLayout, hidden_s: float = 0.0
) -> float:
    """Return the seconds for which training stands still where all that moves is sent; 0 where nothing must.

    Args:
        coefficients: for the links.
        hidden_s: that the step runs before it needs its optimizer state.

    Raises:
        ConfigError: the coefficients know no link that the bytes cross, or cp or tp change.
    """
    weights_s = _moving_seconds(_weights_of(model, new), model, coefficients, old, new)
    state_s = _moving_seconds(_state_of(model, new), model, coefficients, old, new)
    return weights_s + max(0.0, state_s - hidden_s)


class _UnitBytes(NamedTuple):
    """Hold the bytes of every unit that move whole to devices that lack it, and in shares; float64[U] each."""

    weights: NDArray[np.float64]
    state: NDArray[np.float64]


def _weights_of(model: ModelSpec, layout: ParallelLayout) -> _UnitBytes:
    weights = model.bytes_per_element * unit_parameters(model, layout.tp)[0].astype(np.float64)
    return _UnitBytes(weights, np.zeros_like(weights))


def _state_of(model: ModelSpec, layout: ParallelLayout) -> _UnitBytes:
    state = optimizer_bytes_per_parameter(model) * unit_parameters(model, layout.tp)[1].astype(np.float64)
    return _UnitBytes(np.zeros_like(state), state)


def _moving_seconds(
    units: _UnitBytes, model: ModelSpec, coefficients: CostCoefficients, old: ParallelLayout, new: ParallelLayout
) -> float:
    needed = _holds(new, model)
    arriving = [part * needed for part in _missing_bytes(units, model, coefficients.devices_per_node, old, new)]
    leaving = _sent_bytes(units, model, coefficients.devices_per_node, old, new, arriving)
    seconds = [0.0]
    for leaves_node, received, sent in zip((False, True), arriving, leaving, strict=True):
        if not received.any() and not sent.any():
            continue
        link = _link(coefficients, leaves_node=leaves_node)
        latency_s = int((received > 0).sum(axis=1).max(initial=0)) * link.latency_s
        for moved in (received.sum(axis=1), sent):
            seconds.append(float(moved.max(initial=0.0)) / link.bandwidth_bytes_per_s + latency_s)
    return max(seconds)


class ReceiveSeconds:
    """Price the weights that a stage's devices receive, by its range of layers, for a search over mappings: without
    the senders' side, latency and optimizer state, so never above `switch_seconds`. Of `new` only sizes matter, not its
    layers. Where copies were measured, inside a node at their rate."""

    def __init__(
        self, model: ModelSpec, coefficients: CostCoefficients, old: ParallelLayout, new: ParallelLayout
    ) -> None:
        parts = _missing_bytes(_weights_of(model, new), model, coefficients.devices_per_node, old, new)
        seconds = [
            part / _link(coefficients, leaves_node=leaves_node).bandwidth_bytes_per_s if part.any() else part
            for leaves_node, part in zip((False, True), parts, strict=True)
        ]
        self._sums = np.pad(np.cumsum(seconds, axis=2), ((0, 0), (0, 0), (1, 0)))  # [link, device, units before]
        self._devices = [_devices_of(new, stage) for stage in range(new.num_stages)]
        self._num_layers, self._is_tied = model.num_layers, model.tied_embeddings
        self._known: dict[tuple[int, int, int], float] = {}

    def of_stage(self, rank: int, first: int, last: int) -> float:
        """Return the seconds until stage `rank`, of a layout with one stage a rank, holds the layers `[first, last)` on
        all its devices."""
        key = rank, first, last
        if key not in self._known:
            low = 0 if first == 0 else first + 1
            high = self._num_layers + 2 if last == self._num_layers else last + 1
            stage = self._sums[:, self._devices[rank]]
            received = stage[:, :, high] - stage[:, :, low]
            if self._is_tied and low > 0 and last == self._num_layers:
                received = received + stage[:, :, 1]
            self._known[key] = float(received.max())
        return self._known[key]


def require_switchable(old: ParallelLayout, new: ParallelLayout) -> None:
    """Refuse, by a `ConfigError`, a switch that changes cp, tp or the number of layers."""
    if (old.cp, old.tp, old.num_layers) != (new.cp, new.tp, new.num_layers):
        raise ConfigError(
            f"switch from {old.describe()} to {new.describe()}: only pp, dp and the layers of stages may change, "
            "cp and tp may not"
        )


def _link(coefficients: CostCoefficients, *, leaves_node: bool) -> LinkSpec:
    if not leaves_node and (copies := coefficients.copies) is not None:
        return LinkSpec(bandwidth_bytes_per_s=copies.rank_bytes_per_s, latency_s=0.0)
    return coefficients.device_link(leaves_node=leaves_node)


def _devices_of(layout: ParallelLayout, stage: int) -> slice:
    span, ranks = layout.dp * layout.cp * layout.tp, layout.ranks_of_stage(stage)
    return slice(ranks.start * span, ranks.stop * span)


class _Places(NamedTuple):
    """Hold for every device the first pipeline rank with its layers (-1: no rank runs there), its place among the
    devices that hold the same, and how many these are; int64[D] each."""

    rank: NDArray[np.int64]
    place: NDArray[np.int64]
    copies: NDArray[np.int64]


def _places(layout: ParallelLayout, devices: int) -> _Places:
    device, span = np.arange(devices), layout.dp * layout.cp * layout.tp
    is_used = device < layout.world_size
    own = np.where(is_used, device // span, 0)
    first = np.array(layout.leading_ranks)[own]
    place = (device // layout.tp) - first * (span // layout.tp)
    copies = np.array(layout.data_sizes)[own]
    return _Places(np.where(is_used, first, -1), place, copies)


def _homes(layout: ParallelLayout, model: ModelSpec) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the pipeline ranks that hold every unit, twice the same but for a tied embedding; int64[U] each."""
    owners = np.repeat(layout.stage_to_rank, layout.stage_counts)
    first = np.concatenate([owners[:1], owners, owners[-1:]]).astype(np.int64)
    other = first.copy()
    if model.tied_embeddings:
        other[0] = first[-1]
    return first, other


def _holds(layout: ParallelLayout, model: ModelSpec, devices: int | None = None) -> NDArray[np.bool_]:
    """Return which units lie on every device's stage; bool[D, U]."""
    rank = _places(layout, layout.world_size if devices is None else devices).rank
    first, other = _homes(layout, model)
    return (rank[:, None] == first[None, :]) | (rank[:, None] == other[None, :])


def _missing_bytes(
    units: _UnitBytes, model: ModelSpec, devices_per_node: int, old: ParallelLayout, new: ParallelLayout
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Count what every device of `new` would lack of every unit on its stage, from its node and from others;
    float64[D, U] each."""
    require_switchable(old, new)
    devices = new.world_size
    held = _holds(old, model, devices)
    weights = units.weights * ~held
    near = _node_sums(_holds(old, model), devices_per_node, devices) > 0
    inside, outside = _shares_elsewhere(new, old, model, devices_per_node)
    return weights * near + units.state * inside, weights * ~near + units.state * outside


def _sent_bytes(
    units: _UnitBytes,
    model: ModelSpec,
    devices_per_node: int,
    old: ParallelLayout,
    new: ParallelLayout,
    arriving: list[NDArray[np.float64]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Count what every device of `old` sends inside its node and to others; weights, and all of a tied embedding, by
    all holders alike; float64[D] each."""
    held = _holds(old, model)
    sent = []
    receiving = _shares_elsewhere(new, old, model, devices_per_node)
    leaving = _shares_elsewhere(old, new, model, devices_per_node)
    for arrived, received_share, leaving_share in zip(arriving, receiving, leaving, strict=True):
        by_share = units.state * leaving_share
        by_all = arrived - units.state * received_share * _holds(new, model)
        if model.tied_embeddings:
            # Two ends have the same shares, and two want them.
            by_share[:, 0], by_all[:, 0] = 0.0, arrived[:, 0]
        sent.append((held * (by_all.sum(axis=0) / np.maximum(held.sum(axis=0), 1) + by_share)).sum(axis=1))
    return sent[0], sent[1]


def _shares_elsewhere(
    mine: ParallelLayout, theirs: ParallelLayout, model: ModelSpec, devices_per_node: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Split the share of a unit's optimizer state that a device would have in `mine`, were the unit on its stage, into
    what other devices of its node have in `theirs`, and devices of other nodes; float64[D, U] each."""
    devices, of_rank = mine.world_size, theirs.dp * theirs.cp * theirs.tp
    places = _places(mine, devices)
    low, high = (places.place / places.copies)[:, None], ((places.place + 1) / places.copies)[:, None]
    # Devices that hold a unit which is on a pipeline rank; int64[ranks].
    spans = np.array(theirs.data_sizes) * theirs.tp

    def shares(first: NDArray, last: NDArray, span: NDArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the range of shares that devices `[first, last)` of the owners' `span` have."""
        begin = np.clip(first // theirs.tp, 0, span // theirs.tp) * theirs.tp / span
        end = np.clip(-(-last // theirs.tp), 0, span // theirs.tp) * theirs.tp / span
        return begin, end

    def overlap(begin: NDArray, end: NDArray) -> NDArray[np.float64]:
        return np.clip(np.minimum(high, end) - np.maximum(low, begin), 0.0, None)

    device = np.arange(devices)[:, None]
    node = device // devices_per_node * devices_per_node
    near, own, of_node = 0.0, 0.0, []
    for home in _homes(theirs, model):
        start, span = (home * of_rank)[None, :], spans[home][None, :]
        of_node.append(shares(node - start, node + devices_per_node - start, span))
        near = near + overlap(*of_node[-1])
        # A device's tensor-parallel neighbours hold other columns; the clip leaves out devices of other stages.
        is_there = (device >= start) & (device < start + span)
        own = np.maximum(own, np.where(is_there, overlap(*shares(device - start, device - start + 1, span)), 0.0))
    # What both homes have in the node counts once; of all units but a tied embedding both are the same.
    (begin, end), (other_begin, other_end) = of_node
    near = near - overlap(np.maximum(begin, other_begin), np.minimum(end, other_end))
    return near - own, (high - low) - near


def _node_sums(held: NDArray[np.bool_], devices_per_node: int, devices: int) -> NDArray[np.int64]:
    """Count, for every device, the devices of its node that hold each unit; int64[devices, U]."""
    rows = max(len(held), devices)
    nodes = -(-rows // devices_per_node)
    padded = np.zeros((nodes * devices_per_node, held.shape[1]), np.int64)
    padded[: len(held)] = held
    counts = padded.reshape(nodes, devices_per_node, -1).sum(axis=1)
    return np.repeat(counts, devices_per_node, axis=0)[:devices]
