"""`GroupPool`: process groups of a run, shared by all layouts that it may take.

A layout needs several groups of the same ranks, because transfers of one group may wait for each other: two channels
between two neighbours, the sum over two replicas. Different layouts never run at the same time. So the first, second,
... group of a set of ranks is made once, and every layout takes them in that order.

Price on gloo: 1.3-1.6 ms a group (docs/design/runtime.md); a layout that has another's groups costs nothing.
"""

from collections import Counter
from datetime import timedelta

import torch.distributed as dist


class GroupPool:
    """Groups by ranks. Every rank makes the same calls in the same order, members or not.

    Args:
        backend: of tensors on the ranks' devices.
        timeout: how long a rank waits for another.
    """

    def __init__(self, backend: str, timeout: timedelta) -> None:
        self._backend, self._timeout = backend, timeout
        self._made: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
        self._taken: Counter[tuple[int, ...]] = Counter()
        self.num_groups = 0
        """Made so far, on all ranks together."""

    def begin_layout(self) -> None:
        """What earlier layouts took may be taken again."""
        self._taken.clear()

    def take(self, ranks: list[int]) -> dist.ProcessGroup:
        """A group of these ranks, in ascending order, that the layout at hand has not taken yet."""
        key = tuple(ranks)
        groups = self._made.setdefault(key, [])
        if self._taken[key] == len(groups):
            groups.append(self.make(ranks))
        self._taken[key] += 1
        return groups[self._taken[key] - 1]

    def make(self, ranks: list[int], backend: str | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
        """A group beside those that layouts take."""
        self.num_groups += 1
        made = dist.new_group(ranks, timeout=timeout or self._timeout, backend=backend or self._backend)
        return made  # type: ignore[return-value]
