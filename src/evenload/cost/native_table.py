"""`CostTable`: one model, device and layout as the plain numbers that native prices are made of (`native/price.h`).

Formulas stay in `cost.pack_cost`, `cost.memory`, `cost.group_comm` and `cost.split_backward`; here they are only
evaluated per stage. Made once for a planner; pricing a pack then multiplies and adds in the core.
"""

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.cost.activation import activation_bytes_per_token
from evenload.cost.attention_workspace import KEY_GRADIENT_BYTES
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.group_comm import ContextTraffic, context_traffic, ring_home, weight_gather_seconds
from evenload.cost.memory import HEAD_ROWS, byte_rates
from evenload.cost.split_backward import weight_elements_per_token, weight_share
from evenload.types.cluster import LinkSpec
from evenload.types.layout import ParallelLayout
from evenload.types.micropack import Direction
from evenload.types.model import ModelSpec


def native_table(
    model: ModelSpec,
    coefficients: CostCoefficients,
    layout: ParallelLayout,
    stage_seconds: dict[Direction, NDArray[np.float64]],
    host_seconds: dict[Direction, NDArray[np.float64]],
    linear_again_s: tuple[NDArray[np.float64], NDArray[np.float64]],
    *,
    keeps_short_whole: bool,
) -> _native.CostTable:
    """The numbers of one `PackCosts`.

    Args:
        stage_seconds: float64[features, P] of each direction, seconds per feature of a pack.
        host_seconds: float64[2, P] of each direction, of the host a slice and a pack.
        linear_again_s: float64[P] each, seconds a token and a pack of what recomputing pays again.
        keeps_short_whole: see `PackCosts`.
    """
    table = _native.CostTable()
    table.num_stages, table.num_ranks = layout.num_stages, layout.pipeline_ranks
    table.layout_cp, table.layout_tp = layout.cp, layout.tp
    table.tile, table.causal = coefficients.attention_tile, model.causal
    table.shared_tile = coefficients.attention_tile if keeps_short_whole else 0
    table.devices_per_node = coefficients.devices_per_node
    table.windows = sorted(set(model.windows))
    table.forward, table.backward = (
        _pass_table(model, coefficients, layout.tp, direction, stage_seconds[direction], host_seconds[direction])
        for direction in ("forward", "backward")
    )
    table.context_hidden_share = coefficients.context_hidden_share
    table.copy_s_per_byte = coefficients.copy_s_per_byte
    table.context_ring = coefficients.context_exchange == "ring"
    # In the core only groups at stride tp choose between the two, and what they get between nodes does not depend on
    # how many they are: the link of one that leaves its node is that of all.
    between = coefficients.group_link_or_none(coefficients.devices_per_node + 1, layout.tp)
    table.intra_node, table.inter_node = _link(coefficients.intra_node), _link(between)
    table.host = _link(coefficients.host_link)
    layers = np.array(layout.stage_counts, np.int64)
    table.layers = layers.astype(float).tolist()
    table.linear_again_token_s, table.linear_again_pack_s = (column.tolist() for column in linear_again_s)
    offloaded = activation_bytes_per_token(model, "replay", layout.tp)
    table.offload_bytes_per_token = (layers * offloaded).astype(float).tolist()
    table.p2p_bytes_per_token = model.hidden_size * model.bytes_per_element / layout.tp
    # One stage sends nothing, so nothing has to be known.
    table.p2p = _link(coefficients.stage_link() if layout.num_stages > 1 else None)
    table.stage_to_rank = list(layout.stage_to_rank)
    rates = byte_rates(model, layout)
    table.static_bytes = rates.static_bytes.tolist()
    table.chunk_bytes = rates.chunk.ravel().tolist()
    table.forward_temp_bytes = rates.forward_temp.ravel().tolist()
    table.backward_temp_bytes = rates.backward_temp.ravel().tolist()
    table.kv_bytes, table.kv_gradient_bytes = rates.kv.tolist(), rates.kv_gradient.tolist()
    table.logits_bytes_per_row = rates.logits_per_row.tolist()
    table.head_rows = HEAD_ROWS
    table.slice_temp_bytes, table.prefix_key_bytes = rates.attention.piece, rates.attention.prefix_key
    table.grouped_key_bytes, table.grouped_key_head_bytes = (
        rates.attention.grouped_key,
        rates.attention.grouped_key_head,
    )
    table.grouped_key_most_bytes = KEY_GRADIENT_BYTES
    table.gathered_forward_bytes, table.gathered_backward_bytes = rates.gathered_forward, rates.gathered_backward
    table.weight_token_s = coefficients.backward.linear_s_per_token / layout.tp
    table.weight_pack_s = coefficients.backward.pack_s
    table.weight_share = weight_share(model, coefficients)
    table.weight_gather_token_s, table.weight_gather_pack_s = weight_gather_seconds(model, coefficients, layout.tp)
    held = (layers * (model.bytes_per_element * weight_elements_per_token(model, layout.tp))).tolist()
    table.weight_held_bytes = table.weight_new_bytes = held
    return table


def _pass_table(
    model: ModelSpec,
    coefficients: CostCoefficients,
    tp: int,
    direction: Direction,
    stage_seconds: NDArray[np.float64],
    host_seconds: NDArray[np.float64],
) -> _native.PassTable:
    return _native.PassTable(
        stage_seconds.ravel().tolist(),
        host_seconds.ravel().tolist(),
        _traffic(context_traffic(model, coefficients, tp, direction, is_cut=False)),
        _traffic(context_traffic(model, coefficients, tp, direction, is_cut=True)),
        *map(float, ring_home(model, coefficients, tp, direction)),
    )


def _traffic(found: ContextTraffic) -> _native.ContextTraffic:
    return _native.ContextTraffic(float(found.token_bytes), float(found.rings), float(found.placed_bytes))


def _link(link: LinkSpec | None) -> _native.Link:
    return _native.Link(0.0, 0.0) if link is None else _native.Link(link.bandwidth_bytes_per_s, link.latency_s)
