"""`with_halves`: a candidate whose packs are computed in halves where that is shorter (`cost.tensor_halves`).

Searches compare packings by packs in one go; halves are chosen where candidates of different kinds are compared, and
for the plan that runs. Which packs are halved changes no order and no memory that packs keep. Price: about 2 ms a
replica of its own packs; twice to four times that of `as_run` where ranks share packs.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.group_comm import weight_gather_seconds
from evenload.cost.halved_rows import in_halves
from evenload.cost.pack_cost import PackCosts
from evenload.cost.tensor_halves import HalvedPacks, halved_packs, pays, wanted_cuts
from evenload.plan.problem.candidate import Candidate
from evenload.simulate.simulate import simulate
from evenload.stepplan.ranked_packs import ranked_in_halves
from evenload.types.micropack import Direction
from evenload.types.pipeline import PipelineTasks

_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_FirstRows = tuple[NDArray[np.int64], NDArray[np.int64]]
"""int64[num_packs] forward and backward, of first halves."""


def with_halves(costs: PackCosts, found: Candidate) -> Candidate:
    """The same order of the same packs of a replica, simulated with halves.

    Packs of its own are in one go where the step is no shorter, also because a stage of few layers gets slower by
    halves and holds up the others. Those that it shares are decided by their own seconds alone, which are the same on
    every replica of the block; no stage gets slower by these.
    """
    if not pays(costs):
        return found
    forward, backward = _halves(costs, found, None)
    if not (forward.first_rows.any() or backward.first_rows.any()):
        return found
    if all((columns.pack_ranks() == 1).all() for columns in (found.forward, found.backward)):
        # A pack's price is its own, so that of the chosen ones is known.
        with_own = _in_halves(costs, found, forward, backward)
        return with_own if with_own.makespan_s < found.makespan_s else found
    of_block = tuple(columns.pack_ranks() > costs.layout.cp for columns in (found.forward, found.backward))
    if found.tasks.split is not None:  # W gathers for either half
        is_slower = (backward.more_s + gathered_again_s(costs, backward.first_rows) > 0).any(axis=1)
        backward = backward.of_packs(~(is_slower & of_block[1]))
    everything = _unharmed(costs, found, (forward.first_rows, backward.first_rows))
    shared = np.where(of_block[0], everything[0], 0), np.where(of_block[1], everything[1], 0)
    best = _with_rows(costs, found, shared)
    if all((one == other).all() for one, other in zip(shared, everything, strict=True)):
        return best
    with_own = _with_rows(costs, found, everything)
    return with_own if with_own.makespan_s < best.makespan_s else best


def _unharmed(costs: PackCosts, found: Candidate, first_rows: _FirstRows) -> _FirstRows:
    """Without halves that cut a document that ranks share, and cost more where the other direction has it in one go: as
    rows stay on a rank, it has more and shorter ranges there."""
    sides = found.forward, found.backward
    priced = _halves(costs, found, first_rows)
    kept = first_rows[0].copy(), first_rows[1].copy()
    for at in (0, 1):
        mine, other, piece = sides[at], sides[1 - at], in_halves(sides[at], first_rows[at]).piece
        more_s, harm_s = (one.more_s.sum(axis=1) for one in (priced[at], priced[1 - at]))
        harm_s = np.where(first_rows[1 - at] > 0, 0.0, harm_s)[other.pack_of_slice()]
        for cut in piece[1:][piece[1:] == piece[:-1]].tolist():
            pack = int(np.searchsorted(mine.pack_offset, cut, side="right")) - 1
            if more_s[pack] + harm_s[other.doc == mine.doc[cut]].sum() >= 0:
                kept[at][pack] = 0
    return kept


def _with_rows(costs: PackCosts, found: Candidate, first_rows: _FirstRows) -> Candidate:
    if not (first_rows[0].any() or first_rows[1].any()):
        return found
    return _in_halves(costs, found, *_halves(costs, found, first_rows))


def _in_halves(costs: PackCosts, found: Candidate, forward: HalvedPacks, backward: HalvedPacks) -> Candidate:
    tasks = _tasks_with(costs, found.tasks, forward, backward)
    context_s = (
        found.context_s[0] + float(forward.context_s.sum() + backward.context_s.sum()),
        found.context_s[1] + float(forward.context_hidden_s.sum() + backward.context_hidden_s.sum()),
    )
    tensor_s = (
        float(forward.transfer_s.sum() + backward.transfer_s.sum()),
        float(forward.hidden_s.sum() + backward.hidden_s.sum()),
    )
    return replace(
        found,
        tasks=tasks,
        simulation=simulate(tasks, found.actions),
        first_rows=(forward.first_rows, backward.first_rows),
        context_s=context_s,
        tensor_s=tensor_s,
    )


def tasks_in_halves(costs: PackCosts, found: Candidate) -> PipelineTasks:
    """Seconds of packs of a replica, each in halves where it is shorter by itself; what `with_halves` gets at best."""
    return _tasks_with(costs, found.tasks, *_halves(costs, found, None)) if pays(costs) else found.tasks


def _tasks_with(costs: PackCosts, tasks: PipelineTasks, forward: HalvedPacks, backward: HalvedPacks) -> PipelineTasks:
    split = tasks.split
    if split is not None:
        split = replace(
            split,
            input_s=split.input_s + backward.more_s,
            weight_s=split.weight_s + gathered_again_s(costs, backward.first_rows),
        )
    return replace(
        tasks,
        forward_s=tasks.forward_s + forward.more_s,
        backward_s=tasks.backward_s + backward.more_s,
        split=split,
    )


def gathered_again_s(costs: PackCosts, first_rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """What W of halved backwards takes beyond that of whole ones: as many transfers again; float64[num_packs, P]."""
    _, pack_s = weight_gather_seconds(costs.model, costs.coefficients, costs.layout.tp)
    return np.outer(first_rows > 0, pack_s * costs.layers())


def _halves(costs: PackCosts, found: Candidate, first_rows: _FirstRows | None) -> tuple[HalvedPacks, HalvedPacks]:
    """Of both directions: with so many rows in first halves, or, None, those that are worth it."""
    sides = found.forward, found.backward
    rows = first_rows or (wanted_cuts(costs, found.forward), wanted_cuts(costs, found.backward))
    ranked = ranked_in_halves(costs, *sides, found.shardings or (), rows)
    forward, backward = (
        halved_packs(costs, columns, direction, found.policy, first, of_ranks)
        for columns, direction, of_ranks, first in zip(
            sides, _DIRECTIONS, ranked, first_rows or (None, None), strict=True
        )
    )
    return forward, backward
