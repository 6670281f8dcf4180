"""`ReplicaBlock`: data-parallel replicas that may share packs (DP-Merge)."""

from typing import NamedTuple


class ReplicaBlock(NamedTuple):
    """Replicas `first` to `first + size - 1`; aligned: `size` is a power of two and `first` a multiple of it.

    Blocks are nested: two that have a replica in common lie one in the other.
    """

    first: int
    size: int

    @property
    def replicas(self) -> range:
        """Members, as data-parallel ranks."""
        return range(self.first, self.first + self.size)
