"""The device of a rank: its choice, copies to it that the host does not wait for, its clock and its peak memory.

On a GPU the host only queues work, so `EventClock` marks the computing stream and is read after the step; `HostClock`
is the same interface where calls are synchronous.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenload.errors import ConfigError
from evenload.types.cluster import DeviceKind


def require_device(kind: DeviceKind, processes_here: int) -> None:
    """Refuse a device that this machine does not have: no GPU, or fewer than ranks on this machine (`ConfigError`)."""
    if kind == "cpu":
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            "train.device is 'cuda', but torch finds no GPU here (torch.cuda.is_available() is false); install a CUDA "
            "build of torch and its driver, or use train.device = 'cpu'"
        )
    if (found := torch.cuda.device_count()) < processes_here:
        raise ConfigError(
            f"train.device is 'cuda' and {processes_here} processes start on this machine, which shows {found} "
            f"GPU{'s' if found > 1 else ''}; a process needs one of its own: lower parallel.dp / cp / pp / tp, or "
            "start with torchrun on more machines"
        )


def rank_device(kind: DeviceKind, local_rank: int) -> torch.device:
    """This process's device, made the current one."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def use_deterministic_kernels(wanted: bool = True) -> None:
    """Have torch add in one order on GPUs too; cuBLAS also wants `CUBLAS_WORKSPACE_CONFIG` before it starts."""
    torch.use_deterministic_algorithms(wanted)
    # Torch would also fill every tensor that is made without values; we write all of them before they are read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[bad-assignment]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor's copy on the device, ordered in its stream; the host does not wait for a GPU. For any thread."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until everything queued is done. Where devices compute in the call, that is now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_now(device: torch.device) -> float:
    """Host seconds after everything that was queued to compute is done; transfers in other streams may go on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def forget_peak_bytes(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def measured_peak_bytes(device: torch.device) -> int | None:
    """Most bytes of tensors at once, by the allocator's own count; None where there is none (CPU)."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# What the whole process holds: interpreter, libraries, tensors, and what allocators keep. On a CPU that is its resident
# memory (Linux: `VmRSS`, and `VmHWM` at its highest, of /proc/self/status). Linux lets a process forget its own peak (5
# written to /proc/self/clear_refs), so that every step has its own; where it may not, the peak is that since the start.
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int | None:
    """Main memory of this process now; None where the system does not say."""
    return _status_bytes("VmRSS")


def peak_process_bytes(device: torch.device) -> int | None:
    """Most bytes since `forget_peak_process_bytes`, on a GPU as torch has reserved; None where not known."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else _status_bytes("VmHWM")


def forget_peak_process_bytes(device: torch.device) -> None:
    """Begin anew, where the system allows it. `forget_peak_bytes` does so for a GPU."""
    if device.type == "cuda" or not _CLEAR_REFS.exists():
        return
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return  # not allowed in this container: the peak stays that since the start


def _status_bytes(field: str) -> int | None:
    if not _STATUS.is_file():
        return None
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


class HostClock:
    """Times inside a step in seconds, read at its end; marks are the host's times."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.mark: Callable[[], Any] = now

    def start(self) -> None:
        """Start before a step's first mark."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Marks of this step as seconds of the host's clock. Waits for the last one."""
        return list(marks)


class EventClock(HostClock):
    """Marks are events on the GPU's stream that is current where they are made. Not run on hardware yet."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._event)
        self._device = device

    def start(self) -> None:
        """Waits for the computing stream, which is idle between steps, so that both clocks start together."""
        self._first_s = seconds_now(self._device)
        self._first = self._event()

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        for mark in marks:
            mark.synchronize()
        return [self._first_s + self._first.elapsed_time(mark) / 1e3 for mark in marks]

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def step_clock(device: torch.device) -> HostClock:
    return EventClock(device) if device.type == "cuda" else HostClock()
