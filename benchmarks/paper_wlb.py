"""WLB-LLM's Table 1: its models and 4D layouts, simulated, beside the speed-ups it reports.

EVERYTHING HERE IS SIMULATED by Evenload's analytic cost model of H100; WLB-LLM measured on H100. Lengths are lognormal
(median 1,200, sigma 1.756) with everything beyond the context at the context: fitted to WLB-LLM Fig. 3 (documents
below 64K hold 77 % of the tokens of its 128K job; "over 75 %" in the paper).

A global batch is PP x DP windows of the context (§7.1), cut from the stream of documents as a loader does; the pieces
are the documents of every strategy.

    Plain-4D            the windows as they come (`sequential`), 1F1B (the paper: interleaved 1F1B); context ranks
                        share every pack `per_sequence`
    Plain-4D adaptive   the same packs, each shared per sequence or per document, whichever is predicted faster: the
                        paper's gain on the level of context parallelism alone (Fig. 13: 1.05 at 7B, 128K)
    Fixed-4D            `fixed_greedy`, one global batch; per sequence or per document throughout, the better of both
    WLB-LLM N           `wlb`: documents put off and flushed at the end, packs up to twice the context, N = PP x DP
                        micro-batches as in the paper, adaptive sharding
    wlb                 the same with 2N or 4N micro-batches where that is faster; then the longest document alone is
                        far above the mean micro-batch
    slimpack            beside them: packs of slices, nothing put off, our `mixed` sharding

Imbalance is the mean over all steps but the last, which trains whatever still waits. All within 80 GB by the same
activation policies.

`--causes` changes one thing at a time and says what WLB-LLM N and Fixed-4D gain then, over Plain-4D under the same
change; `CAUSES` lists the changes.

    python benchmarks/paper_wlb.py [--quick] [--causes] [--append]
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.host_memory import host_memory
from evenload.cost.pack_cost import PackCosts
from evenload.data.hub import model_from
from evenload.errors import EvenloadError
from evenload.explore.stage_layers import usable_bytes
from evenload.plan.deferral.delay import DelayState
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.candidate import imbalance
from evenload.plan.problem.options import PlanOptions
from evenload.plan.problem.step_problem import ReplicaChoice
from evenload.types.cluster import LinkSpec
from evenload.types.cluster_catalog import cluster_from
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import ModelSpec
from results import Row, append_rows

Sharding = Literal["per_sequence", "per_document", "adaptive", "mixed"]
RESULTS = Path(__file__).parent / "results" / "paper_wlb.csv"
# Table 1: model, context, (tp, cp, pp, dp).
SETTINGS = (
    ("wlb-550m", 65_536, (2, 2, 4, 2)), ("wlb-550m", 131_072, (2, 4, 4, 1)),
    ("wlb-7b", 65_536, (4, 2, 4, 1)), ("wlb-7b", 131_072, (8, 2, 4, 1)),
    ("wlb-30b", 65_536, (8, 2, 4, 1)), ("wlb-30b", 131_072, (8, 4, 4, 1)),
    ("wlb-70b", 65_536, (16, 4, 4, 1)), ("wlb-70b", 131_072, (16, 4, 4, 1)),
)  # fmt: skip
PAPER = {"Fixed-4D": "1.03", "WLB-LLM N": "1.23 (64K: 1.15, 128K: 1.30)"}
"""Its means over Plain-4D (Fig. 12)."""
STEPS = 32
CAUSE_STEPS = 8
CAUSES = {
    "nothing changed": {},
    "Fixed-4D in exactly N windows (6 % longer ones)": {"window": 1.06},
    "all transfers free": {"free_transfers": True},
    "mixed sharding in WLB-LLM N": {"mixed": True},
    "these three at once": {"window": 1.06, "free_transfers": True, "mixed": True},
    "no limit of memory": {"unlimited": True},
}
"""Changes, as `Change` names them."""


class Change(NamedTuple):
    """What is unlike the paper's settings.

    Args:
        window: tokens of Fixed-4D's windows, in contexts: whole documents do not fill N of 1 exactly.
    """

    window: float = 1.0
    free_transfers: bool = False
    mixed: bool = False
    unlimited: bool = False


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
    """All steps of one strategy; imbalance as in WLB-LLM Table 2: longest over mean forward pack of a step, mean over
    all steps but the last."""

    seconds: float
    imbalance: float
    mean_token_delay_steps: float
    plan_ms: float


def windows_of_step(generator: np.random.Generator, context: int, count: int) -> list[list[int]]:
    """`count` full windows of a stream of documents; a document that crosses an edge becomes two."""
    windows: list[list[int]] = []
    room = 0
    while True:
        length = min(int(np.ceil(generator.lognormal(np.log(1200), 1.756))), context)
        while length:
            if not room:
                if len(windows) == count:
                    return windows  # the rest of the document starts no new batch
                windows.append([])
                room = context
            taken = min(length, room)
            windows[-1].append(taken)
            room -= taken
            length -= taken


def forward_imbalance(choices: tuple[ReplicaChoice, ...]) -> float:
    """Longest over mean forward pack, worst replica."""
    return max(imbalance(choice.candidate.tasks.forward_s) for choice in choices)


def run_strategy(planner: StepPlanner, steps: list[list[list[int]]], strategy: str) -> Outcome:
    """One of Evenload's, with its state carried from step to step."""
    state = DelayState()
    known: dict[int, Document] = {}
    arrived: dict[int, int] = {}
    seconds, uneven, plan_ms = [], [], []
    delayed = tokens = 0
    for step, windows in enumerate(steps):
        carried = tuple(known[one.doc_id] for one in state.waiting)
        fresh = []
        for length in (length for window in windows for length in window):
            fresh.append(Document(doc_id=len(known), num_tokens=length, num_label_tokens=length - 1))
            known[fresh[-1].doc_id] = fresh[-1]
            arrived[fresh[-1].doc_id] = step
        start_s = time.perf_counter()
        proposal = planner.propose(step, carried + tuple(fresh), strategy, state=state, is_last=step == len(steps) - 1)
        plan_ms.append((time.perf_counter() - start_s) * 1e3)
        if not proposal.feasible:
            raise EvenloadError(proposal.why)
        for document in proposal.plan.documents:
            delayed += document.num_tokens * (step - arrived[document.doc_id])
            tokens += document.num_tokens
        seconds.append(proposal.plan.predicted.step_time_s)
        uneven.append(forward_imbalance(proposal.choices))
        state = proposal.state or DelayState()
    given = sum(length for windows in steps for window in windows for length in window)
    assert tokens == given, f"{strategy} trained {tokens} of {given} tokens"
    return Outcome(sum(seconds), statistics.mean(uneven[:-1]), delayed / tokens, statistics.median(plan_ms))


def lower_bound(model: ModelSpec, layout: ParallelLayout, steps: list[list[list[int]]]) -> float:
    """Of all steps."""
    lengths: NDArray[np.int64] = np.array([n for step in steps for window in step for n in window], dtype=np.int64)
    coefficients = analytic_coefficients(model, cluster_from(f"h100x{layout.world_size}"), layout)
    return PackCosts(model, coefficients, layout).lower_bound_seconds(lengths)


def run_way(
    way: Way,
    model: ModelSpec,
    context: int,
    layout: ParallelLayout,
    steps: list[list[list[int]]],
    change: Change = Change(),  # noqa: B008
) -> Outcome:
    """All steps, under the fastest of the way's shardings.

    Raises:
        EvenloadError: they cannot be planned, or do not fit.
    """
    cluster = cluster_from(f"h100x{layout.world_size}")
    coefficients = analytic_coefficients(model, cluster, layout)
    if change.free_transfers:
        free = LinkSpec(bandwidth_bytes_per_s=1e18, latency_s=0.0)
        coefficients = msgspec.structs.replace(coefficients, intra_node=free, inter_node=free, copy_s_per_byte=0.0)
    window = change.window if way.strategy == "fixed_greedy" else way.contexts
    found = []
    for sharding in ("mixed",) if change.mixed and way.same_count else way.shardings:
        options = PlanOptions(
            max_pack_tokens=int(context * window),
            policy="choose",
            micro_batches=layout.pp if way.same_count else None,
            cp_sharding=sharding,
        )
        cap, host = (None, "unlimited") if change.unlimited else (usable_bytes(cluster), host_memory(cluster))
        planner = StepPlanner(model, coefficients, layout, cap, options, host=host)
        found.append(run_strategy(planner, steps, way.strategy))
    return min(found, key=lambda outcome: outcome.seconds)


def causes() -> list[Row]:
    """What WLB-LLM N and Fixed-4D gain over Plain-4D, geometric means over all settings, under each change."""
    rows = []
    ways = [way for way in WAYS if way.name in PAPER]
    for cause, changed in CAUSES.items():
        gains: dict[str, list[float]] = {way.name: [] for way in ways}
        for name, context, (tp, cp, pp, dp) in SETTINGS:
            model = model_from(name)
            layout = even_layout(model.num_layers, dp=dp, cp=cp, pp=pp, tp=tp)
            generator = np.random.default_rng(0)
            steps = [windows_of_step(generator, context, pp * dp) for _ in range(CAUSE_STEPS)]
            plain, *others = (
                run_way(way, model, context, layout, steps, Change(**changed)).seconds for way in (PLAIN, *ways)
            )
            for way, seconds in zip(ways, others, strict=True):
                gains[way.name].append(plain / seconds)
        for way_name, found in gains.items():
            gain = statistics.geometric_mean(found)
            rows.append(Row("wlb causes", f"{cause}, {way_name}, simulated", "speed-up", gain, "x", "Plain-4D"))
            print(f"{cause}: {way_name} {gain:.3f} x Plain-4D", flush=True)
    return rows


def main() -> None:
    """Every cell: print, and append when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{RESULTS.name}")
    parser.add_argument("--causes", action="store_true", help="one change at a time instead of every way to train")
    options = parser.parse_args()
    if options.causes:
        rows = causes()
        if options.append:
            append_rows(rows, RESULTS)
        return
    table = Table(title=f"WLB-LLM's Table 1, SIMULATED, {STEPS} steps")
    for head in ("model", "context", "tp cp pp dp", "strategy", "s", "of bound", "x Plain-4D", "imbalance", "delay"):
        table.add_column(head, justify="left" if head in ("model", "strategy") else "right")
    table.add_column("plan ms", justify="right")
    rows: list[Row] = []
    speed_ups: dict[str, list[float]] = {}
    for name, context, (tp, cp, pp, dp) in SETTINGS[:1] if options.quick else SETTINGS:
        model = model_from(name)
        layout = even_layout(model.num_layers, dp=dp, cp=cp, pp=pp, tp=tp)
        generator = np.random.default_rng(0)
        steps = [windows_of_step(generator, context, pp * dp) for _ in range(STEPS)]
        bound_s = lower_bound(model, layout, steps)
        plain_s = None
        for way in WAYS:
            shape = f"{tp} {cp} {pp} {dp}"
            try:
                outcome = run_way(way, model, context, layout, steps)
            except EvenloadError as error:
                table.add_row(name, f"{context // 1024}K", shape, way.name, str(error)[:60])
                continue
            plain_s = outcome.seconds if way is PLAIN else plain_s
            speed_up = plain_s / outcome.seconds if plain_s else float("nan")
            fraction = bound_s / outcome.seconds
            table.add_row(
                name, f"{context // 1024}K", shape, way.name, f"{outcome.seconds:.2f}", f"{fraction:.1%}",
                f"{speed_up:.2f}", f"{outcome.imbalance:.3f}", f"{outcome.mean_token_delay_steps:.2f}",
                f"{outcome.plan_ms:.1f}",
            )  # fmt: skip
            speed_ups.setdefault(way.name, []).append(speed_up)
            case = f"{name} {context // 1024}K, tp={tp} cp={cp} pp={pp} dp={dp}, {way.name}, simulated"
            rows += [
                Row("wlb", case, "speed-up", speed_up, "x", "Plain-4D"),
                Row("wlb", case, "of bound", fraction, "", ""),
                Row("wlb", case, "imbalance forward", outcome.imbalance, "x", "mean pack"),
                Row("wlb", case, "mean token delay", outcome.mean_token_delay_steps, "steps", ""),
            ]
        table.add_section()
    console = Console(width=150)
    console.print(table)
    for name, found in speed_ups.items():
        paper = f"; the paper: {PAPER[name]}" if name in PAPER else ""
        console.print(
            f"{name} over Plain-4D, geometric mean: {statistics.geometric_mean(found):.3f} (simulated{paper})"
        )
    if options.append:
        append_rows(rows, RESULTS)


if __name__ == "__main__":
    main()
