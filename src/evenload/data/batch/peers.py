"""`Peers`: how the loaders of all ranks talk to each other; and the one rank that has nobody to talk to.

All calls are collective: every rank makes them in the same order. `evenload.runtime.comm.torch_peers` runs them over
`torch.distributed`; this package knows nothing of torch.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Peers(Protocol):
    """The ranks that read one data set together: `size` of them, this one is `rank`."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank, on every rank."""
        ...

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's bytes on every rank; what the others give is not looked at."""
        ...

    def exchange(self, outgoing: Sequence[NDArray[np.int32]], incoming: Sequence[int]) -> list[NDArray[np.int32]]:
        """Send `outgoing[r]` to rank r and receive int32[incoming[r]] from it; by rank."""
        ...


class Alone:
    """A single rank."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data

    def exchange(self, outgoing: Sequence[NDArray[np.int32]], incoming: Sequence[int]) -> list[NDArray[np.int32]]:
        return list(outgoing)
