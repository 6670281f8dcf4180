"""Megatron-LM's two schedulers of packed sequences, restated: who shares which document, micro-batch by micro-batch.

Restated in own code from megatron/core/datasets/data_schedule.py and data_schedule_utils.py of NVIDIA/Megatron-LM,
branch dev as of September 2026 (`DpBalancedScheduler`, `DefaultDynamicCPScheduler`, `next_hdp_group_packing_aware`),
for numbers of ranks that are powers of two and without virtual stages. Nothing is copied; names are ours.

`dp_balanced`         documents in arrival order into packs of cp times the tokens of a rank, the next pack where one is
                      full; the last packs give away documents until dp divides their number; all cp ranks share each
`default_dynamic_cp`  longest first. A micro-batch begins with the longest document, on as few ranks as hold it. Every
                      further one joins a group that has room, or opens one on free ranks, of any size that holds it,
                      where the busiest rank stays least busy; work is tokens² over ranks, and no rank may have more
                      than 1.05 times the longest's tokens times a rank's room. What fits nowhere waits for the next
                      micro-batch. Ranks that are left free join the smallest groups, which double.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evenload.engines.context_groups import RankDocuments

WORK_SLACK = 1.05


def dp_balanced(num_tokens: Sequence[int], dp: int, cp: int, room_tokens: int) -> tuple[RankDocuments, ...]:
    """Packs of all `cp` ranks. By micro-batch and rank the documents, as indices of `num_tokens`."""
    packs: list[list[int]] = [[]]
    filled = 0
    for document, tokens in enumerate(num_tokens):
        if filled + tokens > cp * room_tokens:
            packs.append([])
            filled = 0
        packs[-1].append(document)
        filled += tokens
    packs = [pack for pack in packs if pack]
    giver = len(packs) - 1
    while len(packs) % dp:
        if giver < 0:
            raise ValueError(f"{len(num_tokens)} documents do not make a multiple of {dp} packs")
        if len(packs[giver]) > 1:
            packs.append([packs[giver].pop()])
        else:
            giver -= 1
    return tuple(
        tuple(tuple(sorted(pack)) for pack in packs[first : first + dp] for _ in range(cp))
        for first in range(0, len(packs), dp)
    )


def default_dynamic_cp(num_tokens: Sequence[int], num_ranks: int, room_tokens: int) -> tuple[RankDocuments, ...]:
    """Groups of 1, 2, 4 ... ranks. As `dp_balanced`."""
    if num_ranks & (num_ranks - 1):
        raise ValueError(f"{num_ranks} ranks are no power of two; only those are restated here")
    waiting = sorted(range(len(num_tokens)), key=lambda document: -num_tokens[document])
    found = []
    while waiting:
        groups, waiting = _micro_batch(num_tokens, waiting, num_ranks, room_tokens)
        found.append(tuple(tuple(sorted(group.documents)) for group in groups for _ in range(group.size)))
    return tuple(found)


@dataclass(eq=False)
class _Group:
    """Ranks side by side that share documents."""

    size: int
    documents: list[int]

    def tokens(self, num_tokens: Sequence[int]) -> float:
        """On one of the ranks."""
        return sum(num_tokens[document] / self.size for document in self.documents)

    def work(self, num_tokens: Sequence[int]) -> float:
        """Of one of the ranks."""
        return sum(num_tokens[document] ** 2 / self.size for document in self.documents)


def _micro_batch(
    num_tokens: Sequence[int], waiting: list[int], num_ranks: int, room_tokens: int
) -> tuple[list[_Group], list[int]]:
    """The groups of the next micro-batch in the order of their ranks, and who waits further; longest first."""
    sizes = [1 << power for power in range(num_ranks.bit_length())]
    longest = waiting[0]
    groups = [_Group(_least_size(num_tokens[longest], sizes, room_tokens), [longest])]
    limit = WORK_SLACK * num_tokens[longest] * room_tokens
    left: list[int] = []
    for document in waiting[1:]:
        tokens = num_tokens[document]
        least = _least_size(tokens, sizes, room_tokens)
        busiest = max(group.work(num_tokens) for group in groups)
        free = num_ranks - sum(group.size for group in groups)
        best: tuple[float, _Group | int] | None = None
        for size in (size for size in sizes if size >= least):
            joined = [
                (max(busiest, group.work(num_tokens) + tokens**2 / size), group)
                for group in groups
                if group.size == size and group.tokens(num_tokens) + tokens / size <= room_tokens
            ]
            opened = [(max(busiest, tokens**2 / size), size)] if free >= size else []
            for option in (*joined, *opened):
                if option[0] <= limit and (best is None or option[0] < best[0]):
                    best = option
        if best is None:
            left.append(document)
        elif isinstance(best[1], _Group):
            best[1].documents.append(document)
        else:
            groups.append(_Group(best[1], [document]))
    while sum(group.size for group in groups) < num_ranks:
        min(groups, key=lambda group: group.size).size *= 2
    return groups, left


def _least_size(tokens: int, sizes: Sequence[int], room_tokens: int) -> int:
    size = next((size for size in sizes if size * room_tokens >= tokens), None)
    if size is None:
        raise ValueError(f"a document of {tokens} tokens does not fit {sizes[-1]} ranks of {room_tokens}")
    return size
