"""Packs priced in numpy: what the core's prices (`native/price.cpp`) must equal to the last bit."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import ReplicaPacks, pipeline_bytes
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_pricing import divide_backward, gather_seconds, weight_seconds
from evenload.types.columns import SliceColumns
from evenload.types.pipeline import PipelineTasks, SplitBackward


def pipeline_tasks(costs: PackCosts, packs: ReplicaPacks, *, split: bool = False) -> PipelineTasks:
    """Price as `evenload.cost.pack_pricing`."""
    forward, backward, num_tokens, policy = packs.forward, packs.backward, packs.num_tokens, packs.policy
    held = pipeline_bytes(costs.model, costs.layout, packs)
    is_cut = np.zeros(len(num_tokens), bool)
    for columns in (forward, backward):
        is_cut[columns.doc[columns.start > 0]] = True
    tasks = PipelineTasks(
        forward_s=costs.pack_seconds(
            packs.pieces("forward"), "forward", policy, is_cut, costs.stops_of(forward, backward)
        ),
        backward_s=costs.pack_seconds(packs.pieces("backward"), "backward", policy, is_cut),
        p2p_forward_s=p2p_seconds(costs, forward),
        p2p_backward_s=p2p_seconds(costs, backward),
        forwards_needed=forwards_needed(forward, backward, num_tokens),
        stage_to_rank=np.array(costs.layout.stage_to_rank, np.int32),
        held=held,
    )
    return replace(tasks, split=split_backward(costs, tasks, backward, policy)) if split else tasks


def p2p_seconds(costs: PackCosts, columns: SliceColumns) -> NDArray[np.float64]:
    """One transfer of every pack's hidden states (or their gradient) to the next stage; float64[num_packs]."""
    if costs.layout.num_stages == 1:
        return np.zeros(columns.num_packs)
    link = costs.coefficients.stage_link()
    token_bytes = costs.model.hidden_size * costs.model.bytes_per_element / costs.layout.tp
    pack_bytes = columns.rank_tokens() * token_bytes
    return pack_bytes / link.bandwidth_bytes_per_s + link.latency_s


def forwards_needed(forward: SliceColumns, backward: SliceColumns, num_tokens: NDArray[np.int64]) -> NDArray[np.int32]:
    """`D[j]`: forward packs that hold any slice of a document of backward pack j; int32[m_b]."""
    last = np.zeros(len(num_tokens), np.int32)
    is_last = forward.stop == num_tokens[forward.doc]
    last[forward.doc[is_last]] = forward.pack_of_slice()[is_last] + 1
    needed = np.zeros(backward.num_packs, np.int32)
    # `at`, not `reduceat`: an empty pack must give 0, not its neighbour's value.
    np.maximum.at(needed, backward.pack_of_slice(), last[backward.doc])
    return needed


def split_backward(
    costs: PackCosts, tasks: PipelineTasks, backward: SliceColumns, policy: NDArray[np.int8] | None = None
) -> SplitBackward:
    """How the backward packs of `tasks`, priced whole under a policy (int8[num_documents]), divide."""
    copy_s = None if policy is None else costs.copy_seconds(backward, policy)
    weight_s = weight_seconds(costs, backward.rank_tokens(), tasks.backward_s, copy_s)
    input_s, weight_s = tasks.backward_s - weight_s, weight_s + gather_seconds(costs, backward)
    return divide_backward(costs.model, costs.layout, tasks, backward, input_s, weight_s)
