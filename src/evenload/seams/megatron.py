"""Megatron-Core 0.19.2: samples of hybrid context parallelism (`hybrid_context_parallel`) placed by our search.

    from evenload.seams import megatron as seam
    seam.install()  # on every rank, before Megatron's pretrain()

What it changes: `BalancedCPScheduler` places samples on ranks in groups, at whose end all ranks of data and context
parallelism wait. A sample takes a power of two of ranks, so many that each holds at most `max_seqlen_per_dp_cp_rank`
tokens of it. Megatron prices a sample by L² alone and closes a group at the first balanced moment; here a sample has
the seconds of `Cost`, and all samples on equally many ranks are one group, divided by `micro_batches` with
`waits="step"`. The longest of a group take twice the ranks, in the next one, where that makes the step shorter or too
few are left for all ranks; Megatron does so too, and wants lengths that twice all ranks divide.

What stays: every sample is trained once, on aligned ranks that Megatron has process groups for, in one order on all of
them. Steps of fewer samples than ranks are Megatron's own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError, DataError
from evenload.planning.micro_batches import Cost, Rules, micro_batches
from evenload.seams.replacing import Replaced, module_of, require_release

_COST = Cost()


def install(cost: Cost = _COST) -> Replaced:
    """Place the samples of every step in this process by `cost`, the seconds of a sample on one rank; every rank needs
    it. Returns what undoes it. Raises `MissingPackageError` and `ConfigError` as `require_release` and `Replaced`."""
    tested = require_release("megatron-core", ("0.19.2",))
    owner = module_of("megatron.core.pipeline_parallel.hybrid_cp_schedule", tested).BalancedCPScheduler
    theirs = owner.get_groups_and_subsamples

    def get_groups_and_subsamples(self: Any, sample_id_seqlens: list[tuple[int, int]], config: Any) -> Any:
        if len(sample_id_seqlens) < self.total_hdp_gpus:
            return theirs(self, sample_id_seqlens, config)
        ids, lengths = [one for one, _ in sample_id_seqlens], [int(length) for _, length in sample_id_seqlens]
        groups = groups_of(lengths, self.total_hdp_gpus, self.max_seq_len_per_rank, cost)
        of_rank = [[[[of[at] for at in rank] for rank in group] for group in groups] for of in (lengths, ids)]
        return of_rank[0], of_rank[1]

    return Replaced(tested, (owner, get_groups_and_subsamples))


def groups_of(lengths: Sequence[int], ranks: int, max_tokens: int, cost: Cost) -> list[list[list[int]]]:
    """Return the samples of every rank of every group, `[group][rank]` indices; ranks that share a sample are aligned.

    Args:
        lengths: tokens of every sample; an empty one, or one too long for all ranks together, is a `DataError`.
        ranks: of data and context parallelism together, a power of two, else a `ConfigError`.
        max_tokens: of one sample on one rank.
    """
    if ranks < 1 or ranks & (ranks - 1):
        raise ConfigError(f"{ranks} ranks of data and context parallelism, must be a power of two for this seam")
    if any(not 1 <= length <= ranks * max_tokens for length in lengths):
        raise DataError(
            f"samples have {min(lengths):,} to {max(lengths):,} tokens; the least is 1, and {ranks} ranks hold "
            f"{max_tokens:,} each (max_seqlen_per_dp_cp_rank)"
        )
    tokens = np.array(lengths, np.int64)
    work_s, least = cost.work_s(tokens), -(-tokens // max_tokens)
    groups, size, left = [], 1, np.argsort(-tokens, kind="stable")
    while len(left):
        blocks, too_long = ranks // size, int((least[left] > size).sum())
        # So many take more ranks; the others are at least one for every block of ranks, or none.
        most = min(len(left) - blocks, too_long + 2 * blocks)
        moved = [*range(too_long, most + 1), len(left)] if size < ranks else [0]
        made = {at: _group(left[at:], work_s[left[at:]] / size + cost.micro_batch_s, blocks) for at in moved}
        later_s = {at: (work_s[left[:at]].sum() + at * 2 * size * cost.micro_batch_s) / ranks for at in moved}
        best = min(moved, key=lambda at: made[at][0] + later_s[at])
        if best < len(left):
            groups.append([samples for samples in made[best][1] for _ in range(size)])
        left, size = left[:best], size * 2
    return groups[::-1]


def _group(samples: NDArray[np.int64], busy_s: NDArray[np.float64], blocks: int) -> tuple[float, list[list[int]]]:
    """Return the seconds of a group, and the samples of every block of ranks that share all of theirs."""
    rules: Rules = {"work_s": busy_s, "cost": Cost(0.0, 0.0, 0.0), "waits": "step", "count": 1}
    made = micro_batches(np.ones(len(samples), np.int64), blocks, **rules)
    return made.step_s, [samples[rank[0]].tolist() for rank in made.ranks]
