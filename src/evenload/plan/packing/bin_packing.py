"""Whole documents into groups: best-fit decreasing by tokens, longest first (LPT) by work.

Best-fit decreasing fills windows as Megatron-LM's baseline does (SlimPack §6; Krell et al. 2021,
"Efficient Sequence Packing without Cross-contamination"); O(n log n). Longest first is Graham's LPT
(1969): at most 4/3 - 1/(3k) of the best makespan, in practice 1.0001 on thousands of documents;
O(n log n), and O(n k) in the worst case when most groups are full under a token capacity.

Replicas are such groups, too (SlimPack phase 1, §4.1.1). SlimPack balances forward FLOPs; that leaves up to 1.5 %
spread because attention's backward is 2.5x and linear's 2x, so we balance predicted seconds of both. One document
longer than its share needs replicas that share it (`plan.packing.dp_merge`).
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.errors import ConfigError, InfeasiblePlanError


def best_fit_decreasing(num_tokens: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Place documents, longest first, into the fullest bin that still has room.

    Equal lengths go in index order; equally full bins by the lowest bin index.

    Args:
        num_tokens: int64[n], each at least 1.
        capacity: tokens of a bin.

    Returns:
        Per bin its document indices in the order they were placed.

    Raises:
        InfeasiblePlanError: a document is longer than `capacity`.
        ConfigError: a length below 1.
    """
    return _split(*_native.best_fit_decreasing(_checked_tokens(num_tokens, capacity), capacity))


def longest_first(
    work_s: NDArray[np.float64],
    num_groups: int,
    *,
    num_tokens: NDArray[np.int64] | None = None,
    capacity: int | None = None,
    load_s: NDArray[np.float64] | None = None,
) -> list[list[int]]:
    """Place items in descending work into the group with the least work that has room.

    Equal works go in index order; equally loaded groups by the lowest index. With a capacity, a new
    group opens when no group has room, so more than `num_groups` may come back; with fewer items than
    groups the last groups come back empty.

    Args:
        work_s: float64[n] seconds, finite and not negative.
        num_groups: groups to start with, at least 1.
        num_tokens: int64[n] and `capacity`: token limit of every group; both or neither.
        load_s: float64[num_groups], the work that groups begin with, not negative; None = nothing.

    Returns:
        Per group its item indices in the order they were placed.

    Raises:
        InfeasiblePlanError: an item has more than `capacity` tokens.
        ConfigError: shapes that differ, a bad work, length or group count.
    """
    work = np.ascontiguousarray(work_s, dtype=np.float64)
    if work.ndim != 1 or not np.isfinite(work).all() or (work < 0).any():
        raise ConfigError(f"longest_first: work_s of shape {work.shape} must be one finite column without negatives")
    if num_groups < 1:
        raise ConfigError(f"longest_first: num_groups is {num_groups}, must be at least 1")
    if (num_tokens is None) != (capacity is None):
        raise ConfigError("longest_first: give num_tokens and capacity together, or neither")
    sizes, limit = np.empty(0, dtype=np.int64), 1
    if num_tokens is not None and capacity is not None:
        sizes, limit = _checked_tokens(num_tokens, capacity), capacity
        if len(sizes) != len(work):
            raise ConfigError(f"longest_first: {len(work)} works but {len(sizes)} lengths")
    loads = None if load_s is None else np.ascontiguousarray(load_s, dtype=np.float64)
    if loads is not None and (loads.shape != (num_groups,) or not np.isfinite(loads).all() or (loads < 0).any()):
        raise ConfigError(
            f"longest_first: load_s of shape {loads.shape} must be one finite column of {num_groups} without negatives"
        )
    return _split(*_native.longest_first(work, num_groups, sizes, limit, loads))


def assign_replicas(document_s: NDArray[np.float64], dp: int) -> list[NDArray[np.int64]]:
    """Document indices of every replica, longest first, each ascending (arrival order); a replica may be empty.

    Args:
        document_s: float64[n], forward + backward seconds of every document.
    """
    return [np.sort(np.array(group, dtype=np.int64)) for group in longest_first(document_s, dp)]


def _checked_tokens(num_tokens: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    sizes = np.ascontiguousarray(num_tokens)
    if sizes.ndim != 1 or (sizes.dtype.kind not in "iu" and len(sizes)):
        raise ConfigError(f"num_tokens must be one integer column, got shape {sizes.shape}, dtype {sizes.dtype}")
    sizes = sizes.astype(np.int64, copy=False)
    if len(sizes) and sizes.min() < 1:
        raise ConfigError(f"document {int(sizes.argmin())} has {int(sizes.min())} tokens; every length must be >= 1")
    if len(sizes) and sizes.max() > capacity:
        raise InfeasiblePlanError(
            f"document {int(sizes.argmax())} has {int(sizes.max())} tokens, a pack holds {capacity}; "
            "raise the capacity, or let documents be sliced, split or dropped"
        )
    return sizes


def _split(members: NDArray[np.int64], offset: NDArray[np.int64]) -> list[list[int]]:
    items = members.tolist()
    return [items[lo:hi] for lo, hi in itertools.pairwise(offset.tolist())]
