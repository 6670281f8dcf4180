"""What `stepplan.validate` checks, slice by slice in plain Python: the specification of its columns."""

from collections.abc import Iterator

from evenload.stepplan.validate import group_offences
from evenload.types.document import MicroPack, PackPlan
from evenload.types.plan import StepPlan, block_of


def slice_offences(plan: StepPlan, max_pack_tokens: int | None) -> Iterator[str]:
    """Offences of documents, packs, coverage, order and groups, in words; for plans in which something is wrong."""
    num_tokens = {document.doc_id: document.num_tokens for document in plan.documents}
    for dp_rank, packs in enumerate(plan.pack_plans):
        for pack in (*packs.forward, *packs.backward):
            yield from _pack_offences(dp_rank, pack, num_tokens, max_pack_tokens)
        yield from _order_offences(dp_rank, packs)
    yield from group_offences(plan)
    yield from _coverage_offences(plan, num_tokens)


def _pack_offences(
    dp_rank: int, pack: MicroPack, num_tokens: dict[int, int], max_pack_tokens: int | None
) -> Iterator[str]:
    where = f"replica {dp_rank} {pack.direction} pack {pack.index}"
    seen: set[int] = set()
    for piece in pack.slices:
        if piece.doc_id in seen:
            yield f"{where} holds two slices of document {piece.doc_id}"
        seen.add(piece.doc_id)
        length = num_tokens.get(piece.doc_id)
        if length is None:
            yield f"{where} holds document {piece.doc_id}, which is not in the step"
        elif not 0 <= piece.start < piece.stop <= length:
            yield f"{where}: range [{piece.start}, {piece.stop}) of document {piece.doc_id} is not in [0, {length})"
        elif pack.pad_to and (piece.start != 0 or piece.stop != length or length > pack.pad_to):
            yield f"{where} pads to {pack.pad_to} but holds [{piece.start}, {piece.stop}) of document {piece.doc_id}"
    if not pack.slices:
        yield f"{where} is empty"
    tokens = pack.num_tokens + pack.num_padding_tokens
    if max_pack_tokens is not None and tokens > max_pack_tokens:
        yield f"{where} has {tokens} tokens, limit {max_pack_tokens}"


def _order_offences(dp_rank: int, packs: PackPlan) -> Iterator[str]:
    for direction, listed in (("forward", packs.forward), ("backward", packs.backward)):
        for index, pack in enumerate(listed):
            if pack.index != index or pack.direction != direction:
                yield f"replica {dp_rank} {direction} pack {index} calls itself {pack.direction} pack {pack.index}"
        edge: dict[int, int] = {}
        for pack in listed:
            for piece in pack.slices:
                before = edge.get(piece.doc_id)
                if before is not None and (piece.start < before if direction == "forward" else piece.stop > before):
                    rises = "ascend" if direction == "forward" else "descend"
                    yield (
                        f"replica {dp_rank}: {direction} slices of document {piece.doc_id} do not {rises} at "
                        f"[{piece.start}, {piece.stop}) in pack {pack.index}"
                    )
                edge[piece.doc_id] = piece.stop if direction == "forward" else piece.start
    first_forward, first_backward = _first_packs(packs.forward), _first_packs(packs.backward)
    latest, latest_doc = -1, -1
    documents = sorted(
        first_forward.keys() & first_backward.keys(), key=lambda d: (first_forward[d], first_backward[d], d)
    )
    for doc_id in documents:
        # Documents that start forward in the same pack may start backward in any order: sorted by it above.
        if first_backward[doc_id] < latest:
            yield (
                f"replica {dp_rank}: document {doc_id} starts forward after document {latest_doc} but backward "
                f"before it (packs {first_backward[doc_id]} and {latest}); documents go first in, first out"
            )
        if first_backward[doc_id] > latest:
            latest, latest_doc = first_backward[doc_id], doc_id


def _first_packs(packs: tuple[MicroPack, ...]) -> dict[int, int]:
    first: dict[int, int] = {}
    for pack in packs:
        for piece in pack.slices:
            first.setdefault(piece.doc_id, pack.index)
    return first


def _coverage_offences(plan: StepPlan, num_tokens: dict[int, int]) -> Iterator[str]:
    for direction in ("forward", "backward"):
        ranges: dict[int, list[tuple[int, int]]] = {doc_id: [] for doc_id in num_tokens}
        for dp_rank, packs in enumerate(plan.pack_plans):
            for pack in packs.forward if direction == "forward" else packs.backward:
                if block_of(plan, dp_rank, pack)[0] != dp_rank:
                    continue  # shared packs count once, where their block begins
                for piece in pack.slices:
                    if piece.doc_id in ranges:
                        ranges[piece.doc_id].append((piece.start, piece.stop))
        for doc_id, pieces in ranges.items():
            edge = 0
            for start, stop in sorted(pieces):
                if start > edge:
                    yield f"document {doc_id}: tokens [{edge}, {start}) are in no {direction} slice"
                elif start < edge:
                    yield f"document {doc_id}: tokens [{start}, {min(edge, stop)}) are in two {direction} slices"
                edge = max(edge, stop)
            if edge < num_tokens[doc_id]:
                yield f"document {doc_id}: tokens [{edge}, {num_tokens[doc_id]}) are in no {direction} slice"
