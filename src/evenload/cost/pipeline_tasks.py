"""`pipeline_tasks`: seconds, bytes and dependencies of one replica's packs, in one call of the core.

What is computed stands in `cost.pack_cost` (seconds), `cost.memory` (bytes) and `cost.split_backward` (I and W), which
plans use for single quantities; `tests/reference/prices.py` puts them together in numpy and agrees to the last bit.
`forwards_needed[j]` is one more than the last forward pack that holds a slice of a document of backward pack j.
O(slices + packs · stages · features), about 50 ns a slice and 10 ns a pack and stage.
"""

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.cost.activation import OFFLOAD
from evenload.cost.pack_cost import PackCosts
from evenload.types.columns import SliceColumns
from evenload.types.pipeline import PackBytes, PipelineTasks, SplitBackward

_SPLIT = tuple(field.name for field in fields(SplitBackward))


def pipeline_tasks(
    costs: PackCosts,
    forward: SliceColumns,
    backward: SliceColumns,
    num_tokens: NDArray[np.int64],
    policy: NDArray[np.int8] | None = None,
    *,
    split: bool = False,
) -> PipelineTasks:
    """Price packs of one replica.

    Args:
        num_tokens: int64[k] of the replica's documents, indexed by `SliceColumns.doc`.
        policy: int8[k], indices into `cost.activation.POLICIES`; None = all replay.
        split: also price backwards as I and W.

    Raises:
        ConfigError: slices of a bidirectional model, or a transfer over a link that is not known.
        ValueError: columns that are no packs of these documents.
    """
    _require_known_links(costs, forward, backward, policy)
    codes = np.empty(0, np.int8) if policy is None else np.ascontiguousarray(policy, np.int8)
    *columns, parts = _native.price_packs(
        costs.native, _arrays(forward), _arrays(backward), np.ascontiguousarray(num_tokens, np.int64), codes, split
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


def _require_known_links(
    costs: PackCosts, forward: SliceColumns, backward: SliceColumns, policy: NDArray[np.int8] | None
) -> None:
    """What the core takes for granted, refused as `PackCosts` refuses it."""
    costs.require_sliceable(forward)
    costs.require_sliceable(backward)
    if policy is not None and (policy == OFFLOAD).any():
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
