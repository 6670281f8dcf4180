"""`ReplicaBlock`: data-parallel replicas that may share packs (DP-Merge)."""

from typing import NamedTuple


class ReplicaBlock(NamedTuple):
    """Replicas `first` to `first + size - 1`; aligned: `size` divides the replicas and `first` is a multiple of it.

    Blocks of one plan are nested: two that have a replica in common lie one in the other (`nested_sizes`).
    """

    first: int
    size: int

    @property
    def replicas(self) -> range:
        """Members, as data-parallel ranks."""
        return range(self.first, self.first + self.size)


def block_sizes(dp: int) -> list[int]:
    """Replicas of a block that a plan may use, ascending: all divisors of dp but 1."""
    return [size for size in range(2, dp + 1) if dp % size == 0]


def nested_sizes(dp: int) -> list[int]:
    """Sizes of which each divides the next, so that their blocks are nested, as many as there can be: powers of two
    first; 12 gives 2, 4, 12. O(dp)."""
    found, size = [], 1
    while size < dp:
        size = next(larger for larger in range(2 * size, dp + 1, size) if dp % larger == 0)
        found.append(size)
    return found
