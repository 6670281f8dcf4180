"""Micro-batches whose ranks share heads (DeepSpeed's Ulysses): the all-to-alls before and behind attention.

Outside of attention a rank has 1/n of a micro-batch's rows, inside 1/n of its heads with all rows, so every rank does
1/n of everything, whatever the documents, none of which is cut. What is paid for it, on every layer, beside nothing, as
DeepSpeed waits for each (`UlyssesSPAttentionHF`): all-to-alls of queries, keys, values and attention's output in
forward, of their gradients in backward, and in forward an all-gather of the positions of all rows. Key heads are
repeated until every rank has one.

An all-to-all sends (n-1)/n of what a rank has over its link, to all others at once. Nothing of it has been measured.
Across nodes a network's cards carry more of it than of a ring, which is not in the link that the group has here.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts, weighted
from evenload.types.columns import SliceColumns
from evenload.types.micropack import Direction
from evenload.types.pipeline import PipelineTasks

CALLS = 4
"""All-to-alls of a layer in each direction."""
POSITION_BYTES = 8


def with_head_exchange(costs: PackCosts, columns: SliceColumns, tasks: PipelineTasks) -> PipelineTasks:
    """The same packs of one stage, where Evenload's runtime would cut documents and move keys and values."""
    if not columns.num_packs or costs.layout.cp == 1:
        return tasks
    forward_s, backward_s = (
        shared_seconds(costs, columns, direction) + exchange_seconds(costs, columns, direction)[:, None]
        for direction in ("forward", "backward")
    )
    return replace(tasks, forward_s=forward_s, backward_s=backward_s)


def shared_seconds(costs: PackCosts, columns: SliceColumns, direction: Direction) -> NDArray[np.float64]:
    """What a rank computes of every pack: its share of tokens and of whole documents' attention, and all that a
    document and a pack take anyhow; float64[num_packs, P]."""
    features = costs.features.of_packs(replace(columns, cp=np.ones_like(columns.cp)))
    features[:, 0] /= costs.layout.cp
    features[:, 3:] /= costs.layout.cp
    on_device_s = weighted(features, costs.stage_seconds[direction])
    return np.maximum(on_device_s, weighted(features[:, 1:3], costs.host_seconds[direction]))


def exchange_seconds(costs: PackCosts, columns: SliceColumns, direction: Direction) -> NDArray[np.float64]:
    """Seconds of every pack on all layers; float64[num_packs].

    Raises:
        ConfigError: no link is known for the group.
    """
    model, layout = costs.model, costs.layout
    ranks = layout.cp
    link = costs.coefficients.group_link(ranks, stride=layout.tp)
    # Heads of a tensor-parallel rank; those of keys and values at least one for each rank of the group.
    queries = model.num_heads / layout.tp
    keys = max(model.num_kv_heads / layout.tp, ranks)
    token_bytes = 2 * (queries + keys) * model.head_dim * model.bytes_per_element / ranks
    hops = float(CALLS)
    if direction == "forward":
        token_bytes += POSITION_BYTES
        hops += ranks - 1
    sent_bytes = columns.pack_sums(columns.slice_tokens()) * token_bytes * (ranks - 1) / ranks
    return model.num_layers * (sent_bytes / link.bandwidth_bytes_per_s + hops * link.latency_s)
