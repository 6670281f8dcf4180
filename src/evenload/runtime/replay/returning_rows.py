"""`ReturningRows`: offloaded tensors of a backward pack on their way back from the host.

Layers come back in the order in which the backward enters them, each while the one before it is computed, so at most
two are on the device.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evenload.runtime.replay.blocks import BlockIndex
from evenload.runtime.replay.held_bytes import HeldBytes
from evenload.runtime.replay.host_copies import Copy, HostCopies
from evenload.types.token_range import Range


@dataclass(eq=False)
class _Layer:
    """Tensors of one layer, on the device or on their way there."""

    tensors: dict[Hashable, Tensor] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    num_bytes: int = 0


class ReturningRows:
    """The rows of some ranges, layer by layer.

    Args:
        ranges: offloaded ones, in row order.
        layers: in the order in which they will be entered.
        index: where the ranges were recorded.
        own_rows_keys: keys of which a tensor-parallel rank has own rows only.
        held: where bytes on the device are counted.
    """

    def __init__(
        self,
        ranges: tuple[Range, ...],
        layers: Sequence[int],
        index: BlockIndex,
        own_rows_keys: Collection[Hashable],
        copies: HostCopies,
        device: torch.device,
        held: HeldBytes,
    ) -> None:
        self.ranges = ranges
        self._known = frozenset(ranges)
        self._order = deque(layers)
        self._index, self._own_rows_keys = index, own_rows_keys
        self._copies, self._device, self._held = copies, device, held
        self._there: dict[int, _Layer] = {}
        self._start_next()

    def __contains__(self, r: Range) -> bool:
        return r in self._known

    def enter(self, layer: int) -> None:
        """Have the tensors of a layer on the device, and those of the next one on their way."""
        for copy in self._there[layer].copies:
            copy.wait()
        self._start_next()

    def leave(self, layer: int) -> None:
        """Nothing of a layer is needed any more."""
        self._held.count("offload_buffers", -self._there.pop(layer).num_bytes)

    def find(self, key: Hashable) -> Tensor | None:
        """All rows that were recorded under a key; None where it is of no layer that is here, or never left."""
        return next((layer.tensors[key] for layer in self._there.values() if key in layer.tensors), None)

    def _start_next(self) -> None:
        if not self._order:
            return
        number = self._order.popleft()
        pieces: dict[Hashable, list[Tensor]] = defaultdict(list)
        for part in self._index.parts(self.ranges):
            for key, host in part.block.host[number].items():
                pieces[key] += host.rows(part.own_rows if key in self._own_rows_keys else part.rows)
        layer = self._there[number] = _Layer()
        for key, parts in pieces.items():
            layer.tensors[key], copy = self._copies.to_device(parts, self._device)
            layer.copies.append(copy)
            layer.num_bytes += layer.tensors[key].nbytes
        self._held.count("offload_buffers", layer.num_bytes)
