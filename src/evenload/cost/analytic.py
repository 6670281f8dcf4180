"""Make cost coefficients from data sheets, for planning without a device: `analytic_coefficients`.

    linear_s_per_token    2·parameters / (peak · matmul_efficiency)          backward 2x
                          more for functions that carry a state (`cost.layer_counts.STATE_SLOWNESS`)
    attention_s_per_pair  2·heads·(width of a key + of a value) / (peak · attention_efficiency)
                                                                             backward 2.5x the work (SlimPack §2.2.2)
    prefix_s_per_token    backward: fp32 dK and dV of the prefix read and written once per slice; forward: 0
    slice_s               kernel_s · a share, more where states are carried   backward 2x
    pack_s                kernel_s + linear_s_per_token / tp · matmul_half_tokens
    tensor_exposed_share  1 - hidden share: of a layer's 10 transfers (`cost.group_transfers`) 6 are in 4 chunks, of
                          which products hide all but the first, 4 hide whole behind weight gradients; a hidden second
                          costs the products 0.2 (`OverlapCost`). Half of the products hide something at most
    head_s_per_token      3 · 2·hidden·vocab / (peak · matmul_efficiency): logits, dX, dW, all in the backward

All but the constants of a pack are of one device that computes whole layers; `cost.pack_cost` divides by tp and cp.
Of memory-bound kernels only the optimizer, the embedding and dK/dV are counted.
"""

import msgspec

from evenload.cost.coefficients import CostCoefficients, OverlapCost, PassCoefficients
from evenload.cost.group_transfers import BLOCK_RINGS, TENSOR_CHUNKS, tensor_ring_seconds
from evenload.cost.layer_counts import (
    BACKWARD_ATTENTION_RATIO,
    BACKWARD_LINEAR_RATIO,
    accumulator_bytes,
    kind_shares,
    require_supported_layout,
)
from evenload.errors import ConfigError
from evenload.types.cluster import ClusterSpec
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.text import counted

FLOPS_PER_MEMORY_BYTE = 300.0
"""Peak FLOP/s over memory bandwidth (H100: 989e12 / 3.35e12), for memory-bound work of devices that do not say."""
OPTIMIZER_BYTES_PER_PARAMETER = 30.0
"""AdamW reads gradient, master and two moments in fp32, writes the last three and the bf16 weight."""
SLICE_SHARE_OF_KERNEL = 1 / 20
"""A slice inside a varlen kernel costs index work only; assumed a twentieth of a pack's launches. Scans take more
of it (`cost.layer_counts.SCAN_SLICES`)."""
CHUNKED_RINGS = 6
"""Of the 10 transfers of hidden states of a layer, those in chunks (`runtime/replay/tensor_parallel.py`)."""
HIDING_SHARE = 0.5  # Of a layer's matrix products, those that run while its tensor-parallel transfers are under way


def analytic_coefficients(
    model: ModelSpec, cluster: ClusterSpec, layout: ParallelLayout, attention: str = "auto"
) -> CostCoefficients:
    """Return the coefficients of a model on a cluster; the layout decides which links the transfers cross.

    Args:
        attention: backend of range attention (`train.attention`), which decides how fast its kernels are.

    Raises:
        ConfigError: the layout needs more devices than the cluster has, or does not fit the model.
    """
    require_supported_layout(model, layout)
    if layout.world_size > cluster.num_devices:
        raise ConfigError(
            f"layout {layout.describe()} needs {counted(layout.world_size, 'device')}, cluster {cluster.name} has "
            f"{cluster.num_devices}; lower dp or pp, or name a larger cluster"
        )
    device = cluster.device
    matmul_flops_per_s = device.peak_flops_per_s * device.matmul_efficiency
    memory_bytes_per_s = device.memory_bytes_per_s or device.peak_flops_per_s / FLOPS_PER_MEMORY_BYTE

    shares = kind_shares(model)
    linear_s = 2.0 * shares.mean_products / matmul_flops_per_s
    linear_ratio = 1.0 if model.has_adapters else BACKWARD_LINEAR_RATIO  # frozen matrices have no dW
    attention_s = [
        ratio * 2.0 * shares.mean_pair_width / (device.peak_flops_per_s * share)
        for ratio, share in zip((1.0, BACKWARD_ATTENTION_RATIO), device.attention_shares(attention), strict=True)
    ]
    prefix_s = 2.0 * shares.mean_key_width * accumulator_bytes(model) / memory_bytes_per_s
    head_s = (1.0 + linear_ratio) * 2.0 * model.embedding_parameters / matmul_flops_per_s
    passes = [
        PassCoefficients(
            linear_s_per_token=linear_s * ratio,
            attention_s_per_pair=pair_s,
            prefix_s_per_token=token_s,
            slice_s=device.kernel_s * SLICE_SHARE_OF_KERNEL * shares.mean_pieces * ratio,
            pack_s=(device.kernel_s + linear_s / layout.tp * device.matmul_half_tokens) * ratio,
        )
        for ratio, pair_s, token_s in ((1.0, attention_s[0], 0.0), (linear_ratio, attention_s[1], prefix_s))
    ]
    # Pipeline neighbours lie dp·cp·tp ranks apart (types.layout), so some transfer leaves the node as soon as the
    # whole pipeline does; data-parallel ranks are neighbours.
    p2p = cluster.device_link(layout.world_size)
    reduce = cluster.group_link(max(layout.data_sizes), layout.tp)
    costs = CostCoefficients(
        source="analytic",
        device=device.name,
        peak_flops_per_s=device.peak_flops_per_s,
        forward=passes[0],
        backward=passes[1],
        attention_tile=device.attention_tile,
        # Read a row and write it (forward), read the gradient and add it to an fp32 row (backward): alike.
        embedding_s_per_token=2.0 * model.hidden_size * model.bytes_per_element / memory_bytes_per_s,
        head_s_per_token=head_s,
        head_pack_s=3.0 * device.kernel_s + head_s / layout.tp * device.matmul_half_tokens,
        copy_s_per_byte=2.0 / memory_bytes_per_s,
        optimizer_s_per_parameter=OPTIMIZER_BYTES_PER_PARAMETER / memory_bytes_per_s,
        p2p_bandwidth_bytes_per_s=p2p.bandwidth_bytes_per_s,
        p2p_latency_s=p2p.latency_s,
        reduce_bandwidth_bytes_per_s=reduce.bandwidth_bytes_per_s,
        reduce_latency_s=reduce.latency_s,
        overlap=OverlapCost(),
        weight_share=None if shares.matrix_share == 1 else 0.5 * shares.matrix_share,
        intra_node=cluster.intra_node,
        inter_node=cluster.inter_node,
        devices_per_node=cluster.devices_per_node,
        nics_per_node=cluster.num_nics,
        host_link=cluster.host_link(),
    )
    if layout.tp == 1:
        return costs
    # Both directions of a layer, a token: matrix products, and the transfers that they may hide.
    products_s = linear_s * (1.0 + linear_ratio) / layout.tp
    # Of two blocks, as a layer without experts has.
    rings, assumed = 2 * sum(BLOCK_RINGS.values()), OverlapCost()
    transfer_s, _ = tensor_ring_seconds(model, costs, layout.tp, rings)
    hidden_share = min(1.0 - CHUNKED_RINGS / rings / TENSOR_CHUNKS, HIDING_SHARE * products_s / transfer_s)
    gained_share = 1.0 - assumed.communication_slowdown * assumed.compute_slowdown
    return msgspec.structs.replace(costs, tensor_exposed_share=1.0 - gained_share * hidden_share)
