"""Invariants of slices that several replicas share (DP-Merge): what `validate_plan` checks about groups.

sharing    a slice is shared by the layout's context ranks, by one of them (DACP), or by a whole block of replicas:
           aligned, a number that divides all replicas
nested     blocks that have a replica in common lie one in the other
members    every replica of the block, and no other, has the document
order      all members run the shared packs, larger blocks first, in the same order in both directions, with the same
           sharding, and on every rank in the same order of actions: else they meet at different collectives
           and hang
"""

import itertools
from collections.abc import Iterator

from evenload.types.micropack import MicroPack
from evenload.types.plan import StepPlan
from evenload.types.replica_block import ReplicaBlock


def block_of(plan: StepPlan, dp_rank: int, pack: MicroPack) -> ReplicaBlock:
    """The replicas that share a pack of this replica."""
    size = max((max(1, piece.cp // plan.layout.cp) for piece in pack.slices), default=1)
    return ReplicaBlock(dp_rank // size * size, size)


def group_offences(plan: StepPlan) -> Iterator[str]:
    """Offences against the invariants, in words."""
    layout = plan.layout
    homes: dict[int, set[int]] = {}
    wanted: dict[int, ReplicaBlock] = {}
    blocks: set[ReplicaBlock] = set()
    for dp_rank, packs in enumerate(plan.pack_plans):
        for pack in (*packs.forward, *packs.backward):
            where = f"replica {dp_rank} {pack.direction} pack {pack.index}"
            _, size = block = block_of(plan, dp_rank, pack)
            for piece in pack.slices:
                if piece.cp not in (1, layout.cp, size * layout.cp) or (size > 1 and piece.cp != size * layout.cp):
                    yield (
                        f"{where}: {piece.cp} ranks share a slice of document {piece.doc_id}, "
                        f"its pack has {size} replicas"
                    )
                homes.setdefault(piece.doc_id, set()).add(dp_rank)
                if wanted.setdefault(piece.doc_id, block) != block:
                    yield f"document {piece.doc_id} lies on replicas {wanted[piece.doc_id].first} and {dp_rank}"
            if layout.dp % size:
                yield f"{where}: {size} replicas share it, which does not divide dp={layout.dp} into equal blocks"
            elif size > 1:
                blocks.add(block)
    for doc_id, block in wanted.items():
        if homes[doc_id] != set(block.replicas):
            yield (
                f"document {doc_id} is shared by replicas {block.first} to {block.replicas[-1]}, "
                f"but lies on {sorted(homes[doc_id])}"
            )
    crossing = [pair for pair in itertools.combinations(sorted(blocks), 2) if _cross(*pair)]
    for one, other in crossing:
        yield (
            f"replicas {one.first} to {one.replicas[-1]} share packs and so do replicas {other.first} to "
            f"{other.replicas[-1]}; of two blocks with a replica in common one must lie in the other"
        )
    if crossing:
        return  # members of crossing blocks have no common order
    for block in sorted(blocks):
        yield from _order_offences(plan, block)


def _cross(one: ReplicaBlock, other: ReplicaBlock) -> bool:
    """Whether two blocks have replicas in common, and each some of its own."""
    both = set(one.replicas) & set(other.replicas)
    return bool(both) and len(both) < min(one.size, other.size)


def _order_offences(plan: StepPlan, block: ReplicaBlock) -> Iterator[str]:
    expected = None
    for dp_rank in block.replicas:
        packs = plan.pack_plans[dp_rank]
        # Larger blocks that hold this replica hold the whole block, so their order counts too.
        shared = [
            {
                pack.index: (pack.slices, pack.sharding)
                for pack in listed
                if block_of(plan, dp_rank, pack).size >= block.size
            }
            for listed in (packs.forward, packs.backward)
        ]
        actions = [
            [(action.kind, action.stage, shared[action.kind != "F"].get(action.pack)) for action in row]
            for row in plan.schedules[dp_rank].ranks
        ]
        met = [[one for one in row if one[2] is not None] for row in actions]
        found = ([list(listed.values()) for listed in shared], met)
        if expected is None:
            expected = found
        elif found != expected:
            yield f"replicas {block.first} and {dp_rank} run the packs that they share in different orders or shardings"
