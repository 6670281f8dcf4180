"""Clusters by name (`h100x32`, `a100-40x8`: N devices, 8 a node) or from a TOML file of `ClusterSpec`'s fields.

Peaks are dense bf16 of NVIDIA's data sheets, links what one device gets one way; of links so much is counted as
SlimPack §6.1 sees arrive on H100: 400 of NVLink's 450 GB/s, and 42 of the 50 GB/s of a 400 Gbit/s adapter a device.

    name     data sheet         FLOP/s    memory           memory bandwidth    NVLink, both ways    network a device
    h100     H100 SXM           989e12    80 GB            3.35 TB/s           900 GB/s             400 Gbit/s
    h200     H200 SXM           989e12    141 GB           4.8 TB/s            900 GB/s             400 Gbit/s
    b200     DGX B200, of 8     2,250e12  180 GB           8 TB/s              1,800 GB/s           400 Gbit/s
    a100     A100 80GB SXM      312e12    80 GB            2.039 TB/s          600 GB/s             200 Gbit/s
    a100-40  A100 40GB SXM      312e12    40 GB            1.555 TB/s          600 GB/s             200 Gbit/s

(The data sheets of H100, H200 and B200 print twice the FLOP/s, "with sparsity". Networks are those of the DGX systems.)
The bandwidth of H100's memory is left to the default, which is made from it. 3 GB of memory are kept for CUDA, NCCL and
libraries, 3 % for fragmentation: both are assumptions. Host links: PCIe 5 x16 (4 x16 of A100), about 80 % of the 63 and
31.5 GB/s of the data sheet arrive.

Attention, share of the peak forward and backward, of long causal documents with heads of 128:

    FlashAttention 2, which torch ships and the runtime takes by default
        A100    62 and 55 %     Dao 2023, abstract and section 4: 50 to 73 % forward, up to 63 % backward
        H100    37 and 33 %     Shah et al. 2024 (FlashAttention 3), section 1: 35 %; Dao 2023, section 4: 335
                                TFLOP/s, 34 %, both passes together
        B200    16 and 14 %     assumed as fast as on H100: its instructions are those of Ampere
    FlashAttention 3, `varlen_cuda_fa3`
        H100    68 and 56 %     Shah et al. 2024, abstract: up to 75 % forward; backward 1.5 to 1.75 times as fast as 2

Host memory of a node and its bandwidth, both sockets, are those of the DGX systems of eight devices, in proportion
where fewer are asked for; about 80 % of the bandwidth of the memory modules arrives.

    name     system (data sheet)    memory    memory modules                       bandwidth
    h100     DGX H100, DGX H200     2 TB      2 x 8 channels of DDR5-4800          614 GB/s
    b200     DGX B200               2 TB      2 x 8 channels of DDR5-5600          717 GB/s (memory: up to 4 TB)
    a100     DGX A100 640GB         2 TB      2 x 8 channels of DDR4-3200          410 GB/s
    a100-40  DGX A100 320GB         1 TB      the same                             410 GB/s
"""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from evenload.errors import ConfigError
from evenload.types.cluster import ClusterSpec, DeviceSpec, LinkSpec
from evenload.types.nearest_name import nearest_name

DEVICES_PER_NODE = 8
"""Of the built-in clusters."""

_PCIE5 = LinkSpec(bandwidth_bytes_per_s=50e9, latency_s=10e-6)
_PCIE4 = LinkSpec(bandwidth_bytes_per_s=24e9, latency_s=10e-6)
_NETWORK_400 = LinkSpec(bandwidth_bytes_per_s=42e9, latency_s=10e-6)
_NETWORK_200 = LinkSpec(bandwidth_bytes_per_s=21e9, latency_s=10e-6)


def _nvlink(bandwidth_bytes_per_s: float) -> LinkSpec:
    return LinkSpec(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=5e-6)


def _device(
    name: str,
    peak_flops_per_s: float,
    memory_gb: int,
    memory_bytes_per_s: float | None,
    host_link: LinkSpec,
    attention: tuple[float, float],
    others: dict[str, tuple[float, float]] | None = None,
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        peak_flops_per_s=peak_flops_per_s,
        memory_bytes=memory_gb * 1_000_000_000,
        reserved_bytes=3_000_000_000,
        attention_efficiency=attention[0],
        attention_backward_efficiency=attention[1],
        attention_by_backend=others or {},
        memory_bytes_per_s=memory_bytes_per_s,
        host_link=host_link,
    )


_A100_ATTENTION = (0.62, 0.55)
_H100_ATTENTION = (0.37, 0.33)
_H100_OTHERS = {"varlen_cuda_fa3": (0.68, 0.56)}
_B200_ATTENTION = (0.16, 0.14)
_HOST_SHARE = 0.8
"""Of the bandwidth of the memory modules."""


class _System(NamedTuple):
    """A device with what eight of them have in one node."""

    device: DeviceSpec
    intra_node: LinkSpec
    inter_node: LinkSpec
    host_memory_bytes: int
    host_memory_bytes_per_s: float


_TB = 10**12
_DEVICES: dict[str, _System] = {
    "h100": _System(
        _device("H100-80GB", 989e12, 80, None, _PCIE5, _H100_ATTENTION, _H100_OTHERS),
        _nvlink(400e9),
        _NETWORK_400,
        2 * _TB,
        _HOST_SHARE * 614.4e9,
    ),
    "h200": _System(
        _device("H200-141GB", 989e12, 141, 4.8e12, _PCIE5, _H100_ATTENTION, _H100_OTHERS),
        _nvlink(400e9),
        _NETWORK_400,
        2 * _TB,
        _HOST_SHARE * 614.4e9,
    ),
    "b200": _System(
        _device("B200-180GB", 2250e12, 180, 8e12, _PCIE5, _B200_ATTENTION),
        _nvlink(800e9),
        _NETWORK_400,
        2 * _TB,
        _HOST_SHARE * 716.8e9,
    ),
    "a100": _System(
        _device("A100-80GB", 312e12, 80, 2.039e12, _PCIE4, _A100_ATTENTION),
        _nvlink(250e9),
        _NETWORK_200,
        2 * _TB,
        _HOST_SHARE * 409.6e9,
    ),
    "a100-40": _System(
        _device("A100-40GB", 312e12, 40, 1.555e12, _PCIE4, _A100_ATTENTION),
        _nvlink(250e9),
        _NETWORK_200,
        _TB,
        _HOST_SHARE * 409.6e9,
    ),
}

BUILT_IN = tuple(_DEVICES)
"""Devices of the built-in clusters, to be followed by x and how many."""


def cluster_from(name_or_path: str) -> ClusterSpec:
    """A built-in cluster or one described by a TOML file.

    Raises:
        ConfigError: unknown name (the message offers the nearest), a device count that does not fill nodes, or a
            TOML with missing or unknown fields.
    """
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
        device=system.device,
        intra_node=system.intra_node,
        inter_node=system.inter_node,
        host_memory_bytes=system.host_memory_bytes * per_node // DEVICES_PER_NODE,
        host_memory_bytes_per_s=system.host_memory_bytes_per_s * per_node / DEVICES_PER_NODE,
    )
