"""What the whole process holds: interpreter, libraries, tensors, and what allocators keep.

On a CPU that is its resident memory (Linux: `VmRSS`, and `VmHWM` at its highest, of /proc/self/status). Linux lets a
process forget its own peak (5 written to /proc/self/clear_refs), so that every step has its own; where it may not,
the peak is that since the start. On a GPU it is what torch's allocator has reserved of the device at its highest.
"""

from pathlib import Path

import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int | None:
    """Main memory of this process now; None where the system does not say."""
    return _status_bytes("VmRSS")


def peak_process_bytes(device: torch.device) -> int | None:
    """The most since `forget_peak_process_bytes`, of the device's memory; None where the system does not say."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else _status_bytes("VmHWM")


def forget_peak_process_bytes(device: torch.device) -> None:
    """Begin anew, where the system allows it. A GPU's peak is forgotten with those of `runtime.device`."""
    if device.type == "cuda" or not _CLEAR_REFS.exists():
        return
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return  # not allowed in this container: the peak stays that since the start, which the docstring says


def _status_bytes(field: str) -> int | None:
    if not _STATUS.is_file():
        return None
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None
