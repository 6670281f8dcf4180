"""A bounded, seeded shuffle window, and the permutation of files.

Algorithm: the window holds up to `capacity` documents; each draw takes one at random and the next
document of the stream takes its place. Randomness is counter-based (Philox keyed by seed and epoch,
counted by draw), so the whole random state is the number of draws: resume is exact, and no draw
depends on how many were made before in the process. Price: O(1) per document, `capacity` documents in
memory; how far a document can move forward is bounded by the window, backward it is geometric.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

Item = TypeVar("Item")

_BLOCK = 1024  # draws made at once; making a Philox costs more than its numbers
_DRAWS, _FILES = 0, 1  # purposes, kept apart in the counter


class ShuffleWindow(Generic[Item]):
    """Documents waiting to be drawn.

    Args:
        capacity: most documents held while drawing; 1 keeps the order.
        seed: of the run.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self.epoch = 0
        self.num_draws = 0
        self._seed = seed
        self._items: list[Item] = []
        self._block = -1
        self._numbers: list[int] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> Sequence[Item]:
        """What is held; the order matters for what is drawn next."""
        return tuple(self._items)

    @property
    def is_full(self) -> bool:
        """No room for another document before the next draw."""
        return len(self._items) >= self.capacity

    def restart(self, epoch: int, num_draws: int = 0, items: Sequence[Item] = ()) -> None:
        """Begin an epoch, or go on in one where a saved window was."""
        self.epoch, self.num_draws, self._items, self._block = epoch, num_draws, list(items), -1

    def add(self, item: Item) -> None:
        """Put in the next document of the stream."""
        self._items.append(item)

    def draw(self) -> Item:
        """Take out one document."""
        block, index = divmod(self.num_draws, _BLOCK)
        if block != self._block:
            self._numbers, self._block = _random_uint64(self._seed, self.epoch, _DRAWS, block, _BLOCK).tolist(), block
        # Multiply-shift instead of modulo: its bias is at most len / 2**64.
        chosen = (self._numbers[index] * len(self._items)) >> 64
        self.num_draws += 1
        self._items[chosen], self._items[-1] = self._items[-1], self._items[chosen]
        return self._items.pop()


def file_order(num_files: int, seed: int, epoch: int) -> list[int]:
    """A permutation of the files that depends on seed and epoch only."""
    numbers = _random_uint64(seed, epoch, _FILES, 0, num_files)
    return np.argsort(numbers, kind="stable").tolist()


def _random_uint64(seed: int, epoch: int, purpose: int, block: int, size: int) -> np.ndarray:
    """uint64[size] raw Philox output; numpy keeps the raw stream stable over versions, its distributions not."""
    key = np.array([seed, epoch], dtype=np.uint64)
    counter = np.array([0, block, purpose, 0], dtype=np.uint64)
    return np.atleast_1d(np.random.Philox(key=key, counter=counter).random_raw(size))
