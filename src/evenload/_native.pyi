# Compiled core (native/). Call it through the wrappers named beside each function; they check inputs.
from typing import Any

import numpy as np
from numpy.typing import NDArray

# plan/bin_packing.py: (members int64[n], offset int64[groups + 1])
def best_fit_decreasing(
    num_tokens: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def longest_first(
    work_s: NDArray[np.float64], num_groups: int, num_tokens: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

# plan/var_length.py: int64[n], the group of every item, -1 = left over
def pack_greedily(
    work_s: NDArray[np.float64], num_tokens: NDArray[np.int64], num_groups: int, capacity: int
) -> NDArray[np.int64]: ...

# plan/partition.py: (doc int32[slices], start, stop int64[slices], pack_offset int64[packs + 1])
def partition_by_work(
    num_tokens: NDArray[np.int64],
    order: NDArray[np.int32],
    linear_s: float,
    attention_s: tuple[tuple[float, int], ...],
    slice_s: float,
    num_packs: int,
    align: int,
    min_slice_tokens: int,
    max_pack_tokens: int,
    last_first: bool,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]: ...

# `tasks` below: the columns of PipelineTasks in field order, from schedule/task_arrays.py.
# schedule/packflow.py: (kind uint8[n], stage int32[n], pack int32[n], rank_offset int64[ranks + 1])
def list_schedule(
    tasks: tuple[NDArray[Any], ...],
    cap_bytes: NDArray[np.int64],
    alternate: bool,
    lookahead: int,
    split: tuple[NDArray[Any], ...] | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]: ...

# simulate/simulate.py: (start_s, end_s float64[n], peak_bytes int64[ranks], done int64[ranks])
def simulate(
    tasks: tuple[NDArray[Any], ...],
    kind: NDArray[np.uint8],
    stage: NDArray[np.int32],
    pack: NDArray[np.int32],
    rank_offset: NDArray[np.int64],
    split: tuple[NDArray[Any], ...] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]: ...
