"""`TorchPeers`: loaders of all ranks talk over `torch.distributed`, on CPU tensors and a group that one thread uses."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenload.runtime.comm.collectives import all_gather_single


class TorchPeers:
    """See `evenload.data.batches.Peers`; the group is of all ranks that read together, with a CPU backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes: one gather of sizes, one of bytes padded to the longest."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        all_gather_single(sizes, torch.tensor([len(data)]), group=self._group)
        longest = int(sizes.max())
        if not longest:
            return [b""] * self.size
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else own[:0]
        everyone = torch.zeros(self.size * longest, dtype=torch.uint8)
        all_gather_single(everyone, own, group=self._group)
        rows = everyone.view(self.size, longest).numpy()
        return [rows[rank, : int(size)].tobytes() for rank, size in enumerate(sizes)]

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's bytes: their number, then they."""
        size = torch.tensor([len(data)])
        dist.broadcast(size, group=self._group, group_src=0)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0 and data:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(content, group=self._group, group_src=0)
        return content.numpy().tobytes()

    def exchange(self, outgoing: Sequence[NDArray[np.int32]], incoming: Sequence[int]) -> list[NDArray[np.int32]]:
        """One all-to-all of the sizes that both sides know."""
        sent = torch.from_numpy(np.concatenate(outgoing).astype(np.int32, copy=False))
        received = torch.empty(sum(incoming), dtype=torch.int32)
        dist.all_to_all_single(received, sent, list(incoming), [len(part) for part in outgoing], group=self._group)
        return [part.numpy() for part in received.split(list(incoming))]
