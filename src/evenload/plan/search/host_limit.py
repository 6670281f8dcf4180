"""`plan_within_host`: plans whose offloaded activations fit the memory of their nodes.

How much lies in host memory at once follows from the schedule, so it is known after planning (`cost.host_memory`).
Where it is too much, the same packs are ordered anew (`plan.search.host_order`), which is enough where they then take
hardly longer: llama-150b on 256 H100 at 128K, github_dirs, dp=4 pp=16 tp=4, simulated, went from 88.5 to 89.9 % of the
bound by it, in a quarter of the planning time. Else the step is also planned again without the policies that offload as
many tokens or more, and with such as offload what there is room for (`policies_within_host`). Without these a node that
lacked a tenth of what it takes to offload everything fell back on shares of the batch: at 64K, dp=16 pp=2 tp=8
virtual=2 was at 69 % of the bound and is at 89 %. Price: a search more each time that no order is good enough.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.host_memory import HostMemory, fullest_node_bytes, peak_host_bytes
from evenload.cost.layer_counts import OFFLOAD
from evenload.cost.pack_cost import PackCosts
from evenload.plan.deferral.delay import DelayedChoice
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.search.host_order import ordered_within_host
from evenload.plan.search.policy_choice import worst_score
from evenload.plan.search.policy_order import policies_within_host
from evenload.types.scaled_units import format_bytes

HELD_SHARE = 0.98
"""Of host memory, at which added policies aim."""
GOOD_ORDER = 1.002
"""Of the seconds without a limit: an order within it is taken."""
MOST_TRIED = 3
"""Times at most that policies are added: a schedule may hold more at once of fewer tokens, and each is a search."""


def plan_within_host(
    problems: Sequence[StepProblem],
    plan_step: Callable[[Sequence[StepProblem]], tuple[StepProblem, DelayedChoice]],
    host_bytes: Callable[[StepProblem, Sequence[ReplicaChoice]], int],
    host: HostMemory,
) -> tuple[StepProblem, DelayedChoice, str]:
    """The answer of a strategy whose offloaded activations fit their node, the last one where none does.

    Args:
        problems: the step under every policy that may be chosen; at least one.
        plan_step: the best of problems, and its answer.
        host_bytes: of an answer, on the fullest node.

    Returns:
        Problem and answer, and what is to be said where host memory was too little for the first; "" = it was not.
    """
    said, times_tried = "", 0
    ordered: tuple[StepProblem, DelayedChoice] | None = None
    while True:
        problem, answer = plan_step(problems)
        needed_bytes = host_bytes(problem, answer.choices)
        if host.limit_bytes is None or needed_bytes <= host.limit_bytes:
            return *_faster((problem, answer), ordered), said
        said = said or (
            f"offloaded activations would take {format_bytes(needed_bytes)} of host memory on the fullest node of "
            f"{host.devices_per_node} devices, which offers them {format_bytes(host.limit_bytes)}"
        )
        fitting = [ordered_within_host(problem, choice) for choice in answer.choices]
        choices = tuple(choice for choice in fitting if choice is not None)
        if len(choices) == len(fitting):
            ordered = _faster((problem, replace(answer, choices=choices)), ordered)
            (excess, seconds), (least_excess, least_s) = (worst_score(one.choices) for one in (ordered[1], answer))
            if (excess, seconds) <= (least_excess, GOOD_ORDER * least_s):
                return *ordered, said
        offloaded = offloaded_tokens(problem)
        problems = [other for other in problems if offloaded_tokens(other) < offloaded]
        if not problems:
            return *(ordered or (problem, answer)), said
        if times_tried < MOST_TRIED:
            assert problem.policy is not None, "something is offloaded"
            times_tried += 1
            # Fewer of the tokens in flight are offloaded, and fewer are in flight at once.
            share = (HELD_SHARE * host.limit_bytes / needed_bytes) ** 0.5
            fewer = policies_within_host(problem.num_tokens, problem.policy, share)
            # Not last: searches take the last for the one that holds least on devices.
            problems[-1:-1] = [replace(problem, policy=policy) for policy in fewer]


def _faster(
    one: tuple[StepProblem, DelayedChoice], other: tuple[StepProblem, DelayedChoice] | None
) -> tuple[StepProblem, DelayedChoice]:
    return one if other is None else min(one, other, key=lambda found: worst_score(found[1].choices))


def offloaded_node_bytes(
    costs: PackCosts, num_tokens: NDArray[np.int64], choices: Sequence[ReplicaChoice], devices_per_node: int
) -> int:
    """What a step offloads, in host memory of its fullest node.

    Args:
        num_tokens: int64[n] of the documents that choices index.
        choices: of every replica.
    """
    peaks = [
        peak_host_bytes(
            costs.model,
            costs.layout,
            choice.candidate.forward,
            choice.candidate.backward,
            num_tokens[choice.documents],
            choice.candidate.policy,
            choice.candidate.actions,
        )
        for choice in choices
    ]
    return fullest_node_bytes(costs.layout, peaks, devices_per_node)


def offloaded_tokens(problem: StepProblem) -> int:
    """Of a step's documents."""
    return 0 if problem.policy is None else int(problem.num_tokens[problem.policy == OFFLOAD].sum())
