"""Evenload's strategies beside public packers: the same lengths, one cost model, one simulator, one process.

Every planner gets one global batch and a token limit of a pack, for llama-7b on 32 H100: DP 8 x PP 4, and DP 8 x TP 4,
where nothing but the micro-batches themselves is to be planned. How many micro-batches a peer makes is what its users
get: `Peer.micro_batches` says by which rule. Cases: the lognormal lengths of our peer study (median 1,200, sigma 1.4,
clipped to 32..32,768, seed 0), and the tables of `examples/lengths` cut to contexts of 32K and 128K. Step times are
SIMULATED (`peers.propose_given`). Planning times are measured here, alternating with best-fit decreasing alone; a
peer's is that of its packing call, Evenload's covers assignment, packing, pricing, schedules, simulation, choice and
the sealed plan. Every plan is checked.

    plan            milliseconds to plan, beside those of best-fit decreasing
    packs           forward packs of all replicas
    left, over      documents in no pack; packs above the token limit
    DP              max/mean forward + backward time of replicas
    of bound        lower bound / simulated step time, memory ignored
    in 80 GB        the same within memory: activations stored, recomputed or offloaded, the fastest way that fits

    pip install 'evenload[bench]' && pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/planners.py [--quick] [--append] [--part pp4|pp1]
"""

import logging
import statistics
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from numpy.typing import NDArray

from evenload.errors import EvenloadError
from evenload.planning.packing import best_fit_decreasing
from evenload.planning.planner import Proposal, StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.registry import STRATEGIES
from evenload.stepplan.validate import validate_plan
from harness import Row, alternate, run
from peers import PEERS, Batch, Calls, deal, propose_given
from setups import TABLES, batch_of, documents_of, lognormal_lengths, planner_for, tokens_of

SETTINGS = {"pp4": ("DP 8 x PP 4", {"dp": 8, "pp": 4}), "pp1": ("DP 8 x TP 4", {"dp": 8, "tp": 4})}
BASE = "best_fit_decreasing, the packing call"
REPEATS = 3


def cases(quick: bool) -> Iterator[tuple[str, NDArray[np.int64], int]]:
    """(name, lengths, token limit of a pack)."""
    yield "lognormal 32K, 512 documents", lognormal_lengths(512), 32_768
    if quick:
        return
    yield "lognormal 32K, 2048 documents", lognormal_lengths(2048), 32_768
    for context in (32_768, 131_072):
        for table in TABLES:
            lengths = tokens_of(batch_of(table, 512, context))
            yield f"{table} {context // 1024}K, 512 documents", lengths, context


def load_peers() -> list[tuple[str, Calls]]:
    """Name and version, and calls, of those that are installed; a line for each of the others."""
    result = []
    for peer in PEERS:
        try:
            result.append((f"{peer.name} {version(peer.package)}", peer.load()))
        except (ImportError, PackageNotFoundError) as error:
            print(f"left out: {peer.name}: {peer.package} cannot be imported ({error})")
    return result


class Judge:
    """One case in one setting: what planners made of it, with and without a limit of memory."""

    def __init__(self, sizes: dict[str, int], lengths: NDArray[np.int64], capacity: int) -> None:
        options = PlanOptions(max_pack_tokens=capacity, policy="choose", dp_merge=True)
        self.lengths, self.capacity = lengths, capacity
        self.free, self.limited = (
            planner_for("llama-7b", "h100x32", sizes, options, limited=limited) for limited in (False, True)
        )

    def strategy(self, planner: StepPlanner, name: str) -> Proposal:
        """A plan of ours."""
        return planner.propose(0, documents_of(self.lengths), name)

    def figures(self, make: Callable[[StepPlanner], Proposal], left: int = 0) -> Iterator[tuple[str, float, str]]:
        """(metric, value, unit) of a planner.

        Args:
            make: its plan by a planner of ours.
            left: documents that it leaves out.
        """
        free, within = make(self.free), make(self.limited)
        for proposal in (free, within):
            validate_plan(proposal.plan)
        result = [choice.candidate for choice in free.choices]
        busy_s = [one.tasks.forward_s.sum() + one.tasks.backward_s.sum() for one in result]
        over = sum(
            int((columns.rank_tokens() > self.capacity).sum())
            for one in result
            for columns in (one.forward, one.backward)
        )
        yield "packs", sum(one.forward.num_packs for one in result), ""
        yield "left", left, ""
        yield "over", over, ""
        yield "DP", max(busy_s) / statistics.mean(busy_s), "x"
        bound_s = self.free.costs.lower_bound_seconds(tokens_of(free.plan.documents))
        yield "of bound", bound_s / free.plan.predicted.step_time_s, ""
        yield "in 80 GB", bound_s / within.plan.predicted.step_time_s if within.feasible else 0.0, ""


def measure(setting: str, quick: bool) -> Iterator[Row]:
    """A row a case, planner and figure; a planner that refuses a case has none."""
    warnings.simplefilter("ignore")  # of the peers' imports
    logging.disable(logging.WARNING)
    title, sizes = SETTINGS[setting]
    peers = load_peers()
    for name, lengths, capacity in cases(quick):
        judge = Judge(sizes, lengths, capacity)
        batch = Batch(lengths, capacity, judge.free.layout.dp, judge.free.layout.pp)
        own = [one for one, about in STRATEGIES.items() if not (about.needs_solver or about.changes_layout)]
        makers = {f"evenload {one}": (partial(judge.strategy, judge.free, one), partial(judge.strategy, name=one), 0)
                  for one in own}  # fmt: skip
        base = partial(best_fit_decreasing, lengths, capacity)
        makers["evenload best_fit_decreasing"] = base, given(judge, deal(base(), batch.dp)), 0
        for peer, calls in peers:
            prepared = calls.prepare(batch)
            try:
                replicas = calls.read(calls.pack(prepared), batch)
            except Exception as error:  # whatever a peer raises is said, and ends none of the others
                print(f"{title}, {name}, {peer} raised {type(error).__name__}: {error}")
                continue
            left = len(lengths) - sum(len(pack) for packs in replicas for pack in packs)
            makers[peer] = partial(calls.pack, prepared), given(judge, replicas), left
        for planner, (work, make, left) in makers.items():
            case = f"{title}, {name}, packs of {capacity:,} tokens, {planner}"
            try:
                rows = [Row("planners", case, metric, value, unit) for metric, value, unit in judge.figures(make, left)]
                seconds = alternate({"own": work, "base": base}, 1 if quick else REPEATS)
            except EvenloadError as error:
                print(f"{case}: {error}")
                continue
            own_ms, base_ms = (statistics.median(seconds[one]) * 1e3 for one in ("own", "base"))
            yield Row("planners", case, "plan", own_ms, "ms", f"{BASE} {base_ms:.3g} ms")
            yield from rows


def given(judge: Judge, replicas: list[list[list[int]]]) -> Callable[[StepPlanner], Proposal]:
    """The plan of these packs, of the documents that they hold."""
    placed = sorted(index for packs in replicas for pack in packs for index in pack)
    place = {index: at for at, index in enumerate(placed)}
    packs = [[[place[index] for index in pack] for pack in packs] for packs in replicas]
    return lambda planner: propose_given(planner, judge.lengths[placed], packs)


PARTS = {setting: partial(measure, setting) for setting in SETTINGS}

if __name__ == "__main__":
    run(PARTS)
