"""`Timeline`: what ran when, made by the simulator and by the runtime alike.

Because both sides produce the same columns, "predicted against measured" is one function.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KINDS = "FBIW"
"""Code of an action kind in `Timeline.kind` is its index here."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """Columns over tasks, and byte samples over time. Times start at 0 with the step.

    Args:
        dp_rank, rank, stage, pack: int32[num_tasks]; `rank` is the pipeline rank.
        kind: uint8[num_tasks], index into `KINDS`.
        start_s, end_s: float64[num_tasks].
        step_time_s: from the first start to the optimizer step's end.
        memory_dp_rank, memory_rank: int32[num_samples].
        memory_time_s: float64[num_samples]; ascending for each rank.
        memory_bytes: int64[num_samples], bytes held from that time on.
    """

    dp_rank: NDArray[np.int32]
    rank: NDArray[np.int32]
    stage: NDArray[np.int32]
    kind: NDArray[np.uint8]
    pack: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    step_time_s: float
    memory_dp_rank: NDArray[np.int32]
    memory_rank: NDArray[np.int32]
    memory_time_s: NDArray[np.float64]
    memory_bytes: NDArray[np.int64]

    @property
    def num_tasks(self) -> int:
        """Rows of the task columns."""
        return len(self.start_s)

    def peak_bytes(self) -> int:
        """The most bytes any rank held at any time; 0 without samples."""
        return int(self.memory_bytes.max()) if len(self.memory_bytes) else 0

    def bubble_fraction(self) -> float:
        """Share of all ranks' step time in which a rank computed no pack."""
        num_ranks = len(np.unique(self.dp_rank.astype(np.int64) * 2**32 + self.rank))
        if not num_ranks or self.step_time_s <= 0:
            return 0.0
        return 1.0 - float((self.end_s - self.start_s).sum()) / (num_ranks * self.step_time_s)
