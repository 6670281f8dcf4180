"""WLB-LLM's Table 1: its models and 4D layouts, simulated, beside the speed-ups it reports.

EVERYTHING HERE IS SIMULATED by Evenload's analytic cost model of H100; WLB-LLM measured on H100. Lengths are lognormal
(median 1,200, sigma 1.756) with everything beyond the context at the context: fitted to WLB-LLM Fig. 3 (documents
below 64K hold 77 % of the tokens of its 128K job; "over 75 %" in the paper).

A global batch is PP x DP windows of the context (§7.1), cut from the stream of documents as a loader does; the pieces
are the documents of every strategy.

    Plain-4D    the windows as they come, 1F1B (the paper: interleaved 1F1B)
    Fixed-4D    `fixed_greedy`, one global batch
    WLB-LLM     `wlb`: documents put off and flushed at the end, packs up to twice the context
    WLB-LLM, N  the same in N = PP x DP micro-batches, as in the paper; `wlb` alone takes 2N or 4N where that is faster,
                and then the longest document alone is far above the mean micro-batch
    slimpack    beside them: packs of slices, nothing put off

Imbalance is the mean over all steps but the last, which trains whatever still waits. All within 80 GB by the same
activation policies. Context parallelism is costed with `mixed` sharding for all of them, so WLB-LLM's own gain from
adaptive sharding (1.05x of its 1.33x at 7B-128K) is not in these ratios.

    python benchmarks/paper_wlb.py [--quick] [--append]
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from evenload.cost.analytic import analytic_coefficients
from evenload.errors import EvenloadError
from evenload.explore.default_layout import usable_bytes
from evenload.plan.deferral.delay import DelayState
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.candidate import imbalance
from evenload.plan.problem.options import PlanOptions
from evenload.plan.problem.step_problem import ReplicaChoice
from evenload.types.cluster_catalog import cluster_from
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.model import ModelSpec
from evenload.types.model_catalog import model_from
from planner_score import whole_documents_within
from results import Row, append_rows

RESULTS = Path(__file__).parent / "results" / "paper_wlb.csv"
# Table 1: model, context, (tp, cp, pp, dp).
SETTINGS = (
    ("wlb-550m", 65_536, (2, 2, 4, 2)), ("wlb-550m", 131_072, (2, 4, 4, 1)),
    ("wlb-7b", 65_536, (4, 2, 4, 1)), ("wlb-7b", 131_072, (8, 2, 4, 1)),
    ("wlb-30b", 65_536, (8, 2, 4, 1)), ("wlb-30b", 131_072, (8, 4, 4, 1)),
    ("wlb-70b", 65_536, (16, 4, 4, 1)), ("wlb-70b", 131_072, (16, 4, 4, 1)),
)  # fmt: skip
PAPER = "mean 1.23 over Plain-4D (64K: 1.15, 128K: 1.30), 1.19 over Fixed-4D"
STEPS = 32
LONGEST_PACK = 2
"""Tokens of a variable-length pack, in contexts."""
SAME_COUNT = "wlb N micro-batches"
STRATEGIES = ("Plain-4D", "fixed_greedy", "wlb", SAME_COUNT, "slimpack")


class Outcome(NamedTuple):
    """All steps of one strategy; imbalance as in WLB-LLM Table 2: longest over mean forward pack of a step, mean over
    all steps but the last."""

    seconds: float
    imbalance: float
    mean_token_delay_steps: float
    plan_ms: float


def divisible_heads(model: ModelSpec, tp: int) -> ModelSpec:
    """The model, or where its heads do not divide over tp the same work in narrower heads (30B: 52 x 128 = 64 x 104).

    The paper gives no head counts; ours of 30B are LLaMA's, which its own tp of 8 does not divide.
    """
    if model.num_heads % tp == 0:
        return model
    width = model.num_heads * model.head_dim
    heads = next(count for count in range(model.num_heads, width) if count % tp == 0 and width % count == 0)
    return msgspec.structs.replace(model, num_heads=heads, num_kv_heads=heads, head_dim=width // heads)


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


def run_plain(planner: StepPlanner, steps: list[list[list[int]]]) -> Outcome:
    """The windows as they come, window i on replica `i mod dp`."""
    seconds, uneven = [], []
    for windows in steps:
        lengths = np.array([length for window in windows for length in window], dtype=np.int64)
        ids = iter(range(len(lengths)))
        packs = [[next(ids) for _ in window] for window in windows]
        replicas = [packs[rank :: planner.layout.dp] for rank in range(planner.layout.dp)]
        choices = whole_documents_within(replicas, lengths, planner.costs, usable_memory(planner))
        if choices is None:
            raise EvenloadError("the windows do not fit memory by any policy")
        after_s = planner.costs.reduction_seconds() + planner.costs.optimizer_seconds()
        seconds.append(max(choice.candidate.makespan_s for choice in choices) + after_s)
        uneven.append(forward_imbalance(choices))
    return Outcome(sum(seconds), statistics.mean(uneven), 0.0, 0.0)


def usable_memory(planner: StepPlanner) -> int:
    """The limit the planner was made with."""
    assert planner.memory_cap_bytes is not None
    return planner.memory_cap_bytes


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


def lower_bound(planner: StepPlanner, steps: list[list[list[int]]]) -> float:
    """Of all steps."""
    lengths: NDArray[np.int64] = np.array([n for step in steps for window in step for n in window], dtype=np.int64)
    return planner.costs.lower_bound_seconds(lengths)


def main() -> None:
    """Every cell: print, and append when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{RESULTS.name}")
    options = parser.parse_args()
    table = Table(title=f"WLB-LLM's Table 1, SIMULATED, {STEPS} steps", caption=f"paper: {PAPER}")
    for head in ("model", "context", "tp cp pp dp", "strategy", "s", "of bound", "x Plain-4D", "imbalance", "delay"):
        table.add_column(head, justify="left" if head in ("model", "strategy") else "right")
    table.add_column("plan ms", justify="right")
    rows: list[Row] = []
    speed_ups: list[float] = []
    for name, context, (tp, cp, pp, dp) in SETTINGS[:1] if options.quick else SETTINGS:
        model, cluster = divisible_heads(model_from(name), tp), cluster_from(f"h100x{tp * cp * pp * dp}")
        layout = even_layout(model.num_layers, dp=dp, cp=cp, pp=pp, tp=tp)
        generator = np.random.default_rng(0)
        steps = [windows_of_step(generator, context, pp * dp) for _ in range(STEPS)]
        plain_s = None
        for strategy in STRATEGIES:
            longest = context * (1 if strategy in ("Plain-4D", "fixed_greedy") else LONGEST_PACK)
            micro_batches = pp if strategy == SAME_COUNT else None
            plan_options = PlanOptions(max_pack_tokens=longest, policy="choose", micro_batches=micro_batches)
            shape = f"{tp} {cp} {pp} {dp}"
            try:
                coefficients = analytic_coefficients(model, cluster, layout)
                planner = StepPlanner(model, coefficients, layout, usable_bytes(cluster), plan_options)
                plain = strategy == "Plain-4D"
                outcome = run_plain(planner, steps) if plain else run_strategy(planner, steps, strategy.split()[0])
            except EvenloadError as error:
                table.add_row(name, f"{context // 1024}K", shape, strategy, str(error)[:60])
                continue
            plain_s = outcome.seconds if plain else plain_s
            speed_up = plain_s / outcome.seconds if plain_s else float("nan")
            fraction = lower_bound(planner, steps) / outcome.seconds
            table.add_row(
                name, f"{context // 1024}K", shape, strategy, f"{outcome.seconds:.2f}", f"{fraction:.1%}",
                f"{speed_up:.2f}", f"{outcome.imbalance:.3f}", f"{outcome.mean_token_delay_steps:.2f}",
                f"{outcome.plan_ms:.1f}",
            )  # fmt: skip
            if strategy == "wlb":
                speed_ups.append(speed_up)
            case = f"{name} {context // 1024}K, tp={tp} cp={cp} pp={pp} dp={dp}, {strategy}, simulated"
            rows += [
                Row("wlb", case, "speed-up", speed_up, "x", f"Plain-4D; paper {PAPER}"),
                Row("wlb", case, "of bound", fraction, "", ""),
                Row("wlb", case, "imbalance forward", outcome.imbalance, "x", "mean pack"),
                Row("wlb", case, "mean token delay", outcome.mean_token_delay_steps, "steps", ""),
            ]
        table.add_section()
    console = Console(width=150)
    console.print(table)
    if speed_ups:
        console.print(f"wlb over Plain-4D, geometric mean: {statistics.geometric_mean(speed_ups):.2f} (simulated)")
    if options.append:
        append_rows(rows, RESULTS)


if __name__ == "__main__":
    main()
