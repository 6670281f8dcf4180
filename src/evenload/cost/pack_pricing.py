"""Price one replica's packs in one call of the core: seconds, bytes and dependencies, and backwards as I and W.

`forwards_needed[j]` is one more than the last forward pack that holds a slice of a document of backward pack j.
Formulas stand in `cost.pack_cost`, `cost.memory` and here (I and W); `tests/reference/prices.py` agrees to the last
bit. About 50 ns a slice and 10 ns a pack and stage.

W (zero bubble; Qi et al. 2023) is one of the two equal products of every linear layer's backward, dW, and its part
of their constants: the measured share of these seconds, else half. Attention, norms, embedding and head stay in I:
keeping logits for W would cost vocab·(e + 4) bytes a token. Under tensor parallelism W gathers rows again
(`cost.group_transfers.WEIGHT_RINGS`), so I and W together take longer than the whole backward.

From I to W stay, per token and layer (`runtime/replay/weight_products.py`), on top of the forward's chunk until I ends:

    inputs      e·(2·hidden + q + ffn)             of q k v (one for the three), o_proj, gate and up, down
    gradients   e·(2·hidden + q + 2·kv + 2·ffn)    of q k v, o_proj, gate and up, down
"""

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.cost.group_transfers import weight_gather_seconds
from evenload.cost.layer_counts import OFFLOAD, stage_kinds, weight_elements_per_token
from evenload.cost.memory import ReplicaPacks
from evenload.cost.pack_cost import PackCosts
from evenload.types.columns import SliceColumns
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.pipeline import PackBytes, PipelineTasks, SplitBackward


def gather_seconds(costs: PackCosts, backward: SliceColumns) -> NDArray[np.float64]:
    """Return what I and W of every backward pack take beyond the whole backward: tensor-parallel transfers made again
    in W; float64[m_b, P]."""
    token_s, pack_s = weight_gather_seconds(costs.model, costs.coefficients, costs.layout.tp)
    return np.outer(backward.rank_tokens() * token_s + pack_s, costs.tensor_blocks())


def weight_seconds(
    costs: PackCosts, tokens: NDArray[np.int64], backward_s: NDArray[np.float64], copy_s: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Return what W defers of every backward of so many tokens of the rank (int64[m_b]); `backward_s` whole, `copy_s`
    of what comes back from the host (None = nothing); float64[m_b, P] each."""
    share, per_layer = costs.coefficients.split_share(costs.model), costs.coefficients.backward
    layer_s = tokens * (per_layer.linear_s_per_token / costs.layout.tp) + per_layer.pack_s
    weight_s = share * np.outer(layer_s, costs.linear_layers())
    # The head and exposed transfers come on top in I, so W is never more than this share of the whole.
    weight_s = np.minimum(weight_s, share * backward_s)
    # I needs all that comes back from the host; while it waits, a part of W's work is done.
    return weight_s if copy_s is None else np.minimum(weight_s, backward_s - copy_s)


def divide_backward(
    model: ModelSpec,
    layout: ParallelLayout,
    tasks: PipelineTasks,
    backward: SliceColumns,
    input_s: NDArray[np.float64],
    weight_s: NDArray[np.float64],
) -> SplitBackward:
    """Divide the bytes of backwards between I and W, whose seconds are known; float64[m_b, P] each."""
    tokens, element = backward.rank_tokens(), model.bytes_per_element
    held_bytes = stage_kinds(model, layout) @ (element * weight_elements_per_token(model, layout.tp))
    held = np.outer(tokens, held_bytes)
    return SplitBackward(
        input_s=input_s,
        weight_s=weight_s,
        input_freed_bytes=tasks.held.backward_freed_bytes - held,
        input_temp_bytes=tasks.held.backward_temp_bytes + held,
        weight_freed_bytes=held,
    )


_SPLIT = tuple(field.name for field in fields(SplitBackward))


def pipeline_tasks(costs: PackCosts, packs: ReplicaPacks, *, split: bool = False) -> PipelineTasks:
    """Price packs of one replica, whose slices are shared by their `cp` ranks.

    Args:
        split: also price backwards as I and W.

    Raises:
        ConfigError: slices of a bidirectional model, or a transfer over a link that is not known.
        ValueError: columns that are no packs of these documents.
    """
    _require_known_links(costs, packs)
    codes = np.empty(0, np.int8) if packs.policy is None else np.ascontiguousarray(packs.policy, np.int8)
    num_tokens = np.ascontiguousarray(packs.num_tokens, np.int64)
    *columns, parts = _native.price_packs(
        costs.native, _arrays(packs.forward), _arrays(packs.backward), num_tokens, codes, split
    )
    forward_s, backward_s, p2p_forward_s, p2p_backward_s, needed, kept, forward_temp, freed, backward_temp = columns
    return PipelineTasks(
        forward_s=forward_s,
        backward_s=backward_s,
        p2p_forward_s=p2p_forward_s,
        p2p_backward_s=p2p_backward_s,
        forwards_needed=needed,
        stage_to_rank=np.array(costs.layout.stage_to_rank, np.int32),
        held=PackBytes(
            static_bytes=np.array(costs.native.static_bytes, np.int64),
            forward_kept_bytes=kept,
            forward_temp_bytes=forward_temp,
            backward_freed_bytes=freed,
            backward_temp_bytes=backward_temp,
        ),
        split=None if parts is None else SplitBackward(**dict(zip(_SPLIT, parts, strict=True))),
    )


def _require_known_links(costs: PackCosts, packs: ReplicaPacks) -> None:
    """Refuse, as `PackCosts` does, what the core takes for granted."""
    forward, backward = packs.forward, packs.backward
    costs.require_sliceable(forward)
    costs.require_sliceable(backward)
    if packs.policy is not None and (packs.policy == OFFLOAD).any():
        costs.host_link()
    shared = (forward.cp > 1).any() or (backward.cp > 1).any()
    coefficients = costs.coefficients
    leaves_node = costs.layout.world_size > coefficients.devices_per_node
    if shared and (coefficients.intra_node is None or (leaves_node and coefficients.inter_node is None)):
        costs.context_seconds(forward, "forward")  # refuses a group over a link that is not known
        costs.context_seconds(backward, "backward")


def require_links_of_group(costs: PackCosts, ranks: int, policy: NDArray[np.int8] | None) -> None:
    """Refuse, as `pipeline_tasks` does, packs that so many ranks share over a link that is not known."""
    if policy is not None and (policy == OFFLOAD).any():
        costs.host_link()
    if ranks > 1:
        costs.coefficients.group_link(ranks, stride=costs.layout.tp)


def _arrays(columns: SliceColumns) -> tuple[NDArray, ...]:
    return columns.doc, columns.start, columns.stop, columns.pack_offset, columns.pad_to, columns.cp
