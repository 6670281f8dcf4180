"""Choose which documents store, recompute or offload their activations (FlexPipe §5's memory options).

`choose` starts with `replay`, the fastest, and only where that does not fit memory tries offloading or recomputing the
longest documents, which alone decide the peak, or all (`policies_in_order`); the fastest that fits is kept, else the
one that misses memory by the least. A policy is one column for the whole global batch. `plan_under_policies` plans
under every policy in turn.

How much lies in host memory at once follows from the schedule, so it is known after planning (`cost.memory`). What
exceeds it is first reordered: the list rules (`schedule.packflow`), with host bytes in the place of the device's, run
fewer forwards ahead. Phases of documents that replicas share are reordered before they are joined (`plan.search`),
because a group's replicas need one order; other rules' orders stay as they are. Each device has an even share of its
node's memory. Where no order is good enough the step is planned again without the policies that offload as many tokens
or more, and with some that offload what fits (`plan_within_host`). Price: six list schedules where a replica holds too
much, twelve where backwards may be split; and a search each time no order is good enough.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.layer_counts import OFFLOAD, POLICIES, RECOMPUTE, REPLAY
from evenload.cost.memory import HostMemory, PacksInHostMemory, host_bytes_of_packs
from evenload.planning.candidates import LOOKAHEADS
from evenload.planning.deferral import DelayedChoice
from evenload.planning.problem import Candidate, PolicyOption, ReplicaChoice, SlowerPlanError, StepProblem
from evenload.schedule.packflow import LIST, LIST_SPLIT, packflow_list
from evenload.types.pipeline import ActionColumns, PackBytes, PipelineTasks
from evenload.types.text import format_bytes

LONG_SHARES = (0.25, 0.5, 0.75)  # Of the tokens: the longest documents that hold them count as long


def policies_in_order(
    num_tokens: NDArray[np.int64], option: PolicyOption, *, can_offload: bool
) -> list[NDArray[np.int8] | None]:
    """List the policy columns to try in order; int8[n] indices into `POLICIES`, None = all replay. "choose" offloads
    only where the link to the host is known (`can_offload`)."""
    if option != "choose":
        code = POLICIES.index(option)
        return [np.full(len(num_tokens), code, np.int8) if code else None]
    quarter, half, most = (_long_documents(num_tokens, share) for share in LONG_SHARES)
    shares = [
        *((long, OFFLOAD, REPLAY) for long in (quarter, half, most)),
        *((long, RECOMPUTE, REPLAY) for long in (quarter, half, most)),
        (half, RECOMPUTE, RECOMPUTE),
        (half, OFFLOAD, RECOMPUTE),
        (half, OFFLOAD, OFFLOAD),
    ]
    columns: list[NDArray[np.int8] | None] = [None]
    for long, of_long, of_short in shares:
        column = np.where(long, of_long, of_short).astype(np.int8)
        # One document may hold all shares: equal columns are one policy.
        is_new = not any(other is not None and (other == column).all() for other in columns)
        if is_new and (can_offload or OFFLOAD not in (of_long, of_short)):
            columns.append(column)
    return columns


def policies_within_host(
    num_tokens: NDArray[np.int64], policy: NDArray[np.int8], share: float
) -> list[NDArray[np.int8]]:
    """List policy columns, int8[n] each, for where the documents that `policy` offloads do not fit host memory: the
    longest of these that hold at most `share` of their tokens stay offloaded, the others are stored, or recomputed.
    None where the longest alone holds more, or all of them hold less."""
    offloaded = policy == OFFLOAD
    order = np.argsort(-num_tokens, kind="stable")
    order = order[offloaded[order]]
    held = np.cumsum(num_tokens[order]) <= share * num_tokens[offloaded].sum()
    if not held.any() or held.all():
        return []
    result = []
    for rest in (REPLAY, RECOMPUTE):
        column = np.where(offloaded, rest, policy).astype(np.int8)
        column[order[held]] = OFFLOAD
        result.append(column)
    return result


def _long_documents(num_tokens: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Mark the longest documents that hold at least this share of the tokens; equal lengths in arrival order."""
    order = np.argsort(-num_tokens, kind="stable")
    before = np.cumsum(num_tokens[order]) - num_tokens[order]
    long = np.zeros(len(num_tokens), bool)
    long[order[before < share * num_tokens.sum()]] = True
    return long


def plan_under_policies(
    problems: Sequence[StepProblem],
    plan: Callable[[StepProblem], DelayedChoice],
    can_fit: Callable[[StepProblem], bool] | None,
    enough_s: float = 0.0,
) -> tuple[StepProblem, DelayedChoice]:
    """Return the best answer over policies (`problems`, all stored first): within memory, then the fastest; one within
    memory that takes `enough_s` at most ends the choice. What cannot fit (`can_fit`) is planned only where no policy
    fits. Raise `SlowerPlanError` where none can beat a plan that is known (`Effort.to_beat`)."""
    best: tuple[StepProblem, DelayedChoice] | None = None
    slower: SlowerPlanError | None = None
    promising = [problem for problem in problems if can_fit is None or can_fit(problem)]
    for problem in promising or problems:
        problem.effort.add(1, len(problem.num_tokens))
        try:
            answer = plan(problem)
        except SlowerPlanError as error:
            slower = error
            continue
        if best is None or worst_score(answer.choices) < worst_score(best[1].choices):
            best = problem, answer
        excess, seconds = worst_score(answer.choices)
        if not excess and (problem.policy is None or seconds <= enough_s):
            break  # every other policy costs time to save memory
    if best is None:
        assert slower is not None, "there is at least one policy"
        raise slower
    return best


def worst_score(choices: tuple[ReplicaChoice, ...]) -> tuple[int, float]:
    """Return excess memory, then time, of the worst replica; smaller is better."""
    return max(c.candidate.excess_bytes for c in choices), max(c.candidate.makespan_s for c in choices)


HELD_SHARE = 0.98  # Of host memory, at which added policies aim
GOOD_ORDER = 1.002  # Of the seconds without a limit: an order within it is taken


def host_excess_bytes(problem: StepProblem, result: Candidate) -> int:
    """Return by how much a device exceeds its share of host memory; 0 = it fits."""
    held = _held(problem, result)
    return 0 if held is None else _excess(problem, held, result.actions)


def ordered_within_host(problem: StepProblem, choice: ReplicaChoice, *, of_block: bool = False) -> ReplicaChoice | None:
    """Return the fastest order in which a replica holds no more than its share of host memory, nor more than before on
    any device; itself where it fits, None where nothing does. Shared packs move only where the choice is `of_block`,
    from which all replicas that share them take their order."""
    result = choice.candidate
    held = _held(problem, result)
    if held is None or not _excess(problem, held, result.actions):
        return choice
    shares = not of_block and bool((result.packs.forward.cp > problem.layout.cp).any())
    if shares or result.schedule not in (LIST.name, LIST_SPLIT.name):
        return None
    tasks = _with_host_bytes(result.tasks, held)
    caps = np.full(tasks.num_ranks, problem.host_device_bytes, np.int64)
    others: list[Candidate] = []
    for split, alternate, lookahead in itertools.product((False, True), (False, True), LOOKAHEADS):
        if split and tasks.split is None:
            continue
        actions = packflow_list(tasks, cap_bytes=caps, alternate=alternate, lookahead=lookahead, split=split)
        if not _excess(problem, held, actions):
            other = problem.reordered(result, actions)
            schedule = (LIST_SPLIT if split else LIST).name
            others.append(replace(other, label=f"{result.label}, ordered for host memory", schedule=schedule))
    best = min(others, key=Candidate.score, default=None)
    return replace(choice, candidate=best) if best and best.excess_bytes <= result.excess_bytes else None


def _held(problem: StepProblem, result: Candidate) -> PacksInHostMemory | None:
    is_limited = problem.host_device_bytes is not None
    return host_bytes_of_packs(problem.costs.model, problem.layout, result.packs) if is_limited else None


def _excess(problem: StepProblem, held: PacksInHostMemory, actions: ActionColumns) -> int:
    assert problem.host_device_bytes is not None, "held by something that has a limit"
    return max(0, int(held.peaks(actions).max(initial=0)) - problem.host_device_bytes)


def _with_host_bytes(tasks: PipelineTasks, held: PacksInHostMemory) -> PipelineTasks:
    nothing = PackBytes.nothing(tasks.num_forward, tasks.num_backward, tasks.num_stages, tasks.num_ranks)
    split = tasks.split
    if split is not None:
        zeros = np.zeros_like(held.freed)
        split = replace(split, input_freed_bytes=held.freed, input_temp_bytes=zeros, weight_freed_bytes=zeros)
    return replace(
        tasks, held=replace(nothing, forward_kept_bytes=held.kept, backward_freed_bytes=held.freed), split=split
    )


def plan_within_host(
    problems: Sequence[StepProblem],
    plan_step: Callable[[Sequence[StepProblem]], tuple[StepProblem, DelayedChoice]],
    host_bytes: Callable[[Sequence[ReplicaChoice]], int],
    host: HostMemory,
) -> tuple[StepProblem, DelayedChoice, str]:
    """Plan a step under one of its policies so that its offloaded activations fit their node, else the last plan;
    return problem and answer, and a message where host memory was too little for the first ("" = it was not).
    `plan_step` gives the best of problems and its answer, `host_bytes` those of an answer on the fullest node."""
    message, may_add = "", True
    ordered: tuple[StepProblem, DelayedChoice] | None = None
    while True:
        problem, answer = plan_step(problems)
        needed_bytes = host_bytes(answer.choices)
        if host.limit_bytes is None or needed_bytes <= host.limit_bytes:
            return *_faster((problem, answer), ordered), message
        message = message or (
            f"offloaded activations would take {format_bytes(needed_bytes)} of host memory on the fullest node of "
            f"{host.devices_per_node} devices, which offers them {format_bytes(host.limit_bytes)}"
        )
        fitting = [ordered_within_host(problem, choice) for choice in answer.choices]
        choices = tuple(choice for choice in fitting if choice is not None)
        if len(choices) == len(fitting):
            ordered = _faster((problem, replace(answer, choices=choices)), ordered)
            (excess, seconds), (least_excess, least_s) = (worst_score(one.choices) for one in (ordered[1], answer))
            if (excess, seconds) <= (least_excess, GOOD_ORDER * least_s):
                return *ordered, message
        offloaded = offloaded_tokens(problem)
        problems = [other for other in problems if offloaded_tokens(other) < offloaded]
        if not problems:
            return *(ordered or (problem, answer)), message
        if may_add:
            assert problem.policy is not None, "something is offloaded"
            may_add = False  # once: a schedule may hold more at once of fewer tokens, and each is a search
            # Fewer of the tokens in flight are offloaded, and fewer are in flight at once.
            share = (HELD_SHARE * host.limit_bytes / needed_bytes) ** 0.5
            fewer = policies_within_host(problem.num_tokens, problem.policy, share)
            # Not last: searches take the last for the one that holds least on devices.
            problems[-1:-1] = [replace(problem, policy=policy) for policy in fewer]


def _faster(
    one: tuple[StepProblem, DelayedChoice], other: tuple[StepProblem, DelayedChoice] | None
) -> tuple[StepProblem, DelayedChoice]:
    return one if other is None else min(one, other, key=lambda result: worst_score(result[1].choices))


def offloaded_tokens(problem: StepProblem) -> int:
    return 0 if problem.policy is None else int(problem.num_tokens[problem.policy == OFFLOAD].sum())
