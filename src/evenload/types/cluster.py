"""`ClusterSpec`: devices, memory and links, as far as the cost model needs them."""

from typing import Literal

import msgspec

from evenload.errors import ConfigError
from evenload.types.base import Frozen

DeviceKind = Literal["cpu", "cuda"]
"""On which a rank of `evenload train` computes."""


class LinkSpec(Frozen):
    """A link between two devices: bytes per second one way, and start-up seconds."""

    bandwidth_bytes_per_s: float
    latency_s: float


class DeviceSpec(Frozen):
    """One accelerator (or CPU process).

    Args:
        name: for example "H100-80GB".
        peak_flops_per_s: dense matrix-product peak in compute precision; MFU is a share of it.
        memory_bytes: usable for training.
        reserved_bytes: of `memory_bytes`, for what is no tensor of training: CUDA's context and kernels, NCCL's
            buffers, workspaces of libraries.
        fragmentation_share: of `memory_bytes`, what the allocator cannot use in one piece.
        matmul_efficiency: share of the peak that large matrix products reach.
        attention_efficiency: share of the peak that long attention kernels reach forward, by the kernels that the
            runtime takes by default: on GPUs those in torch itself, FlashAttention 2.
        attention_backward_efficiency: the same backward; None = as forward.
        attention_by_backend: [forward, backward] of other backends (`train.attention`) by name, such as
            "varlen_cuda_fa3"; one that is not named counts as the default.
        matmul_half_tokens: tokens at which matrix products reach half of that efficiency.
        attention_tile: query rows of one attention kernel block; fewer rows cost a whole block. The rows of a block are
            of one head, so tensor parallelism, which splits heads, leaves tiles as they are.
        kernel_s: fixed seconds a pack costs in every layer (launches, small kernels).
        memory_bytes_per_s: bandwidth of device memory, for work that it bounds; None = as of an H100, in proportion to
            the peak.
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
        """For weights, gradients, optimizer state, activations and buffers: memory without what is reserved and what
        fragments."""
        return self.memory_bytes - self.reserved_bytes - round(self.fragmentation_share * self.memory_bytes)

    def attention_shares(self, backend: str = "auto") -> tuple[float, float]:
        """Of the peak, that attention of a backend reaches: forward, backward."""
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
        if self.num_nodes < 1 or self.devices_per_node < 1:
            raise ConfigError(
                f"cluster {self.name}: {self.num_nodes} nodes of {self.devices_per_node} devices; both must be >= 1"
            )
        if self.nics_per_node is not None and self.nics_per_node < 1:
            raise ConfigError(
                f"cluster {self.name}: nics_per_node is {self.nics_per_node}, must be >= 1; leave it out where every "
                "device has an adapter of its own"
            )
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
        """To host memory, for one device while the others of its node copy too; None where it is not known."""
        link, shared = self.device.host_link, self.host_memory_bytes_per_s
        if link is None or shared is None:
            return link
        bandwidth = min(link.bandwidth_bytes_per_s, shared / self.devices_per_node)
        return LinkSpec(bandwidth_bytes_per_s=bandwidth, latency_s=link.latency_s)

    def group_link(self, members: int, stride: int) -> LinkSpec:
        """What bounds a collective over `members` ranks that lie `stride` devices apart: `group_link`."""
        return group_link(members, stride, self.devices_per_node, self.num_nics, self.intra_node, self.inter_node)

    def device_link(self, span_devices: int) -> LinkSpec:
        """What one device gets that sends to one other, where both lie among so many consecutive devices."""
        if span_devices <= self.devices_per_node:
            return self.intra_node
        return device_share(self.inter_node, self.num_nics, self.devices_per_node)


def group_link(
    members: int, stride: int, devices_per_node: int, nics_per_node: int, intra_node: LinkSpec, inter_node: LinkSpec
) -> LinkSpec:
    """The link that bounds a ring over `members` ranks that lie `stride` devices apart.

    Inside a node it is the node's own. A group that leaves the node and has k members in each (k = devices_per_node /
    stride: in the rank order of `types.layout` the groups of data and context ranks have stride tp) crosses the network
    on k adapters at once, as NCCL's rings and trees do, one a member; the other groups of the node use the others. With
    fewer or more adapters than devices each member has its share of them. Inside the node the same bytes go from member
    to member: min(inside a node, rails x adapter). Counted as if the group filled all its nodes.
    """
    if members * stride <= devices_per_node:
        return intra_node
    rails = max(1, devices_per_node // stride) * nics_per_node / devices_per_node
    return LinkSpec(
        bandwidth_bytes_per_s=min(intra_node.bandwidth_bytes_per_s, rails * inter_node.bandwidth_bytes_per_s),
        latency_s=inter_node.latency_s,
    )


def device_share(inter_node: LinkSpec, nics_per_node: int, devices_per_node: int) -> LinkSpec:
    """Of the network, for one transfer of one device while the others of its node send too: one adapter, or its share
    of one where there are fewer than devices."""
    share = min(1.0, nics_per_node / devices_per_node)
    return LinkSpec(bandwidth_bytes_per_s=share * inter_node.bandwidth_bytes_per_s, latency_s=inter_node.latency_s)
