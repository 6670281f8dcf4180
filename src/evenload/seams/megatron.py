"""Megatron-Core 0.19.2: samples of hybrid context parallelism (`hybrid_context_parallel`) placed by our search.

    from evenload.seams import megatron as seam
    seam.install()  # on every rank, before Megatron's pretrain()

What it changes: `BalancedCPScheduler` places samples on ranks in groups, at whose end all ranks of data and context
parallelism wait. A sample takes a power of two of ranks, so many that each holds at most `max_seqlen_per_dp_cp_rank`
tokens of it; each rank runs its samples one by one, so a group may hold any number. Megatron prices a sample by L²
alone and closes a group at the first balanced moment; here a sample has the seconds of `Cost`, its `micro_batch_s` too,
and a group goes on as long as that shortens the step. What is trained does not change: every sample once, on aligned
ranks that Megatron has process groups for, in one order on all of them. Samples may take more ranks than they need,
which Megatron does too and for which it wants lengths that twice all ranks divide.

Where all samples take one rank, the step is one group, divided by `micro_batches` with `waits="step"`. Long ones first:
for a number of ends of the group, samples are placed on blocks of ranks, those of the most ranks first, on the block
with the least work, or on new ones; what does not end by then is left for the next group. The end is kept for which
the group and all work left, spread evenly, take the least time. Last, ranks that got nothing take part in the work of
their neighbours. `integrations.megatron_step` has no context parallelism; `evenload train` plans it by `plan.dacp` and
`plan.dp_merge`, which place documents in one pipeline's packs, a different contract.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evenload.errors import ConfigError, DataError
from evenload.plan.micro_batches import Cost, micro_batches
from evenload.seams.methods import Method, Replaced, require_release

RELEASES = ("0.19.2",)
Groups = list[list[list[int]]]
"""Samples of every rank of every group."""
_SHARES = (1.0, 1.4, 2.0, math.inf)  # of all work: samples that take longer get more ranks than they need
_NUM_ENDS = 24  # of a group, tried
_WAIT = 0.1  # of `micro_batch_s`: what a wait for all ranks costs, far less than the launches of a sample


def install(cost: Cost | None = None) -> Replaced:
    """Place the samples of every step in this process; every rank needs it. Returns what undoes it.

    Args:
        cost: predicts seconds of a sample on one rank; None = `Cost()`.

    Raises:
        MissingPackageError: Megatron-Core is not installed.
        ConfigError: another release, or the seam is installed already.
    """
    require_release("megatron-core", RELEASES)
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import (  # type: ignore[missing-import]
        BalancedCPScheduler,
    )

    def placing(theirs: Callable) -> Callable:
        def get_groups_and_subsamples(self: Any, sample_id_seqlens: list[tuple[int, int]], config: Any) -> Any:
            ids, lengths = [one for one, _ in sample_id_seqlens], [int(length) for _, length in sample_id_seqlens]
            groups = groups_of(lengths, self.total_hdp_gpus, self.max_seq_len_per_rank, cost or Cost())
            of_rank = [[[[of[at] for at in rank] for rank in group] for group in groups] for of in (lengths, ids)]
            return of_rank[0], of_rank[1]

        return get_groups_and_subsamples

    name = "get_groups_and_subsamples"
    return Replaced(Method(BalancedCPScheduler, name, ("self", "sample_id_seqlens", "config"), placing))


def groups_of(lengths: Sequence[int], ranks: int, max_tokens: int, cost: Cost) -> Groups:
    """Return the samples of every rank of every group, `[group][rank]` indices; ranks that share a sample are aligned.

    Args:
        lengths: tokens of every sample, each at least 1.
        ranks: of data and context parallelism together, a power of two.
        max_tokens: of one sample on one rank.
        cost: predicts seconds of a sample.

    Raises:
        ConfigError: ranks are no power of two.
        DataError: a sample is empty, or too long for all ranks together.
    """
    if ranks < 1 or ranks & (ranks - 1):
        raise ConfigError(f"{ranks} ranks of data and context parallelism, must be a power of two for this seam")
    if any(not 1 <= length <= ranks * max_tokens for length in lengths):
        raise DataError(
            f"samples have {min(lengths):,} to {max(lengths):,} tokens; the least is 1, and {ranks} ranks hold "
            f"{max_tokens:,} each (max_seqlen_per_dp_cp_rank)"
        )
    works = cost.work_s(np.asarray(lengths, np.int64)).tolist()
    least = [1 << (-(-length // max_tokens) - 1).bit_length() for length in lengths]
    plans = {}
    for share in _SHARES:
        samples = [_Sample(at, size, work_s) for at, (size, work_s) in enumerate(zip(least, works, strict=True))]
        _spread_longest(samples, ranks, share, cost)
        sizes = tuple(sample.size for sample in samples)
        if sizes not in plans:
            plans[sizes] = _divided(samples, ranks, cost)
    return min(plans.values())[1]


@dataclass
class _Sample:
    at: int
    size: int  # ranks that share it, at least
    work_s: float  # on one rank

    def busy_s(self, size: int, cost: Cost) -> float:
        """Return the seconds of each of `size` ranks that share it."""
        return self.work_s / size + cost.micro_batch_s


@dataclass
class _Block:
    """Holds ranks that share all samples of a group that any of them has."""

    size: int
    samples: list[_Sample] = field(default_factory=list)
    busy_s: float = 0.0


def _divided(samples: list[_Sample], ranks: int, cost: Cost) -> tuple[float, Groups]:
    """Return the seconds of a step and its groups."""
    left = sorted(samples, key=lambda sample: (-sample.size, -sample.work_s, sample.at))
    step_s, groups = 0.0, []
    while left:
        if left[0].size == 1 and len(left) >= ranks:
            busy = [sample.busy_s(1, cost) for sample in left]
            made = micro_batches([1] * len(left), ranks, work_s=busy, waits="step", count=1, cost=Cost(0.0, 0.0, 0.0))
            groups.append([[left[at].at for at in rank[0]] for rank in made.ranks])
            return step_s + made.step_s, groups
        blocks, left = _best_group(left, ranks, cost)
        # Powers of two in descending order stand at multiples of themselves.
        blocks.sort(key=lambda block: -block.size)
        groups.append([[sample.at for sample in block.samples] for block in blocks for _ in range(block.size)])
        step_s += max(block.busy_s for block in blocks)
    return step_s, groups


def _spread_longest(samples: list[_Sample], ranks: int, share: float, cost: Cost) -> None:
    """Double the ranks of the longest sample while it alone takes longer than so many even shares of all work."""
    even_s = _even_s(samples, ranks, cost)
    longest = [(-sample.busy_s(sample.size, cost), sample.at) for sample in samples]
    heapq.heapify(longest)
    while longest and -longest[0][0] > share * even_s:
        sample = samples[longest[0][1]]
        if sample.size == ranks:
            heapq.heappop(longest)
            continue
        even_s += sample.size * cost.micro_batch_s / ranks
        sample.size *= 2
        heapq.heapreplace(longest, (-sample.busy_s(sample.size, cost), sample.at))


def _even_s(samples: list[_Sample], ranks: int, cost: Cost) -> float:
    return sum(sample.busy_s(sample.size, cost) * sample.size for sample in samples) / ranks


def _best_group(left: list[_Sample], ranks: int, cost: Cost) -> tuple[list[_Block], list[_Sample]]:
    """Return the blocks of a group, and the samples left, of the end for which both together take the least time."""
    least = max(sample.busy_s(sample.size, cost) for sample in left if sample.size == left[0].size)
    even_s = _even_s(left, ranks, cost)
    best: tuple[float, list[_Block], list[_Sample]] = math.inf, [], []
    for end_s in np.geomspace(least, max(least, even_s) * 1.5, _NUM_ENDS).tolist():
        blocks, rest = _group(left, ranks, end_s * (1 + 1e-9), cost)
        rest_s = _even_s(rest, ranks, cost)
        longest = max((sample.busy_s(sample.size, cost) for sample in rest), default=0.0)
        group_s = max(block.busy_s for block in blocks)
        # Groups as long as this one follow, and each costs a wait.
        total_s = group_s + max(rest_s, longest) + _WAIT * cost.micro_batch_s * rest_s / group_s
        if total_s < best[0]:
            best = total_s, blocks, rest
    return best[1], best[2]


def _group(left: list[_Sample], ranks: int, end_s: float, cost: Cost) -> tuple[list[_Block], list[_Sample]]:
    """Place samples, those of the most ranks first, on blocks that end by `end_s`; return the others too."""
    open_blocks: dict[int, list[tuple[float, int]]] = {}  # by size, heaps of seconds and the block
    blocks, rest, free, smallest = [], [], ranks, left[-1].size
    for sample in left:
        heap = open_blocks.setdefault(sample.size, [])
        busy_s = sample.busy_s(sample.size, cost)
        fits = heap and heap[0][0] + busy_s <= end_s
        # Blocks of more ranks shall be few, so that others have ranks; of the fewest ranks there shall be all.
        if sample.size <= free and busy_s <= end_s and (not fits or sample.size == smallest):
            free -= sample.size
            blocks.append(_Block(sample.size, [sample], busy_s))
            heapq.heappush(heap, (busy_s, len(blocks) - 1))
            continue
        for size in (size for size in sorted(open_blocks) if size >= sample.size and open_blocks[size]):
            busy_s, at = open_blocks[size][0]
            if (busy_s := busy_s + sample.busy_s(size, cost)) <= end_s:
                blocks[at].samples.append(sample)
                blocks[at].busy_s = busy_s
                heapq.heapreplace(open_blocks[size], (busy_s, at))
                break
        else:
            rest.append(sample)
    while free:
        # Ranks without samples join the block with the most work of those that they can double.
        block = max((block for block in blocks if block.size <= free), key=lambda block: block.busy_s)
        free -= block.size
        block.size *= 2
        block.busy_s = sum(sample.busy_s(block.size, cost) for sample in block.samples)
    return blocks, rest
