"""The search of native/micro_batches.cpp in plain Python: the same micro-batches to the bit."""

import math
from dataclasses import dataclass, field

import numpy as np

from reference.bin_packing import best_fit_decreasing, longest_first

EQUAL, LEAST_GAIN = 1e-9, 1e-5
SAME_INDEX, OTHER_INDEX = 10, 14
MOST_PASSES, ENOUGH_WORSE = 50, 4


@dataclass
class Problem:
    num_tokens: list[int]
    work_s: list[float]
    rank_of: list[int]
    ranks: int
    max_tokens: int
    max_items: int
    micro_batch_s: float
    least: int
    most: int
    multiple: int
    waits_at_each: bool
    no_empty: bool
    most_trials: int


@dataclass
class Bin:
    items: list[int] = field(default_factory=list)
    rank: int = 0
    index: int = 0
    tokens: int = 0
    work_s: float = 0.0


class Search:
    def __init__(self, problem: Problem, count: int) -> None:
        self.problem, self.count, self.trials = problem, count, 0
        self.bins: list[Bin] = []

    def place(self) -> bool:
        problem, is_free = self.problem, not self.problem.rank_of
        everyone = range(len(problem.work_s))
        own = [list(everyone)]
        if not is_free:
            own = [[item for item in everyone if problem.rank_of[item] == rank] for rank in range(problem.ranks)]
        for rank, items in enumerate(own):
            num_bins = self.count * (problem.ranks if is_free else 1)
            if problem.no_empty and len(items) < num_bins:
                return False
            bins = self.fill(items, num_bins)
            if len(bins) > num_bins:
                return False
            bins += [Bin() for _ in range(num_bins - len(bins))]
            for one in bins:
                one.rank = rank
            self.bins += bins
        self.align()
        return True

    def align(self) -> None:
        """Let heavy micro-batches meet heavy ones."""
        is_free, ranks = not self.problem.rank_of, self.problem.ranks
        self.bins.sort(key=lambda one: (0 if is_free else one.rank, -one.work_s))
        for at, one in enumerate(self.bins):
            one.index = at // ranks if is_free else at % self.count
            one.rank = at % ranks if is_free else one.rank
        self.of_index = [[b for b in range(len(self.bins)) if self.bins[b].index == j] for j in range(self.count)]
        self.longest = [self.longest_of(index) for index in range(self.count)]

    def fill(self, items: list[int], num_bins: int) -> list[Bin]:
        problem = self.problem
        tokens = np.array([problem.num_tokens[item] for item in items], np.int64)
        work = np.array([problem.work_s[item] for item in items])
        limits = {"num_tokens": tokens, "capacity": problem.max_tokens, "max_items": problem.max_items}
        groups = longest_first(work, num_bins, **limits)
        if len(groups) > num_bins:
            groups = best_fit_decreasing(tokens, problem.max_tokens, problem.max_items)
        bins = [Bin([items[at] for at in group]) for group in groups]
        for one in bins:
            self.set_sums(one)
        return bins

    def fill_empty(self) -> None:
        work_s = self.problem.work_s
        for one in self.bins:
            if not one.items:
                others = [other for other in self.bins if len(other.items) > 1]
                if self.problem.rank_of:
                    others = [other for other in others if other.rank == one.rank]
                donor = min(others, key=lambda other: (work_s[other.items[-1]], -other.items[-1]))
                one.items.append(donor.items.pop())
                self.set_sums(one)
                self.set_sums(donor)
        self.align()

    def set_sums(self, one: Bin) -> None:
        work_s = self.problem.work_s
        one.items.sort(key=lambda item: (-work_s[item], item))
        one.tokens, one.work_s = 0, 0.0
        for item in one.items:
            one.tokens += self.problem.num_tokens[item]
            one.work_s += work_s[item]

    def longest_of(self, index: int) -> float:
        return max([0.0, *(self.bins[b].work_s for b in self.of_index[index])])

    def exchange(self) -> None:
        before = math.inf
        for _ in range(MOST_PASSES):
            now = sequential_sum(0.0, self.longest)
            if self.trials >= self.problem.most_trials or now > before * (1 - LEAST_GAIN):
                break
            before = now
            for index in range(self.count):
                self.relieve(index)
            self.align()

    def relieve(self, index: int) -> None:
        stalled = 0
        while self.trials < self.problem.most_trials and stalled <= self.problem.ranks:
            of_index = self.of_index[index]
            start = max(of_index, key=lambda b: (self.bins[b].work_s, -b))
            second = max([0.0, *(self.bins[b].work_s for b in of_index if b != start)])
            made = [one for partner in self.partners(start) for one in self.exchanges(start, partner, second)]
            if not made:
                return
            best = min(made, key=lambda one: one[:2])
            longest = self.bins[start].work_s
            self.apply(start, *best[2:])
            stalled = stalled + 1 if best[0] > -longest * LEAST_GAIN else 0

    def partners(self, start: int) -> list[int]:
        same, other = [], []
        for b, one in enumerate(self.bins):
            if b == start or (self.problem.rank_of and one.rank != self.bins[start].rank):
                continue
            kind = same if one.index == self.bins[start].index else other
            kind.append((one.work_s - self.longest[one.index], b))
        return [b for _, b in sorted(same)[:SAME_INDEX] + sorted(other)[:OTHER_INDEX]]

    def exchanges(self, start: int, partner: int, second: float) -> list[tuple[float, float, int, int, int]]:
        """(change of the step, longest left, partner, x, y or -1) of all that may be made."""
        p, q, work_s = self.bins[start], self.bins[partner], self.problem.work_s
        slack = self.longest[q.index] - q.work_s
        wanted = (p.work_s - q.work_s) / 2
        if p.index != q.index:
            is_tied = second >= p.work_s * (1 - EQUAL)
            wanted = slack / 2 if is_tied else min(p.work_s - second, slack)
        made = []
        for x, item in enumerate(p.items if wanted > 0 else []):
            like = p.items[x - 1] if x else -1
            if x and (work_s[item], self.problem.num_tokens[item]) == (work_s[like], self.problem.num_tokens[like]):
                continue
            limit = work_s[item] - wanted
            near = next((at for at, one in enumerate(q.items) if work_s[one] <= limit), len(q.items))
            for y in (-1, *range(max(0, near - 2), min(len(q.items), near + 2))):
                self.trials += 1
                if (change := self.change(p, q, x, y, second)) is not None:
                    made.append((*change, partner, x, y))
        return made

    def change(self, p: Bin, q: Bin, x: int, y: int, second: float) -> tuple[float, float] | None:
        problem = self.problem
        given, taken = p.items[x], None if y < 0 else q.items[y]
        moved_s = problem.work_s[given] - (0.0 if taken is None else problem.work_s[taken])
        moved = problem.num_tokens[given] - (0 if taken is None else problem.num_tokens[taken])
        longest = p.work_s
        if moved_s <= longest * EQUAL or q.tokens + moved > problem.max_tokens or p.tokens - moved > problem.max_tokens:
            return None
        if taken is None and len(q.items) >= problem.max_items:
            return None
        left, other = p.work_s - moved_s, q.work_s + moved_s
        if p.index == q.index:
            if other >= longest * (1 - EQUAL):
                return None
            left = max(left, other)
            return max(second, left) - longest, left
        reached = self.longest[q.index]
        gain = max(second, left) - longest + max(0.0, other - reached)
        if gain > -longest * EQUAL and (second < longest * (1 - EQUAL) or other >= reached * (1 - EQUAL)):
            return None
        return gain, left

    def apply(self, start: int, partner: int, x: int, y: int) -> None:
        p, q = self.bins[start], self.bins[partner]
        if y < 0:
            q.items.append(p.items.pop(x))
        else:
            p.items[x], q.items[y] = q.items[y], p.items[x]
        self.set_sums(p)
        self.set_sums(q)
        for index in (p.index, q.index):
            self.longest[index] = self.longest_of(index)

    def step_s(self) -> float:
        total = self.count * self.problem.micro_batch_s
        if self.problem.waits_at_each:
            return sequential_sum(total, self.longest)
        load = [0.0] * self.problem.ranks
        for one in self.bins:
            load[one.rank] += one.work_s
        return total + max(load)

    def result(self) -> tuple[int, list[int], list[int]]:
        if not self.problem.rank_of:
            load = [0.0] * self.problem.ranks
            for of_index in self.of_index:
                bins = sorted(of_index, key=lambda b: -self.bins[b].work_s)
                ranks = sorted(range(self.problem.ranks), key=load.__getitem__)
                for b, rank in zip(bins, ranks, strict=True):
                    self.bins[b].rank = rank
                    load[rank] += self.bins[b].work_s
        place = {item: (one.rank, one.index) for one in self.bins for item in one.items}
        everyone = range(len(self.problem.work_s))
        return self.count, [place[item][0] for item in everyone], [place[item][1] for item in everyone]


def sequential_sum(total: float, values: list[float]) -> float:
    for value in values:
        total += value
    return total


def micro_batches(problem: Problem) -> tuple[int, list[int], list[int]]:
    rank_s = sequential_sum(0.0, problem.work_s) / problem.ranks
    best_s, best, worse = math.inf, (0, [], []), 0
    count = -(-problem.least // problem.multiple) * problem.multiple
    while count <= problem.most and worse < ENOUGH_WORSE and rank_s + count * problem.micro_batch_s < best_s:
        search = Search(problem, count)
        count += problem.multiple
        if not search.place():
            continue
        if problem.waits_at_each and problem.most_trials:
            search.exchange()
        if problem.no_empty:
            search.fill_empty()
        if search.step_s() < best_s:
            best_s, best, worse = search.step_s(), search.result(), 0
        else:
            worse += 1
    return best
