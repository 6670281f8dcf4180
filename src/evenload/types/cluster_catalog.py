"""Clusters by name (`h100x32`, `a100x8`: N devices, 8 a node) or from a TOML file of `ClusterSpec`'s fields.

Numbers are data-sheet peaks; links are what one device gets one way. H100: SlimPack §6.1 (NVLink 400 GB/s a
device, one 400 Gbit/s NIC a device, of which 42 GB/s arrive). A100: NVLink 3 and one 200 Gbit/s NIC.
5 GB of memory are kept for the runtime and fragmentation. Host links: PCIe 5 x16 (H100) and 4 x16 (A100), about
80 % of the 63 and 31.5 GB/s of the data sheet arrive.
"""

import difflib
import re
from pathlib import Path

import msgspec

from evenload.errors import ConfigError
from evenload.types.cluster import ClusterSpec, DeviceSpec, LinkSpec

DEVICES_PER_NODE = 8
"""Of the built-in clusters."""

_DEVICES: dict[str, tuple[DeviceSpec, LinkSpec, LinkSpec]] = {
    "h100": (
        DeviceSpec(
            name="H100-80GB",
            peak_flops_per_s=989e12,
            memory_bytes=80_000_000_000,
            reserved_bytes=5_000_000_000,
            host_link=LinkSpec(bandwidth_bytes_per_s=50e9, latency_s=10e-6),
        ),
        LinkSpec(bandwidth_bytes_per_s=400e9, latency_s=5e-6),
        LinkSpec(bandwidth_bytes_per_s=42e9, latency_s=10e-6),
    ),
    "a100": (
        DeviceSpec(
            name="A100-80GB",
            peak_flops_per_s=312e12,
            memory_bytes=80_000_000_000,
            reserved_bytes=5_000_000_000,
            host_link=LinkSpec(bandwidth_bytes_per_s=24e9, latency_s=10e-6),
        ),
        LinkSpec(bandwidth_bytes_per_s=250e9, latency_s=5e-6),
        LinkSpec(bandwidth_bytes_per_s=21e9, latency_s=10e-6),
    ),
}


def cluster_from(name_or_path: str) -> ClusterSpec:
    """A built-in cluster or one described by a TOML file.

    Raises:
        ConfigError: unknown name (the message offers the nearest), a device count that does not fill nodes, or a
            TOML with missing or unknown fields.
    """
    match = re.fullmatch(r"([a-z0-9]+?)x(\d+)", name_or_path.lower())
    if match and match[1] in _DEVICES:
        return _built_in(name_or_path.lower(), match[1], int(match[2]))
    path = Path(name_or_path)
    if not path.is_file():
        count = match[2] if match else "8"
        names = [f"{device}x{count}" for device in _DEVICES]
        near = difflib.get_close_matches(name_or_path.lower(), names, n=1, cutoff=0.3)
        raise ConfigError(
            f"cluster '{name_or_path}' is no built-in name and no TOML file; "
            f"did you mean '{(near or names)[0]}'? built in: {', '.join(f'{d}xN' for d in _DEVICES)}"
        )
    try:
        return msgspec.toml.decode(path.read_bytes(), type=ClusterSpec)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"cluster file {path}: {error}") from error


def _built_in(name: str, device_name: str, num_devices: int) -> ClusterSpec:
    device, intra_node, inter_node = _DEVICES[device_name]
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
        device=device,
        intra_node=intra_node,
        inter_node=inter_node,
    )
