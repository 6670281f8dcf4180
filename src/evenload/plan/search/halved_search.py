"""`searched_as_if_halved`: a search whose packs are priced as if all were computed in halves (`cost.tensor_halves`).

A search that prices packs in one go takes many small ones, where halves would not pay; under the price of halves it
takes fewer and larger ones, whose tensor-parallel transfers hide. What it finds is then priced in one go again, because
packs are halved one by one where the plan is priced as it runs (`plan.sharing.as_run`). Price: one search more, where
halves may pay at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from evenload.cost.pipeline_tasks import pipeline_tasks
from evenload.cost.tensor_halves import as_if_halved, pays
from evenload.plan.problem.candidate import Candidate, candidate
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.search.found_step import FoundStep

Steps = list[tuple[StepProblem, FoundStep]]
"""What a search finds, by activation policies; the best first."""


def searched_as_if_halved(problems: Sequence[StepProblem], search: Callable[[Sequence[StepProblem]], Steps]) -> Steps:
    """What a search finds under that price, beside those of `problems` that it found it for. None where no packs may be
    halved."""
    if not pays(problems[0].costs):
        return []
    costs = as_if_halved(problems[0].costs)
    halved = [replace(problem, costs=costs) for problem in problems]
    origin_of = {id(other): one for one, other in zip(problems, halved, strict=True)}
    found = search(halved)
    return [(origin_of[id(problem)], step) for problem, step in found]


def in_one_go(problem: StepProblem, choice: ReplicaChoice) -> Candidate:
    """The same order of the same packs under the problem's own costs."""
    found = choice.candidate
    num_tokens, split = problem.num_tokens[choice.documents], found.tasks.split is not None
    tasks = pipeline_tasks(problem.costs, found.forward, found.backward, num_tokens, found.policy, split=split)
    return candidate(
        found.label,
        found.forward,
        found.backward,
        tasks,
        found.actions,
        problem.cap_bytes,
        found.policy,
        schedule=found.schedule,
    )
