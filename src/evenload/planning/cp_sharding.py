"""Choose how the ranks of a context-parallel group share each pack, and reprice candidates as their ranks run them.

    per_sequence, per_document   as `stepplan.cp_rows` has them
    adaptive                     of every pack the faster of the two (WLB §5.3)
    mixed                        long slices per document, short ones whole on one rank, longest first to the least
                                 loaded; where long begins, and whether one of the two above is faster, is tried

A plan records the decision (`MicroPack.sharding`). Skrull's owners (DACP) come from `skrull`. Searches compare
packings by the mean over the ranks that share a pack; what runs waits for the slowest. So the packs of a chosen
candidate are priced rank by rank and the pipeline is simulated again (`repriced`): about 2 ms for 512 documents, two to
three times as much where a rule chooses, nothing where no rank shares anything.

What a replica runs alone begins in the gaps that packs shared with other replicas leave (`run_ahead`). Members of a
block meet at every shared pack and are simulated apart, so a shared action never moves: an action is put before one
only where it ends before that one starts, within memory, and never before shared packs of its own stage and direction,
because packs pass every channel in index order. So no two actions can wait for each other in a circle, whatever they
really take. O(actions · phases) in the core.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.cost.memory import ReplicaPacks, packs_of_first_rows
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_pricing import PerRankPacks, gather_seconds, rank_seconds, weight_seconds
from evenload.planning.packing import longest_first
from evenload.planning.problem import Candidate, ReplicaChoice, StepProblem
from evenload.schedule.simulate import simulate, split_arrays, task_arrays
from evenload.stepplan.cp_rows import ranked_if_shared
from evenload.types.columns import SliceColumns
from evenload.types.document import PackSharding
from evenload.types.pipeline import ActionColumns, PipelineTasks, SplitBackward

MIXED_BOUNDS = (1, 4, 16)  # Slices of at least so many tiles a chunk count as long; all are tried
CpRule = Literal["per_sequence", "per_document", "adaptive", "mixed"]
Shardings = tuple[PackSharding, ...]  # `MicroPack.sharding` of every forward pack of a replica


def possible_shardings(rule: CpRule, costs: PackCosts, packs: SliceColumns) -> list[Shardings]:
    ranks = packs.pack_ranks()
    is_shared = (ranks > 1).tolist()
    if not any(is_shared):
        return [("",) * packs.num_packs]
    names: list[PackSharding] = ["per_sequence", "per_document"] if rule in ("adaptive", "mixed") else [rule]
    result: list[Shardings] = [tuple(name if shared else "" for shared in is_shared) for name in names]
    return [*result, *_mixed(costs, packs, ranks)] if rule == "mixed" else result


def _mixed(costs: PackCosts, packs: SliceColumns, ranks: NDArray[np.int64]) -> list[Shardings]:
    tokens, pack = packs.slice_tokens(), packs.pack_of_slice()
    of_slices = costs.features.of_slices(packs.start, packs.start + tokens)
    seconds = of_slices @ sum(matrix.sum(axis=1) for matrix in costs.stage_seconds.values())
    edges = packs.pack_offset.tolist()
    result: list[Shardings] = []
    owner, was_short = np.full(packs.num_slices, -1), np.zeros(packs.num_slices, bool)
    for bound in MIXED_BOUNDS:
        is_short = (ranks[pack] > 1) & (tokens < bound * 2 * ranks[pack] * costs.coefficients.attention_tile)
        changed = np.unique(pack[is_short != was_short])
        if not len(changed):
            continue
        was_short, owner = is_short, owner.copy()
        for index in changed.tolist():
            low, high = edges[index : index + 2]
            short = low + np.flatnonzero(is_short[low:high])
            for rank, members in enumerate(longest_first(seconds[short], int(ranks[index]))):
                owner[short[members]] = rank
        listed = owner.tolist()
        shared = enumerate((ranks > 1).tolist())
        result.append(tuple(tuple(listed[edges[at] : edges[at + 1]]) if is_shared else "" for at, is_shared in shared))
    return result


def run_ahead(
    tasks: PipelineTasks,
    actions: ActionColumns,
    phase_of_forward: NDArray[np.int64],
    phase_of_backward: NDArray[np.int64],
    cap_bytes: NDArray[np.int64] | None,
) -> ActionColumns:
    """Order actions, phase after phase on every rank, with later phases in the gaps of earlier ones.

    Args:
        phase_of_forward, phase_of_backward: of every pack, not falling; int64[m_f], int64[m_b].
        cap_bytes: int64[R] that ranks may hold, None = not limited.

    Raises:
        ConfigError, ValueError: columns or values out of range, or phases that cannot run.
    """
    columns = actions.kind, actions.stage, actions.pack, actions.rank_offset
    phases = phase_of_forward.astype(np.int64), phase_of_backward.astype(np.int64)
    cap = np.empty(0, np.int64) if cap_bytes is None else np.ascontiguousarray(cap_bytes, np.int64)
    return ActionColumns(*_native.run_ahead(task_arrays(tasks), *columns, *phases, cap, split_arrays(tasks)))


def repriced_choices(problem: StepProblem, choices: tuple[ReplicaChoice, ...]) -> tuple[ReplicaChoice, ...]:
    return tuple(replace(choice, candidate=repriced(problem, choice.candidate)) for choice in choices)


def repriced(problem: StepProblem, result: Candidate) -> Candidate:
    """Return the candidate of a replica with shardings, its slowest ranks' seconds and their simulation."""
    if result.shardings is not None:
        return result
    possible = possible_shardings(problem.options.cp_sharding, problem.costs, result.packs.forward)
    ways = _fastest_first(problem, result, possible) if len(possible) > 1 else [(0.0, possible[0])]
    best: Candidate | None = None
    for least_s, shardings in ways:
        if best is not None and best.makespan_s <= least_s:
            break
        one = _as_shared(problem, result, shardings)
        best = one if best is None else min(best, one, key=Candidate.score)
    assert best is not None, "some sharding is always possible"
    return best


def _fastest_first(
    problem: StepProblem, result: Candidate, possible: Sequence[Shardings]
) -> list[tuple[float, Shardings]]:
    """Return every sharding for all packs, and of every pack the one with the least seconds, each with about the
    pipeline's seconds. Packs that replicas share have the latter in all of them: replicas must agree without simulating
    each other's steps."""
    forward, backward = result.packs.forward, result.packs.backward
    packs, back = forward.num_packs, backward.num_packs
    all_ways = _in_all_ways(problem.costs, result, possible)
    of_slice, of_backward = packs_of_first_rows(backward, forward), backward.pack_of_slice()
    tokens = backward.slice_tokens()
    share = tokens / backward.pack_sums(tokens)[of_backward]
    backward_s = all_ways.backward_s.sum(axis=1).reshape(len(possible), back)[:, of_backward] * share
    seconds = all_ways.forward_s.sum(axis=1).reshape(len(possible), packs)
    fastest = (seconds + [np.bincount(of_slice, one, packs) for one in backward_s]).argmin(axis=0)
    of_block = forward.pack_ranks() > problem.layout.cp
    # A backward pack is about as long as under the sharding of the forward pack that its first slice lies in.
    first = of_slice[backward.pack_offset[:-1]]
    ways: dict[Shardings, float] = {}
    for way in (fastest, *(np.where(of_block, fastest, one) for one in range(len(possible)))):
        tasks = _rows_of(result.tasks, all_ways, way * packs + np.arange(packs), way[first] * back + np.arange(back))
        shardings = tuple(possible[one][pack] for pack, one in enumerate(way.tolist()))
        ways.setdefault(shardings, simulate(tasks, result.actions).makespan_s)
    return sorted(((makespan_s, way) for way, makespan_s in ways.items()), key=lambda one: one[0])


def _in_all_ways(costs: PackCosts, result: Candidate, possible: Sequence[Shardings]) -> PipelineTasks:
    """Price the candidate's packs once for every sharding, as packs of one candidate: numpy's price is by the call."""
    count, packs = len(possible), result.packs
    first_doc = [len(packs.num_tokens) * way for way in range(count)]
    repeated = ReplicaPacks(
        SliceColumns.concat([packs.forward] * count, first_doc),
        SliceColumns.concat([packs.backward] * count, first_doc),
        np.tile(packs.num_tokens, count),
        None if packs.policy is None else np.tile(packs.policy, count),
    )
    tasks, shardings = PipelineTasks.concat([result.tasks] * count), tuple(itertools.chain.from_iterable(possible))
    return _slowest_ranks(costs, replace(result, packs=repeated, tasks=tasks, shardings=shardings))[0]


def _as_shared(problem: StepProblem, result: Candidate, shardings: Shardings) -> Candidate:
    costs, result = problem.costs, replace(result, shardings=shardings)
    tasks, ranked = _slowest_ranks(costs, result)
    if ranked is None:
        return result
    actions = result.actions
    of_forward, of_backward = (_phases(costs.layout.cp, side) for side in ranked)
    if of_forward.any() and costs.layout.pp > 1:
        actions = run_ahead(tasks, actions, of_forward, of_backward, problem.cap_bytes)
    return problem.reordered(result, actions, tasks)


def _slowest_ranks(
    costs: PackCosts, result: Candidate
) -> tuple[PipelineTasks, tuple[PerRankPacks, PerRankPacks] | None]:
    """Price shared packs by their slowest ranks, and return both directions rank by rank; None where nobody shares."""
    packs = result.packs
    forward, backward = ranked_if_shared(costs, packs.forward, packs.backward, result.shardings or ())
    if forward is None or backward is None or not packs.forward.num_packs:  # an idle replica has none
        return result.tasks, None
    forward_s = forward.slowest(rank_seconds(costs, forward, "forward", packs.policy))
    tasks = _with_slowest_backward(costs, replace(result.tasks, forward_s=forward_s), backward, packs.policy)
    return tasks, (forward, backward)


def _phases(cp: int, ranked: PerRankPacks) -> NDArray[np.int64]:
    """Number the phase that every pack belongs to, 0 = that of the largest blocks."""
    sizes = np.maximum(1, ranked.num_ranks() // cp)
    return np.searchsorted(np.unique(-sizes), -sizes)


def _rows_of(
    tasks: PipelineTasks, others: PipelineTasks, forward: NDArray[np.int64], backward: NDArray[np.int64]
) -> PipelineTasks:
    split = tasks.split
    if split is not None and others.split is not None:
        split = replace(split, input_s=others.split.input_s[backward], weight_s=others.split.weight_s[backward])
    return replace(tasks, forward_s=others.forward_s[forward], backward_s=others.backward_s[backward], split=split)


def _with_slowest_backward(
    costs: PackCosts, tasks: PipelineTasks, backward: PerRankPacks, policy: NDArray[np.int8] | None
) -> PipelineTasks:
    """Give backwards the seconds of their slowest ranks; where they are split, I and W are that rank's."""
    rank_s = rank_seconds(costs, backward, "backward", policy)
    whole_s = backward.slowest(rank_s)
    if tasks.split is None:
        return replace(tasks, backward_s=whole_s)
    copy_s = None if policy is None else costs.copy_seconds(backward.rows, policy)
    weight_s = weight_seconds(costs, backward.rows.rank_tokens(), rank_s, copy_s)
    of_slowest = np.where(rank_s == np.repeat(whole_s, backward.num_ranks(), axis=0), weight_s, 0.0)
    weight_s = backward.slowest(of_slowest)
    gather_s = backward.slowest(gather_seconds(costs, backward.rows))
    split: SplitBackward = replace(tasks.split, input_s=whole_s - weight_s, weight_s=weight_s + gather_s)
    return replace(tasks, backward_s=whole_s, split=split)
