"""Main memory of this machine, or of the container in which the process runs."""

import os
from pathlib import Path

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of cgroup v2 and v1; "max" or a huge number where there is none."""


def machine_memory_bytes() -> int:
    """What the machine has, or the container where one is limited."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _LIMITS:
        text = limit.read_text().strip() if limit.is_file() else "max"
        if text.isdigit():
            total = min(total, int(text))
    return total
