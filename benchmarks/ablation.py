"""Which ideas pay: one change at a time to the planner's search, in three deep layouts and one without a pipeline.

EVERYTHING HERE IS SIMULATED by Evenload's analytic cost model of H100. Lengths are
`examples/lengths/commoncrawl_like.py`, 1,024 documents a step, cut to the context; 80 GB of which some is reserved,
and of 2 TB of host memory a node 85 % for offloaded activations.
A figure is the lower bound (all useful work, spread evenly over all devices) over the step time, mean over batches.

The base is the planner's own search (`plan.search`) held to symmetric cuts under the list schedule (without a
pipeline: to whole documents). It still chooses the number of packs, shared documents, moves between replicas and,
of all activation policies, the fastest. Every other row changes one of these things. Three tests leave the search:

    document order   `document_order.py`: longest or shortest first
    not evened out   every replica rates all trials for itself and no document moves afterwards
    noise            `duration_noise.py`: pack durations differ from the estimate

    python benchmarks/ablation.py [--quick] [--append]
"""

import argparse
import math
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from document_order import choices_in_order
from duration_noise import NOISES, noise_losses
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.host_memory import host_memory
from evenload.data.hub import model_from
from evenload.explore.batches import BatchRule
from evenload.explore.stage_layers import usable_bytes
from evenload.plan.deferral.delay import DelayedChoice
from evenload.plan.packing.bin_packing import assign_replicas
from evenload.plan.packing.dp_merge import (
    _merged_above,  # one threshold alone; `merge_documents` goes on to smaller ones
)
from evenload.plan.packing.pack_counts import pack_counts
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.search.found_step import FoundStep
from evenload.plan.search.host_limit import offloaded_node_bytes, plan_within_host
from evenload.plan.search.policy_choice import worst_score
from evenload.plan.search.policy_order import policies_in_order
from evenload.plan.search.probe_rating import SearchRules
from evenload.plan.search.replica_search import ReplicaSearch, score
from evenload.plan.search.step_search import search_merged, search_step
from evenload.plan.search.trial_space import ORDERS, TAPERS, Cut, Setting, Trial
from evenload.plan.strategies.auto import AutoOptions
from evenload.plan.strategies.slimpack import search_with_merging
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout
from results import Row, append_rows

HERE = Path(__file__).parent
SAMPLER = HERE.parent / "examples" / "lengths" / "commoncrawl_like.py"
RESULTS = HERE / "results" / "ablation.csv"
SETTINGS = (
    ("llama-13b", {"dp": 4, "cp": 2, "pp": 4, "tp": 4}, 262_144),
    ("llama-150b", {"dp": 4, "cp": 1, "pp": 16, "tp": 4}, 262_144),
    ("llama-70b", {"dp": 8, "cp": 1, "pp": 8, "tp": 4}, 131_072),
    ("llama-13b", {"dp": 16, "cp": 2, "pp": 1, "tp": 4}, 262_144),
)
DOCUMENTS, BATCHES, NUM_LENGTHS, SEED = 1024, 3, 20_000, 104
OPTIONS = PlanOptions(policy="choose", dp_merge=True)


class Outcome(NamedTuple):
    """Of one batch: bytes beyond a device's memory and beyond a node's, seconds of a step, and what a search found."""

    excess_bytes: int
    host_excess_bytes: int
    step_s: float
    found: FoundStep | None = None


class Change(NamedTuple):
    """What differs from the base.

    Args:
        cut: None = symmetric, without a pipeline whole documents.
        search: how replicas get their documents.
        strategy: plan by this one instead of a search.
        first: documents laid out "longest" or "shortest" first by hand instead of a search.
        options: of `PlanOptions`.
    """

    cut: Cut | None = None
    order: str = "list"
    lookahead: int | None = None
    token_weight: int = 1
    tapers: tuple[tuple[int, int], ...] = ((0, 0),)
    split: bool = False
    virtual: int = 1
    capped: bool = True
    search: Callable[[StepProblem, SearchRules], FoundStep | None] = search_with_merging
    strategy: str = ""
    first: str = ""
    options: Mapping[str, object] = MappingProxyType({})

    def trials(self, search: ReplicaSearch) -> list[Trial]:
        """All numbers of packs."""
        cut = self.cut or ("symmetric" if search.problem.layout.pp > 1 else "whole")
        return [
            Trial(Setting(cut, count, self.token_weight, taper), self.order, self.lookahead, self.split)
            for count, taper in product(counts_of(search.problem), self.tapers)
        ]


def counts_of(problem: StepProblem) -> list[int]:
    """Numbers of packs to try."""
    return pack_counts(int(problem.num_tokens.sum()), problem.layout.pp, problem.options.candidates, None)


def apart(
    problem: StepProblem, rules: SearchRules, *, dealt_by: str = "both", even_out: bool = True
) -> FoundStep | None:
    """No shared documents; dealt by forward + backward time or by forward time alone."""
    work_s = problem.document_s
    if dealt_by == "forward":
        tokens = problem.num_tokens
        work_s = problem.costs.forward_work().slice_works_s(np.zeros_like(tokens), tokens)
    replicas = assign_replicas(work_s, problem.layout.dp)
    if even_out:
        return search_step(problem, replicas, rules)
    searches = [ReplicaSearch(problem, documents) for documents in replicas]
    score([(search, rules.first(search)) for search in searches])
    return FoundStep(searches, {})


def merged(problem: StepProblem, rules: SearchRules, *, threshold: float) -> FoundStep | None:
    """Documents above one threshold are shared, whatever that leaves; apart where there are none."""
    merge, without = _merged_above(problem, threshold), apart(problem, rules)
    if merge is None or without is None:
        return without
    share = float(problem.document_s.sum()) / (problem.layout.pp * float(without.seconds().sum()))
    return search_merged(problem, merge[0], rules, min(1.0, share))


BASE = "base"
SHARING = {
    BASE: Change(),
    "no shared documents": Change(search=apart),
    "shared above 1.0 alone, as printed": Change(search=partial(merged, threshold=1.0)),
    "shared above 0.4 alone": Change(search=partial(merged, threshold=0.4)),
    "shared above 0.2 alone": Change(search=partial(merged, threshold=0.2)),
    "not shared, dealt by forward": Change(search=partial(apart, dealt_by="forward")),
    "not shared, dealt by both, not evened out": Change(search=partial(apart, even_out=False)),
    "not shared, dealt by forward, not evened out": Change(search=partial(apart, dealt_by="forward", even_out=False)),
    "policy replay": Change(options={"policy": "replay"}),
    "policy recompute": Change(options={"policy": "recompute"}),
    "policy offload": Change(options={"policy": "offload"}),
    "memory unlimited": Change(capped=False),
    "slimpack": Change(strategy="slimpack"),
    "auto, executable": Change(strategy="auto", options={"strategies": (AutoOptions(split_backward=False),)}),
    "auto": Change(strategy="auto"),
}
PIPELINE = {
    "symmetric, word catching up": Change(order="static"),
    "symmetric, word injecting": Change(order="static inject"),
    "asymmetric, list": Change("asymmetric"),
    "asymmetric, word catching up": Change("asymmetric", "static"),
    "asymmetric, word injecting": Change("asymmetric", "static inject"),
    "whole documents, list": Change("whole"),
    "list, forward first after a backward": Change(order="list alternate"),
    "look-ahead 3": Change(lookahead=3),
    "token weight 2": Change(token_weight=2),
    "tapered ends": Change(tapers=TAPERS[1:]),
    "W split": Change(split=True),
    "2 virtual stages": Change(virtual=2),
    "2 virtual stages, W split": Change(split=True, virtual=2),
    "auto, 2 virtual stages": Change(strategy="auto", virtual=2),
    **{
        f"by hand: asymmetric, {order}, {first} first": Change("asymmetric", order, first=first)
        for order, first in product(ORDERS[:1] + ORDERS[2:], ("longest", "shortest"))
    },
}


class Cell:
    """One setting and one batch."""

    def __init__(self, name: str, sizes: dict[str, int], context: int, batch: int) -> None:
        self.model, self.sizes = model_from(name), sizes
        self.cluster = cluster_from(f"h100x{math.prod(sizes.values())}")
        lengths = runpy.run_path(str(SAMPLER))["commoncrawl_like_lengths"](NUM_LENGTHS, SEED).astype(np.int64)
        (drawn,) = BatchRule(num_documents=DOCUMENTS, context=context, overlong="truncate").sample(
            lengths, steps=1, seed=batch
        )
        self.documents = drawn.documents
        self.num_tokens = np.array([document.num_tokens for document in self.documents])

    def planner(self, change: Change) -> StepPlanner:
        """Within the memory of device and node."""
        layout = even_layout(self.model.num_layers, virtual=change.virtual, **self.sizes)
        # Rows that are priced by hand sum gradients after the last backward; so do all.
        found = analytic_coefficients(self.model, self.cluster, layout)
        coefficients = msgspec.structs.replace(found, overlap_reduction=False, overlap_gather=False)
        options = msgspec.structs.replace(OPTIONS, **change.options)
        return StepPlanner(
            self.model, coefficients, layout, usable_bytes(self.cluster), options, host=host_memory(self.cluster)
        )

    def run(self, change: Change) -> Outcome:
        """The best of all policies, by search, by strategy or by hand."""
        planner = self.planner(change)
        if change.strategy:
            proposal = planner.propose(0, self.documents, change.strategy)
            excess = max(choice.candidate.excess_bytes for choice in proposal.choices)
            return self._outcome(planner, excess, proposal.choices, proposal.plan.predicted.step_time_s)
        cap = np.full(planner.layout.pp, usable_bytes(self.cluster), np.int64) if change.capped else None
        levels = (
            policies_in_order(self.num_tokens, planner.options.policy, can_offload=True) if change.capped else [None]
        )
        ids, tokens = np.arange(len(self.num_tokens)), self.num_tokens
        problems = [StepProblem(ids, tokens, planner.costs, cap, planner.options, level) for level in levels]
        after_s = planner.costs.reduction_seconds() + planner.costs.optimizer_seconds()
        searched: list[FoundStep] = []

        def laid_out(problems: Sequence[StepProblem]) -> tuple[StepProblem, DelayedChoice]:
            counts, longest_first = counts_of(problems[0]), change.first == "longest"
            made = [(one, choices_in_order(one, counts, change.order, longest_first=longest_first)) for one in problems]
            problem, choices = min(made, key=lambda one: worst_score(one[1]))
            return problem, DelayedChoice(choices)

        def search(problems: Sequence[StepProblem]) -> tuple[StepProblem, DelayedChoice]:
            rules = SearchRules(first=change.trials, variants=lambda _: [])
            found = [(problem, change.search(problem, rules)) for problem in problems]
            problem, best = min(((one, step) for one, step in found if step), key=lambda one: one[1].worth())
            searched.append(best)
            return problem, DelayedChoice(best.choices())

        by_hand = laid_out if change.first else search
        _, answer, _ = plan_within_host(
            problems, by_hand, lambda _, choices: self._host_bytes(planner, choices), planner.host
        )
        excess, seconds = searched[-1].worth()[:2] if searched else worst_score(answer.choices)
        return self._outcome(planner, excess, answer.choices, seconds + after_s, searched[-1] if searched else None)

    def _host_bytes(self, planner: StepPlanner, choices: Sequence[ReplicaChoice]) -> int:
        return offloaded_node_bytes(planner.costs, self.num_tokens, choices, planner.host.devices_per_node)

    def _outcome(
        self,
        planner: StepPlanner,
        excess_bytes: int,
        choices: Sequence[ReplicaChoice],
        step_s: float,
        found: FoundStep | None = None,
    ) -> Outcome:
        limit_bytes = planner.host.limit_bytes
        assert limit_bytes is not None, "the catalog knows the memory of its nodes"
        return Outcome(excess_bytes, max(0, self._host_bytes(planner, choices) - limit_bytes), step_s, found)


def measure(name: str, sizes: dict[str, int], context: int, batches: int) -> list[Row]:
    """Rows of one setting."""
    cells = [Cell(name, sizes, context, batch) for batch in range(batches)]
    bounds_s = [cell.planner(Change()).costs.lower_bound_seconds(cell.num_tokens) for cell in cells]
    layout = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    case = f"{name}, {layout}, {context // 1024}K, {DOCUMENTS} documents, {batches} batches, simulated"
    rows: list[Row] = []
    for idea, change in (SHARING | (PIPELINE if sizes["pp"] > 1 else {})).items():
        outcomes = [cell.run(change) for cell in cells]
        fraction = float(np.mean([bound_s / one.step_s for bound_s, one in zip(bounds_s, outcomes, strict=True)]))
        rows.append(Row("ablation", case, idea, fraction, "", "lower bound"))
        excess_bytes = max(one.excess_bytes for one in outcomes)
        if excess_bytes:
            rows.append(Row("ablation", case, f"{idea}: beyond memory", excess_bytes / 2**30, "GiB", ""))
        host_excess_bytes = max(one.host_excess_bytes for one in outcomes)
        if host_excess_bytes:
            rows.append(Row("ablation", case, f"{idea}: beyond host memory", host_excess_bytes / 2**30, "GiB", ""))
        if idea != BASE or sizes["pp"] == 1:
            continue
        lost = [loss for seed, one in enumerate(outcomes) if one.found for loss in noise_losses(one.found, seed)]
        for sigma in NOISES:
            mean = np.mean([losses for noise, *losses in lost if noise == sigma], axis=0).tolist()
            for orders, loss in zip(("recorded list", "static"), mean, strict=True):
                rows.append(Row("ablation", case, f"noise {sigma:g}: {orders} loses", loss, "", "list that knows"))
    return rows


def main() -> None:
    """Every setting: print, and append when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one batch of one setting: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{RESULTS.name}")
    options = parser.parse_args()
    if options.quick and options.append:
        sys.exit("--quick results are noise; measure without --quick to append")
    rows: list[Row] = []
    for setting in SETTINGS[:1] if options.quick else SETTINGS:
        found = measure(*setting, batches=1 if options.quick else BATCHES)
        print(found[0].case)
        for row in found:
            print(f"    {row.metric:<50} {f'{row.value:.1f} GiB' if row.unit else f'{row.value:.2%}'}")
        rows += found
    if options.append:
        append_rows(rows, RESULTS)


if __name__ == "__main__":
    main()
