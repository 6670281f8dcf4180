"""Main memory of this machine, or of the container in which the process runs."""

import os
from pathlib import Path

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of cgroup v2 and v1; "max" or a huge number where there is none."""


_FREE_SHARE = 0.2
"""Kept for the interpreter, libraries and the operating system when the memory limit is not configured."""


def process_memory_bytes(processes: int) -> int:
    """What one of so many processes of a run may hold."""
    return int(machine_memory_bytes() * (1 - _FREE_SHARE) / processes)


def machine_memory_bytes() -> int:
    """What the machine has, or the container where one is limited."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _LIMITS:
        text = limit.read_text().strip() if limit.is_file() else "max"
        if text.isdigit():
            total = min(total, int(text))
    return total
