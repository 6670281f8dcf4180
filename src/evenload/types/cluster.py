"""`ClusterSpec`: devices, memory and links, as far as the cost model needs them."""

from typing import Literal

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
        reserved_bytes: of `memory_bytes`, kept for the runtime and fragmentation.
        matmul_efficiency: share of the peak that large matrix products reach.
        attention_efficiency: share of the peak that long attention kernels reach.
        matmul_half_tokens: tokens at which matrix products reach half of that efficiency.
        attention_tile: query rows of one attention kernel block; fewer rows cost a whole block.
        kernel_s: fixed seconds a pack costs in every layer (launches, small kernels).
        memory_bytes_per_s: bandwidth of device memory, for work that it bounds; None = as of an H100, in proportion to
            the peak.
        host_link: to host memory, for offloaded activations; None = offloading cannot be planned.
    """

    name: str
    peak_flops_per_s: float
    memory_bytes: int
    reserved_bytes: int = 0
    matmul_efficiency: float = 0.65
    attention_efficiency: float = 0.55
    matmul_half_tokens: int = 256
    attention_tile: int = 128
    kernel_s: float = 20e-6
    memory_bytes_per_s: float | None = None
    host_link: LinkSpec | None = None


class ClusterSpec(Frozen):
    """Homogeneous nodes of equal devices.

    Args:
        intra_node: link between two devices of a node (NVLink, shared memory).
        inter_node: link of one device to another node (its share of the NICs).
    """

    name: str
    num_nodes: int
    devices_per_node: int
    device: DeviceSpec
    intra_node: LinkSpec
    inter_node: LinkSpec

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.devices_per_node < 1:
            raise ConfigError(
                f"cluster {self.name}: {self.num_nodes} nodes of {self.devices_per_node} devices; both must be >= 1"
            )

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return self.num_nodes * self.devices_per_node

    def link(self, group_span_devices: int) -> LinkSpec:
        """The link that bounds a group whose ranks span that many consecutive devices."""
        return self.intra_node if group_span_devices <= self.devices_per_node else self.inter_node
