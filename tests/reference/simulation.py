"""The simulator as an explicit graph: nodes, edges, topological longest path (SlimPack §4.3, Algorithm 1).

What `native/simulate.cpp` and `schedule.critical_path` must equal to the last bit. Nodes are actions; edges are
(from, to, delay):

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

from evenload.errors import ConfigError
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.plan import Action
from evenload.types.timeline import KINDS

_BACKWARD, _INPUT, _WEIGHT = (KINDS.index(name) for name in "BIW")


@dataclass(frozen=True, eq=False)
class ReferenceSimulation:
    """Times, memory and the critical path.

    Args:
        start_s, end_s: float64[n], aligned with the action columns; 0 for actions that never run.
        peak_bytes: int64[R].
        done: int64[R], actions that ran on each rank; fewer than it has means deadlock.
        critical_path: actions from the start of the step to its end, each of which determines the start
            of the next; empty on deadlock. Transfers between them are not listed.
    """

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    peak_bytes: NDArray[np.int64]
    done: NDArray[np.int64]
    critical_path: tuple[Action, ...]


def reference_simulation(tasks: PipelineTasks, actions: ActionColumns) -> ReferenceSimulation:
    """Build the graph and solve it.

    Raises:
        ConfigError: an action that is not of an existing pack and stage on its own rank, packs of a stage that are
            not in index order, or I and W of tasks without a split.
    """
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
    path: tuple[Action, ...] = ()
    if num_nodes and all(finished):
        path = _critical_path(actions, predecessors, start, end)
    return ReferenceSimulation(
        start_s=np.array(start, dtype=np.float64),
        end_s=np.array(end, dtype=np.float64),
        peak_bytes=np.array([_peak(tasks, actions, r, count) for r, count in enumerate(done)], dtype=np.int64),
        done=np.array(done, dtype=np.int64),
        critical_path=path,
    )


def _predecessors(tasks: PipelineTasks, actions: ActionColumns) -> list[list[tuple[int, float]]]:
    """Per node its incoming edges as (source node or -1 if it does not exist, delay in seconds)."""
    node_of: dict[tuple[int, int, int], int] = {}
    widths = tasks.widths.tolist()
    seen = {(way, stage, turn): turn for way in (0, 1) for stage, width in enumerate(widths) for turn in range(width)}
    totals = (tasks.num_forward, tasks.num_backward)
    rows = list(zip(actions.kind.tolist(), actions.stage.tolist(), actions.pack.tolist(), strict=True))
    offsets = actions.rank_offset.tolist()
    rank_of_node = np.repeat(np.arange(actions.num_ranks), np.diff(actions.rank_offset)).tolist()
    for node, (kind, stage, pack) in enumerate(rows):
        where = f"rank {rank_of_node[node]} action {node - offsets[rank_of_node[node]]}"
        if kind > 3:
            raise ConfigError(f"{where}: kind {kind} is none of F B I W (0..3)")
        if kind > 1 and tasks.split is None:
            raise ConfigError(f"{where}: I or W, but these tasks have no split backward")
        if not 0 <= stage < tasks.num_stages:
            raise ConfigError(f"{where}: stage {stage} is not on this rank")
        width = widths[stage]
        if tasks.stage_to_rank[stage] + pack % width != rank_of_node[node] or (pack < 0 and width > 1):
            named = f"pack {pack} of stage {stage}" if width > 1 else f"stage {stage}"
            raise ConfigError(f"{where}: {named} is not on this rank")
        if kind == _WEIGHT:
            if not 0 <= pack < tasks.num_backward:
                raise ConfigError(f"{where}: W of pack {pack} does not exist")
            if (_WEIGHT, stage, pack) in node_of or (_BACKWARD, stage, pack) in node_of:
                raise ConfigError(f"{where}: W of pack {pack} where its backward was whole or W ran already")
            node_of[_WEIGHT, stage, pack] = node
            continue
        direction = min(kind, 1)
        expected = seen[direction, stage, pack % width]
        if pack != expected or pack >= totals[direction]:
            raise ConfigError(f"{where}: pack {pack} of stage {stage} where {expected} is next")
        seen[direction, stage, pack % width] += width
        node_of[kind, stage, pack] = node
    hops = (tasks.p2p_forward_s.tolist(), tasks.p2p_backward_s.tolist())
    needed = tasks.forwards_needed.tolist()
    first_nodes = set(offsets[:-1])
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


def _critical_path(
    actions: ActionColumns, predecessors: list[list[tuple[int, float]]], start: list[float], end: list[float]
) -> tuple[Action, ...]:
    """Back from the last end (ties: lowest rank) along the edge that set each start (ties: schedule edge first)."""
    node: int | None = max(range(len(end)), key=lambda i: (end[i], -i))
    path = []
    while node is not None:
        name = KINDS[actions.kind[node]]
        path.append(Action(kind=name, stage=int(actions.stage[node]), pack=int(actions.pack[node])))  # type: ignore[arg-type]
        at = start[node]
        node = next((source for source, delay in predecessors[node] if end[source] + delay == at), None)
    return tuple(reversed(path))


def _peak(tasks: PipelineTasks, actions: ActionColumns, rank: int, done: int) -> int:
    """Most bytes the rank holds while its first `done` actions run."""
    live = peak = int(tasks.held.static_bytes[rank])
    lo = int(actions.rank_offset[rank])
    for i in range(lo, lo + done):
        stage, pack = actions.stage[i], actions.pack[i]
        if actions.kind[i] == 0:
            live += int(tasks.held.forward_kept_bytes[pack, stage])
            peak = max(peak, live + int(tasks.held.forward_temp_bytes[pack, stage]))
        else:
            temporary, freed = _backward_bytes(tasks, int(actions.kind[i]))
            peak = max(peak, live + (0 if temporary is None else int(temporary[pack, stage])))
            live -= int(freed[pack, stage])
            peak = max(peak, live)
    return peak


def _backward_bytes(tasks: PipelineTasks, kind: int) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
    """(temporary bytes, bytes given back) of B, I or W."""
    if kind == _BACKWARD:
        return tasks.held.backward_temp_bytes, tasks.held.backward_freed_bytes
    assert tasks.split is not None  # checked with the kinds
    if kind == _INPUT:
        return tasks.split.input_temp_bytes, tasks.split.input_freed_bytes
    return None, tasks.split.weight_freed_bytes
