"""Tokens of a global batch to the ranks that train them.

Every rank has read some of the documents, and a plan says which documents each rank trains: one all-to-all brings them
there. Who sends what follows from plan and batch alone, so nothing is negotiated and no sizes travel. A document that
several ranks need (pipeline stages of one replica; replicas that share it) goes to each of them.

Price: 4 bytes a token and rank that needs it (8 where labels travel too), one message per pair of ranks.
"""

from collections.abc import Sequence

import numpy as np

from evenload.data.batch.global_batch import GlobalBatch
from evenload.data.batch.peers import Peers
from evenload.data.encoding.token_table import TokenTable, all_labels, join_tables
from evenload.types.plan import StepPlan


def documents_by_replica(plan: StepPlan) -> tuple[tuple[int, ...], ...]:
    """The documents with a slice in each replica's packs, ascending."""
    return tuple(
        tuple(sorted({piece.doc_id for pack in (*packs.forward, *packs.backward) for piece in pack.slices}))
        for packs in plan.pack_plans
    )


def exchange_tokens(batch: GlobalBatch, wanted: Sequence[Sequence[int]], peers: Peers) -> TokenTable:
    """This rank's documents, where `wanted` are the doc_ids of every rank of `peers`, each once. Collective."""
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
    copies = 2 if batch.has_labels else 1  # all tokens, then all labels
    sizes = [copies * sum(lengths[doc_id] for doc_id in documents) for documents in incoming]
    outgoing = [table.tokens for table in tables]
    if batch.has_labels:
        outgoing = [np.concatenate([table.tokens, all_labels(table)]) for table in tables]
    received = peers.exchange(outgoing, sizes)
    arrived: list[TokenTable] = []
    for documents, content in zip(incoming, received, strict=True):
        tokens, labels = (content, None) if copies == 1 else np.split(content, 2)
        edges = np.cumsum([0, *(lengths[doc_id] for doc_id in documents)], dtype=np.int64)
        arrived.append(TokenTable(np.array(documents, np.int64), edges, tokens, labels))
    return join_tables(arrived)
