"""DP-Merge: replicas that join as a context-parallel group for documents too long for one (SlimPack §4.1.1, Fig. 7).

A document of forward + backward time f goes to a group of g replicas, the least of a chain of sizes that divide each
other (2, 4, 8, ...) for which its time on each of them is at most `threshold` of the mean replica's: 0.4 leaves below
1 % imbalance in simulations, the paper's 1.0 leaves 10-25 %. Groups are aligned blocks of replicas: longest first, each
document takes the block whose fullest member has the least work; the others then go longest first to the least loaded
replica. Another way is groups of any sizes side by side (2 + 2 of 5 replicas), each as small as its documents allow
(`unequal_merge`). Where memory binds, documents that a pipeline cannot hold one a stage of are shared, too
(`long_merges`).

Every replica runs the documents of its largest group first, then of the next smaller one, then its own (the printed
rule has no order, and hangs). A phase does not wait until the one before has drained the pipeline: its packs run in the
gaps that this one leaves, each behind the last earlier one of its stage and direction, and delay none of it
(`planning.cp_sharding.run_ahead`).

No two replicas wait for each other in a circle. A phase is ordered behind those of larger groups alone, which all
members of its own group have in common, so a shared action has the same predicted times on all of them. Of all actions
that have not run, take the one that is predicted to end first (of equal ones, the first that no other of them feeds).
What it waits for, the action before it on any rank that takes part and the neighbouring stage's, is predicted to end
earlier, so it has run; so this one runs, whatever the real durations.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import ReplicaPacks, pipeline_bytes
from evenload.planning.packing import longest_first
from evenload.planning.problem import Candidate, ReplicaChoice, StepProblem
from evenload.types.columns import SliceColumns, whole_document_columns
from evenload.types.document import ReplicaBlock
from evenload.types.pipeline import ActionColumns, PipelineTasks

PRINTED_THRESHOLD = 1.0  # SlimPack's: only documents longer than a whole replica's share
THRESHOLDS = 4  # Thresholds to try, each half of the one before
GROUP_SHARES = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)  # Of the mean replica's work, for groups of unequal sizes
EVEN_ENOUGH = 1.005  # Max/mean work of replicas at which a threshold is good enough


@dataclasses.dataclass(frozen=True, eq=False)
class Merge:
    """Hold the shared documents of every block, longest first, larger blocks first; and each replica's own."""

    blocks: dict[ReplicaBlock, NDArray[np.int64]]
    own: list[NDArray[np.int64]]

    def deal_own(self, document_s: NDArray[np.float64], load_s: NDArray[np.float64]) -> list[NDArray[np.int64]]:
        """Assign the unshared documents again to replicas that shared ones keep busy for `load_s`, float64[dp]."""
        return _longest_first(document_s, np.sort(np.concatenate(self.own)), load_s)


def nested_sizes(dp: int) -> list[int]:
    """Return sizes of blocks of which each divides the next, so that blocks are nested, as many as there can be: powers
    of two first; 12 gives 2, 4, 12. O(dp)."""
    sizes, size = [], 1
    while size < dp:
        size = next(larger for larger in range(2 * size, dp + 1, size) if dp % larger == 0)
        sizes.append(size)
    return sizes


def merge_documents(problem: StepProblem) -> Merge | None:
    """Form groups for outliers; None where no document is one, or there is one replica. Where the replicas' work
    differs by more than `EVEN_ENOUGH`, smaller thresholds are tried too, for the least work on the fullest replica."""
    tried: list[tuple[float, Merge]] = []
    for merge, load_s in _merges(problem):
        tried.append((float(load_s.max()), merge))
        if load_s.max() <= EVEN_ENOUGH * load_s.mean():
            break
    return min(tried, key=lambda one: one[0])[1] if tried else None


def merge_above_printed(problem: StepProblem) -> Merge | None:
    result = _merged_above(problem, PRINTED_THRESHOLD)
    return None if result is None else result[0]


def other_merges(problem: StepProblem, than: Merge) -> list[Merge]:
    """Form groups by the printed threshold and by smaller ones, and groups of one size only: where memory keeps shared
    documents whole, twice as large groups run twice as many packs of half the time, which fill a pipeline better."""
    result = [merge for merge, _ in _merges(problem)]
    result += [printed] if (printed := merge_above_printed(problem)) else []
    result += uniform_merges(problem, than)
    return [merge for merge in result if _blocks_of(merge) != _blocks_of(than)]


def uniform_merges(problem: StepProblem, than: Merge) -> list[Merge]:
    outliers = np.concatenate(list(than.blocks.values()))
    return [_uniform(problem, outliers, size) for size in _equal_sizes(problem)]


def _equal_sizes(problem: StepProblem) -> list[int]:
    return [size for size in problem.layout.block_sizes if problem.layout.dp % size == 0]


def unequal_merge(problem: StepProblem) -> Merge | None:
    """Form groups of any size side by side, in one phase: every document of more than some share of the mean replica's
    work gets the smallest group that brings it below. The share is the one with the least work on the fullest replica;
    None where no group is needed, or fits. O(shares · documents · dp)."""
    dp, work_s = problem.layout.dp, problem.document_s
    best: tuple[float, Merge] | None = None
    for share in GROUP_SHARES:
        limit_s = share * float(work_s.sum()) / dp
        outliers = np.flatnonzero(work_s > limit_s)
        outliers = outliers[np.argsort(-work_s[outliers], kind="stable")]
        groups = _least_groups(problem, outliers, limit_s)
        blocks = _side_by_side(groups, dp)
        if not blocks:
            continue
        load_s = np.zeros(dp)
        for block, group in blocks.items():
            load_s[block.first : block.first + block.size] = group.seconds
        own = _longest_first(work_s, np.setdiff1d(np.arange(len(work_s)), outliers), load_s)
        most_s = float((load_s + [work_s[documents].sum() for documents in own]).max())
        if best is None or most_s < best[0]:
            documents = {block: np.array(group.documents, np.int64) for block, group in blocks.items()}
            best = most_s, Merge(documents, own)
    return None if best is None else best[1]


@dataclasses.dataclass(eq=False)
class _Group:
    """So many replicas, the seconds of each of them, and what they share."""

    size: int
    seconds: float
    documents: list[int]


def _least_groups(problem: StepProblem, outliers: NDArray[np.int64], limit_s: float) -> list[_Group]:
    """Put every document into the fullest group that it fits into, else into one of its own, as small as can be."""
    sizes, tokens, policy = problem.layout.block_sizes, problem.num_tokens[outliers], problem.policy_of(outliers)
    of_size = {s: problem.costs.document_seconds(tokens, policy, ranks=s * problem.layout.cp).tolist() for s in sizes}
    groups: list[_Group] = []
    for at, document in enumerate(outliers.tolist()):
        fitting = [group for group in groups if group.seconds + of_size[group.size][at] <= limit_s]
        group = max(fitting, key=lambda group: group.seconds, default=None)
        if group is None:
            group = _Group(next((s for s in sizes if of_size[s][at] <= limit_s), sizes[-1]), 0.0, [])
            groups.append(group)
        group.seconds += of_size[group.size][at]
        group.documents.append(document)
    return groups


def _side_by_side(groups: list[_Group], dp: int) -> dict[ReplicaBlock, _Group]:
    """Give every group a block that no other one has, larger ones first; none where they do not fit."""
    blocks: dict[ReplicaBlock, _Group] = {}
    is_free = [True] * dp
    for group in sorted(groups, key=lambda group: -group.size):
        size = group.size
        first = next((first for first in range(0, dp - size + 1, size) if all(is_free[first : first + size])), None)
        if first is None:
            return {}
        is_free[first : first + size] = [False] * size
        blocks[ReplicaBlock(first, size)] = group
    return blocks


def long_merges(problem: StepProblem) -> list[Merge]:
    """Form groups of one size, for every size, for all documents of which memory cannot hold one for every stage: each
    holds all its activations until its last forward has run, so the next ones wait, unless enough replicas share."""
    most = _most_stored_tokens(problem)
    long = np.flatnonzero(problem.num_tokens > most) if most is not None else np.empty(0, np.int64)
    if not len(long):
        return []
    return [_uniform(problem, long, size) for size in _equal_sizes(problem)]


def _most_stored_tokens(problem: StepProblem) -> float | None:
    """Return the tokens of a document that a rank can hold for every stage, all stored; None = not limited."""
    if problem.cap_bytes is None or problem.layout.dp == 1 or not len(problem.num_tokens):
        return None
    longest = int(problem.num_tokens.max())
    whole = whole_document_columns([[0]], np.array([longest]), problem.layout.cp)
    held = pipeline_bytes(problem.costs.model, problem.layout, ReplicaPacks(whole, whole, whole.stop))
    temporary = np.maximum(held.forward_temp_bytes, held.backward_temp_bytes).max()
    headroom_bytes = float((problem.cap_bytes - held.static_bytes).min() - temporary)
    return max(0.0, headroom_bytes) / problem.layout.num_stages / (float(held.forward_kept_bytes.max()) / longest)


def _blocks_of(merge: Merge) -> dict[ReplicaBlock, list[int]]:
    return {block: documents.tolist() for block, documents in merge.blocks.items()}


def _uniform(problem: StepProblem, outliers: NDArray[np.int64], size: int) -> Merge:
    """Share all outliers in groups of one size, longest first to the least loaded; the rest fills up."""
    dp, cp = problem.layout.dp, problem.layout.cp
    seconds = problem.costs.document_seconds(problem.num_tokens[outliers], problem.policy_of(outliers), ranks=size * cp)
    groups = _longest_first(seconds, np.arange(len(outliers)), np.zeros(dp // size))
    load_s = np.repeat([seconds[group].sum() for group in groups], size)
    own = _longest_first(problem.document_s, np.setdiff1d(np.arange(len(problem.num_tokens)), outliers), load_s)
    blocks = {
        ReplicaBlock(index * size, size): outliers[group[np.argsort(-seconds[group], kind="stable")]]
        for index, group in enumerate(groups)
        if len(group)
    }
    return Merge(blocks, own)


def _merges(problem: StepProblem) -> Iterator[tuple[Merge, NDArray[np.float64]]]:
    for halvings in range(THRESHOLDS):
        result = _merged_above(problem, problem.options.dp_merge_threshold / 2**halvings)
        if result is not None:
            yield result


def _merged_above(problem: StepProblem, threshold: float) -> tuple[Merge, NDArray[np.float64]] | None:
    dp, cp = problem.layout.dp, problem.layout.cp
    sizes = nested_sizes(dp)
    work_s = problem.document_s
    limit_s = threshold * float(work_s.sum()) / dp
    outliers = np.flatnonzero(work_s > limit_s)
    if not sizes or not len(outliers):
        return None
    tokens, policy = problem.num_tokens[outliers], problem.policy_of(outliers)
    by_size = {size: problem.costs.document_seconds(tokens, policy, ranks=size * cp) for size in sizes}
    load_s = np.zeros(dp)
    result: dict[ReplicaBlock, list[int]] = {}
    for position in np.argsort(-work_s[outliers], kind="stable").tolist():
        size = next((size for size in sizes if by_size[size][position] <= limit_s), sizes[-1])
        first = int(load_s.reshape(-1, size).max(axis=1).argmin()) * size
        load_s[first : first + size] += by_size[size][position]
        result.setdefault(ReplicaBlock(first, size), []).append(int(outliers[position]))
    own = _longest_first(work_s, np.setdiff1d(np.arange(len(work_s)), outliers), load_s)
    load_s += [work_s[documents].sum() for documents in own]
    ordered = sorted(result, key=lambda block: (-block.size, block.first))
    return Merge({block: np.array(result[block], np.int64) for block in ordered}, own), load_s


def _longest_first(
    work_s: NDArray[np.float64], documents: NDArray[np.int64], load_s: NDArray[np.float64]
) -> list[NDArray[np.int64]]:
    groups = longest_first(work_s[documents], len(load_s), load_s=load_s)
    return [np.sort(documents[np.array(group, np.int64)]) for group in groups]


def in_phases(problem: StepProblem, choices: list[ReplicaChoice]) -> ReplicaChoice:
    """Make one choice that runs others one after the other on every rank, of the documents of all."""
    phases, documents = [one.candidate for one in choices], np.concatenate([one.documents for one in choices])
    first_doc = np.cumsum([0, *(len(one.documents) for one in choices[:-1])]).tolist()
    forward = SliceColumns.concat([phase.packs.forward for phase in phases], first_doc)
    backward = SliceColumns.concat([phase.packs.backward for phase in phases], first_doc)
    packs = problem.packs_of(documents, forward, backward)
    used = [phase for phase in phases if phase.packs.forward.num_packs]
    label = "; then ".join(phase.label for phase in used)
    schedule = ", ".join(dict.fromkeys(phase.schedule for phase in used))
    tasks = PipelineTasks.concat([phase.tasks for phase in phases])
    return ReplicaChoice(documents, problem.ordered(label, packs, tasks, _joined_actions(phases), schedule))


def _joined_actions(phases: list[Candidate]) -> ActionColumns:
    rows = []
    for rank in range(phases[0].actions.num_ranks):
        parts, forwards, backwards = [], 0, 0
        for phase in phases:
            actions, mine = phase.actions, phase.actions.of_rank(rank)
            packs = actions.pack[mine] + np.where(actions.kind[mine] == 0, forwards, backwards)
            parts.append((actions.kind[mine], actions.stage[mine], packs))
            forwards, backwards = forwards + phase.tasks.num_forward, backwards + phase.tasks.num_backward
        kinds, stages, packs = (np.concatenate(column) for column in zip(*parts, strict=True))
        rows.append((kinds, stages, packs))
    return ActionColumns.of_ranks(rows)
