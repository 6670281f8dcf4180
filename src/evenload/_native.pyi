# Compiled core (native/). Call it through the wrappers named beside each function; they check inputs first.
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.types.tree import Segment

# planning/packing.py: (members int64[n], offset int64[groups + 1])
def best_fit_decreasing(
    num_tokens: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def longest_first(
    work_s: NDArray[np.float64],
    num_groups: int,
    num_tokens: NDArray[np.int64],
    capacity: int,
    load_s: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

# planning/packing.py: int64[n], the group of every item, -1 = left over
def pack_greedily(
    work_s: NDArray[np.float64], num_tokens: NDArray[np.int64], num_groups: int, capacity: int
) -> NDArray[np.int64]: ...

# planning/micro_batches.py: (micro-batches a rank, rank of every item int64[n], index of its micro-batch int64[n])
def micro_batches(
    num_tokens: NDArray[np.int64],
    work_s: NDArray[np.float64],
    rank_of: NDArray[np.int64],
    ranks: int,
    max_tokens: int,
    max_items: int,
    micro_batch_s: float,
    least: int,
    most: int,
    multiple: int,
    waits_at_each: bool,
    no_empty: bool,
    most_trials: int,
) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]: ...

# planning/strategies/skrull.py: (owner int64[members], seconds float64[groups])
def assign_owners(
    num_tokens: NDArray[np.int64],
    local_s: NDArray[np.float64],
    shared_s: NDArray[np.float64],
    gather_s: NDArray[np.float64],
    members: NDArray[np.int64],
    offset: NDArray[np.int64],
    cp: int,
    bucket: int,
    algorithm_1_only: bool,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]: ...

# `tasks` below: the columns of PipelineTasks in field order, from schedule/simulate.py.
# schedule/packflow.py: (kind uint8[n], stage int32[n], pack int32[n], rank_offset int64[ranks + 1])
def list_schedule(
    tasks: tuple[NDArray[Any], ...],
    cap_bytes: NDArray[np.int64],
    alternate: bool,
    lookahead: int,
    split: tuple[NDArray[Any], ...] | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]: ...

# schedule/simulate.py: (start_s, end_s float64[n], peak_bytes int64[ranks], done int64[ranks])
def simulate(
    tasks: tuple[NDArray[Any], ...],
    kind: NDArray[np.uint8],
    stage: NDArray[np.int32],
    pack: NDArray[np.int32],
    rank_offset: NDArray[np.int64],
    split: tuple[NDArray[Any], ...] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]: ...

# planning/cp_sharding.py: as list_schedule; cap_bytes int64[ranks], empty = not limited
def run_ahead(
    tasks: tuple[NDArray[Any], ...],
    kind: NDArray[np.uint8],
    stage: NDArray[np.int32],
    pack: NDArray[np.int32],
    rank_offset: NDArray[np.int64],
    phase_of_forward: NDArray[np.int64],
    phase_of_backward: NDArray[np.int64],
    cap_bytes: NDArray[np.int64],
    split: tuple[NDArray[Any], ...] | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]: ...

# cost/pack_cost.py: the numbers prices are made of; see native/price.h.
class Link:
    def __init__(self, bandwidth_bytes_per_s: float, latency_s: float) -> None: ...

class ContextTraffic:
    def __init__(self, token_bytes: float, rings: float, placed_bytes: float) -> None: ...

class PassTable:
    def __init__(
        self,
        matrix: list[float],
        host: list[float],
        whole: ContextTraffic,
        cut: ContextTraffic,
        home_token_bytes: float = 0.0,
        home_hops: float = 0.0,
        context_part_s: float = 0.0,
    ) -> None: ...

class CostTable:
    num_stages: int
    num_ranks: int
    tile: int
    layout_cp: int
    layout_tp: int
    devices_per_node: int
    causal: bool
    windows: list[int]
    forward: PassTable
    backward: PassTable
    context_hidden_share: float
    copy_s_per_byte: float
    context_ring: bool
    context_most_parts: int
    context_gained_share: float
    context_computed_share: float
    intra_node: Link
    inter_node: Link
    host: Link
    tensor_blocks: list[float]
    linear_layers: list[float]
    exchanging_layers: list[float]
    linear_again_token_s: list[float]
    linear_again_pack_s: list[float]
    offload_bytes_per_token: list[float]
    p2p_bytes_per_token: float
    p2p: Link
    stage_to_rank: list[int]
    static_bytes: list[int]
    chunk_bytes: list[int]
    forward_temp_bytes: list[int]
    backward_temp_bytes: list[int]
    kv_bytes: list[int]
    kv_gradient_bytes: list[int]
    state_bytes: list[int]
    cut_multiple: int
    logits_bytes_per_row: list[int]
    head_rows: int
    slice_temp_bytes: int
    prefix_key_bytes: int
    grouped_key_bytes: int
    grouped_key_head_bytes: int
    grouped_key_most_bytes: int
    gathered_forward_bytes: int
    gathered_backward_bytes: int
    weight_token_s: float
    weight_pack_s: float
    weight_share: float
    weight_gather_token_s: float
    weight_gather_pack_s: float
    weight_held_bytes: list[int]
    weight_new_bytes: list[int]

# types/tree_columns.py: (first, count, start, depth)
TreeRanges = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]

def tree_columns(documents: list[tuple[Segment, ...]]) -> TreeRanges: ...

# cost/pack_pricing.py: columns of PipelineTasks that depend on packs, in field order, then SplitBackward's or None
def price_packs(
    table: CostTable,
    forward: tuple[NDArray[Any], ...],
    backward: tuple[NDArray[Any], ...],
    num_tokens: NDArray[np.int64],
    ranges: TreeRanges,
    policy: NDArray[np.int8],
    split: bool,
) -> tuple[Any, ...]: ...

# planning/candidates.py; a curve is (linear_s, attention terms, slice_s)
def cut_packs(
    table: CostTable,
    num_tokens: NDArray[np.int64],
    ranges: TreeRanges,
    setting: NDArray[np.int64],
    forward: tuple[float, tuple[tuple[float, int], ...], float],
    backward: tuple[float, tuple[tuple[float, int], ...], float],
    min_slice_tokens: int,
    max_pack_tokens: int,
    align_from_tiles: int,
) -> tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]] | None: ...

# per replica (excess_bytes int64[trials], makespan_s, imbalance forward, imbalance backward float64[trials])
def score_trials(
    table: CostTable,
    replicas: list[tuple[NDArray[np.int64], TreeRanges, NDArray[np.int8], int, NDArray[np.int64]]],
    forward: tuple[float, tuple[tuple[float, int], ...], float],
    backward: tuple[float, tuple[tuple[float, int], ...], float],
    cap_bytes: NDArray[np.int64],
    min_slice_tokens: int,
    max_pack_tokens: int,
    align_from_tiles: int,
    threads: int,
) -> list[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]]: ...
