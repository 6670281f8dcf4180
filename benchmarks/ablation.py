"""Which ideas pay: one change at a time in what the planner may do. Simulated, everything within 80 GB.

The base is `slimpack` with symmetric cuts under the list schedule, activation policies and shared documents chosen by
search; every other row changes one thing, by settings that users have. `commoncrawl_like` lengths, 1,024 documents a
step, mean of 3 batches, data-sheet costs of H100. Figures are shares of the lower bound.

    noise  durations of all packs differ from the estimate by log-normal noise: what the recorded orders of the base
           lose, and PackFlow's static order on the same packs, against a list made with the true durations. That list
           is greedy and so not the best there is: a loss may be slightly negative

    python benchmarks/ablation.py [--quick] [--append] [--part llama-13b|llama-150b|llama-70b|"llama-13b, no pipeline"]
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from evenload.errors import EvenloadError
from evenload.planning.planner import Proposal
from evenload.planning.problem import PlanOptions, StrategyOptions
from evenload.planning.strategies.auto import AutoOptions
from evenload.planning.strategies.slimpack import SlimpackOptions
from evenload.schedule.packflow import packflow_list, packflow_static
from evenload.schedule.simulate import simulate
from evenload.types.document import Document
from harness import Row, run
from setups import batch_of, planner_for, tokens_of

SETTINGS = {
    "llama-13b": ({"dp": 4, "cp": 2, "pp": 4, "tp": 4}, 262_144),
    "llama-150b": ({"dp": 4, "pp": 16, "tp": 4}, 262_144),
    "llama-70b": ({"dp": 8, "pp": 8, "tp": 4}, 131_072),
    "llama-13b, no pipeline": ({"dp": 16, "cp": 2, "tp": 4}, 262_144),
}
DOCUMENTS, BATCHES = 1_024, 3
NOISES, DRAWS = (0.03, 0.1, 0.2), 8


class Change(NamedTuple):
    """What differs from the base: the strategy, its own options, others of `PlanOptions`, virtual stages, the limit."""

    strategy: str = "slimpack"
    own: tuple[StrategyOptions, ...] = (SlimpackOptions(cuts="symmetric"),)
    options: Mapping[str, object] = MappingProxyType({"schedule": "list"})
    virtual: int = 1
    limited: bool = True


ASYMMETRIC = (SlimpackOptions(cuts="asymmetric"),)
BASE = "base"
SHARING = {
    BASE: Change(),
    "no shared documents": Change(options={"schedule": "list", "dp_merge": False}),
    "shared above 1.0 of a share": Change(options={"schedule": "list", "dp_merge_threshold": 1.0}),
    "shared above 0.2 of a share": Change(options={"schedule": "list", "dp_merge_threshold": 0.2}),
    **{
        f"policy {name}": Change(options={"schedule": "list", "policy": name})
        for name in ("replay", "recompute", "offload")
    },
    "memory unlimited": Change(limited=False),
    "slimpack": Change(own=(), options={}),
    "auto": Change("auto", own=(), options={}),
}
PIPELINE = {
    "asymmetric cuts, list": Change(own=ASYMMETRIC),
    "symmetric cuts, static order": Change(options={"schedule": "static"}),
    "asymmetric cuts, static order": Change(own=ASYMMETRIC, options={"schedule": "static"}),
    "as published": Change(own=(SlimpackOptions(as_published=True),), options={}),
    "whole documents, list": Change("balanced", own=()),
    "W split": Change(options={"schedule": "list_split"}),
    "2 virtual stages": Change(virtual=2),
    "2 virtual stages, W split": Change(options={"schedule": "list_split"}, virtual=2),
    "auto, no W split": Change("auto", own=(AutoOptions(split_backward=False),), options={}),
    "auto, 2 virtual stages": Change("auto", own=(), options={}, virtual=2),
}


def plan(setting: str, change: Change, documents: tuple[Document, ...]) -> tuple[Proposal, float]:
    """The plan under a change, and the lower bound of its documents."""
    sizes, context = SETTINGS[setting]
    options = PlanOptions(**({"max_pack_tokens": context, "policy": "choose", "dp_merge": True} | dict(change.options)),
                          strategies=change.own)  # fmt: skip
    model, cluster = setting.split(",")[0], f"h100x{math.prod(sizes.values())}"
    planner = planner_for(model, cluster, sizes | {"virtual": change.virtual}, options, limited=change.limited)
    proposal = planner.propose(0, documents, change.strategy)
    return proposal, planner.costs.lower_bound_seconds(tokens_of(documents))


def measure(setting: str, quick: bool) -> Iterator[Row]:
    """Rows of one setting; to be quick, some changes to one small batch of the last."""
    if quick and setting != "llama-13b, no pipeline":
        return
    sizes, context = SETTINGS[setting]
    batches = 1 if quick else BATCHES
    drawn = [batch_of("commoncrawl_like", 64 if quick else DOCUMENTS, context, seed) for seed in range(batches)]
    layout = " ".join(f"{axis}={size}" for axis, size in sizes.items())
    case = f"{setting.split(',')[0]}, {layout}, {context // 1024}K, {DOCUMENTS} documents, {batches} batches, simulated"
    for idea, change in (SHARING | (PIPELINE if sizes.get("pp", 1) > 1 else {})).items():
        try:
            result = [plan(setting, change, documents) for documents in drawn]
        except EvenloadError as error:
            print(f"{case}: {idea}: {error}")
            continue
        share = statistics.mean(bound_s / one.plan.predicted.step_time_s for one, bound_s in result)
        yield Row("ablation", case, idea, share, "", "lower bound")
        beyond = max(choice.candidate.excess_bytes for one, _ in result for choice in one.choices)
        if beyond:
            yield Row("ablation", case, f"{idea}: beyond memory", beyond / 2**30, "GiB")
        if idea == BASE and "pp" in sizes:
            yield from noise_rows(case, [one for one, _ in result], planner_cap(setting))


def planner_cap(setting: str) -> np.ndarray:
    """int64[pp]: usable bytes of every pipeline rank."""
    sizes, _ = SETTINGS[setting]
    planner = planner_for(setting.split(",")[0], f"h100x{math.prod(sizes.values())}", sizes, PlanOptions())
    return np.full(sizes["pp"], planner.memory_cap_bytes, np.int64)


def noise_rows(case: str, proposals: list[Proposal], cap_bytes: np.ndarray) -> Iterator[Row]:
    """Mean losses over replicas and draws."""
    generator = np.random.default_rng(0)
    for sigma in NOISES:
        recorded, static = [], []
        for choice, _ in product((choice for one in proposals for choice in one.choices), range(DRAWS)):
            tasks = choice.candidate.tasks
            drawn = {name: getattr(tasks, name) * np.exp(generator.normal(0.0, sigma, getattr(tasks, name).shape))
                     for name in ("forward_s", "backward_s")}  # fmt: skip
            true = replace(tasks, **drawn)
            known_s = simulate(true, packflow_list(true, cap_bytes=cap_bytes)).makespan_s
            orders = [packflow_static(tasks, inject=inject) for inject in (False, True)]
            order = min(orders, key=lambda one: simulate(tasks, one).makespan_s)
            recorded.append(simulate(true, choice.candidate.actions).makespan_s / known_s - 1)
            static.append(simulate(true, order).makespan_s / known_s - 1)
        for orders, losses in (("recorded list", recorded), ("static", static)):
            metric = f"noise {sigma:g}: {orders} loses"
            yield Row("ablation", case, metric, statistics.mean(losses), "", "list that knows")


PARTS = {setting: partial(measure, setting) for setting in SETTINGS}

if __name__ == "__main__":
    run(PARTS)
