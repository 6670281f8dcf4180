"""`usable_cores`: on how many cores this process may run, on every operating system that plans."""

import os


def usable_cores() -> int:
    """Cores that the system lets this process use; all of the machine's where it cannot say (macOS, Windows)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
