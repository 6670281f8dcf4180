"""What is inside a pack, in the few words that fit a tooltip or a trace argument."""

from typing import NamedTuple

from evenload.report.units import format_count
from evenload.types.micropack import Direction, MicroPack
from evenload.types.plan import StepPlan

PackKey = tuple[int, Direction, int]
"""(dp rank, direction, pack index): the same for every stage and for predicted and measured."""


class PackLabel(NamedTuple):
    """Content of one pack.

    Args:
        num_documents: documents with tokens in the pack.
        num_slices: of those, the ones that are only a piece of their document.
        num_tokens: real tokens.
        text: the first documents by id and range; shown as it is, never as markup.
    """

    num_documents: int
    num_slices: int
    num_tokens: int
    text: str


def label_packs(plan: StepPlan, max_documents: int = 4) -> dict[PackKey, PackLabel]:
    """Labels of all packs of a step.

    Args:
        max_documents: of a pack that are listed by name; the rest is counted. Long lists make
            tooltips unreadable and pages large (every stage repeats them).
    """
    num_tokens = {document.doc_id: document.num_tokens for document in plan.documents}
    return {
        (packs.dp_rank, pack.direction, pack.index): _label(pack, num_tokens, max_documents)
        for packs in plan.pack_plans
        for pack in (*packs.forward, *packs.backward)
    }


def _label(pack: MicroPack, num_tokens: dict[int, int], max_documents: int) -> PackLabel:
    texts = []
    for piece in pack.slices[:max_documents]:
        length = num_tokens[piece.doc_id]
        if piece.num_tokens == length:
            texts.append(f"{piece.doc_id} ({format_count(length)})")
        else:
            texts.append(f"{piece.doc_id} [{piece.start}, {piece.stop}) of {format_count(length)}")
    if len(pack.slices) > max_documents:
        texts.append(f"{len(pack.slices) - max_documents} more")
    return PackLabel(
        num_documents=len(pack.slices),
        num_slices=sum(piece.num_tokens != num_tokens[piece.doc_id] for piece in pack.slices),
        num_tokens=pack.num_tokens,
        text="doc " + ", ".join(texts) if texts else "",
    )
