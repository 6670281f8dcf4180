"""WLB-LLM's Table 1, and what its documents that wait buy: simulated, beside the figures it reports.

EVERYTHING HERE IS SIMULATED by Evenload's analytic cost model of H100; WLB-LLM measured on H100. Lengths are lognormal
(median 1,200, sigma 1.756) with everything beyond the context at the context: fitted to WLB-LLM Fig. 3 (documents
below 64K hold 77 % of the tokens of its 128K job; "over 75 %" in the paper).

    settings  its models and 4D layouts. A global batch is PP x DP windows of the context (§7.1), cut from the stream of
              documents as a loader does; the pieces are the documents of every strategy
        Plain-4D            the windows as they come (`sequential`), 1F1B (the paper: interleaved 1F1B); context ranks
                            share every pack `per_sequence`
        Plain-4D adaptive   the same packs, each shared per sequence or per document, whichever is predicted faster: the
                            paper's gain on the level of context parallelism alone (Fig. 13: 1.05 at 7B, 128K)
        Fixed-4D            `fixed_greedy`, one global batch; per sequence or per document throughout, the better one
        WLB-LLM N           `wlb`: documents put off and flushed at the end, packs up to twice the context, N = PP x DP
                            micro-batches as in the paper, adaptive sharding
        wlb                 the same with 2N or 4N micro-batches where that is faster; then the longest document alone
                            is far above the mean micro-batch
        slimpack            packs of slices, nothing put off, our `mixed` sharding
    waiting   imbalance of N micro-batches (longest over mean, forward + backward) and mean delay of a token in steps
              (Table 2), llama-7b at 128K, global batches of N windows, 40 steps, mean of 3 seeds: both release rules of
              `wlb` on these lengths and on those of examples/lengths
    contexts  its Fig. 14: three of the ways above at 7B over contexts of 32K to 160K, all in Table 1's layout of 7B at
              128K, because the paper names no other
    solver    its Table 2 at 7B and 128K: imbalance of forward micro-batches, predicted, and time to plan a step,
              measured: windows by the greedy packing and by the solver over several global batches, and WLB-LLM with
              several queues. The paper times the packing alone; ours is the whole plan, with prices and simulation,
              median and mean of steps. Shared per document, so that what is uneven is the packing. The solver has 2 s
              a step

Imbalance is the mean over all steps but the last, which trains whatever still waits. All within 80 GB by the same
activation policies.

    python benchmarks/paper_wlb.py [--quick] [--append] [--part settings|waiting|contexts|solver]
"""

import statistics
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.errors import EvenloadError
from evenload.planning.deferral import DelayState
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions, ReplicaChoice
from evenload.planning.strategies.fixed import FixedExactOptions
from evenload.planning.strategies.wlb import WlbOptions
from evenload.types.document import Document
from harness import Row, run
from setups import TABLES, planner_for, table_lengths

Sharding = Literal["per_sequence", "per_document", "adaptive", "mixed"]
Steps = list[list[int]]
"""Lengths of the documents of every global batch."""
# Table 1: model, context, (tp, cp, pp, dp).
SETTINGS = (
    ("wlb-550m", 65_536, (2, 2, 4, 2)), ("wlb-550m", 131_072, (2, 4, 4, 1)),
    ("wlb-7b", 65_536, (4, 2, 4, 1)), ("wlb-7b", 131_072, (8, 2, 4, 1)),
    ("wlb-30b", 65_536, (8, 2, 4, 1)), ("wlb-30b", 131_072, (8, 4, 4, 1)),
    ("wlb-70b", 65_536, (16, 4, 4, 1)), ("wlb-70b", 131_072, (16, 4, 4, 1)),
)  # fmt: skip
STEPS = 32
CONTEXTS, CONTEXT_LAYOUT = (32_768, 65_536, 98_304, 131_072, 163_840), (8, 2, 4, 1)
CONTEXT_STEPS = 160  # Speed-ups of 32 steps are off by some per cent: long documents are rare
BATCHES, QUEUES, SOLVER_LIMIT_S = (1, 2, 4), (1, 2, 3), 2.0
SOLVER_STEPS, WARM_UP_STEPS = 64, 16  # The first ones fill windows and queues
# Of a context, on top of the windows that the greedy packing and the solver fill: whole documents do not fill N windows
# exactly, and the paper has N of them.
ROOM = 1 / 64
WINDOW, WAITING_PP, WAITING_DP, WAITING_STEPS, SEEDS = 131_072, 4, (8, 4, 2), 40, 3


class Way(NamedTuple):
    """A way to train.

    Args:
        shardings: values of `plan.options.cp_sharding`; of several the one that trains all steps fastest.
        contexts: tokens of the longest pack, in contexts.
        same_count: exactly N = PP x DP micro-batches.
    """

    name: str
    strategy: str
    shardings: tuple[Sharding, ...]
    contexts: int = 1
    same_count: bool = False


PLAIN = Way("Plain-4D", "sequential", ("per_sequence",))
WAYS = (
    PLAIN,
    Way("Plain-4D adaptive", "sequential", ("adaptive",)),
    Way("Fixed-4D", "fixed_greedy", ("per_sequence", "per_document")),
    Way("WLB-LLM N", "wlb", ("adaptive",), contexts=2, same_count=True),
    Way("wlb", "wlb", ("adaptive",), contexts=2),
    Way("slimpack", "slimpack", ("mixed",), contexts=2),
)


class Outcome(NamedTuple):
    """All steps of one strategy; imbalance of forward packs, and of all micro-batches over forward + backward; seconds
    that each step took to plan, and what its plan says of how it was found."""

    seconds: float
    forward_imbalance: list[float]
    imbalance: list[float]
    token_delay_steps: float
    plan_s: list[float]
    notes: list[str]


def window_steps(context: int, count: int, steps: int) -> Steps:
    """Global batches of `count` full windows of a stream; a document that crosses an edge becomes two."""
    generator, result = np.random.default_rng(0), []
    for _ in range(steps):
        pieces: list[int] = []
        room = context
        while count * context > sum(pieces):
            length = min(int(np.ceil(generator.lognormal(np.log(1200), 1.756))), context)
            while length and count * context > sum(pieces):
                taken = min(length, room)
                pieces.append(taken)
                length, room = length - taken, room - taken or context
        result.append(pieces)
    return result


def run_strategy(planner: StepPlanner, steps: Steps, strategy: str, *, flush: bool = True) -> Outcome:
    """Plans all steps, with what waits carried from step to step.

    Args:
        flush: the last step trains whatever still waits; else the data goes on.
    """
    state, known, arrived = DelayState(), list[Document](), list[int]()
    seconds, forward, both, plan_s, notes = [], [], [], [], []
    delayed = tokens = 0
    for step, lengths in enumerate(steps):
        carried = tuple(known[one.doc_id] for one in state.waiting)
        first = len(known)
        known += [Document(doc_id=first + i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths)]
        arrived += [step] * len(lengths)
        is_last = flush and step == len(steps) - 1
        started_s = time.perf_counter()
        proposal = planner.propose(step, carried + tuple(known[first:]), strategy, state=state, is_last=is_last)
        plan_s.append(time.perf_counter() - started_s)
        notes.append(proposal.note)
        proposal.require_feasible()
        left_out = {one.doc_id for one in proposal.plan.left_out}
        trained = [document for document in proposal.plan.documents if document.doc_id not in left_out]
        delayed += sum(document.num_tokens * (step - arrived[document.doc_id]) for document in trained)
        tokens += sum(document.num_tokens for document in trained)
        seconds.append(proposal.plan.predicted.step_time_s)
        forward.append(max(imbalance_of([choice], backward=False) for choice in proposal.choices))
        both.append(imbalance_of(proposal.choices, backward=True))
        state = proposal.state or DelayState()
    assert not flush or tokens == sum(map(sum, steps)), f"{strategy} trained {tokens} tokens, not all"
    return Outcome(sum(seconds), forward, both, delayed / tokens, plan_s, notes)


def imbalance_of(choices: list[ReplicaChoice] | tuple[ReplicaChoice, ...], *, backward: bool) -> float:
    """Longest over mean micro-batch, on its slowest stage; with its backward pack where packs are the same."""
    loads = []
    for choice in choices:
        tasks = choice.candidate.tasks
        loads += (tasks.forward_s + tasks.backward_s if backward else tasks.forward_s).max(axis=1).tolist()
    return max(loads) / statistics.mean(loads)


def run_way(way: Way, setting: tuple, steps: Steps) -> Outcome:
    """All steps, under the fastest of the way's shardings.

    Raises:
        EvenloadError: they cannot be planned, or do not fit.
    """
    name, context, (tp, cp, pp, dp) = setting
    result = []
    for sharding in way.shardings:
        options = PlanOptions(
            max_pack_tokens=context * way.contexts,
            policy="choose",
            micro_batches=pp if way.same_count else None,
            cp_sharding=sharding,
        )
        sizes = {"dp": dp, "cp": cp, "pp": pp, "tp": tp}
        result.append(run_strategy(planner_for(name, f"h100x{dp * cp * pp * tp}", sizes, options), steps, way.strategy))
    return min(result, key=lambda outcome: outcome.seconds)


def settings(quick: bool) -> Iterator[Row]:
    """Every setting and way to train."""
    for setting in SETTINGS[: 1 if quick else None]:
        name, context, (tp, cp, pp, dp) = setting
        steps = window_steps(context, pp * dp, 4 if quick else STEPS)
        sizes = {"dp": dp, "cp": cp, "pp": pp, "tp": tp}
        costs = planner_for(name, f"h100x{dp * cp * pp * tp}", sizes, PlanOptions()).costs
        bound_s = costs.lower_bound_seconds(np.array([n for step in steps for n in step], dtype=np.int64))
        plain_s = None
        for way in WAYS:
            case = f"{name} {context // 1024}K, tp={tp} cp={cp} pp={pp} dp={dp}, {way.name}, simulated"
            try:
                outcome = run_way(way, setting, steps)
            except EvenloadError as error:
                print(f"{case}: {error}")
                continue
            plain_s = plain_s or outcome.seconds
            yield Row("wlb", case, "speed-up", plain_s / outcome.seconds, "x", PLAIN.name)
            yield Row("wlb", case, "of bound", bound_s / outcome.seconds, "")
            yield Row(
                "wlb", case, "imbalance forward", statistics.mean(outcome.forward_imbalance[:-1]), "x", "mean pack"
            )
            yield Row("wlb", case, "mean token delay", outcome.token_delay_steps, "steps")


def waiting(quick: bool) -> Iterator[Row]:
    """Every table, N and release rule; the end of the data, where everything is flushed, is not reached."""
    lognormal = np.random.default_rng(0).lognormal(np.log(1200), 1.756, 400_000)
    tables: dict[str, NDArray[np.int64]] = {"WLB-like lognormal": np.clip(lognormal.astype(np.int64), 16, WINDOW)}
    tables |= {name: np.minimum(table_lengths(name), WINDOW) for name in TABLES}
    for name, lengths in list(tables.items())[: 1 if quick else None]:
        for dp in WAITING_DP[-1:] if quick else WAITING_DP:
            count = int(dp * WAITING_PP * WINDOW // lengths.mean())
            for release in ("balance", "queues"):
                options = PlanOptions(
                    max_pack_tokens=4 * WINDOW, micro_batches=WAITING_PP, strategies=(WlbOptions(release=release),)
                )
                sizes = {"dp": dp, "pp": WAITING_PP}
                planner = planner_for("llama-7b", f"h100x{dp * WAITING_PP}", sizes, options, limited=False)
                result = []
                for seed in range(1 if quick else SEEDS):
                    drawn = np.random.default_rng(seed).choice(lengths, (3 if quick else WAITING_STEPS, count))
                    result.append(run_strategy(planner, drawn.tolist(), "wlb", flush=False))
                case = f"{name}, N={dp * WAITING_PP}, release {release}"
                uneven = statistics.mean(value for outcome in result for value in outcome.imbalance)
                yield Row("wlb waiting", case, "imbalance", uneven, "x", "mean micro-batch")
                delay = statistics.mean(outcome.token_delay_steps for outcome in result)
                yield Row("wlb waiting", case, "mean token delay", delay, "steps")


def contexts(quick: bool) -> Iterator[Row]:
    """Speed-up over Plain-4D in every context."""
    plain, *others = (way for way in WAYS if way.name in ("Plain-4D", "WLB-LLM N", "wlb"))
    for context in CONTEXTS[: 1 if quick else None]:
        setting = ("wlb-7b", context, CONTEXT_LAYOUT)
        steps = window_steps(context, CONTEXT_LAYOUT[2] * CONTEXT_LAYOUT[3], 4 if quick else CONTEXT_STEPS)
        plain_s = run_way(plain, setting, steps).seconds
        for way in others:
            outcome, case = run_way(way, setting, steps), f"{context // 1024}K, {way.name}, simulated"
            yield Row("wlb contexts", case, "speed-up", plain_s / outcome.seconds, "x", plain.name)


def solver(quick: bool) -> Iterator[Row]:
    """Every packing of Table 2; nothing is flushed."""
    pp, count, first = CONTEXT_LAYOUT[2], *((4, 2) if quick else (SOLVER_STEPS, WARM_UP_STEPS))
    steps, limit = window_steps(WINDOW, pp, count), FixedExactOptions(solver_time_limit_s=SOLVER_LIMIT_S)
    cells = [("original packing", "sequential", PlanOptions(max_pack_tokens=WINDOW))]
    for name, strategy in (("greedy", "fixed_greedy"), ("solver", "fixed_exact")):
        for batches in BATCHES[: 1 if quick else None]:
            options = PlanOptions(max_pack_tokens=int((1 + ROOM) * WINDOW), window=batches, strategies=(limit,))
            cells.append((f"{name}, global batches: {batches}", strategy, options))
    for queues in QUEUES:
        own = WlbOptions(as_published=True, outlier_queues=queues)
        options = PlanOptions(max_pack_tokens=2 * WINDOW, micro_batches=pp, strategies=(own,))
        cells.append((f"WLB-LLM, queues: {queues}", "wlb", options))
    tp, cp, _, dp = CONTEXT_LAYOUT
    for case, strategy, options in cells:
        options = msgspec.structs.replace(options, cp_sharding="per_document", candidates=1)
        sizes = {"dp": dp, "cp": cp, "pp": pp, "tp": tp}
        planner = planner_for("wlb-7b", f"h100x{dp * cp * pp * tp}", sizes, options, limited=False)
        outcome = run_strategy(planner, steps, strategy, flush=False)
        counted = slice(first, None)
        uneven = statistics.mean(outcome.forward_imbalance[counted])
        yield Row("wlb solver", case, "imbalance forward, simulated", uneven, "x", "mean pack")
        plan_ms = [1e3 * seconds for seconds in outcome.plan_s[counted]]
        spread = max(plan_ms) / min(plan_ms)
        yield Row("wlb solver", case, "plan, median", statistics.median(plan_ms), "ms", "", spread)
        yield Row("wlb solver", case, "plan, mean", statistics.mean(plan_ms), "ms", "", spread)
        if strategy == "fixed_exact":
            stopped = statistics.mean("solver stopped" in note for note in outcome.notes[counted])
            yield Row("wlb solver", case, "stopped at its limit", stopped, "")


PARTS = {"settings": settings, "waiting": waiting, "contexts": contexts, "solver": solver}

if __name__ == "__main__":
    run(PARTS)
