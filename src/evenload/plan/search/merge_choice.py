"""Which ways of sharing documents among replicas (`plan.packing.dp_merge`) are worth a search.

A search of one way takes a hundred trials and more, so each is first rated by a few: of the block of each size with the
most work, and of the replica with the most work of its own. The others take time by their work.
"""

from collections.abc import Sequence

import numpy as np

from evenload.plan.packing.dp_merge import Merge
from evenload.plan.problem.step_problem import StepProblem
from evenload.plan.search.probe_rating import SearchRules
from evenload.plan.search.replica_search import ReplicaSearch, score
from evenload.plan.search.trial_space import CUTS, Trial

Estimate = tuple[int, float]
"""Bytes beyond memory, seconds."""

FEW_SLICED = slice(1, None, 2)
"""Pack counts that are tried of slices: few and many, which memory may ask for."""
FEW_WHOLE = 2
"""Pack counts that are tried of whole documents, up to one document a pack."""
FEW_DOCUMENTS = 8
"""Documents whose trials are so cheap that all are rated."""
ENOUGH_WHOLE = 8
"""Documents for every stage with which whole ones fill a pipeline, so that slices need not be tried."""


def quick_trials(search: ReplicaSearch, rules: SearchRules) -> list[Trial]:
    """First trials under the list schedule with whole backwards, which tells packs apart."""
    first = rules.first(search)
    return [trial._replace(split=False) for trial in first if trial.order == "list"] or first


def rate_merges(problem: StepProblem, merges: Sequence[Merge], rules: SearchRules) -> list[Estimate]:
    """Memory beyond the limit and time of every merge; all trials in one go."""
    probes = [_Probes(problem, merge, rules) for merge in merges]
    searches = [search for one in probes for search in one.searches()]
    score([(search, _few_trials(search, rules)) for search in searches])
    return [one.estimate() for one in probes]


class _Probes:
    """Of a merge the block of each size with the most work, and the replica with the most work of its own."""

    def __init__(self, problem: StepProblem, merge: Merge, rules: SearchRules) -> None:
        self._problem, self._merge = problem, merge
        work_s = problem.document_s
        self._block_s = {block: float(work_s[documents].sum()) for block, documents in merge.blocks.items()}
        heaviest = {
            size: max((block for block in merge.blocks if block.size == size), key=self._block_s.__getitem__)
            for size in dict.fromkeys(block.size for block in merge.blocks)
        }
        self._shared = {
            size: (
                self._block_s[block],
                ReplicaSearch(problem, merge.blocks[block], size * problem.layout.cp, rules.worth, rules.known),
            )
            for size, block in heaviest.items()
        }
        own_s = [float(work_s[documents].sum()) for documents in merge.own]
        replica = max(range(len(own_s)), key=own_s.__getitem__)
        self._own = ReplicaSearch(problem, merge.own[replica], worth=rules.worth, known=rules.known)
        self._own_s = sum(own_s) / own_s[replica] if own_s[replica] else 0.0

    def searches(self) -> list[ReplicaSearch]:
        return [search for search in (*(one for _, one in self._shared.values()), self._own) if len(search.documents)]

    def estimate(self) -> Estimate:
        """Blocks take time by their work; what replicas run alone fills up what sharing leaves uneven."""
        start_s = np.zeros(self._problem.layout.dp)
        for block, seconds in self._block_s.items():
            most_s, probe = self._shared[block.size]
            start_s[block.first : block.first + block.size] += probe.best().makespan_s * seconds / most_s
        excess = max(search.best().excess_bytes for search in self.searches())
        even_s = float(start_s.mean()) + self._own_s * self._own.best().makespan_s / len(start_s)
        return excess, max(float(start_s.max()), even_s)


def _few_trials(search: ReplicaSearch, rules: SearchRules) -> list[Trial]:
    trials, documents = quick_trials(search, rules), len(search.documents)
    if documents <= FEW_DOCUMENTS:
        return trials
    of_cut = {cut: [trial for trial in trials if trial.setting.cut == cut] for cut in CUTS}
    whole = of_cut["whole"]
    one_each = sum(trial.setting.num_packs < documents for trial in whole)
    whole = whole[max(0, one_each + 1 - FEW_WHOLE) : one_each + 1]
    if whole and documents >= ENOUGH_WHOLE * search.problem.layout.num_stages:
        return whole
    return [*of_cut["symmetric"][FEW_SLICED], *of_cut["asymmetric"][FEW_SLICED], *whole] or trials
