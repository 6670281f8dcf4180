"""Pack whole documents into groups, and price and schedule groups as packs of all replicas.

Best-fit decreasing fills windows as Megatron-LM's baseline does (Krell et al. 2021); O(n log n). Longest first is
Graham's LPT (1969): at most 4/3 - 1/(3k) of the best makespan; O(n log n), and O(n k) where most groups are full under
a token capacity. `pack_greedily` is the inner loop of WLB's Algorithm 1: each document, in the order given, goes to the
group with the least work; where that would exceed the token limit to the group with the fewest tokens; where that would
too it is left over. Replicas are such groups, too (SlimPack §4.1.1), balanced by predicted seconds. All packs of a step
are priced at once, because numpy's cost is by the call; replicas with equally many packs share one schedule.
"""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.cost.pack_pricing import pipeline_tasks
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.planning.problem import ReplicaChoice, StepProblem
from evenload.schedule.static_schedules import ONE_F_ONE_B
from evenload.types.columns import whole_document_columns
from evenload.types.pipeline import ActionColumns
from evenload.types.text import counted

LEFT_OVER = -1  # Group of a document that no group can hold
NO_LIMIT = 2**62  # Tokens that no group reaches


def best_fit_decreasing(num_tokens: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Place documents (int64[n] tokens, each at least 1), longest first, into the fullest bin of `capacity` tokens that
    can hold them; equal lengths and bins by index. Return per bin its document indices in the order of placement.

    Raises:
        ConfigError, InfeasiblePlanError: a length below 1, or longer than `capacity`.
    """
    return _split(*_native.best_fit_decreasing(_checked_tokens(num_tokens, capacity), capacity))


class WholePacks:
    """Take documents in the order in which they come for as long as `num_packs` packs of `capacity` tokens hold them
    whole; for one that finds no room all are packed anew, longest first, about once a batch. O(log packs) a document.
    `packs` has the indices of those taken."""

    def __init__(self, num_packs: int, capacity: int) -> None:
        self.packs: list[list[int]] = [[] for _ in range(num_packs)]
        self._capacity, self._lengths = capacity, list[int]()
        self._room = [(capacity, pack) for pack in range(num_packs)]

    def take(self, num_tokens: int) -> bool:
        """Take a document of at most `capacity` tokens; False where the packs cannot hold it too."""
        lengths, at = self._lengths, bisect_left(self._room, (num_tokens, -1))
        lengths.append(num_tokens)
        if at < len(self._room):
            room, pack = self._room.pop(at)
            self.packs[pack].append(len(lengths) - 1)
            insort(self._room, (room - num_tokens, pack))
            return True
        anew = best_fit_decreasing(np.array(lengths, np.int64), self._capacity)
        if len(anew) > len(self.packs):
            lengths.pop()
            return False
        self.packs[:] = anew + [[] for _ in self.packs[len(anew) :]]
        used = [sum(lengths[index] for index in pack) for pack in self.packs]
        self._room = sorted((self._capacity - tokens, pack) for pack, tokens in enumerate(used))
        return True


def longest_first(
    work_s: NDArray[np.float64],
    num_groups: int,
    *,
    num_tokens: NDArray[np.int64] | None = None,
    capacity: int | None = None,
    load_s: NDArray[np.float64] | None = None,
) -> list[list[int]]:
    """Place items in descending work into the group with the least work that can hold them; equal ones by index. With a
    capacity, a new group opens where none can hold an item, so more than `num_groups` may come back; with fewer items
    than groups the last come back empty. Return per group its item indices in the order of placement.

    Args:
        work_s: float64[n] seconds, finite and not negative.
        num_tokens: int64[n] and `capacity`: token limit of every group; both or neither.
        load_s: float64[num_groups], the work that groups begin with, not negative; None = nothing.

    Raises:
        ConfigError, InfeasiblePlanError: values out of range; an item of more than `capacity` tokens.
    """
    work = _checked_work("longest_first", work_s, num_groups)
    sizes, limit = np.empty(0, dtype=np.int64), 1
    if num_tokens is not None and capacity is not None:
        sizes, limit = _checked_tokens(num_tokens, capacity), capacity
    if (num_tokens is None) != (capacity is None) or (num_tokens is not None and len(sizes) != len(work)):
        raise ConfigError(f"longest_first: give {len(work)} lengths and capacity together, or neither")
    loads = None if load_s is None else _checked_work("longest_first: load_s", load_s, num_groups)
    if loads is not None and len(loads) != num_groups:
        raise ConfigError(f"longest_first: {len(loads)} loads for {num_groups} groups")
    return _split(*_native.longest_first(work, num_groups, sizes, limit, loads))


def longest_first_within(
    work_s: NDArray[np.float64], count: int, unit: int, num_tokens: NDArray[np.int64], capacity: int | None
) -> list[list[int]]:
    """Place as `longest_first` into `count` groups, or into as many more, in multiples of `unit`, as the limit asks."""
    tokens = None if capacity is None else num_tokens
    while True:
        groups = longest_first(work_s, count, num_tokens=tokens, capacity=capacity)
        if len(groups) <= count:
            return groups
        count = -(-len(groups) // unit) * unit


def assign_replicas(document_s: NDArray[np.float64], dp: int) -> list[NDArray[np.int64]]:
    """Assign documents to replicas by forward + backward seconds (float64[n]), longest first; indices ascending."""
    return [np.sort(np.array(group, dtype=np.int64)) for group in longest_first(document_s, dp)]


def _checked_work(name: str, work_s: NDArray[np.float64], num_groups: int) -> NDArray[np.float64]:
    work = np.ascontiguousarray(work_s, np.float64)
    if work.ndim != 1 or not np.isfinite(work).all() or (work < 0).any() or num_groups < 1:
        raise ConfigError(
            f"{name}: works of shape {work.shape} must be a column, finite and not negative, num_groups {num_groups} "
            "at least 1"
        )
    return work


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


def pack_counts(total_tokens: int, pp: int, candidates: int, max_pack_tokens: int | None) -> list[int]:
    """Return `i·pp` for i growing by powers of two from the least that the token limit allows, at most the tokens: the
    gain of more packs falls roughly as 1/i, so doublings cover the optimum within a few percent."""
    least = 1 if max_pack_tokens is None else -(-total_tokens // (max_pack_tokens * pp))
    counts = [max(1, least) * 2**k * pp for k in range(candidates)]
    return [count for count in counts if count <= total_tokens] or counts[:1]


def pack_greedily(
    work_s: NDArray[np.float64], num_tokens: NDArray[np.int64], num_groups: int, capacity: int | None
) -> NDArray[np.int64]:
    """Place documents of so much work (float64[n], finite, not negative) and so many tokens (int64[n], at least 1 each)
    in the order given, into groups of at most `capacity` tokens (None = no limit); return the group of each, int64[n],
    `LEFT_OVER` = none. Raises `ConfigError` for columns of different lengths, a bad work, length or group count."""
    work, sizes = _checked_work("pack_greedily", work_s, num_groups), np.ascontiguousarray(num_tokens, np.int64)
    if work.shape != sizes.shape or (len(sizes) and sizes.min() < 1):
        raise ConfigError(f"pack_greedily: {len(work)} works need as many lengths, each at least 1")
    return _native.pack_greedily(work, sizes, num_groups, NO_LIMIT if capacity is None else capacity)


def members_of(group_of: NDArray[np.int64], items: NDArray[np.int64], num_groups: int) -> list[list[int]]:
    """List the items of every group of `pack_greedily` in the order of placement; items left over are in none."""
    placed = group_of != LEFT_OVER
    by_group = np.argsort(group_of[placed], kind="stable")
    members = items[placed][by_group].tolist()
    edges = [0, *np.cumsum(np.bincount(group_of[placed], minlength=num_groups)).tolist()]
    return [members[edges[group] : edges[group + 1]] for group in range(num_groups)]


Shares = list[list[list[int]]]  # Per replica, per pack, document indices of the problem


def assign_evenly(problem: StepProblem, groups: list[list[int]], note: str = "") -> tuple[ReplicaChoice, ...]:
    """Share groups evenly among replicas, by number and by time; 1F1B, longest packs first."""
    groups = [group for group in groups if group]
    dp = problem.layout.dp
    group_of = np.repeat(np.arange(len(groups)), np.array([len(group) for group in groups], np.int64))
    documents = np.array(list(itertools.chain.from_iterable(groups)), np.int64)
    group_s = np.bincount(group_of, weights=problem.document_s[documents], minlength=len(groups)).astype(np.float64)
    one_each = np.ones(len(groups), np.int64)
    shares = longest_first(group_s, dp, num_tokens=one_each, capacity=max(1, -(-len(groups) // dp)))
    return run_packs(problem, [[groups[index] for index in share] for share in shares], note)


def assign_in_turn(problem: StepProblem, packs: list[list[int]], *, padded: bool = False) -> tuple[ReplicaChoice, ...]:
    """Give pack i to replica `i mod dp`; 1F1B in that order."""
    shares = [packs[dp_rank :: problem.layout.dp] for dp_rank in range(problem.layout.dp)]
    return run_packs(problem, shares, padded=padded)


def run_packs(
    problem: StepProblem, shares: Shares, note: str = "", *, padded: bool = False
) -> tuple[ReplicaChoice, ...]:
    """Price and simulate every replica's packs in the order given, under the schedule of the options (1F1B)."""
    rule = problem.options.rule(ONE_F_ONE_B)
    packs = [pack for share in shares for pack in share]
    # All packs of the step as if they were one replica's; `doc` counts `everyone`.
    whole = whole_document_columns(packs, problem.num_tokens, problem.layout.cp, padded=padded)
    everyone = whole.doc.astype(np.int64)
    whole = replace(whole, doc=np.arange(len(everyone), dtype=np.int32))
    all_tasks = pipeline_tasks(problem.costs, problem.packs_of(everyone, whole), split=rule.splits_backward)
    actions: dict[int, ActionColumns] = {}

    def choices() -> Iterator[ReplicaChoice]:
        for first, last in itertools.pairwise([0, *itertools.accumulate(map(len, shares))]):
            count, (lo, hi) = last - first, whole.pack_offset[[first, last]].tolist()
            columns = replace(whole.pack_range(first, last), doc=np.arange(hi - lo, dtype=np.int32))
            tasks, documents = all_tasks.rows(first, last), everyone[lo:hi]
            if rule.reads_times or count not in actions:
                actions[count] = rule.actions(tasks, problem.cap_bytes)
            label, own = f"{counted(count, 'pack')}, {rule.name}", problem.packs_of(documents, columns)
            yield ReplicaChoice(documents, problem.ordered(label, own, tasks, actions[count], rule.name), note)

    return problem.effort.faster(choices())
