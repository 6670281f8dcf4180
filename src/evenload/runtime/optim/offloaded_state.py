"""Keep optimizer state in host memory, and bring it to the device a few elements at a time while weights are updated
(`optimizer.offload_stages`; ZeRO-Offload, Ren et al. 2021, but the device computes).

    host to device   chunk 1   chunk 2   chunk 3             chunk 4
    update                     chunk 1   chunk 2             chunk 3
    device to host                       chunk 1             chunk 2

Copies run beside the update, each direction in an order of its own, since a link carries both at once; a step begins
when all of the step before has been written. AdamW updates every element by itself, so the result is the same to the
bit. The device holds three chunks at once. Price: state bytes there and back over the link to host memory a step, of
which the update hides its own seconds at most.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from evenload.runtime.replay.host_copies import HostCopies, Wait

CHUNK_ELEMENTS = 2**22
"""Of a tensor of the state: 16 MiB in fp32, which a copy over PCIe does not notice to be cut."""
_AHEAD = 2

Chunk = Mapping[str, Tensor]
"""A few elements of every tensor of a state, by name."""


class OffloadedState:
    """Holds tensors in host memory; `begin` names the chunks of an update, which are then taken in order, updated in
    place and given back."""

    def __init__(self, copies_in: HostCopies, copies_out: HostCopies, device: torch.device) -> None:
        self._in, self._out, self._device = copies_in, copies_out, device
        self._coming = deque[Chunk]()
        self._brought = deque[tuple[Chunk, dict[str, tuple[Tensor, Wait]]]]()
        self._written = deque[list[Wait]]()

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a copy of a flat tensor in host memory, of this object for its life."""
        memory = self._in.arena.new_segment(max(1, tensor.nbytes))
        return memory[: tensor.nbytes].view(tensor.dtype).copy_(tensor)

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Begin an update of these chunks of what is kept."""
        assert not self._brought, "an update has not taken all of its chunks"
        self.synchronize()
        self._coming = deque(chunks)
        for _ in range(_AHEAD):
            self._bring()

    def take(self) -> dict[str, Tensor]:
        """Return the next chunk on the device."""
        copies = self._brought[0][1]
        for _, wait in copies.values():
            wait()
        return {name: tensor for name, (tensor, _) in copies.items()}

    def give_back(self, state: Mapping[str, Tensor]) -> None:
        """Write the chunk that was taken last, with its new values, and bring another one."""
        chunk, _ = self._brought.popleft()
        self._written.append([self._out.to_rows(state[name], rows) for name, rows in chunk.items()])
        if len(self._written) == _AHEAD:
            for wait in self._written.popleft():
                wait()
        self._bring()

    def synchronize(self) -> None:
        """Wait until what was given back is in host memory, where the processor reads it."""
        while self._written:
            for wait in self._written.popleft():
                wait()
        self._out.synchronize()

    def _bring(self) -> None:
        if self._coming:
            chunk = self._coming.popleft()
            self._brought.append(
                (chunk, {name: self._in.to_device([rows], self._device) for name, rows in chunk.items()})
            )
