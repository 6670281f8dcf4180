"""GDS: the documents of a step into replicas and micro-batches, each micro-batch run by DACP (Skrull §4.2, eq. 8-11).

Objective: the slowest replica's sum over its micro-batches of `pack_s` + DACP's time; memory: a micro-batch holds at
most bucket · cp tokens (eq. 10, `limit_tokens`) and every rank at most a bucket (eq. 7).

1. Documents to replicas by time, longest first (Algorithm 2, line 1).
2. Per replica several deals, of which the fastest is kept:
   interleaved   ascending, n micro-batches `Subset[j::n]`, which pairs long and short; the least n that fits.
                 Right reading of Algorithm 2 (oracle §5): as printed it never stops on success, its slices repeat
                 documents and a failure skips a micro-batch instead of starting anew.
   apart         documents that fill more than half of what a micro-batch may hold, apart from the others; paired, they
                 would force n up to one document a micro-batch
   longest first by work into the fewest micro-batches that the tokens allow, more where they do not fit
   best fit      decreasing by tokens: the fewest micro-batches, so the least `pack_s`
   filled        the longest document left with those of the others that leave least room (subset sums); few documents
   whole         ranks filled by work, nothing shared that fits one, cp of them a micro-batch; few documents
   consecutive   filled in ascending and in descending length: documents of one length balance whole on their ranks
   one each      one document a micro-batch, which always fits
3. Few documents: descent over moves of a document, swaps of two and unions of two micro-batches, of the slowest replica
   with any other, until none is faster or `MAX_EVALUATED` micro-batches were looked at.
   At most `ALL_SUBSETS` documents: the best partition outright, from DACP's time of every subset.

Skrull has 1 and the first deal only. O(deals · n · documents of a micro-batch · cp) natively; 3 adds a few ms at most.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenload.plan.bin_packing import best_fit_decreasing, longest_first
from evenload.plan.dacp import QUICK, THOROUGH, USUAL, Effort, MicroBatch, assign_groups
from evenload.plan.dp_balance import assign_replicas
from evenload.plan.subset_partition import best_partition
from evenload.types.backend import Backend

ALL_SUBSETS = 12
"""Documents of a step up to which every subset is tried as a micro-batch."""
STARTS = 6
"""Deals that the descent begins with."""
REPARTITIONED = 10
"""Documents of a few micro-batches up to which they are dealt anew, the best of all ways."""
SEARCHED_DOCUMENTS = 48
"""Documents of a step up to which the deals are improved; with more of them they balance by themselves."""
MAX_EVALUATED = 6000
"""Micro-batches that the descent may look at."""
WORTH_SEARCHING = 2e-3
"""Relative distance to the bound below which nothing is searched."""

Groups = list[list[int]]
"""Documents of every micro-batch."""


@dataclass(frozen=True, eq=False)
class StepDocuments:
    """What GDS deals.

    Args:
        columns: of all documents of the step, with the bucket (`plan.dacp`).
        document_s: float64[n] seconds that replicas are balanced by.
        dp: replicas.
        limit_tokens: of a micro-batch.
        pack_s: constant of a micro-batch.
    """

    columns: MicroBatch
    document_s: NDArray[np.float64]
    dp: int
    limit_tokens: int
    pack_s: float = 0.0
    backend: Backend = "native"

    def group_seconds(self, groups: Groups, effort: Effort) -> NDArray[np.float64]:
        """Of every micro-batch, its constant included; infinite where it does not fit."""
        found = assign_groups(self.columns, groups, effort, backend=self.backend)
        tokens = np.concatenate([[0], np.cumsum(self.columns.num_tokens[found.members])])[found.offset]
        return np.where(np.diff(tokens) > self.limit_tokens, np.inf, found.seconds + self.pack_s)

    def lower_bound_s(self) -> float:
        """No deal is faster: the mean rank of the mean replica, with the fewest micro-batches."""
        tokens = int(self.columns.num_tokens.sum())
        fewest = max(-(-tokens // max(1, self.limit_tokens)), 1)
        return (float(self.columns.least_s().sum()) + self.pack_s * fewest) / self.dp


def deal_micro_batches(step: StepDocuments, *, search: bool = True) -> list[Groups] | None:
    """Micro-batches of every replica; None where a document does not fit a micro-batch of its own.

    Every document lies in one micro-batch, none is empty; a replica may have none. Same input, same answer.

    Args:
        search: False = the first deal that fits, as in the paper.
    """
    tokens = step.columns.num_tokens
    if not len(tokens):
        return [[] for _ in range(step.dp)]
    if tokens.max() > step.limit_tokens or step.columns.share_tokens().max() > step.columns.bucket_tokens:
        return None
    if len(tokens) <= ALL_SUBSETS and search:
        return _best_of_all(step, list(range(len(tokens))), [0.0] * step.dp, THOROUGH)
    replicas = assign_replicas(step.document_s, step.dp, backend=step.backend)
    if not search:
        deals = (_deals(step, documents) if len(documents) else iter([[]]) for documents in replicas)
        return [next(found) for found in deals]
    if len(tokens) > SEARCHED_DOCUMENTS:
        return [_fastest_deals(step, documents)[0] for documents in replicas]
    descent = _Descent(step)
    for dealt in _starts(step, replicas):
        if descent.run(dealt):
            break
    return descent.best


def _starts(step: StepDocuments, replicas: list[NDArray[np.int64]]) -> Iterator[list[Groups]]:
    """Deals of every replica side by side, then of the whole step, its micro-batches dealt to replicas."""
    deals = [_fastest_deals(step, documents) for documents in replicas]
    for number in range(max(map(len, deals))):
        yield [of_replica[min(number, len(of_replica) - 1)] for of_replica in deals]
    if step.dp > 1:
        for groups in _fastest_deals(step, np.arange(len(step.columns.num_tokens)))[: STARTS // 2]:
            ranks = longest_first(step.group_seconds(groups, QUICK), step.dp, backend=step.backend)
            yield [[groups[index] for index in members] for members in ranks]


def _best_of_all(step: StepDocuments, documents: list[int], loads: list[float], effort: Effort) -> list[Groups]:
    """The best micro-batches of some documents on replicas that have `loads` already."""
    subsets = [[d for bit, d in enumerate(documents) if mask >> bit & 1] for mask in range(1 << len(documents))]
    seconds = step.group_seconds(subsets, effort)
    seconds[0] = 0.0
    partition = best_partition(seconds, loads, backend=step.backend)
    return [[subsets[mask] for mask in masks] for masks in partition]


def _fastest_deals(step: StepDocuments, documents: NDArray[np.int64]) -> list[Groups]:
    """At most `STARTS` deals, the fastest first; all fit."""
    if not len(documents):
        return [[]]
    found: list[tuple[float, int, Groups]] = []
    bound_s = replace(step, columns=step.columns.chosen(documents), dp=1).lower_bound_s()
    for groups in _deals(step, documents):
        total_s = float(step.group_seconds(groups, QUICK).sum())
        if np.isfinite(total_s) and total_s not in (known for known, _, _ in found):
            found.append((total_s, len(found), groups))
        if total_s <= bound_s * (1 + WORTH_SEARCHING):
            break
    return [groups for _, _, groups in sorted(found)[:STARTS]]


def _deals(step: StepDocuments, documents: NDArray[np.int64]) -> Iterator[Groups]:
    tokens = step.columns.num_tokens[documents]
    ascending = documents[np.argsort(tokens, kind="stable")]
    long = step.columns.num_tokens[ascending] > step.limit_tokens / 2
    least = -(-int(tokens.sum()) // step.limit_tokens)
    interleaved = _interleaved(step, ascending, least)
    if interleaved is not None:
        yield interleaved
    if long.any() and not long.all():
        short = ascending[~long]
        paired = _interleaved(step, short, -(-int(step.columns.num_tokens[short].sum()) // step.limit_tokens))
        if paired is not None:
            yield [[document] for document in ascending[long].tolist()] + paired
    # Shares rounded up under the bucket: all documents shared then fit.
    shares = step.columns.share_tokens()[documents]
    bucket = max(int(shares.max()), min(step.columns.bucket_tokens, step.limit_tokens // step.columns.cp))
    work, listed = step.columns.local_s[documents], documents.tolist()
    for deal in (
        longest_first(work, least, num_tokens=shares, capacity=bucket, backend=step.backend),
        best_fit_decreasing(shares, bucket, backend=step.backend),
    ):
        yield [[listed[index] for index in group] for group in deal if group]
    if len(documents) <= SEARCHED_DOCUMENTS:
        order = ascending[::-1]
        yield _filled(order.tolist(), step.columns.share_tokens()[order].tolist(), bucket)
        yield _whole(step, documents)
    for order in (ascending, ascending[::-1]):
        yield _consecutive(step, order)
    yield [[document] for document in ascending.tolist()]


def _whole(step: StepDocuments, documents: NDArray[np.int64]) -> Groups:
    """Nothing shared that fits a rank: ranks filled by work under the bucket, the most loaded of them side by side."""
    columns, cp = step.columns, step.columns.cp
    tokens = columns.num_tokens[documents]
    on_a_rank = tokens <= columns.bucket_tokens
    whole, long = documents[on_a_rank], documents[~on_a_rank].tolist()
    groups: Groups = [[document] for document in long]
    if len(whole):
        sizes, work = columns.num_tokens[whole], columns.local_s[whole]
        fewest = len(best_fit_decreasing(sizes, columns.bucket_tokens, backend=step.backend))
        ranks = longest_first(
            work, -(-fewest // cp) * cp, num_tokens=sizes, capacity=columns.bucket_tokens, backend=step.backend
        )
        ranks.sort(key=lambda rank: -float(work[rank].sum()))
        for first in range(0, len(ranks), cp):
            group = [int(whole[index]) for rank in ranks[first : first + cp] for index in rank]
            if group:
                groups.append(group)
    return groups


def _filled(descending: list[int], shares: list[int], bucket: int) -> Groups:
    """One micro-batch after the other, the longest document left and of the others those that fill it best."""
    groups: Groups = []
    while descending:
        room = bucket - shares[0]
        # Bit s of reachable[k]: the sum s of some of the first k others.
        reachable = [1]
        for share in shares[1:]:
            reachable.append((reachable[-1] | reachable[-1] << share) & ((1 << room + 1) - 1))
        left, chosen = reachable[-1].bit_length() - 1, {0}
        for index in range(len(shares) - 1, 0, -1):
            if not reachable[index - 1] >> left & 1:
                chosen.add(index)
                left -= shares[index]
        groups.append([document for index, document in enumerate(descending) if index in chosen])
        descending = [document for index, document in enumerate(descending) if index not in chosen]
        shares = [share for index, share in enumerate(shares) if index not in chosen]
    return groups


def _consecutive(step: StepDocuments, order: NDArray[np.int64]) -> Groups:
    """Filled one after the other."""
    shares, tokens = step.columns.share_tokens()[order].tolist(), step.columns.num_tokens[order].tolist()
    groups: Groups = [[]]
    room, room_tokens = step.columns.bucket_tokens, step.limit_tokens
    for document, share, count in zip(order.tolist(), shares, tokens, strict=True):
        if share > room or count > room_tokens:
            groups.append([])
            room, room_tokens = step.columns.bucket_tokens, step.limit_tokens
        groups[-1].append(document)
        room, room_tokens = room - share, room_tokens - count
    return groups


def _interleaved(step: StepDocuments, ascending: NDArray[np.int64], least: int) -> Groups | None:
    """The fewest micro-batches `ascending[j::n]` that keep to the token limit and that DACP finds owners for."""
    descending = step.columns.num_tokens[ascending][::-1]
    for count in range(max(1, least), len(ascending) + 1):
        # The micro-batch of the longest document has, position by position, the longest of every round.
        if descending[::count].sum() > step.limit_tokens:
            continue
        groups = [ascending[first::count].tolist() for first in range(count)]
        if np.isfinite(step.group_seconds(groups, QUICK)).all():
            return groups
    return None


class _Descent:
    """Best improvement of (slowest replica, sum of all)."""

    def __init__(self, step: StepDocuments) -> None:
        self.step = step
        self.groups: list[tuple[int, tuple[int, ...]]] = []
        self.known: dict[tuple[int, ...], float] = {(): 0.0}
        self.tokens = step.columns.num_tokens.tolist()
        self.evaluated = 0
        self.best: list[Groups] = []
        self.best_score = (math.inf, math.inf)

    def run(self, dealt: list[Groups]) -> bool:
        """From one deal until nothing is faster; True where it is not worth to go on from another."""
        self.groups = [(dp_rank, tuple(sorted(group))) for dp_rank, groups in enumerate(dealt) for group in groups]
        self._learn({group for _, group in self.groups})
        bound_s = self.step.lower_bound_s() * (1 + WORTH_SEARCHING)
        while self.evaluated < MAX_EVALUATED and self._score(self.groups)[0] > bound_s:
            if not self._descend() and not self._repartition():
                break
        score = self._score(self.groups)
        if score < self.best_score:
            self.best_score = score
            self.best = [[] for _ in range(self.step.dp)]
            for dp_rank, group in self.groups:
                self.best[dp_rank].append(list(group))
        return self.evaluated >= MAX_EVALUATED or score[0] <= bound_s

    def _descend(self) -> bool:
        """One step, the best of all neighbours; False where none is faster."""
        steps = list(self._neighbours())
        self._learn({group for _, added in steps for _, group in added})
        loads = self._loads(self.groups)
        best, best_score = None, (max(loads), sum(loads))
        for removed, added in steps:
            score = self._score_after(loads, removed, added)
            if _is_faster(score, best_score):
                best, best_score = (removed, added), score
        if best is not None:
            self._apply(*best)
        return best is not None

    def _repartition(self) -> bool:
        """Deal a few micro-batches anew, the best of all ways; False where none is faster."""
        loads = self._loads(self.groups)
        before = max(loads), sum(loads)
        for chosen in self._combinations(loads):
            documents = sorted(document for index in chosen for document in self.groups[index][1])
            ranks = sorted({self.groups[index][0] for index in chosen})
            base = [
                loads[rank] - sum(self.known[self.groups[i][1]] for i in chosen if self.groups[i][0] == rank)
                for rank in ranks
            ]
            dealt = _best_of_all(self.step, documents, [max(0.0, load) for load in base], USUAL)
            self.evaluated += 1 << len(documents)
            added = tuple((rank, tuple(group)) for rank, groups in zip(ranks, dealt, strict=True) for group in groups)
            self._learn({group for _, group in added})
            if _is_faster(self._score_after(loads, chosen, added), before):
                self._apply(chosen, added)
                return True
            if self.evaluated > MAX_EVALUATED:
                return False
        return False

    def _combinations(self, loads: list[float]) -> Iterator[tuple[int, ...]]:
        """Micro-batches of few documents together, at least one of them of the slowest replica."""
        slowest = max(range(self.step.dp), key=loads.__getitem__)
        for count in (4, 3, 2):
            for chosen in itertools.combinations(range(len(self.groups)), count):
                of = [self.groups[index] for index in chosen]
                if any(rank == slowest for rank, _ in of) and sum(len(group) for _, group in of) <= REPARTITIONED:
                    yield chosen

    def _apply(self, removed: tuple[int, ...], added: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        kept = [group for index, group in enumerate(self.groups) if index not in removed]
        self.groups = kept + [(dp_rank, group) for dp_rank, group in added if group]

    def _loads(self, groups: list[tuple[int, tuple[int, ...]]]) -> list[float]:
        loads = [0.0] * self.step.dp
        for dp_rank, group in groups:
            loads[dp_rank] += self.known[group]
        return loads

    def _score(self, groups: list[tuple[int, tuple[int, ...]]]) -> tuple[float, float]:
        loads = self._loads(groups)
        return max(loads), sum(loads)

    def _score_after(
        self, loads: list[float], removed: tuple[int, ...], added: tuple[tuple[int, tuple[int, ...]], ...]
    ) -> tuple[float, float]:
        after = loads.copy()
        for index in removed:
            dp_rank, group = self.groups[index]
            after[dp_rank] -= self.known[group]
        for dp_rank, group in added:
            after[dp_rank] += self.known[group]
        return max(after), sum(after)

    def _learn(self, groups: set[tuple[int, ...]]) -> None:
        # Sorted, because the order of a set is not the same every time.
        new = sorted(groups - self.known.keys())
        if new:
            seconds = self.step.group_seconds([list(group) for group in new], USUAL)
            self.known.update(zip(new, seconds.tolist(), strict=True))
            self.evaluated += len(new)

    def _neighbours(self) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...]]]:
        """(micro-batches taken away, micro-batches put in their place with their replica)."""
        loads = self._loads(self.groups)
        slowest = max(range(self.step.dp), key=loads.__getitem__)
        fastest = min(range(self.step.dp), key=loads.__getitem__)
        total = [sum(self.tokens[i] for i in group) for _, group in self.groups]
        limit = self.step.limit_tokens
        mine = [index for index, (dp_rank, _) in enumerate(self.groups) if dp_rank == slowest]
        for one in mine:
            group = self.groups[one][1]
            if fastest != slowest:
                yield (one,), ((fastest, group),)
            for document in group:
                rest = tuple(i for i in group if i != document)
                for dp_rank in sorted({slowest, fastest}):
                    if rest or dp_rank != slowest:
                        yield (one,), ((slowest, rest), (dp_rank, (document,)))
                for other, (dp_rank, theirs) in enumerate(self.groups):
                    if other == one:
                        continue
                    if total[other] + self.tokens[document] <= limit:
                        yield (one, other), ((slowest, rest), (dp_rank, _with(theirs, document)))
                    for swapped in theirs:
                        gain = self.tokens[swapped] - self.tokens[document]
                        if gain and total[one] + gain <= limit and total[other] - gain <= limit:
                            without = tuple(i for i in theirs if i != swapped)
                            yield (one, other), ((slowest, _with(rest, swapped)), (dp_rank, _with(without, document)))
        for one, other in itertools.combinations(mine, 2):
            if total[one] + total[other] <= limit:
                yield (one, other), ((slowest, tuple(sorted(self.groups[one][1] + self.groups[other][1]))),)


def _is_faster(score: tuple[float, float], than: tuple[float, float]) -> bool:
    """By more than rounding: the slowest replica, or all of them together where it is as slow as before."""
    falls = 1 - 1e-9
    return score[0] < than[0] * falls or (score[0] <= than[0] and score[1] < than[1] * falls)


def _with(group: tuple[int, ...], document: int) -> tuple[int, ...]:
    return tuple(sorted((*group, document)))
