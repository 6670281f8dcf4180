"""`GroupPool`: process groups of a run, shared by all layouts that it may take.

A layout needs several groups of the same ranks, because transfers of one group may wait for each other: two channels
between two neighbours, the sum over two replicas. Different layouts never run at the same time. So the first, second,
... group of a set of ranks is made once, and every layout takes them in that order.

Price on gloo: 1.3-1.6 ms a group (docs/design/runtime.md); a layout that has another's groups costs nothing.

On NCCL a channel's kernels wait on the device for the other end, and hold the processors that they run on meanwhile. So
groups of channels get few of them, and a stream that comes before computation; others get what NCCL takes.
"""

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

CHANNEL_CTAS = 4
"""Blocks of threads of one transfer of a channel on a GPU, each on a processor of its own (an H100 has 132). Not
measured yet."""


_Key = tuple[tuple[int, ...], bool]
"""Ranks, and whether a group of theirs has the options of channels."""


class GroupPool:
    """Groups by ranks. Every rank makes the same calls in the same order, members or not.

    Args:
        backend: of tensors on the ranks' devices.
        timeout: how long a rank waits for another.
    """

    def __init__(self, backend: str, timeout: timedelta) -> None:
        self._backend, self._timeout = backend, timeout
        self._made: dict[_Key, list[dist.ProcessGroup]] = {}
        self._taken: Counter[_Key] = Counter()
        self.num_groups = 0
        """Made so far, on all ranks together."""

    def begin_layout(self) -> None:
        """What earlier layouts took may be taken again."""
        self._taken.clear()

    def take(self, ranks: list[int], *, is_channel: bool = False) -> dist.ProcessGroup:
        """A group of these ranks, in ascending order, that the layout at hand has not taken yet; for a channel, or for
        anything else."""
        # Only where channels have options of their own are their groups no good for others.
        key = tuple(ranks), is_channel and self._backend == "nccl"
        groups = self._made.setdefault(key, [])
        if self._taken[key] == len(groups):
            groups.append(self.make(ranks, options=channel_options(self._timeout) if key[1] else None))
        self._taken[key] += 1
        return groups[self._taken[key] - 1]

    def make(
        self, ranks: list[int], backend: str | None = None, timeout: timedelta | None = None, options: Any = None
    ) -> dist.ProcessGroup:
        """A group beside those that layouts take; `options` are of its backend."""
        self.num_groups += 1
        made = dist.new_group(
            ranks, timeout=timeout or self._timeout, backend=backend or self._backend, pg_options=options
        )
        return made  # type: ignore[return-value]


def channel_options(timeout: timedelta) -> Any:
    """Of an NCCL group that carries channels: few processors, at once. Torch without NCCL has none."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timeout  # else torch warns that this and `new_group`'s are not the same
    options.config.min_ctas, options.config.max_ctas = 1, CHANNEL_CTAS
    return options
