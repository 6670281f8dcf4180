"""Whether something else kept the machine busy while it was timed: seconds without a core, and spread of repeats.

A busy neighbour that is always there slows the fastest repeat as well, so that spread alone does not show it; the
system's own count of how long threads stood ready without a core does (Linux; elsewhere only the spread is known).
`cost.measured_on.Disturbance` is what a cost file keeps of it.
"""

import time
from pathlib import Path


class CoreWaits:
    """Counts from when it is made.

    Args:
        demand: threads that this machine's ranks compute with, for each core they may use; above 1, ranks wait for
            each other in training too.
    """

    def __init__(self, demand: float) -> None:
        self._own_share = 1 - 1 / max(1.0, demand)
        self._from_s = time.perf_counter()
        self._before_s = _ready_without_core_s()

    def share(self) -> float:
        """Of the time since then, in which the thread that waited longest had no core; 0 where it is not known."""
        passed_s = max(time.perf_counter() - self._from_s, 1e-9)
        now_s = _ready_without_core_s()
        longest_s = max((waited - self._before_s.get(task, 0.0) for task, waited in now_s.items()), default=0.0)
        return min(1.0, max(0.0, longest_s / passed_s - self._own_share))


def spread_of_repeats(timings: list[list[float]]) -> float:
    """By how much the sum of means is above the sum of minima.

    Args:
        timings: seconds of the repeats of each pack.
    """
    fastest = sum(min(repeats) for repeats in timings)
    means = sum(sum(repeats) / len(repeats) for repeats in timings)
    return means / fastest - 1 if fastest > 0 else 0.0


def _ready_without_core_s() -> dict[str, float]:
    found = {}
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            found[task.parent.name] = int(task.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            continue  # A thread that has just ended, or a system that does not count.
    return found
