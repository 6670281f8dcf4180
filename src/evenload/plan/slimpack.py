"""`slimpack`: equal-work MicroPacks from exact slices, forward and backward cut separately (SlimPack §4-5).

    phase 1   documents to replicas by forward + backward time (`plan.dp_balance`)
    phase 2   per replica, documents in descending forward work, m = i·pp packs with i log-spaced (§5.1):
              asymmetric   sequential fill with exact cuts, forward by forward work, backward by backward work,
                           slices of a document last-first (§4.1.2)
              symmetric    chain-free slices used in both directions (`plan.chain_free`; ours, oracle §3)
    order     PackFlow word with and without the injected forward (§4.2), and the memory-capped list schedule
    choose    by simulated makespan among the candidates within memory (§4.3)

Where we differ from the paper: exact boundaries from a closed form instead of a MILP (the same optimum: work is
monotone in the cut); time instead of FLOPs; the list schedule, because injecting "one extra forward" never says
when to come back and its memory grows (oracle §5). Without a pipeline, packs of whole documents are tried too.
DP-Merge (`plan.dp_merge`) where the options allow it and the simulated step is faster.

Search: the replica with the most work prices every (m, cuts) and simulates every order of those that are evenly
cut. The others, which hold nearly equal work, walk down its ranking to the first trial that is even and fits.
Then the slowest replica, for which the step waits, tries the upper ranks too, a few times. Deterministic: the
amount of search depends on the options and the batch, never on the clock.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import RECOMPUTE
from evenload.errors import ConfigError
from evenload.plan.bin_packing import longest_first
from evenload.plan.candidate import PACKFLOW_ORDERS, Candidate, imbalance, packflow_candidate, pipeline_tasks
from evenload.plan.chain_free import chain_free_columns, work_below
from evenload.plan.dp_balance import assign_replicas
from evenload.plan.dp_merge import Block, Merge, in_phases, merge_documents
from evenload.plan.pack_counts import pack_counts
from evenload.plan.partition import partition_by_work
from evenload.plan.problem import ReplicaChoice, StepProblem
from evenload.types.columns import SliceColumns, whole_document_columns
from evenload.types.pipeline import PipelineTasks
from evenload.types.work import WorkCurve

ALIGN_FROM_TILES = 16
"""Cut at whole attention tiles where the shortest slices hold at least this many: a cut then moves by at most
half a tile, 1/32 of the slice, which is what the incomplete tile would have cost."""

EVENNESS_WORTH = 1.1
"""Uneven cuts win only where they are faster than even ones by more than this: where memory leaves even cuts no
room, a few of their packs in flight can take three times as long."""
EVEN_REPLICAS = 1.01
"""Max/mean makespan of replicas above which merging documents is tried."""
REFINED_REPLICAS = 3
"""How often the slowest replica is searched further."""
REFINED_TRIALS = 6
"""Ranks of the first search that it tries."""

Setting = tuple[int, str]
"""(pack count, cuts)."""
Trial = tuple[Setting, str]
"""A setting under one order of `candidate.PACKFLOW_ORDERS`."""


def plan_slimpack(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    """One choice per replica.

    Raises:
        ConfigError: a bidirectional model, whose documents cannot be sliced.
    """
    if not problem.costs.model.causal:
        raise ConfigError(
            f"strategy slimpack: model {problem.costs.model.name} is bidirectional, every token sees the whole "
            "document, so documents cannot be sliced; use padded, best_fit or balanced"
        )
    replicas = assign_replicas(problem.document_s, problem.layout.dp, backend=problem.options.backend)
    apart = _plan_replicas(problem, replicas)
    merge = merge_documents(problem) if problem.options.dp_merge and not _is_even_and_fits(apart) else None
    if merge is None:
        return apart
    return min(apart, _plan_merged(problem, merge), key=_step_score)


def _plan_merged(problem: StepProblem, merge: Merge) -> tuple[ReplicaChoice, ...]:
    """Merged documents first, planned once a block, then each replica's own."""
    blocks: dict[Block, Candidate] = {}
    for block, documents in merge.blocks.items():
        search = _ReplicaSearch(problem, documents, block[1] * problem.layout.cp)
        search.try_all()
        blocks[block] = search.best()
    choices = []
    for replica, own in enumerate(_plan_replicas(problem, merge.own)):
        mine = merge.blocks_of(replica)
        documents = [*(merge.blocks[block] for block in mine), own.documents]
        found = in_phases(problem, [*(blocks[block] for block in mine), own.candidate], documents)
        choices.append(ReplicaChoice(np.concatenate(documents), found) if mine else own)
    return tuple(choices)


def _is_even_and_fits(choices: tuple[ReplicaChoice, ...]) -> bool:
    """Merging would gain nothing: replicas end together, within memory."""
    makespan_s = np.array([choice.candidate.makespan_s for choice in choices])
    return _step_score(choices)[0] == 0 and makespan_s.max() <= EVEN_REPLICAS * makespan_s.mean()


def _step_score(choices: tuple[ReplicaChoice, ...]) -> tuple[int, float]:
    """Memory first, then time, of the worst replica."""
    found = [choice.candidate for choice in choices]
    return max(one.excess_bytes for one in found), max(one.makespan_s for one in found)


def _plan_replicas(problem: StepProblem, replicas: list[NDArray[np.int64]]) -> tuple[ReplicaChoice, ...]:
    """One choice per replica for documents that are already dealt."""
    searches = [_ReplicaSearch(problem, documents) for documents in replicas]
    probe = max(searches, key=lambda search: float(problem.document_s[search.documents].sum()))
    probe.try_all()
    ranking = probe.ranking()
    if probe.best().excess_bytes:
        # Nothing fits one replica, so the step does not fit: its numbers are shown, more search is in vain.
        for search in searches:
            search.try_trial_or_all(ranking[0][0])
        return tuple(ReplicaChoice(search.documents, search.best()) for search in searches)
    for search in searches:
        if search is not probe:
            search.try_until_acceptable(ranking)
    refined = [probe]
    for _ in range(REFINED_REPLICAS):
        slowest = max(searches, key=lambda search: search.best().score())
        if slowest in refined:
            break
        for trial, _ in ranking[:REFINED_TRIALS]:
            slowest.try_trial(trial)
        refined.append(slowest)
    return tuple(ReplicaChoice(search.documents, search.best()) for search in searches)


@dataclass(frozen=True, eq=False)
class _Priced:
    """Packs of one setting, priced once for all orders."""

    forward: SliceColumns
    backward: SliceColumns
    tasks: PipelineTasks
    imbalance: float


class _ReplicaSearch:
    """Candidates of one replica, each trial simulated once."""

    def __init__(self, problem: StepProblem, documents: NDArray[np.int64], ranks: int | None = None) -> None:
        self.problem = problem
        self.ranks = ranks
        self.documents = documents
        self.num_tokens = problem.num_tokens[documents]
        self.forward_work = problem.costs.forward_work()
        self.policy = problem.policy_of(documents)
        self.backward_work = problem.costs.backward_work(recomputed_share=self._recomputed_share())
        forward_s = work_below((self.forward_work,), self.num_tokens)
        self.order = np.argsort(-forward_s, kind="stable").astype(np.int32)
        self.priced: dict[Setting, _Priced | None] = {}
        self.found: dict[Trial, Candidate] = {}

    def try_all(self) -> None:
        """Every setting and order that the options allow; unevenly cut ones only where memory binds the others."""
        settings = self._settings()
        for even in (True, False):
            for setting in settings:
                priced = self._price(setting)
                if priced and self._is_even(priced) == even:
                    for order in self._orders():
                        self.try_trial((setting, order))
            if self.found and not any(found.excess_bytes for found in self.found.values()):
                return
        while not self.found:
            # Symmetric cuts cannot always meet a token limit: a rest may be too long. More packs make every
            # rest shorter, down to single tokens, so this ends.
            settings = [(2 * count, cut) for count, cut in settings]
            for setting in settings:
                for order in self._orders():
                    self.try_trial((setting, order))

    def try_until_acceptable(self, trials: list[tuple[Trial, float]]) -> None:
        """The first trial that fits memory and is cut evenly, or as evenly as where it was ranked; all settings
        where none is."""
        for trial, imbalance_there in trials:
            priced = self._price(trial[0])
            if priced and (self._is_even(priced) or priced.imbalance <= imbalance_there):
                self.try_trial(trial)
                if trial in self.found and not self.found[trial].excess_bytes:
                    return
        self.try_all()

    def try_trial_or_all(self, trial: Trial) -> None:
        """One trial, whatever it costs; everything where its cuts are not possible here."""
        self.try_trial(trial)
        if not self.found:
            self.try_all()

    def try_trial(self, trial: Trial) -> None:
        """Simulate one trial, unless it was or its cuts are not possible."""
        priced = None if trial in self.found else self._price(trial[0])
        if priced:
            (_, cut), order = trial
            counts = f"{priced.forward.num_packs} forward and {priced.backward.num_packs} backward packs"
            label = f"{cut} cuts, {counts}, {order}"
            self.found[trial] = packflow_candidate(
                label,
                priced.forward,
                priced.backward,
                priced.tasks,
                order,
                self.problem.cap_bytes,
                self.problem.options,
                self.policy,
            )

    def best(self) -> Candidate:
        """Within memory, then the fastest, where being evenly cut is worth `EVENNESS_WORTH`."""
        return self.found[min(self.found, key=self._score)]

    def ranking(self) -> list[tuple[Trial, float]]:
        """Trials with their max/mean pack time, best first."""
        return [(trial, self._priced_of(trial).imbalance) for trial in sorted(self.found, key=self._score)]

    def _score(self, trial: Trial) -> tuple[int, float]:
        excess, makespan_s = self.found[trial].score()
        return excess, makespan_s * (1.0 if self._is_even(self._priced_of(trial)) else EVENNESS_WORTH)

    def _priced_of(self, trial: Trial) -> _Priced:
        priced = self.priced[trial[0]]
        assert priced is not None, "only priced settings are simulated"
        return priced

    def _is_even(self, priced: _Priced) -> bool:
        return self._is_flat or priced.imbalance <= self.problem.options.max_imbalance

    @property
    def _is_flat(self) -> bool:
        """Without a pipeline no pack waits for another, so neither cuts nor evenness are needed."""
        return self.problem.layout.num_stages == 1

    def _recomputed_share(self) -> float:
        """Of the replica's tokens; backward cuts are balanced as if all recomputed alike."""
        if self.policy is None or not len(self.num_tokens):
            return 0.0
        return float(self.num_tokens[self.policy == RECOMPUTE].sum() / self.num_tokens.sum())

    def _settings(self) -> list[Setting]:
        options = self.problem.options
        counts = pack_counts(
            int(self.num_tokens.sum()), self.problem.layout.pp, options.candidates, options.max_pack_tokens
        )
        cuts = ("asymmetric", "symmetric") if options.cuts == "choose" else (options.cuts,)
        # A shared document that is cut keeps all its keys and values on every rank; a whole one keeps a share.
        longest = int(self.num_tokens.max(initial=0))
        if (
            options.cuts == "choose"
            and (self._is_flat or self.ranks)
            and longest <= (options.max_pack_tokens or longest)
        ):
            cuts = (*cuts, "whole")
        return [(count, cut) for count in counts for cut in cuts]

    def _orders(self) -> tuple[str, ...]:
        wanted = self.problem.options.schedule
        return tuple(name for name in PACKFLOW_ORDERS if wanted == "choose" or name.startswith(wanted))

    def _price(self, setting: Setting) -> _Priced | None:
        """Packs of a setting with their costs; None where its cuts cannot meet the token limit."""
        if setting not in self.priced:
            packs = self._shared(self._packs(*setting))
            if packs is None:
                self.priced[setting] = None
            else:
                tasks = pipeline_tasks(self.problem.costs, *packs, self.num_tokens, self.policy)
                # In a pipeline one whole document is never even, though its only pack equals the mean.
                uneven = max(imbalance(tasks.forward_s), imbalance(tasks.backward_s))
                if setting[1] == "whole" and not self._is_flat:
                    uneven = float("inf")
                self.priced[setting] = _Priced(*packs, tasks, uneven)
        return self.priced[setting]

    def _shared(self, packs: tuple[SliceColumns, SliceColumns] | None) -> tuple[SliceColumns, SliceColumns] | None:
        """Packs of a group of replicas say how many ranks share them."""
        if packs is None or self.ranks is None:
            return packs
        forward, backward = (replace(packs_, cp=np.full(packs_.num_slices, self.ranks, np.int64)) for packs_ in packs)
        return forward, backward

    def _packs(self, count: int, cut: str) -> tuple[SliceColumns, SliceColumns] | None:
        options, num_tokens = self.problem.options, self.num_tokens
        if not len(num_tokens):
            empty = whole_document_columns([], num_tokens)
            return empty, empty
        if cut == "whole":
            groups = longest_first(
                self.problem.document_s[self.documents],
                min(count, len(num_tokens)),
                num_tokens=None if options.max_pack_tokens is None else num_tokens,
                capacity=options.max_pack_tokens,
                backend=options.backend,
            )
            columns = whole_document_columns([group for group in groups if group], num_tokens)
            return columns, columns
        if cut == "asymmetric":
            return self._partition(count, self.forward_work, False), self._partition(count, self.backward_work, True)
        return chain_free_columns(
            num_tokens,
            (self.forward_work, self.backward_work),
            count,
            align=self._align(count, self.forward_work, self.backward_work),
            min_slice_tokens=options.min_slice_tokens,
            max_pack_tokens=options.max_pack_tokens,
            backend=options.backend,
        )

    def _partition(self, count: int, work: WorkCurve, last_first: bool) -> SliceColumns:
        options = self.problem.options
        return partition_by_work(
            self.num_tokens,
            self.order,
            work,
            count,
            align=self._align(count, work),
            min_slice_tokens=options.min_slice_tokens,
            max_pack_tokens=options.max_pack_tokens,
            last_first=last_first,
            backend=options.backend,
        )

    def _align(self, count: int, *curves: WorkCurve) -> int:
        """The attention tile where slices are long compared with it, else 1."""
        tile, limit = self.problem.costs.coefficients.attention_tile, self.problem.options.max_pack_tokens
        if tile == 1 or (limit is not None and limit < ALIGN_FROM_TILES * tile):
            return 1
        # The last token of the longest document is the dearest; a pack of only such tokens is the shortest.
        longest = int(self.num_tokens.max())
        edge = work_below(curves, np.array([longest - 1, longest]))
        target = float(work_below(curves, self.num_tokens).sum()) / count
        return tile if target >= ALIGN_FROM_TILES * tile * float(edge[1] - edge[0]) else 1
