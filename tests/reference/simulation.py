"""The simulator as an explicit graph: nodes, edges, topological longest path (SlimPack §4.3, Algorithm 1).

What `native/simulate.cpp` must equal to the last bit. Nodes are actions; edges are (from, to, delay):

    schedule   consecutive actions of a rank                               delay 0
    data       F(k, s-1) -> F(k, s) and B(j, s+1) -> B(j, s)               delay one transfer
    forward    F(D[j] - 1, s) -> B(j, s)                                   delay 0
    weight     I(j, s) -> W(j, s)                                          delay 0

Where a backward is split, I stands for B in all edges but the last.
One forward edge stands for all D[j]: forwards of a stage run in index order. Where a stage has several ranks, pack k
runs on rank number k % width, in index order there, and the edge is from the last of those forwards that rank runs.
O(V + E), about 3 us a node.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.timeline import KINDS

_BACKWARD, _INPUT, _WEIGHT = (KINDS.index(name) for name in "BIW")


@dataclass(frozen=True, eq=False)
class ReferenceSimulation:
    """Times of actions (float64[n], 0 for those that never run), peak bytes of ranks (int64[R]), and how many actions
    ran on each rank (int64[R]); fewer than it has means deadlock."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    peak_bytes: NDArray[np.int64]
    done: NDArray[np.int64]


def reference_simulation(tasks: PipelineTasks, actions: ActionColumns) -> ReferenceSimulation:
    """Build the graph of actions that ranks could run, and solve it."""
    num_nodes = len(actions.kind)
    predecessors = _predecessors(tasks, actions)
    successors: list[list[int]] = [[] for _ in range(num_nodes)]
    waiting = [0] * num_nodes
    for node, edges in enumerate(predecessors):
        for source, _ in edges:
            waiting[node] += 1
            if source >= 0:  # a missing source is never finished: the node waits for ever
                successors[source].append(node)
    kind, stage, pack = actions.kind.tolist(), actions.stage.tolist(), actions.pack.tolist()
    parts = (tasks.split.input_s, tasks.split.weight_s) if tasks.split else ()
    durations = [seconds.tolist() for seconds in (tasks.forward_s, tasks.backward_s, *parts)]
    start, end = [0.0] * num_nodes, [0.0] * num_nodes
    finished = [False] * num_nodes
    ready = [node for node in range(num_nodes) if waiting[node] == 0]
    while ready:
        node = ready.pop()
        start[node] = max((end[source] + delay for source, delay in predecessors[node]), default=0.0)
        end[node] = start[node] + durations[kind[node]][pack[node]][stage[node]]
        finished[node] = True
        for successor in successors[node]:
            waiting[successor] -= 1
            if waiting[successor] == 0:
                ready.append(successor)
    edges = actions.rank_offset.tolist()
    done = [sum(finished[lo:hi]) for lo, hi in itertools.pairwise(edges)]
    return ReferenceSimulation(
        start_s=np.array(start, dtype=np.float64),
        end_s=np.array(end, dtype=np.float64),
        peak_bytes=np.array([_peak(tasks, actions, r, count) for r, count in enumerate(done)], dtype=np.int64),
        done=np.array(done, dtype=np.int64),
    )


def _predecessors(tasks: PipelineTasks, actions: ActionColumns) -> list[list[tuple[int, float]]]:
    """Per node its incoming edges as (source node or -1 if it does not exist, delay in seconds)."""
    rows = list(zip(actions.kind.tolist(), actions.stage.tolist(), actions.pack.tolist(), strict=True))
    node_of = {row: node for node, row in enumerate(rows)}
    hops = (tasks.p2p_forward_s.tolist(), tasks.p2p_backward_s.tolist())
    needed, widths = tasks.forwards_needed.tolist(), tasks.widths.tolist()
    first_nodes = set(actions.rank_offset[:-1].tolist())
    result = []
    for node, (kind, stage, pack) in enumerate(rows):
        edges = [] if node in first_nodes else [(node - 1, 0.0)]
        if kind == _WEIGHT:
            edges.append((node_of.get((_INPUT, stage, pack), -1), 0.0))
            result.append(edges)
            continue
        direction = min(kind, 1)
        source_stage = stage - 1 if kind == 0 else stage + 1
        if 0 <= source_stage < tasks.num_stages:
            source = node_of.get((direction, source_stage, pack), -1)
            if direction == 1 and source < 0:
                source = node_of.get((_INPUT, source_stage, pack), -1)
            edges.append((source, hops[direction][pack]))
        if direction == 1 and needed[pack] > 0:
            last = needed[pack] - 1 - (needed[pack] - 1 - pack) % widths[stage]
            if last >= 0:
                edges.append((node_of.get((0, stage, last), -1), 0.0))
        result.append(edges)
    return result


def _peak(tasks: PipelineTasks, actions: ActionColumns, rank: int, done: int) -> int:
    """Most bytes the rank holds while its first `done` actions run."""
    columns = {_BACKWARD: (tasks.held.backward_temp_bytes, tasks.held.backward_freed_bytes)}
    if tasks.split is not None:
        columns[_INPUT] = tasks.split.input_temp_bytes, tasks.split.input_freed_bytes
        columns[_WEIGHT] = np.zeros_like(tasks.split.weight_freed_bytes), tasks.split.weight_freed_bytes
    live = peak = int(tasks.held.static_bytes[rank])
    lo = int(actions.rank_offset[rank])
    for i in range(lo, lo + done):
        stage, pack = actions.stage[i], actions.pack[i]
        if actions.kind[i] == 0:
            live += int(tasks.held.forward_kept_bytes[pack, stage])
            peak = max(peak, live + int(tasks.held.forward_temp_bytes[pack, stage]))
        else:
            temporary, freed = columns[int(actions.kind[i])]
            peak = max(peak, live + int(temporary[pack, stage]))
            live -= int(freed[pack, stage])
            peak = max(peak, live)
    return peak
