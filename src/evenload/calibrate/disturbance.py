"""Whether something else kept the machine busy while it was timed: seconds without a core, and spread of repeats.

A busy neighbour that is always there slows the fastest repeat as well, so that spread alone does not show it; the
system's own count of how long threads stood ready without a core does (Linux; elsewhere only the spread is known).
"""

import time
from pathlib import Path
from typing import NamedTuple

# Above these, predicted seconds are off by more than what plans decide by. A quiet machine stays far below.
_MOST_WAITED_SHARE = 0.15
_MOST_SPREAD = 0.5


class Disturbance(NamedTuple):
    """Of one rank's timings.

    Args:
        waited_share: of the time, in which its busiest thread stood ready and had no core, beyond what the run's own
            processes take from each other.
        spread: by how much the mean of repeated timings is above the fastest, over all packs together.
    """

    waited_share: float
    spread: float

    @property
    def is_noisy(self) -> bool:
        """Too much for what was timed to be believed."""
        return self.size > 1

    @property
    def size(self) -> float:
        """To tell the quieter of two measurements."""
        return max(self.waited_share / _MOST_WAITED_SHARE, self.spread / _MOST_SPREAD)

    def describe(self) -> str:
        return (
            f"processes stood without a core for {self.waited_share:.0%} of the time, and repeated timings were "
            f"{self.spread:.0%} above the fastest"
        )


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
