"""Price what devices must receive when the layout changes between two steps, fast enough for a search over layouts.

Of every unit (embedding, one layer, head) a device holds the weights where it is in its stage. Devices keep their
numbers, so both layouts say which weights each lacks; they come from a device of its own node if one holds them. What a
switch takes in all follows from its moves (`plan.layouts.switch_prices`). O(devices · units) numpy.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory import unit_parameters
from evenload.errors import ConfigError
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


class ReceiveSeconds:
    """Price the weights that a stage's devices receive, by its range of layers, for a search over mappings: without
    the senders' side, latency and optimizer state, so never above the seconds of the switch. Of `new` only sizes
    matter, not its layers. Where copies were measured, inside a node at their rate.

    Raises:
        ConfigError: the coefficients know no link that the bytes cross, or cp or tp change.
    """

    def __init__(
        self, model: ModelSpec, coefficients: CostCoefficients, old: ParallelLayout, new: ParallelLayout
    ) -> None:
        require_switchable(old, new)
        seconds = [
            part / _bandwidth_bytes_per_s(coefficients, leaves_node=leaves_node) if part.any() else part
            for leaves_node, part in zip(
                (False, True), _missing_bytes(model, coefficients.devices_per_node, old, new), strict=True
            )
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


def _bandwidth_bytes_per_s(coefficients: CostCoefficients, *, leaves_node: bool) -> float:
    if not leaves_node and (copies := coefficients.copies) is not None:
        return copies.rank_bytes_per_s
    return coefficients.device_link(leaves_node=leaves_node).bandwidth_bytes_per_s


def _devices_of(layout: ParallelLayout, stage: int) -> slice:
    span, ranks = layout.dp * layout.cp * layout.tp, layout.ranks_of_stage(stage)
    return slice(ranks.start * span, ranks.stop * span)


def _holds(layout: ParallelLayout, model: ModelSpec, devices: int) -> NDArray[np.bool_]:
    """Return which units lie on every device's stage, none on devices beyond the layout's; bool[devices, U]."""
    rank, used = np.full(devices, -1), np.arange(min(devices, layout.world_size))
    rank[used] = np.array(layout.leading_ranks)[used // (layout.dp * layout.cp * layout.tp)]
    owners = np.repeat(layout.stage_to_rank, layout.stage_counts)
    held = rank[:, None] == np.concatenate([owners[:1], owners, owners[-1:]])
    if model.tied_embeddings:
        held[:, 0] |= rank == owners[-1]
    return held


def _missing_bytes(
    model: ModelSpec, devices_per_node: int, old: ParallelLayout, new: ParallelLayout
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Count the weights of every unit that every device of `new` would lack, were it on its stage, from its node and
    from others; float64[D, U] each."""
    nodes = -(-max(old.world_size, new.world_size) // devices_per_node)
    held = _holds(old, model, nodes * devices_per_node)
    on_node = held.reshape(nodes, devices_per_node, -1).any(axis=1).repeat(devices_per_node, axis=0)
    missing = model.bytes_per_element * unit_parameters(model, new.tp)[0].astype(np.float64) * ~held
    return (missing * on_node)[: new.world_size], (missing * ~on_node)[: new.world_size]
