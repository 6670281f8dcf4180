"""`ordered_within_host`: the packs of a replica in an order that holds less of them in host memory.

Offloaded activations leave a device so little to hold that a list schedule starts forwards long before their backwards;
what waits is in host memory then, which is not endless. The same list rules (`schedule.packflow`) with host bytes in
the place of the device's run fewer forwards ahead, which costs a fraction of a percent where offloading fewer documents
costs several.

A node's memory is shared evenly by its devices, which may be stricter than it has to be. Orders that are no list
schedule, and phases of documents that replicas share, stay as they are. Price: six list schedules where a replica holds
too much, twelve where its backwards may be split.
"""

import itertools
from dataclasses import replace

import numpy as np

from evenload.cost.host_memory import PacksInHostMemory, host_bytes_of_packs
from evenload.cost.layer_counts import OFFLOAD
from evenload.plan.problem.candidate import Candidate, in_order
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.search.trial_space import LOOKAHEADS
from evenload.schedule.packflow import LIST, LIST_SPLIT, packflow_list
from evenload.types.pipeline import ActionColumns, PackBytes, PipelineTasks


def beyond_memory_bytes(problem: StepProblem, choice: ReplicaChoice) -> int:
    """What a replica holds beyond its devices' memory and their shares of host memory, on the worst rank of either."""
    return choice.candidate.excess_bytes + host_excess_bytes(problem, choice)


def host_excess_bytes(problem: StepProblem, choice: ReplicaChoice) -> int:
    """What the fullest rank of a replica offloads beyond its device's share of host memory."""
    held = _held(problem, choice)
    return 0 if held is None else _excess(problem, held, choice.candidate.actions)


def ordered_within_host(problem: StepProblem, choice: ReplicaChoice) -> ReplicaChoice | None:
    """The fastest order in which a replica holds no more than its devices' shares of host memory, nor more than before
    on any device; the one it has where that fits, None where none is found."""
    held, found = _held(problem, choice), choice.candidate
    if held is None or not _excess(problem, held, found.actions):
        return choice
    shares = bool((found.forward.cp > problem.layout.cp).any())
    if shares or found.schedule not in (LIST.name, LIST_SPLIT.name):
        return None
    tasks = _with_host_bytes(found.tasks, held)
    caps = np.full(tasks.num_ranks, problem.host_device_bytes, np.int64)
    others: list[Candidate] = []
    for split, alternate, lookahead in itertools.product((False, True), (False, True), LOOKAHEADS):
        if split and tasks.split is None:
            continue
        actions = packflow_list(tasks, cap_bytes=caps, alternate=alternate, lookahead=lookahead, split=split)
        if not _excess(problem, held, actions):
            other = in_order(found, actions, problem.cap_bytes)
            schedule = (LIST_SPLIT if split else LIST).name
            others.append(replace(other, label=f"{found.label}, ordered for host memory", schedule=schedule))
    best = min(others, key=Candidate.score, default=None)
    return replace(choice, candidate=best) if best and best.excess_bytes <= found.excess_bytes else None


def _held(problem: StepProblem, choice: ReplicaChoice) -> PacksInHostMemory | None:
    """What packs offload; None where nothing is offloaded, or without a limit."""
    found = choice.candidate
    if problem.host_device_bytes is None or found.policy is None or not (found.policy == OFFLOAD).any():
        return None
    num_tokens = problem.num_tokens[choice.documents]
    model, layout = problem.costs.model, problem.layout
    return host_bytes_of_packs(model, layout, found.forward, found.backward, num_tokens, found.policy)


def _excess(problem: StepProblem, held: PacksInHostMemory, actions: ActionColumns) -> int:
    assert problem.host_device_bytes is not None, "held by something that has a limit"
    return max(0, int(held.peaks(actions).max(initial=0)) - problem.host_device_bytes)


def _with_host_bytes(tasks: PipelineTasks, held: PacksInHostMemory) -> PipelineTasks:
    """The tasks with what lies in host memory in the place of what lies on the device."""
    nothing = PackBytes.nothing(tasks.num_forward, tasks.num_backward, tasks.num_stages, tasks.num_ranks)
    split = tasks.split
    if split is not None:
        zeros = np.zeros_like(held.freed)
        split = replace(split, input_freed_bytes=held.freed, input_temp_bytes=zeros, weight_freed_bytes=zeros)
    return replace(
        tasks, held=replace(nothing, forward_kept_bytes=held.kept, backward_freed_bytes=held.freed), split=split
    )
