"""Choose the device of a rank, copy to it without waiting, and measure its time and peak memory.

On a GPU the host only queues work, so `EventClock` marks the computing stream and is read after the step; `HostClock`
is the same interface where calls are synchronous.
"""

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenload.errors import ConfigError
from evenload.types.cluster import DeviceKind
from evenload.types.text import counted


def require_device(kind: DeviceKind, processes_here: int) -> None:
    """Raise `ConfigError` where this machine has no GPU, or fewer than ranks."""
    if kind == "cpu":
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            "train.device is 'cuda', but torch finds no GPU here (torch.cuda.is_available() is false); install a CUDA "
            "build of torch and its driver, or use train.device = 'cpu'"
        )
    if (result := torch.cuda.device_count()) < processes_here:
        raise ConfigError(
            f"train.device is 'cuda' and {processes_here} processes start on this machine, which shows "
            f"{counted(result, 'GPU')}; lower parallel.dp / cp / pp / tp, or start with torchrun on more machines"
        )


def rank_device(kind: DeviceKind, local_rank: int) -> torch.device:
    """Return this process's device, and make it the current one."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    # Autograd's thread finds it at its first product; torch says so, once, to everyone whose first kernel is one.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    return device


def use_deterministic_kernels() -> None:
    """Make torch add in one order on GPUs too; cuBLAS also wants `CUBLAS_WORKSPACE_CONFIG` before it starts."""
    torch.use_deterministic_algorithms(True)
    # Torch would also fill every uninitialised tensor; we write all of them before they are read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[bad-assignment]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, ordered in its stream; the host does not wait for a GPU. For any thread."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def seconds_now(device: torch.device) -> float:
    """Return the host's seconds once everything queued to compute is done; transfers in other streams may go on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def reset_peak_bytes(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def measured_peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes of tensors at once, by the allocator's own count; None where there is none (CPU)."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def resident_bytes() -> int | None:
    """Return the resident memory of the whole process; None where the system does not say (Linux does)."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else ():
        name, _, value = line.partition(":")
        if name == "VmRSS":
            return int(value.split()[0]) * 1024
    return None


class HostClock:
    """Measures times inside a step, which begins with `start`; marks are the host's seconds."""

    def start(self) -> None: ...

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return marks of this step as seconds of the host's clock. Waits for the last one."""
        return list(marks)


class EventClock(HostClock):
    """Measures with events on the GPU's current stream as marks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Wait for the computing stream, which is idle between steps, so that both clocks start together."""
        self._first_s = seconds_now(self._device)
        self._first = self.mark()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        for mark in marks:
            mark.synchronize()
        return [self._first_s + self._first.elapsed_time(mark) / 1e3 for mark in marks]


def step_clock(device: torch.device) -> HostClock:
    return EventClock(device) if device.type == "cuda" else HostClock()
