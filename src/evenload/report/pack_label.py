"""What is inside a pack, in the few words that fit the arguments of a trace event."""

from collections.abc import Mapping

from evenload.report.units import format_count
from evenload.types.micropack import Direction, MicroPack
from evenload.types.plan import StepPlan

PackKey = tuple[int, Direction, int]
"""(dp rank, direction, pack index): the same for every stage and for predicted and measured."""


PackLabel = Mapping[str, int | str]
"""Real `tokens`, `documents`, `slices` that are only a piece of their document, and `content`: the first documents by
id and range."""
MAX_DOCUMENTS = 4
"""Listed by name; long lists are unreadable, and every stage repeats them."""


def label_packs(plan: StepPlan) -> dict[PackKey, PackLabel]:
    num_tokens = {document.doc_id: document.num_tokens for document in plan.documents}
    return {
        (packs.dp_rank, pack.direction, pack.index): _label(pack, num_tokens)
        for packs in plan.pack_plans
        for pack in (*packs.forward, *packs.backward)
    }


def _label(pack: MicroPack, num_tokens: dict[int, int]) -> PackLabel:
    texts = []
    for piece in pack.slices[:MAX_DOCUMENTS]:
        length = num_tokens[piece.doc_id]
        if piece.num_tokens == length:
            texts.append(f"{piece.doc_id} ({format_count(length)})")
        else:
            texts.append(f"{piece.doc_id} [{piece.start}, {piece.stop}) of {format_count(length)}")
    if len(pack.slices) > MAX_DOCUMENTS:
        texts.append(f"{len(pack.slices) - MAX_DOCUMENTS} more")
    return {
        "tokens": pack.num_tokens,
        "documents": len(pack.slices),
        "slices": sum(piece.num_tokens != num_tokens[piece.doc_id] for piece in pack.slices),
        "content": "doc " + ", ".join(texts) if texts else "",
    }
