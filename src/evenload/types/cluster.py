"""Describe devices, memory and links for the cost model (`ClusterSpec`), by name, from a file, or from data sheets."""

import re
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from evenload.errors import ConfigError, nearest_name
from evenload.types.base import Frozen, require_at_least_one

DeviceKind = Literal["cpu", "cuda"]
"""What a rank of `evenload train` computes on."""


class LinkSpec(Frozen):
    """A link between two devices: bytes per second one way, and seconds of latency."""

    bandwidth_bytes_per_s: float
    latency_s: float


class DeviceSpec(Frozen):
    """One accelerator (or CPU process).

    Args:
        peak_flops_per_s: dense matrix-product peak in compute precision; MFU is a share of it.
        memory_bytes: in all; reserved_bytes: of them, for CUDA's context, NCCL's buffers, workspaces of libraries.
        fragmentation_share: of `memory_bytes`, what the allocator cannot use in one piece.
        matmul_efficiency: share of the peak that large matrix products reach.
        attention_efficiency: share of the peak that long attention reaches forward, with the default kernels (on GPUs
            torch's FlashAttention 2); attention_backward_efficiency: backward; None = as forward.
        attention_by_backend: [forward, backward] of backends (`train.attention`) that differ from the default.
        matmul_half_tokens: tokens at which matrix products reach half of that efficiency.
        attention_tile: query rows of one attention kernel block, all of one head; fewer rows cost a whole block.
        kernel_s: fixed seconds a pack costs in every layer (launches, small kernels).
        memory_bytes_per_s: bandwidth of device memory; None = as of an H100, in proportion to the peak.
        host_link: to host memory, for offloaded activations; None = offloading cannot be planned.
    """

    name: str
    peak_flops_per_s: float
    memory_bytes: int
    reserved_bytes: int = 0
    fragmentation_share: float = 0.03
    matmul_efficiency: float = 0.65
    attention_efficiency: float = 0.37
    attention_backward_efficiency: float | None = None
    attention_by_backend: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    matmul_half_tokens: int = 256
    attention_tile: int = 128
    kernel_s: float = 20e-6
    memory_bytes_per_s: float | None = None
    host_link: LinkSpec | None = None

    def __post_init__(self) -> None:
        shares = {"matmul_efficiency": (self.matmul_efficiency,), "attention_efficiency": self.attention_shares()}
        shares |= {f"attention_by_backend.{name}": pair for name, pair in self.attention_by_backend.items()}
        for field, values in shares.items():
            if not all(0 < value <= 1 for value in values):
                raise ConfigError(f"device {self.name}: {field} is {values}, must be above 0 and at most 1")
        if not 0 <= self.fragmentation_share < 1:
            raise ConfigError(
                f"device {self.name}: fragmentation_share is {self.fragmentation_share}, must be in 0..1, 1 excluded"
            )
        if self.usable_bytes <= 0:
            raise ConfigError(
                f"device {self.name}: of memory_bytes {self.memory_bytes} nothing is left for training after "
                f"reserved_bytes {self.reserved_bytes} and fragmentation_share {self.fragmentation_share}"
            )

    @property
    def usable_bytes(self) -> int:
        """Memory for weights, gradients, optimizer state, activations and buffers: all but what is reserved or
        fragments."""
        return self.memory_bytes - self.reserved_bytes - round(self.fragmentation_share * self.memory_bytes)

    def attention_shares(self, backend: str = "auto") -> tuple[float, float]:
        """Return the shares of the peak that attention of a backend reaches forward and backward."""
        backward = self.attention_backward_efficiency
        default = self.attention_efficiency, self.attention_efficiency if backward is None else backward
        return self.attention_by_backend.get(backend, default)


class ClusterSpec(Frozen):
    """Homogeneous nodes of equal devices.

    Args:
        intra_node: link between two devices of a node (NVLink, shared memory).
        inter_node: what ONE network adapter of a node carries to another node.
        nics_per_node: network adapters of a node; None = one for every device.
        host_memory_bytes: main memory of a node, for offloaded activations; None = not limited.
        host_memory_bytes_per_s: its bandwidth, which the devices of a node share; None = it does not bound their links.
    """

    name: str
    num_nodes: int
    devices_per_node: int
    device: DeviceSpec
    intra_node: LinkSpec
    inter_node: LinkSpec
    nics_per_node: int | None = None
    host_memory_bytes: int | None = None
    host_memory_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        require_at_least_one(f"cluster {self.name}: ", self, "num_nodes", "devices_per_node", "nics_per_node")
        for field in ("host_memory_bytes", "host_memory_bytes_per_s"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ConfigError(f"cluster {self.name}: {field} is {value}, must be > 0; leave it out where not known")

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return self.num_nodes * self.devices_per_node

    @property
    def num_nics(self) -> int:
        """Network adapters of a node."""
        return self.devices_per_node if self.nics_per_node is None else self.nics_per_node

    def host_link(self) -> LinkSpec | None:
        """Return the link of one device to host memory while all of its node copy; None where it is not known."""
        link, shared = self.device.host_link, self.host_memory_bytes_per_s
        if link is None or shared is None:
            return link
        bandwidth = min(link.bandwidth_bytes_per_s, shared / self.devices_per_node)
        return LinkSpec(bandwidth_bytes_per_s=bandwidth, latency_s=link.latency_s)

    def group_link(self, members: int, stride: int) -> LinkSpec:
        """Return the link that bounds a collective over `members` ranks that lie `stride` devices apart."""
        return group_link(members, stride, self.devices_per_node, self.num_nics, self.intra_node, self.inter_node)

    def device_link(self, span_devices: int) -> LinkSpec:
        """Return the link of one device to one other, both among so many consecutive devices."""
        if span_devices <= self.devices_per_node:
            return self.intra_node
        return device_share(self.inter_node, self.num_nics, self.devices_per_node)


def group_link(
    members: int, stride: int, devices_per_node: int, nics_per_node: int, intra_node: LinkSpec, inter_node: LinkSpec
) -> LinkSpec:
    """Return the link that bounds a ring over `members` ranks that lie `stride` devices apart.

    Inside a node it is the node's own. A group that leaves the node has devices_per_node / stride members in each (data
    and context groups have stride tp) and crosses the network on as many adapters at once, as NCCL's rings do, or on
    each member's share of the adapters. Counted as if the group filled all its nodes.
    """
    if members * stride <= devices_per_node:
        return intra_node
    rails = max(1, devices_per_node // stride) * nics_per_node / devices_per_node
    return LinkSpec(
        bandwidth_bytes_per_s=min(intra_node.bandwidth_bytes_per_s, rails * inter_node.bandwidth_bytes_per_s),
        latency_s=inter_node.latency_s,
    )


def device_share(inter_node: LinkSpec, nics_per_node: int, devices_per_node: int) -> LinkSpec:
    """Return one device's share of the network while all of its node send: at most one adapter."""
    share = min(1.0, nics_per_node / devices_per_node)
    return LinkSpec(bandwidth_bytes_per_s=share * inter_node.bandwidth_bytes_per_s, latency_s=inter_node.latency_s)


# Clusters by name (`h100x32`, `a100-40x8`: N devices, 8 a node) or from a TOML file of `ClusterSpec`'s fields.
#
# Peaks are dense bf16 of NVIDIA's data sheets (those of H100, H200 and B200 print twice as much, "with sparsity").
# Links are what one device gets one way, as much as SlimPack §6.1 sees arrive on H100: 400 of NVLink's 450 GB/s, and 42
# of the 50 GB/s of a 400 Gbit/s adapter a device; networks are those of the DGX systems. 3 GB of memory are kept for
# CUDA, NCCL and libraries, 3 % for fragmentation: both are assumed. About 80 % of PCIe 5 x16 (63 GB/s; A100: 4 x16,
# 31.5 GB/s) arrives at the host, and of its memory modules: 2 x 8 channels of DDR5-4800 (H100, H200), DDR5-5600 (B200),
# DDR4-3200 (A100); 2 TB in eight devices' node, 1 TB of DGX A100 320GB.
#
# Attention, share of the peak forward and backward, of long causal documents with heads of 128, by FlashAttention 2:
#     A100    62 and 55 %     Dao 2023, abstract and section 4: 50 to 73 % forward, up to 63 % backward
#     H100    37 and 33 %     Shah et al. 2024 (FlashAttention 3), section 1: 35 %; Dao 2023, section 4: 34 %
#     B200    16 and 14 %     assumed as fast as on H100: its instructions are those of Ampere
# and by FlashAttention 3 (`varlen_cuda_fa3`):
#     H100    68 and 56 %     Shah et al. 2024, abstract: up to 75 % forward; backward 1.5 to 1.75 times FA 2

DEVICES_PER_NODE = 8
"""Of built-in clusters."""

_H100_OTHERS = {"varlen_cuda_fa3": (0.68, 0.56)}
_HOST_SHARE = 0.8  # of the bandwidth of the memory modules


class _System(NamedTuple):
    """A device, what joins eight of them, and the host memory of their node; bandwidths are bytes a second."""

    name: str
    peak_flops_per_s: float
    memory_gb: int
    memory_bandwidth: float | None
    nvlink: float
    network: float
    pcie: float
    host_memory_tb: int
    host_modules: float
    attention: tuple[float, float]
    others: dict[str, tuple[float, float]] = {}  # noqa: RUF012, never changed


_DEVICES: dict[str, _System] = {
    "h100": _System("H100-80GB", 989e12, 80, None, 400e9, 42e9, 50e9, 2, 614.4e9, (0.37, 0.33), _H100_OTHERS),
    "h200": _System("H200-141GB", 989e12, 141, 4.8e12, 400e9, 42e9, 50e9, 2, 614.4e9, (0.37, 0.33), _H100_OTHERS),
    "b200": _System("B200-180GB", 2250e12, 180, 8e12, 800e9, 42e9, 50e9, 2, 716.8e9, (0.16, 0.14)),
    "a100": _System("A100-80GB", 312e12, 80, 2.039e12, 250e9, 21e9, 24e9, 2, 409.6e9, (0.62, 0.55)),
    "a100-40": _System("A100-40GB", 312e12, 40, 1.555e12, 250e9, 21e9, 24e9, 1, 409.6e9, (0.62, 0.55)),
}

BUILT_IN = tuple(_DEVICES)
"""Devices of built-in clusters, to be followed by x and how many."""


def cluster_from(name_or_path: str) -> ClusterSpec:
    """Return a built-in cluster or one described by a TOML file; `ConfigError` where the name is unknown (with the
    nearest), devices do not fill nodes, or the file lacks fields or has others."""
    match = re.fullmatch(r"([a-z0-9-]+?)x(\d+)", name_or_path.lower())
    if match and match[1] in _DEVICES:
        return _built_in(name_or_path.lower(), match[1], int(match[2]))
    path = Path(name_or_path)
    if not path.is_file():
        count = match[2] if match else "8"
        names = [f"{device}x{count}" for device in _DEVICES]
        near = nearest_name(name_or_path, names, similarity=0.3) or names[0]
        raise ConfigError(
            f"cluster '{name_or_path}' is no built-in name and no TOML file; "
            f"did you mean '{near}'? built in: {', '.join(f'{d}xN' for d in _DEVICES)}"
        )
    try:
        return msgspec.toml.decode(path.read_bytes(), type=ClusterSpec)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"cluster file {path}: {error}") from error


def cluster_of(device: str, num_devices: int) -> ClusterSpec:
    """Return a cluster of built-in devices that holds so many: one part of a node, or whole nodes."""
    whole_nodes = -(-num_devices // DEVICES_PER_NODE) * DEVICES_PER_NODE
    return cluster_from(f"{device}x{num_devices if num_devices < DEVICES_PER_NODE else whole_nodes}")


def _built_in(name: str, device_name: str, num_devices: int) -> ClusterSpec:
    system = _DEVICES[device_name]
    per_node = min(num_devices, DEVICES_PER_NODE)
    if num_devices < 1 or num_devices % per_node:
        raise ConfigError(
            f"cluster {name}: {num_devices} devices do not fill nodes of {DEVICES_PER_NODE}; "
            f"use 1 to {DEVICES_PER_NODE} or a multiple of {DEVICES_PER_NODE}"
        )
    return ClusterSpec(
        name=name,
        num_nodes=num_devices // per_node,
        devices_per_node=per_node,
        device=DeviceSpec(
            name=system.name,
            peak_flops_per_s=system.peak_flops_per_s,
            memory_bytes=system.memory_gb * 1_000_000_000,
            reserved_bytes=3_000_000_000,
            attention_efficiency=system.attention[0],
            attention_backward_efficiency=system.attention[1],
            attention_by_backend=system.others,
            memory_bytes_per_s=system.memory_bandwidth,
            host_link=LinkSpec(bandwidth_bytes_per_s=system.pcie, latency_s=10e-6),
        ),
        intra_node=LinkSpec(bandwidth_bytes_per_s=system.nvlink, latency_s=5e-6),
        inter_node=LinkSpec(bandwidth_bytes_per_s=system.network, latency_s=10e-6),
        host_memory_bytes=system.host_memory_tb * 10**12 * per_node // DEVICES_PER_NODE,
        host_memory_bytes_per_s=_HOST_SHARE * system.host_modules * per_node / DEVICES_PER_NODE,
    )


# Dense bf16 peaks with fp32 sums (GeForce cards are twice as fast without) by torch.cuda.get_device_name, of data
# sheets without sparsity. Names are compared whole: cards of one chip have different peaks ("H200", "H200 NVL").
_A100S = ("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-SXM-80GB", "A100-PCIE-40GB", "A100 80GB PCIe")
_PEAKS: dict[str, float] = {
    # A100 (2021): SXM and PCIe differ in memory and power only.
    **dict.fromkeys(_A100S, 312e12),
    # H100 (2023), H200, GH200 (2024): half of what is printed, "with sparsity": 1,979 (SXM), 1,513 (PCIe), 1,671 (NVL).
    **dict.fromkeys(("H100 80GB HBM3", "H200", "GH200 480GB"), 989e12),
    "H100 PCIe": 756e12,
    **dict.fromkeys(("H100 NVL", "H200 NVL"), 835e12),
    # DGX B200 (2024): half of 36,000, over eight GPUs.
    "B200": 2250e12,
    # A30, A40, A10 (2021); L4 (2023): half of 242; L40 (2022), L40S (2023).
    **{"A30": 165e12, "A40": 149.7e12, "A10": 125e12, "L4": 121e12, "L40": 181.05e12, "L40S": 362.05e12},
    # NVIDIA Ada GPU Architecture V2, table of the RTX 4090 and 3090: bf16 with fp32 accumulate.
    **{"GeForce RTX 3090": 71e12, "GeForce RTX 4090": 165.2e12},
}


def data_sheet_flops_per_s(device: str) -> float | None:
    """Return the dense bf16 peak of a GPU by torch's name, with or without "NVIDIA "; None where it is not known."""
    return _PEAKS.get(device.removeprefix("NVIDIA "))
