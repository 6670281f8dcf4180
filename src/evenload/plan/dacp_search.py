"""`GroupSearch`: the search of `plan.dacp` for one micro-batch, as plain Python; native/dacp.cpp gives the same bits.

Sums are taken in the same order in both, and a step back restores the number that was there, so no rounding differs.
"""

import math

SHARED = -1
"""Owner of a document that all ranks share."""
GOOD_ENOUGH = 2e-3
"""Relative distance to the bound, or to the best answer in branch and bound, that is not worth looking at."""
FALLS = 1 - 1e-9
"""A step of the descent must gain more than rounding."""
WORSE_PREFIXES = 8
"""So many numbers of shared documents in a row without a gain, and no more are tried."""
MAX_BRANCHED = 16
"""Documents; branch and bound of more would run into its limit for nothing."""

RESCUE_NODES = 500
"""Branch and bound looks for owners that fit at all, whatever the effort: rounded up, shares alone may be too many."""


class GroupSearch:
    """Owners of one group; `run` once. Arguments as the fields of `plan.dacp.MicroBatch`, as lists."""

    def __init__(
        self,
        tokens: list[int],
        local_s: list[float],
        shared_s: list[float],
        gather_s: list[float],
        cp: int,
        bucket: int,
    ) -> None:
        self.tokens, self.local_s, self.shared_s, self.gather_s = tokens, local_s, shared_s, gather_s
        self.cp, self.bucket = cp, bucket
        self.n = len(tokens)
        self.shares = [-(-count // cp) for count in tokens]
        self.longest = sorted(range(self.n), key=lambda i: -local_s[i])
        self.bound_s = 0.0
        for document in range(self.n):
            self.bound_s += min(local_s[document] / cp, shared_s[document])
        self.best_s = math.inf
        self.best: list[int] | None = None

    def run(self, evaluations: int, nodes: int) -> list[int] | None:
        """The best owners found, None where none fits; their time is `best_s`."""
        if sum(self.tokens) > self.bucket * self.cp:
            return None  # eq. 10: no owners can hold them
        self._keep(self._algorithm_1())
        if not self._is_good():
            self._longest_shared()
        if self.best is not None and not self._is_good():
            self._descend(evaluations)
        if self.best is None:
            nodes = max(nodes, RESCUE_NODES)
        if nodes and self.n <= MAX_BRANCHED and not self._is_good():
            _Branching(self, nodes).place(0)
        return self.best

    def _is_good(self) -> bool:
        return self.best_s <= self.bound_s * (1 + GOOD_ENOUGH)

    def _keep(self, owner: list[int] | None) -> float:
        """Time of owners; infinite where they do not fit."""
        if owner is None:
            return math.inf
        load_s, held = [0.0] * self.cp, [0] * self.cp
        shared_s, gather_s, shares = 0.0, 0.0, 0
        for document, rank in enumerate(owner):
            if rank == SHARED:
                shared_s += self.shared_s[document]
                gather_s += self.gather_s[document]
                shares += self.shares[document]
            else:
                load_s[rank] += self.local_s[document]
                held[rank] += self.tokens[document]
        if max(held) + shares > self.bucket:
            return math.inf
        time_s = max(gather_s, *load_s) + shared_s
        if time_s < self.best_s:
            self.best_s, self.best = time_s, owner.copy()
        return time_s

    def _algorithm_1(self) -> list[int] | None:
        ranks = range(self.cp)
        room, load_s = [self.bucket] * self.cp, [0.0] * self.cp
        local: list[list[int]] = [[] for _ in ranks]  # ascending length, so the last is the largest
        owner = [SHARED] * self.n

        def share(document: int) -> None:
            owner[document] = SHARED
            for rank in ranks:
                room[rank] -= self.shares[document]
                load_s[rank] += self.shared_s[document]

        for document in sorted(range(self.n), key=self.tokens.__getitem__):
            while True:
                rank = min(ranks, key=load_s.__getitem__)
                if room[rank] < self.tokens[document]:
                    rank = max(ranks, key=room.__getitem__)
                if room[rank] >= self.tokens[document]:
                    owner[document] = rank
                    local[rank].append(document)
                    room[rank] -= self.tokens[document]
                    load_s[rank] += self.local_s[document]
                    break
                if min(room) >= self.shares[document]:
                    share(document)
                    break
                overfull = True
                while overfull:  # the first round makes room, the others repair what its share broke
                    rank = min(ranks, key=room.__getitem__)
                    if not local[rank]:
                        return None
                    given_up = local[rank].pop()
                    room[rank] += self.tokens[given_up]
                    load_s[rank] -= self.local_s[given_up]
                    share(given_up)
                    overfull = min(room) < 0
        return owner

    def _longest_shared(self) -> None:
        room, worse = self.bucket, 0
        for shared in range(self.n + 1):
            if shared:
                room -= self.shares[self.longest[shared - 1]]
            if room < 0 or worse > WORSE_PREFIXES:
                return
            before_s = self.best_s
            fits = self._keep(self._longest_first(shared, room, by_tokens=False)) < math.inf
            if not fits:  # balanced by tokens they may still fit
                fits = self._keep(self._longest_first(shared, room, by_tokens=True)) < math.inf
            if fits:
                worse = 0 if self.best_s < before_s else worse + 1
            if self._is_good():
                return

    def _longest_first(self, shared: int, room: int, *, by_tokens: bool) -> list[int] | None:
        load_s, free = [0.0] * self.cp, [room] * self.cp
        owner = [SHARED] * self.n
        for document in self.longest[shared:]:
            best = SHARED
            for rank in range(self.cp):
                if free[rank] >= self.tokens[document] and (best == SHARED or load_s[rank] < load_s[best]):
                    best = rank
            if best == SHARED:
                return None
            owner[document] = best
            free[best] -= self.tokens[document]
            load_s[best] += float(self.tokens[document]) if by_tokens else self.local_s[document]
        return owner

    def _descend(self, evaluations: int) -> None:
        """Best improvement; one round looks at all neighbours, so it may go beyond `evaluations` once."""
        assert self.best is not None, "there is a start"
        done, falls = 0, True
        while done < evaluations and falls and not self._is_good():
            state = _Placed(self, self.best)
            step: tuple[int, int, int, int] | None = None
            least_s = self.best_s * FALLS
            for document, rank in enumerate(state.owner):
                for target in range(SHARED, self.cp):
                    if target != rank:
                        done += 1
                        time_s = state.time_after(document, target)
                        if time_s < least_s:
                            least_s, step = time_s, (document, target, document, target)
            for first in range(self.n):
                for second in range(first + 1, self.n):
                    one, two = state.owner[first], state.owner[second]
                    if one != two and (state.is_busiest(one) or state.is_busiest(two)):
                        done += 1
                        time_s = state.time_swapped(first, second)
                        if time_s < least_s:
                            least_s, step = time_s, (first, two, second, one)
            falls = step is not None
            if step is not None:
                better = self.best.copy()
                better[step[0]] = step[1]
                better[step[2]] = step[3]
                # The exact sum may differ from the step's in the last bit.
                before_s = self.best_s
                self._keep(better)
                falls = self.best_s < before_s


class _Placed:
    """Sums of some owners, and what a move or swap would make of the time."""

    def __init__(self, group: GroupSearch, owner: list[int]) -> None:
        self.group, self.owner = group, owner
        self.load_s, self.held = [0.0] * group.cp, [0] * group.cp
        self.shared_s, self.gather_s, self.shares = 0.0, 0.0, 0
        for document, rank in enumerate(owner):
            if rank == SHARED:
                self.shared_s += group.shared_s[document]
                self.gather_s += group.gather_s[document]
                self.shares += group.shares[document]
            else:
                self.load_s[rank] += group.local_s[document]
                self.held[rank] += group.tokens[document]
        self.most_s = max(self.gather_s, *self.load_s)

    def is_busiest(self, rank: int) -> bool:
        """Only a swap with it can be faster: of a rank that others wait for, or of the shared documents."""
        return rank == SHARED or self.load_s[rank] >= self.most_s

    def time_after(self, document: int, target: int) -> float:
        return self._time(((document, self.owner[document], target),))

    def time_swapped(self, first: int, second: int) -> float:
        one, two = self.owner[first], self.owner[second]
        return self._time(((first, one, two), (second, two, one)))

    def _time(self, moves: tuple[tuple[int, int, int], ...]) -> float:
        group = self.group
        load_s, held = self.load_s.copy(), self.held.copy()
        shared_s, gather_s, shares = self.shared_s, self.gather_s, self.shares
        for document, source, target in moves:
            if source == SHARED:
                shared_s -= group.shared_s[document]
                gather_s -= group.gather_s[document]
                shares -= group.shares[document]
            else:
                load_s[source] -= group.local_s[document]
                held[source] -= group.tokens[document]
            if target == SHARED:
                shared_s += group.shared_s[document]
                gather_s += group.gather_s[document]
                shares += group.shares[document]
            else:
                load_s[target] += group.local_s[document]
                held[target] += group.tokens[document]
        if max(held) + shares > group.bucket:
            return math.inf
        return max(gather_s, *load_s) + shared_s


class _Branching:
    """Depth first over the documents, longest first; a rank like another one is not tried twice."""

    def __init__(self, group: GroupSearch, nodes: int) -> None:
        self.group, self.nodes_left = group, nodes
        self.owner = [SHARED] * group.n
        self.load_s, self.held = [0.0] * group.cp, [0] * group.cp
        self.shared_s, self.gather_s, self.mean_s = 0.0, 0.0, 0.0
        self.shares = 0
        # Of the documents from each depth on: what they add to the mean rank, and their tokens.
        self.rest_s, self.rest_tokens = [0.0] * (group.n + 1), [0] * (group.n + 1)
        for depth in range(group.n - 1, -1, -1):
            document = group.longest[depth]
            least_s = min(group.local_s[document] / group.cp, group.shared_s[document])
            self.rest_s[depth] = self.rest_s[depth + 1] + least_s
            self.rest_tokens[depth] = self.rest_tokens[depth + 1] + group.tokens[document]

    def place(self, depth: int) -> None:
        """Try every owner of the document of this depth and all of the rest."""
        group = self.group
        if depth == group.n:
            group._keep(self.owner)
            return
        document = group.longest[depth]
        ranks = sorted(range(group.cp), key=self.load_s.__getitem__)
        for number, rank in enumerate(ranks):
            twins = (ranks[other] for other in range(number))
            if any(self.load_s[twin] == self.load_s[rank] and self.held[twin] == self.held[rank] for twin in twins):
                continue
            load_s, mean_s = self.load_s[rank], self.mean_s
            self.load_s[rank] += group.local_s[document]
            self.mean_s += group.local_s[document] / group.cp
            self.held[rank] += group.tokens[document]
            self.owner[document] = rank
            self._below(depth + 1)
            self.load_s[rank], self.mean_s = load_s, mean_s
            self.held[rank] -= group.tokens[document]
        shared_s, gather_s = self.shared_s, self.gather_s
        self.shared_s += group.shared_s[document]
        self.gather_s += group.gather_s[document]
        self.shares += group.shares[document]
        self.owner[document] = SHARED
        self._below(depth + 1)
        self.shared_s, self.gather_s = shared_s, gather_s
        self.shares -= group.shares[document]

    def _below(self, depth: int) -> None:
        group = self.group
        if self.nodes_left == 0:
            return
        self.nodes_left -= 1
        if max(self.held) + self.shares > group.bucket:
            return
        if sum(self.held) + group.cp * self.shares + self.rest_tokens[depth] > group.cp * group.bucket:
            return
        busiest_s = max(self.gather_s, *self.load_s)
        if self.shared_s + max(busiest_s, self.mean_s + self.rest_s[depth]) < group.best_s * (1 - GOOD_ENOUGH):
            self.place(depth)
