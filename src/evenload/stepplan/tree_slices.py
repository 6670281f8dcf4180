"""Say why plans cannot run trees of sequences that share prefixes (`tree_offences`).

They are cut like other documents, but neither shared by ranks nor padded.
"""

from collections.abc import Iterator

from evenload.errors import DataError
from evenload.types.plan import StepPlan
from evenload.types.tree import shape_of


def tree_offences(plan: StepPlan) -> Iterator[str]:
    """Yield why trees of sequences that share prefixes cannot run under a plan."""
    trees = {document.doc_id: document for document in plan.documents if document.segments}
    if not trees:
        return
    for doc_id, document in trees.items():
        try:
            num_rows = shape_of(document.segments).num_rows
        except DataError as error:
            yield f"document {doc_id}: {error}"
            continue
        if num_rows != document.num_tokens:
            yield f"document {doc_id} has {document.num_tokens} tokens, its segments {num_rows}"
    if plan.layout.cp > 1:
        yield (
            f"document {min(trees)} is a tree of sequences, and attention over ranks (parallel.cp is {plan.layout.cp}) "
            "knows no branches; use parallel.cp = 1"
        )
    for packs in plan.pack_plans:
        for pack in (*packs.forward, *packs.backward):
            where = f"replica {packs.dp_rank} {pack.direction} pack {pack.index}"
            for piece in pack.slices:
                if piece.doc_id not in trees:
                    continue
                if pack.pad_to:
                    yield f"{where} pads document {piece.doc_id}, a tree of sequences; use another plan.strategy"
                if piece.cp > plan.layout.cp:
                    yield (
                        f"{where}: {piece.cp} ranks share a slice of document {piece.doc_id}, a tree of sequences, and "
                        "attention over ranks knows no branches; use plan.options.dp_merge = false"
                    )
