"""Tokens of a global batch to the ranks that train them.

Every rank has read some of the documents, and a plan says which documents each rank trains: one all-to-all brings them
there. Who sends what follows from plan and batch alone, so nothing is negotiated and no sizes travel. A document that
several ranks need (pipeline stages of one replica; replicas that share it) goes to each of them.

Price: 4 bytes a token and rank that needs it (8 where labels travel too), one message per pair of ranks.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from evenload.data.global_batch import GlobalBatch
from evenload.data.peers import Peers
from evenload.data.token_table import TokenTable, all_labels, join_tables
from evenload.errors import InvalidPlanError
from evenload.types.plan import StepPlan


def documents_by_replica(plan: StepPlan, lengths: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    """The documents with a slice in each replica's packs, ascending.

    Args:
        lengths: tokens of the batch's documents by doc_id.

    Raises:
        InvalidPlanError: a replica without a pack plan, or a document or length that the batch has not.
    """
    found: dict[int, tuple[int, ...]] = {}
    for packs in plan.pack_plans:
        pieces = {piece.doc_id for pack in (*packs.forward, *packs.backward) for piece in pack.slices}
        found[packs.dp_rank] = tuple(sorted(pieces))
    if sorted(found) != list(range(plan.layout.dp)) or len(found) != len(plan.pack_plans):
        raise InvalidPlanError(
            f"plan of step {plan.step} has pack plans for dp ranks {[packs.dp_rank for packs in plan.pack_plans]}, "
            f"expected each of 0..{plan.layout.dp - 1} once"
        )
    planned = {document.doc_id: document.num_tokens for document in plan.documents}
    for doc_id in {doc_id for documents in found.values() for doc_id in documents}:
        if planned.get(doc_id) is None or lengths.get(doc_id) != planned[doc_id]:
            have = f"has {lengths[doc_id]} tokens" if doc_id in lengths else "is not there"
            raise InvalidPlanError(
                f"plan of step {plan.step} trains document {doc_id} of {planned.get(doc_id)} tokens, "
                f"which {have} in the batch; the plan was made for another batch"
            )
    return tuple(found[rank] for rank in range(plan.layout.dp))


def exchange_tokens(batch: GlobalBatch, wanted: Sequence[Sequence[int]], peers: Peers) -> TokenTable:
    """This rank's documents. Collective.

    Args:
        wanted: doc_ids of every rank of `peers`, each once.

    Returns:
        The documents of `wanted[peers.rank]`.
    """
    if peers.size == 1:
        everything = len(wanted[0]) == len(batch.tokens)
        return batch.tokens if everything else batch.tokens.select(wanted[0])
    lengths = {document.doc_id: document.num_tokens for document in batch.documents + batch.carried}
    rank = peers.rank
    tables = [batch.tokens.select([doc_id for doc_id in documents if doc_id in batch.tokens]) for documents in wanted]
    owners = batch.owners(wanted[rank]).tolist()
    incoming: list[list[int]] = [[] for _ in range(peers.size)]
    for doc_id, owner in zip(wanted[rank], owners, strict=True):
        incoming[owner].append(doc_id)
    copies = 2 if batch.has_labels else 1
    sizes = [copies * sum(lengths[doc_id] for doc_id in documents) for documents in incoming]
    received = peers.exchange([_flatten(table, batch.has_labels) for table in tables], sizes)
    arrived: list[TokenTable] = []
    for documents, content in zip(incoming, received, strict=True):
        tokens, labels = (content, None) if copies == 1 else np.split(content, 2)
        edges = np.cumsum([0, *(lengths[doc_id] for doc_id in documents)], dtype=np.int64)
        arrived.append(TokenTable(np.array(documents, np.int64), edges, tokens, labels))
    return join_tables(arrived)


def _flatten(table: TokenTable, has_labels: bool) -> np.ndarray:
    """int32: all tokens, then all labels if they travel."""
    if not has_labels:
        return table.tokens
    return np.concatenate([table.tokens, all_labels(table)])
